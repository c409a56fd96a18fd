"""One choice of an answer during generation. Streams and whole answers split it into content, reasoning and tool calls
by the same code, so that they are always the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.common.sampling import FinishReason, TokenLogprobs
from diptych.router.api.openai.answers import stop_reason
from diptych.router.requests.messages import ChoiceFinishedEvent, FinishedEvent, TokenEvent
from diptych.router.tools.json_scanner import ValueScanner
from diptych.router.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning, ToolParser
from diptych.router.tools.reasoning import ReasoningSplitter


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def cut(self) -> bool:
        """Its arguments are incomplete."""
        value, text = ValueScanner(), "".join(self.arguments)
        return text.startswith(("{", "[")) and not any(map(value.push, text))


class Choice:
    """One choice.

    Args:
        splitter: None: no reasoning is separated.
        parser: None: no tools were offered.
        parallel: False: calls after the first are dropped.
        keep_reasoning: False: reasoning is dropped.
    """

    def __init__(
        self,
        index: int,
        splitter: ReasoningSplitter | None = None,
        parser: ToolParser | None = None,
        *,
        parallel: bool = True,
        keep_reasoning: bool = True,
    ) -> None:
        self.index = index
        self._splitter = splitter
        self._parser = parser
        self._parallel = parallel
        self._keep_reasoning = keep_reasoning
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def feed(self, event: TokenEvent) -> list[Piece]:
        """The pieces completed by these tokens."""
        if self._splitter is not None and self._splitter.thinking:
            self.reasoning_tokens += len(event.token_ids)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        if self._splitter is None and self._parser is None:
            if not event.text:
                return []
            self.content.append(event.text)
            return [Content(event.text)]
        return self._keep(self._parsed(self._split(event.text)))

    def end(self, event: FinishedEvent | ChoiceFinishedEvent) -> list[Piece]:
        """The held-back pieces. Sets finish_reason and stop_reason."""
        rest = self._parsed(self._splitter.end() if self._splitter is not None else [])
        if self._parser is not None:
            rest += self._parser.end()
        pieces = self._keep(rest)
        # A stop string may end the answer within a call, and "tool_calls" promises complete JSON arguments.
        calls = bool(self.calls) and event.reason is FinishReason.STOP and not self.calls[-1].cut
        self.finish_reason = "tool_calls" if calls else event.reason.value
        self.stop_reason = stop_reason(event)
        return pieces

    def _split(self, text: str) -> list[Piece]:
        if self._splitter is not None:
            return self._splitter.feed(text)
        return [Content(text)] if text else []

    def _parsed(self, pieces: list[Piece]) -> list[Piece]:
        if self._parser is None:
            return pieces
        out: list[Piece] = []
        for piece in pieces:
            out += self._parser.feed(piece.text) if isinstance(piece, Content) else [piece]
        return out

    def _keep(self, pieces: list[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    if not self._keep_reasoning:
                        continue
                    self.reasoning.append(text)
                case CallStart(index, call_id, name):
                    if index and not self._parallel:
                        continue
                    self.calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    if index and not self._parallel:
                        continue
                    self.calls[index].arguments.append(text)
            kept.append(piece)
        return kept

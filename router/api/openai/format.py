"""Formatting of responses: chat and completions, whole and streamed.

chunks of a stream:  role -> content* -> finish_reason -> [usage, if requested] -> data: [DONE]
                     |---- for each choice ----------|
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from diptych.common.errors import DiptychError, InternalError
from diptych.common.sampling import FinishReason
from diptych.common.text.token_bytes import Tokens
from diptych.router.api.openai.answers import DONE, explanation_object, sse, usage_object
from diptych.router.api.openai.choice import Choice
from diptych.router.api.openai.errors import error_body
from diptych.router.api.openai.logprobs import (
    CompletionLogprobs,
    PromptEntries,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    ModelFeatures,
    PromptLogprobsEvent,
    TokenEvent,
    UsageInfo,
    ValidatedRequest,
)
from diptych.router.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from diptych.router.tools.reasoning import ReasoningSplitter
from diptych.router.tools.registry import id_maker, tool_factory


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of the response in the request.

    Args:
        include_usage: a stream ends with the usage.
        continuous_usage: every chunk of a stream carries the usage so far.
        tool_names: functions that were offered; empty: tool calls are not parsed.
        prompt_logprobs: candidates at each prompt position; None: not shown (but an echo may need them).
        echo: the answer begins with the prompt.
        prompt_only: the computed token is not shown (max_tokens: 0).
    """

    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    tool_names: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    prompt_logprobs: int | None = None
    echo: bool = False
    prompt_only: bool = False


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Further inputs of the formatting, beside the events. `created`: Unix seconds. `more`: the further prompts of a
    completion."""

    prepared: ValidatedRequest
    created: int
    features: ModelFeatures
    tokens: Tokens
    more: tuple[ValidatedRequest, ...] = ()

    @property
    def num_choices(self) -> int:
        return self.prepared.sampling.n * (1 + len(self.more))


class ResponseFormatter(Protocol):
    """Pass every event in order: to `chunks` for a stream, else to `absorb`, followed by `whole`. `sequence`: number of the
    next message of a stream, where the API numbers them."""

    sequence: int
    choices: list[Choice]

    def begin(self) -> bytes:
        """The start of a stream; may be empty."""

    def chunks(self, event: GenerateEvent) -> bytes:
        """The chunks of a stream for the event; may be empty."""

    def absorb(self, event: GenerateEvent) -> None: ...

    def whole(self, finished: FinishedEvent) -> dict[str, Any]: ...

    def failure(self, error: DiptychError) -> bytes:
        """The end of a failed stream."""


class _Answer:
    """Common part of chat and completions."""

    prefix = ""
    kind = ""
    chunk_kind = ""
    bytes_prefix = ""

    def __init__(self, options: ResponseOptions, context: ResponseContext, *, chat: bool) -> None:
        self.sequence = 0
        self.options = options
        self.prepared = context.prepared
        self.created = context.created
        self.names = TokenNames(context.tokens, as_ids=options.tokens_as_ids, bytes_prefix=self.bytes_prefix)
        self.choices = [make_choice(index, options, context, chat=chat) for index in range(context.num_choices)]
        self.prompts = (context.prepared, *context.more)
        self.prompt_entries = [PromptEntries(len(prompt.prompt.token_ids)) for prompt in self.prompts]
        self._num_prompt_tokens = sum(len(prompt.prompt.token_ids) for prompt in self.prompts)
        self._num_tokens = 0
        """Of all choices, so far."""
        self._final_usage: dict[str, Any] | None = None
        self.id = self.prefix + context.prepared.request_id
        self._head = self.head()

    def choice(self, index: int) -> Choice:
        if not index < len(self.choices):
            raise InternalError(f"choice {index} arrived, but {len(self.choices)} were requested")
        return self.choices[index]

    def absorb(self, event: GenerateEvent) -> None:
        if isinstance(event, TokenEvent):
            if not self.options.prompt_only:
                self.choice(event.choice).feed(event)
        elif isinstance(event, ChoiceFinishedEvent):
            self.choice(event.choice).end(self._ending(event))
        elif isinstance(event, PromptLogprobsEvent):
            self.prompt_entries[event.prompt].take(event)

    def chunks(self, event: GenerateEvent) -> bytes:
        if isinstance(event, TokenEvent):
            if self.options.prompt_only:
                return b""
            choice = self.choice(event.choice)
            self._num_tokens += len(event.token_ids)
            return self.token_chunks(choice, choice.feed(event), event)
        if isinstance(event, ChoiceFinishedEvent):
            return self._choice_end(self.choice(event.choice), event, {})
        if isinstance(event, PromptLogprobsEvent):
            entries = self.prompt_entries[event.prompt]
            was_complete = entries.complete
            entries.take(event)
            return self.prompt_logprobs_complete(event.prompt) if entries.complete and not was_complete else b""
        if isinstance(event, FinishedEvent):
            return self._end(event)
        return b""

    def _ending(self, event: FinishedEvent | ChoiceFinishedEvent) -> FinishedEvent | ChoiceFinishedEvent:
        """How a choice ended, as the caller sees it."""
        if not self.options.prompt_only:
            return event
        return replace(event, reason=FinishReason.LENGTH, stop_string="", stop_token_id=None)

    def failure(self, error: DiptychError) -> bytes:
        return sse(error_body(error))

    def prompt_logprobs_complete(self, prompt: int) -> bytes:
        """Chunks of a stream once all logprobs of a prompt have arrived."""
        return b""

    def token_chunks(self, choice: Choice, pieces: list[Piece], event: TokenEvent | None) -> bytes:
        raise NotImplementedError

    def empty_choice(self) -> dict[str, Any]:
        raise NotImplementedError

    def _choice_end(self, choice: Choice, event: FinishedEvent | ChoiceFinishedEvent, extra: dict[str, Any]) -> bytes:
        out = self.token_chunks(choice, choice.end(self._ending(event)), None)
        return out + sse(self.chunk(choice, self.empty_choice(), ended=True) | extra)

    def _end(self, event: FinishedEvent) -> bytes:
        extra = {}
        self._final_usage = self.usage(event)
        if event.explanation is not None:
            extra["diptych"] = explanation_object(event.explanation)
        running = [choice for choice in self.choices if choice.finish_reason is None]
        out = b"".join(self._choice_end(choice, event, extra) for choice in running)
        if extra and not running and not self.options.include_usage:  # every choice has had its last chunk
            out += sse(self.head() | {"choices": []} | extra)
        if self.options.include_usage:
            out += sse(self.head() | {"choices": [], "usage": self._final_usage} | extra)
        return out + DONE

    def usage(self, event: FinishedEvent) -> dict[str, Any]:
        usage = event.usage
        if self.options.prompt_only:
            usage = UsageInfo(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage_object(usage, sum(choice.reasoning_tokens for choice in self.choices))

    def head(self, kind: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind or self.chunk_kind,
            "created": self.created,
            "model": self.prepared.shown_model,
        }

    def chunk(self, choice: Choice, body: dict[str, Any], *, ended: bool = False) -> dict[str, Any]:
        shown = {"index": choice.index} | body
        shown.setdefault("logprobs", None)
        shown["finish_reason"] = choice.finish_reason if ended else None
        if ended:
            shown["stop_reason"] = choice.stop_reason
        chunk = {**self._head, "choices": [shown]}
        if self.options.continuous_usage:
            chunk["usage"] = self._final_usage or self._usage_so_far()
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage_so_far(self) -> dict[str, Any]:
        """The number of cached prompt tokens is known only at the end."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }

    def whole(self, finished: FinishedEvent) -> dict[str, Any]:
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.end(self._ending(finished))
        body = self.head(self.kind) | {
            "choices": [self.whole_choice(choice) for choice in self.choices],
            "usage": self.usage(finished),
        }
        if finished.explanation is not None:
            body["diptych"] = explanation_object(finished.explanation)
        return body

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(_Answer):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, options: ResponseOptions, context: ResponseContext) -> None:
        super().__init__(options, context, chat=True)
        self._logprobs = context.prepared.sampling.logprobs is not None

    def begin(self) -> bytes:
        out = b""
        for choice in self.choices:
            chunk = self.chunk(choice, {"delta": {"role": "assistant", "content": ""}})
            if self.options.return_token_ids and not choice.index:
                chunk["prompt_token_ids"] = list(self.prepared.prompt.token_ids)
            out += sse(chunk)
        return out

    def empty_choice(self) -> dict[str, Any]:
        return {"delta": {}}

    def token_chunks(self, choice: Choice, pieces: list[Piece], event: TokenEvent | None) -> bytes:
        """One chunk a piece; the tokens' data go with the first."""
        facts: dict[str, Any] = {}
        if event is not None and self.options.return_token_ids and event.token_ids:
            facts["token_ids"] = list(event.token_ids)
        if event is not None and self._logprobs and event.logprobs:
            facts["logprobs"] = chat_logprobs(event.logprobs, self.names)
        out = b""
        for delta in [_delta(piece) for piece in pieces] or ([{"content": ""}] if facts else []):
            out += sse(self.chunk(choice, {"delta": delta} | facts))
            facts = {}
        return out

    def whole(self, finished: FinishedEvent) -> dict[str, Any]:
        body = super().whole(finished)
        if self.options.return_token_ids:
            body["prompt_token_ids"] = list(self.prepared.prompt.token_ids)
        if self.options.prompt_logprobs is not None:
            entries = self.prompt_entries[0].entries
            body["prompt_logprobs"] = prompt_logprobs(entries, self.names, self.options.prompt_logprobs)
        return body

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not content else content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls
            ]
        shown = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs, self.names) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.options.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown


class CompletionForm(_Answer):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    bytes_prefix = "bytes:"

    def __init__(self, options: ResponseOptions, context: ResponseContext) -> None:
        super().__init__(options, context, chat=False)
        most = context.prepared.sampling.logprobs
        self._with_logprobs = most is not None
        self._logprobs = (
            []
            if most is None
            else [
                CompletionLogprobs(self.names, most, len(prompt.echo), prompt.prompt.token_ids)
                for prompt in map(self._prompt_of, self.choices)
            ]
        )

    def _prompt_number(self, choice: Choice) -> int:
        return choice.index // self.prepared.sampling.n

    def _prompt_of(self, choice: Choice) -> ValidatedRequest:
        return self.prompts[self._prompt_number(choice)]

    def _echo_logprobs(self, choice: Choice) -> dict[str, Any]:
        prompt, entries = self._prompt_of(choice), self.prompt_entries[self._prompt_number(choice)].entries
        return self._logprobs[choice.index].echoed(prompt.prompt.token_ids, entries, prompt.echo_offsets)

    def begin(self) -> bytes:
        """An echo with logprobs waits for them."""
        echoes = self.options.echo and self._with_logprobs
        tell = self.prompt_logprobs_complete if echoes else self._prompt_chunks
        return b"".join(tell(i) for i, entries in enumerate(self.prompt_entries) if entries.complete or not echoes)

    def prompt_logprobs_complete(self, prompt: int) -> bytes:
        return self._prompt_chunks(prompt, with_logprobs=True)

    def _prompt_chunks(self, number: int, *, with_logprobs: bool = False) -> bytes:
        out, prompt = b"", self.prompts[number]
        for choice in self.choices:
            if self._prompt_number(choice) != number:
                continue
            body: dict[str, Any] = {"text": prompt.echo}
            if self.options.return_token_ids:
                body["prompt_token_ids"] = list(prompt.prompt.token_ids)
            if with_logprobs:
                body["logprobs"] = self._echo_logprobs(choice)
            if prompt.echo or len(body) > 1:
                out += sse(self.chunk(choice, body))
        return out

    def empty_choice(self) -> dict[str, Any]:
        return {"text": ""}

    def token_chunks(self, choice: Choice, pieces: list[Piece], event: TokenEvent | None) -> bytes:
        text = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
        body: dict[str, Any] = {"text": text}
        if event is not None and self.options.return_token_ids and event.token_ids:
            body["token_ids"] = list(event.token_ids)
        if event is not None and self._with_logprobs and event.logprobs:
            body["logprobs"] = self._logprobs[choice.index].part(event.logprobs)
        return sse(self.chunk(choice, body)) if text or len(body) > 1 else b""

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs[choice.index].part(choice.logprobs) if self._with_logprobs else None
        if self.options.echo and logprobs is not None:
            echoed = self._echo_logprobs(choice)
            logprobs = {name: echoed[name] + values for name, values in logprobs.items()}
        prompt = self._prompt_of(choice)
        shown = {
            "index": choice.index,
            "text": prompt.echo + "".join(choice.content),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.options.return_token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = list(prompt.prompt.token_ids)
        if self.options.prompt_logprobs is not None:
            entries = self.prompt_entries[self._prompt_number(choice)].entries
            shown["prompt_logprobs"] = prompt_logprobs(entries, self.names, self.options.prompt_logprobs)
        return shown


def make_choice(index: int, options: ResponseOptions, context: ResponseContext, *, chat: bool) -> Choice:
    """Completions are returned unchanged; chat answers are split."""
    if not chat:
        return Choice(index)
    features = context.features
    splitter = ReasoningSplitter(thinking=context.prepared.thinking) if features.reasoning else None
    parser = None
    if options.tool_names and features.tool_parser != "none":
        # Of the request and the choice: the same ones at a router that goes on with the answer.
        ids = id_maker(features.tool_parser, f"{context.prepared.request_id}/{index}")
        parser = tool_factory(features.tool_parser)(options.tool_names, ids)
    return Choice(
        index,
        splitter,
        parser,
        parallel=options.parallel_tool_calls,
        keep_reasoning=options.include_reasoning,
    )


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

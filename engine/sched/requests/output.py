"""From sampled tokens to text and the end of the output: stop rules, in the order in which they apply, and incremental
text.

EOS (unless ignore_eos, and at the end of a grammar even then) and stop_token_ids:
                                             the id counts among the outputs, the text excludes it
stop strings                                 the text is cut in front of the string; all ids so far count
                                             (include_stop_str_in_output: the text ends with the string, or the token's text)
max_tokens, end of the context               LENGTH

A step may yield several tokens of a sequence. The rules apply token by token: what follows the one that ends the output
does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.common.errors import InternalError, InvalidRequestError
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.common.text.detokenizer import StopChecker
from diptych.common.text.detokenizer import TextPiece as Piece


class TextPiece(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output here."""
        ...


class RequestDetokenizer(Protocol):
    """One request's incremental text with its stop strings: common.text.detokenizer.RequestDetokenizer, or a test's toy."""

    def push(self, token_id: int) -> TextPiece:
        """The text that became certain with this token, cut in front of a stop string."""
        ...

    def finish(self) -> TextPiece:
        """What was held back, at an end that is no stop string."""
        ...


DetokenizerFactory = Callable[[SamplingParams, Sequence[int]], RequestDetokenizer]
"""Makes the detokenizer of one request, of its sampling parameters, which carry its stop strings, and its prompt's tokens."""


class LateStops:
    """Looks for stop strings from the min_tokens-th token on: text from before is not looked at.

    Args:
        inner: a detokenizer without stop strings.
    """

    def __init__(self, inner: RequestDetokenizer, stops: tuple[str, ...], min_tokens: int) -> None:
        self._inner = inner
        self._stops = StopChecker(stops)
        self._left = min_tokens

    def push(self, token_id: int) -> TextPiece:
        self._left -= 1
        piece = self._inner.push(token_id)
        return piece if self._left > 0 else Piece(*self._stops.push(piece.text))

    def finish(self) -> TextPiece:
        text, stop = self._stops.push(self._inner.finish().text)
        return Piece(text, stop) if stop is not None else Piece(text + self._stops.flush())


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None


class OutputProcessor:
    """The outputs of one request. Without a detokenizer every text is "".

    Args:
        max_outputs: tokens after which it ends with LENGTH: max_tokens or what the context leaves, whichever is less.
    Raises: InvalidRequestError for stop strings without a detokenizer.
    """

    __slots__ = ("_detokenizer", "_eos", "_include_stop", "max_outputs", "_stop_ids", "finish", "num_outputs")

    def __init__(
        self,
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
        max_outputs: int,
        detokenizer: RequestDetokenizer | None,
    ) -> None:
        # Under a grammar EOS is drawn with ignore_eos only where nothing else may follow.
        self._eos = frozenset() if sampling.ignore_eos and sampling.grammar is None else eos_token_ids
        self._stop_ids = self._eos.union(sampling.stop_token_ids)
        self.max_outputs = max_outputs
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer = detokenizer
        if sampling.stop and detokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        self.num_outputs = 0
        self.finish: Finish | None = None

    def prime(self, token_ids: Sequence[int]) -> None:
        """Tokens that the client has already, with their text; `finish` is set if they end the request. Raises: as
        push."""
        self.push_all(token_ids)

    def push(self, token_id: int) -> str:
        """Count one output token. Returns: the text that became certain; sets `finish` when it was the last token.

        Raises: InternalError when the detokenizer fails: one request's text must not end the engine.
        """
        self.num_outputs += 1
        try:
            if token_id in self._stop_ids:
                return self._stop(token_id)
            text = "" if self._detokenizer is None else self._show(self._detokenizer.push(token_id))
            if self.finish is None and self.num_outputs >= self.max_outputs:
                text += self._flush()
                if self.finish is None:
                    self.finish = Finish(FinishReason.LENGTH)
        except Exception as error:
            raise InternalError(f"making text of the tokens failed: {type(error).__name__}: {error}") from error
        return text

    def push_all(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Count output tokens until one ends the output. Returns: how many were counted, and their text. Raises: as
        push."""
        texts: list[str] = []
        for token_id in token_ids:
            texts.append(self.push(token_id))
            if self.finish is not None:
                break
        return len(texts), "".join(texts)

    def _stop(self, token_id: int) -> str:
        text = self._shown_stop(token_id) if self._include_stop else ""
        if self.finish is None:
            text += self._flush()
        if self.finish is None:
            self.finish = Finish(FinishReason.STOP, stop_token_id=None if token_id in self._eos else token_id)
        return text

    def _flush(self) -> str:
        return self._show(self._detokenizer.finish()) if self._detokenizer is not None else ""

    def _shown_stop(self, token_id: int) -> str:
        return self._show(self._detokenizer.push(token_id)) if self._detokenizer is not None else ""

    def _show(self, piece: TextPiece) -> str:
        if piece.stop is None:
            return piece.text
        self.finish = Finish(FinishReason.STOP, stop_string=piece.stop)
        return piece.text + piece.stop if self._include_stop else piece.text

"""From drawn tokens to text and an end: stop rules, in the order in which they count, and incremental text.

EOS (unless ignore_eos) and stop_token_ids   the id counts among the outputs, the text excludes it
stop strings                                 the text is cut in front of the string; all ids so far count
max_tokens, end of the context               LENGTH
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import FinishReason, SamplingParams


class RequestDetokenizer(Protocol):
    """One request's incremental detokenizer."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def flush(self) -> str:
        """What was held back, at the end."""
        ...


DetokenizerFactory = Callable[[SamplingParams], RequestDetokenizer]


class StopStrings(Protocol):
    def push(self, text: str) -> tuple[str, str | None]:
        """Returns: (text that may be shown now, the stop string that was hit or None)."""
        ...

    def flush(self) -> str: ...


StopStringsFactory = Callable[[tuple[str, ...]], StopStrings]


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

    __slots__ = ("_detokenizer", "_eos", "_max_outputs", "_stop_ids", "_stop_strings", "finish", "num_outputs")

    def __init__(
        self,
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
        max_outputs: int,
        detokenizer: RequestDetokenizer | None,
        stop_strings: StopStringsFactory | None,
    ) -> None:
        self._eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self._stop_ids = self._eos.union(sampling.stop_token_ids)
        self._max_outputs = max_outputs
        self._detokenizer = detokenizer
        self._stop_strings: StopStrings | None = None
        if sampling.stop:
            if detokenizer is None or stop_strings is None:
                raise InvalidRequestError("stop strings need a tokenizer, and this engine has none", param="stop")
            self._stop_strings = stop_strings(sampling.stop)
        self.num_outputs = 0
        self.finish: Finish | None = None

    def prime(self, token_ids: Iterable[int]) -> None:
        """Tokens that the client has already, with their text; `finish` is set if they end the request."""
        for token in token_ids:
            self.push(token)
            if self.finish is not None:
                return

    def push(self, token_id: int) -> str:
        """Count one output token. Returns: the text that became certain; sets `finish` when it was the last token."""
        self.num_outputs += 1
        if token_id in self._stop_ids:
            text = self._flush()
            if self.finish is None:
                self.finish = Finish(FinishReason.STOP, stop_token_id=None if token_id in self._eos else token_id)
            return text
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.push(token_id)
            if self._stop_strings is not None and text:
                text = self._scan(text)
        if self.finish is None and self.num_outputs >= self._max_outputs:
            text += self._flush()
            if self.finish is None:
                self.finish = Finish(FinishReason.LENGTH)
        return text

    def _scan(self, text: str) -> str:
        assert self._stop_strings is not None
        shown, hit = self._stop_strings.push(text)
        if hit is not None:
            self.finish = Finish(FinishReason.STOP, stop_string=hit)
        return shown

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.flush()
        if self._stop_strings is None:
            return text
        shown = self._scan(text) if text else ""
        return shown if self.finish is not None else shown + self._stop_strings.flush()

"""Text of one request's output: incremental detokenizing and stop strings in one, as the engine wants it."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.detokenizer import IncrementalDetokenizer, StopChecker
from diptych.common.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """`text` may go out; `stop` is the stop string that ended the output here, if one did."""

    text: str
    stop: str | None = None


class RequestText:
    """See engine.sched.output.RequestDetokenizer. After a piece with a stop string nothing may be pushed."""

    def __init__(self, tokenizer: ModelTokenizer, stops: tuple[str, ...] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopChecker(stops)

    def push(self, token_id: int) -> TextPiece:
        return TextPiece(*self._stops.push(self._detokenizer.push(token_id)))

    def finish(self) -> TextPiece:
        """What was held back, at an end that is no stop string; the last held characters can still complete one."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return TextPiece(text, stop) if stop is not None else TextPiece(text + self._stops.flush())

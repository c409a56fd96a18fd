"""Log probabilities in the three forms that clients of the OpenAI and vLLM APIs know. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from diptych.router.messages import TokenLogprob

TokenBytesOf = Callable[[int], bytes]
_LEAST = -9999.0
"""JSON has no -Infinity: a token that cannot be drawn at all shows this, as at vLLM."""


class TokenNames:
    """How tokens are written in an answer.

    Args:
        as_ids: as "token_id:17" instead of their text (`return_tokens_as_token_ids`).
    """

    def __init__(self, token_bytes: TokenBytesOf, *, as_ids: bool = False) -> None:
        self.bytes_of = token_bytes
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def chat_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.of(token_id), "logprob": finite(logprob), "bytes": list(names.bytes_of(token_id))}

    content = [
        shown(entry.token_id, entry.logprob) | {"top_logprobs": [shown(*candidate) for candidate in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` object of a completions choice: parallel lists. `offset` runs on over the chunks of a stream."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def part(self, entries: Sequence[TokenLogprob | int]) -> dict[str, Any]:
        """A bare id is a token without a logprob: the first of an echoed prompt."""
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            out["text_offset"].append(self._offset)
            out["tokens"].append(self._names.of(token_id))
            self._offset += len(self._names.text(token_id))
            if isinstance(entry, int):
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
                continue
            top = {self._names.of(other): finite(logprob) for other, logprob in entry.top}
            top[self._names.of(token_id)] = finite(entry.logprob)  # the token itself is always among them
            out["token_logprobs"].append(finite(entry.logprob))
            out["top_logprobs"].append(top)
        return out


def prompt_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> list[dict[str, Any] | None]:
    """vLLM's form: one object a prompt token, by token id; null for the first."""
    out: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
        at_place = {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }
        out.append(at_place)
    return out

"""Log probabilities in the three formats of the OpenAI and vLLM APIs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from diptych.common.errors import InternalError
from diptych.common.sampling import TokenLogprobs
from diptych.common.text.token_bytes import Tokens
from diptych.router.requests.messages import PromptLogprobsEvent

_LEAST = -9999.0
"""JSON has no -Infinity: a token that cannot be sampled shows this, as in vLLM."""


class TokenNames:
    """How tokens are written in a response.

    Args:
        as_ids: as "token_id:17" instead of their text (`return_tokens_as_token_ids`).
        bytes_prefix: before the name of a token that is not valid UTF-8, whose odd bytes are written as \\xf0.
    """

    def __init__(self, tokens: Tokens, *, as_ids: bool = False, bytes_prefix: str = "") -> None:
        self.tokens = tokens
        self._as_ids = as_ids
        self._bytes_prefix = bytes_prefix

    def of(self, token_id: int) -> str:
        piece = b"" if self._as_ids else self.tokens.of(token_id)
        if not piece:
            return self.by_id(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return self._bytes_prefix + piece.decode("utf-8", "backslashreplace")

    def by_id(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def text(self, token_id: int) -> str:
        return self.tokens.of(token_id).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The bytes that the token adds to the text; None: it adds none."""
        return list(self.tokens.of(token_id)) if self.tokens.is_text(token_id) else None


class PromptEntries:
    """Logprobs of one prompt; repeats from a later attempt are dropped."""

    def __init__(self, num_prompt: int) -> None:
        self._wanted = num_prompt - 1
        self.entries: list[TokenLogprobs] = []

    @property
    def complete(self) -> bool:
        return len(self.entries) >= self._wanted

    def take(self, event: PromptLogprobsEvent) -> None:
        """Raises: InternalError for a gap."""
        known = len(self.entries) + 1 - event.first_token
        if known < 0:
            raise InternalError(f"logprobs of prompt token {event.first_token} arrived too early")
        self.entries.extend(event.logprobs[known:])


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.of(token_id), "logprob": finite(logprob), "bytes": names.bytes_of(token_id)}

    content = [
        shown(entry.token_id, entry.logprob) | {"top_logprobs": [shown(*candidate) for candidate in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` object of a completions choice: parallel lists. Offsets continue over the chunks of a stream.
    `most`: candidates requested at each position. `echo`: characters of the prompt before the answer. `prompt`: its tokens.
    """

    def __init__(self, names: TokenNames, most: int, echo: int = 0, prompt: Sequence[int] = ()) -> None:
        self._names = names
        self._most = most
        self._echo = echo
        self._offsets = names.tokens.offsets(prompt)

    def echoed(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """The prompt's part; its first token has no logprob. `offsets`: empty: those of the tokens' own text. Raises:
        InternalError."""
        if len(entries) != len(token_ids) - 1:
            raise InternalError(f"logprobs of {len(entries)} of {len(token_ids) - 1} prompt tokens arrived")
        own = self._names.tokens.offsets()
        return {
            "text_offset": list(offsets) or [own.push(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(finite(entry.logprob) for entry in entries)],
            "tokens": list(map(self._names.of, token_ids)),
            "top_logprobs": [None, *map(self._top, entries)],
        }

    def part(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The part of the answer's next tokens."""
        return {
            "text_offset": [self._echo + self._offsets.push(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "tokens": [self._names.of(entry.token_id) for entry in entries],
            "top_logprobs": list(map(self._top, entries)),
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest first. The token itself is always included, under its name in `tokens`; another with the same
        text is written as an id."""
        own = self._names.of(entry.token_id)
        shown: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._most]:
            name = own if token_id == entry.token_id else self._names.of(token_id)
            taken = name in shown or (name == own and token_id != entry.token_id)
            shown[self._names.by_id(token_id) if taken else name] = finite(logprob)
        shown.setdefault(own, finite(entry.logprob))
        return shown


def prompt_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames, most: int) -> list[dict[str, Any] | None]:
    """vLLM's format: one object a prompt token, by token id; null for the first."""
    out: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:most], 1)]
        at_place = {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }
        out.append(at_place)
    return out

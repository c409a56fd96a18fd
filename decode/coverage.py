"""Which tokens' KV has arrived: proof that nothing is missing and nothing came twice before a request may decode."""

from __future__ import annotations

from bisect import insort

from diptych.common.errors import TransferError


class Coverage:
    """Token ranges inside [first, end). Ranges may come in any order, never outside and never twice."""

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end
        self._ranges: list[tuple[int, int]] = []
        self._covered = 0

    @property
    def complete(self) -> bool:
        """Disjoint ranges inside the bounds that add up to its length leave no gap."""
        return self._covered == self.end - self.first

    @property
    def num_ranges(self) -> int:
        return len(self._ranges)

    def check(self, first_token: int, num_tokens: int) -> None:
        """Raises: TransferError when the range is empty, outside, or overlaps one that is in."""
        end = first_token + num_tokens
        if num_tokens < 1 or first_token < self.first or end > self.end:
            raise TransferError(f"range [{first_token}, {end}) is not inside [{self.first}, {self.end})")
        for a, b in self._ranges:
            if first_token < b and a < end:
                raise TransferError(f"range [{first_token}, {end}) overlaps [{a}, {b})")

    def add(self, first_token: int, num_tokens: int) -> None:
        """Raises: TransferError as `check` does."""
        self.check(first_token, num_tokens)
        insort(self._ranges, (first_token, first_token + num_tokens))
        self._covered += num_tokens

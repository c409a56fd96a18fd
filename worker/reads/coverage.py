"""Tracks the tokens whose KV has arrived: nothing may be missing or arrive twice before a request may decode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diptych.common.errors import TransferError
from diptych.common.kv_format import KvFormat
from diptych.common.kv_groups import expected_ranges


@dataclass(frozen=True, slots=True)
class _Range:
    """Tokens [first, end) of layers [low, high)."""

    first: int
    end: int
    low: int
    high: int


class Coverage:
    """Ranges of tokens inside [first, end), each of some or all layers, in any order, never outside and never twice."""

    def __init__(self, first: int, end: int, num_layers: int = 1) -> None:
        self.first = first
        self.end = end
        self.num_layers = num_layers
        self._ranges: list[_Range] = []
        self._covered = 0

    @property
    def size(self) -> int:
        """Expected total, in tokens times layers."""
        return (self.end - self.first) * self.num_layers

    @property
    def complete(self) -> bool:
        """Disjoint ranges inside the bounds that add up to the total leave no gap."""
        return self._covered == self.size

    @property
    def num_ranges(self) -> int:
        return len(self._ranges)

    def check(self, first_token: int, num_tokens: int, first_layer: int = 0, num_layers: int | None = None) -> None:
        """`num_layers` None: all. Raises: TransferError when the range is empty, outside, or overlaps an earlier one."""
        new = self._range(first_token, num_tokens, first_layer, num_layers)
        if num_tokens < 1 or new.first < self.first or new.end > self.end:
            raise TransferError(f"range [{new.first}, {new.end}) is not inside [{self.first}, {self.end})")
        if not 0 <= new.low < new.high <= self.num_layers:
            raise TransferError(f"layers [{new.low}, {new.high}) are not inside [0, {self.num_layers})")
        for old in self._ranges:
            if new.first < old.end and old.first < new.end and new.low < old.high and old.low < new.high:
                raise TransferError(
                    f"range [{new.first}, {new.end}) of layers [{new.low}, {new.high}) overlaps "
                    f"[{old.first}, {old.end}) of layers [{old.low}, {old.high})"
                )

    def add(self, first_token: int, num_tokens: int, first_layer: int = 0, num_layers: int | None = None) -> None:
        """Raises: TransferError as `check` does."""
        self.check(first_token, num_tokens, first_layer, num_layers)
        new = self._range(first_token, num_tokens, first_layer, num_layers)
        self._ranges.append(new)
        self._covered += num_tokens * (new.high - new.low)

    def _range(self, first_token: int, num_tokens: int, first_layer: int, num_layers: int | None) -> _Range:
        high = self.num_layers if num_layers is None else first_layer + num_layers
        return _Range(first_token, first_token + num_tokens, first_layer, high)


class KvCoverage:
    """The coverage of every KV group of every rank that the tokens [first, end) need, derived from the ranks' formats: what a
    sender does not list is missing all the same. Ranges are checked and added by rank and group.

    Args:
        reusable: see expected_ranges.
        ranks: of these only; None: of all.
    """

    def __init__(
        self,
        parts: Sequence[KvFormat],
        first: int,
        end: int,
        *,
        reusable: bool = False,
        ranks: Collection[int] | None = None,
    ) -> None:
        self.first = first
        self.end = end
        self._names = {
            (number, index): f"{group.name} of rank {number}" if len(parts) > 1 else group.name
            for number, kv in enumerate(parts)
            if ranks is None or number in ranks
            for index, group in enumerate(kv.groups)
        }
        self._groups = {
            (number, own.group): Coverage(own.first, own.end, kv.groups[own.group].num_layers)
            for number, kv in enumerate(parts)
            if ranks is None or number in ranks
            for own in expected_ranges(kv, first, end, reusable=reusable)
        }

    @property
    def size(self) -> int:
        """Expected total, in tokens times layers, over all groups of all ranks."""
        return sum(coverage.size for coverage in self._groups.values())

    @property
    def complete(self) -> bool:
        return all(coverage.complete for coverage in self._groups.values())

    @property
    def num_ranges(self) -> int:
        return sum(coverage.num_ranges for coverage in self._groups.values())

    @property
    def missing(self) -> str:
        """Names of the groups that are not complete."""
        return ", ".join(self._names[key] for key, coverage in self._groups.items() if not coverage.complete)

    def add(
        self, group: int, first_token: int, num_tokens: int, first_layer: int, num_layers: int, part: int = 0
    ) -> None:
        """Raises: TransferError when nothing of this group of this rank is expected, or as Coverage.check."""
        coverage = self._groups.get((part, group))
        if coverage is None:
            known = ", ".join(self._names.values())
            raise TransferError(f"KV group {group} of rank {part} is not expected: the format has {known}")
        coverage.add(first_token, num_tokens, first_layer, num_layers)

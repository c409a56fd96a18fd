"""Which block leaves a tier first, by predicted value: what it saves, times the probability that it is used again, by its
bytes. Pure.

All blocks of a tier have the same bytes, and computing one costs about the same. So the probability decides: of requests
that were there lately more come back, and a block is of no use without those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class OldestUseLastBlockFirst:
    """The blocks of the request that used them longest ago leave first, the last block of a prompt before the first one.

    use 7: a b c d      use 9: a b e      ->  d, c, e, b, a
    """

    def __init__(self) -> None:
        self._uses: dict[int, dict[bytes, None]] = {}
        """By use, in the order in which they began: the keys whose last use it is, as they were named."""
        self._use_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._use_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._use_of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._use_of)

    def used(self, keys: Iterable[bytes], use: int) -> None:
        """Blocks of one request, in the order of its tokens; known ones move. Args: use: its number, rising."""
        for key in keys:
            if (before := self._use_of.get(key)) is not None:
                if before >= use:
                    continue
                self._leave(key, before)
            self._use_of[key] = use
            self._uses.setdefault(use, {})[key] = None

    def remove(self, key: bytes) -> bool:
        """Returns: whether it was known."""
        use = self._use_of.pop(key, None)
        if use is not None:
            self._leave(key, use)
        return use is not None

    def pop(self) -> bytes | None:
        """The one that leaves first; None: there is none."""
        if not self._uses:
            return None
        key = next(reversed(next(iter(self._uses.values()))))
        self.remove(key)
        return key

    def _leave(self, key: bytes, use: int) -> None:
        keys = self._uses[use]
        del keys[key]
        if not keys:
            del self._uses[use]

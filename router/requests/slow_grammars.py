"""At which decode workers a grammar that takes long to compile is compiled already. Pure.

A worker compiles a grammar before it accepts an attempt, mostly in milliseconds; some take seconds. A moved answer must not
wait for that, so when one has taken long, two other workers are asked to compile it, too, and answers that have it move to
one of those. Which ones depends on the grammar alone, so that every router asks the same ones. A worker that comes, or comes
back, is asked for the latest grammars at once: the next loss may be sooner than the next request that has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from hashlib import blake2b
from itertools import islice

from diptych.common.grammar import Grammar
from diptych.router.placement.placer import Incarnation

SLOW_S = 0.25
"""From the submit until the attempt is accepted."""
_SPARES = 2
_MAX_GRAMMARS, _LATEST = 256, 8


class SlowGrammars:
    def __init__(self) -> None:
        self._compiled: OrderedDict[Grammar, set[Incarnation]] = OrderedDict()

    def on_accepted(
        self, grammar: Grammar, at: Incarnation, took_s: float, usable: Collection[Incarnation]
    ) -> list[Incarnation]:
        """An attempt with the grammar was accepted after so many seconds. Returns: the usable decode workers to ask to compile
        it, which count as having it from now on."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            if took_s < SLOW_S:
                return []
            compiled = self._compiled[grammar] = set()
            if len(self._compiled) > _MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        compiled.add(at)
        return self._fill(grammar, usable)

    def on_change(self, usable: Collection[Incarnation]) -> list[tuple[Grammar, Incarnation]]:
        """Other decode workers are usable than before. Returns: which of them to ask to compile which grammar, as on_accepted."""
        latest = list(islice(reversed(self._compiled), _LATEST))
        return [(grammar, one) for grammar in latest for one in self._fill(grammar, usable)]

    def _fill(self, grammar: Grammar, usable: Collection[Incarnation]) -> list[Incarnation]:
        compiled = self._compiled[grammar]
        compiled.intersection_update(usable)  # the others have ended, or will be asked again
        missing = 1 + _SPARES - len(compiled)
        others = sorted(set(usable) - compiled, key=lambda one: _rank(grammar, one[0]))[: max(0, missing)]
        compiled.update(others)
        return others

    def compiled_at(self, grammar: Grammar) -> frozenset[Incarnation]:
        """Workers that have it; empty: nobody knows, or it takes no time."""
        return frozenset(self._compiled.get(grammar, ()))


def _rank(grammar: Grammar, worker_id: str) -> bytes:
    return blake2b(grammar.source.encode(), key=worker_id.encode()[:64], digest_size=8).digest()

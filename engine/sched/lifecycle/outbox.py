"""The events of a step, in order, until the engine takes them; and the totals of what was done since the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diptych.common.errors import DiptychError
from diptych.engine.messages import EngineEvent, Failed


@dataclass(slots=True)
class Totals:
    """Counters since the start. `computed`: prompt tokens; `generated`: sampled tokens; `pulled`: tokens whose KV
    came into the prefix cache from another worker's; `from_tiers`: by lower tier, prompt tokens whose KV came from there;
    `served`: by tier, tokens whose KV other workers were offered from there."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed: int = 0
    generated: int = 0
    preemptions: int = 0
    swaps: int = 0
    refetches: int = 0
    pulled: int = 0
    from_tiers: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)


class Outbox:
    """Owns the events that were not taken yet."""

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self.add: Callable[[EngineEvent], None] = self._events.append
        """Bound once: a step adds an event for every sequence."""
        self.totals = Totals()

    def extend(self, events: Iterable[EngineEvent]) -> None:
        self._events.extend(events)

    def fail(self, attempt_id: str, error: DiptychError) -> None:
        self._events.append(Failed(attempt_id, error))

    def take(self) -> list[EngineEvent]:
        events = self._events.copy()
        self._events.clear()
        return events

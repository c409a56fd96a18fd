"""The last placements of this router, for later explanation. Bounded, oldest evicted first. Pure."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from diptych.router.observe.explain import RequestTrace
from diptych.rpc.v1 import types_pb2

_SHOWN = re.compile(r"(?:(?:chatcmpl|cmpl)-|(?:resp|msg|fc)_)(req-[0-9a-f]+)(?:_\d+)?")
"""Id of an answer or of an item of one: chatcmpl-req-..., cmpl-..., resp_..., msg_..._0, fc_..._1."""


@dataclass(slots=True)
class Decision:
    """One placement.

    Args:
        owner: the tenant's salt; only this tenant may read it.
        trace: the request's trace; grows while it runs.
        outcome: "running", "finished", or the reason of the error that ended the request.
    """

    request_id: str
    label: str
    prompt_tokens: int
    arrived: float
    owner: bytes
    trace: RequestTrace
    outcome: str = "running"

    def explain(self) -> types_pb2.Explanation:
        return self.trace.explanation()


class Decisions:
    """By the router's request id and by the caller's label (the latest)."""

    def __init__(self, max_decisions: int = 2048) -> None:
        self._max = max_decisions
        self._by_id: OrderedDict[str, Decision] = OrderedDict()
        self._labels: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, decision: Decision) -> None:
        self._by_id[decision.request_id] = decision
        self._by_id.move_to_end(decision.request_id)
        if decision.label:
            self._labels[decision.label] = decision.request_id
        while len(self._by_id) > self._max:
            _, old = self._by_id.popitem(last=False)
            if self._labels.get(old.label) == old.request_id:
                del self._labels[old.label]

    def get(self, name: str) -> Decision | None:
        """`name`: a request id, a label, or an id of an answer, which contains the request id."""
        found = self._by_id.get(name) or self._by_id.get(self._labels.get(name, ""))
        if found is None and (shown := _SHOWN.fullmatch(name)):
            found = self._by_id.get(shown[1])
        return found

    def latest(self, owner: bytes, most: int = 40) -> list[Decision]:
        """The owner's last placements, latest first."""
        own = (decision for decision in reversed(self._by_id.values()) if decision.owner == owner)
        return list(islice(own, most))

"""The usable workers by role, and those that only serve their KV. Pure, except that it sets the breakers' pool sizes."""

from __future__ import annotations

from typing import Any

from diptych.router.cluster.breaker import Breakers
from diptych.router.cluster.compatibility import RouterCheck
from diptych.router.cluster.members import Members
from diptych.router.placement.placer import Candidate


def usable_by_role(
    known: Members[Any], breakers: Breakers, check: RouterCheck, now: float
) -> tuple[dict[str, list[Candidate]], dict[str, str], list[Candidate]]:
    """The usable workers by role, the reasons against the others, and of these those that drain and may be read from."""
    sides: dict[str, list[Candidate]] = {}
    unusable = {}
    leaving = []
    for role in ("prefill", "decode"):
        members = [member for member in known.all() if member.record.role == role]
        breakers.set_pool(role, [member.record.worker_id for member in members])
        usable, excluded = [], []
        for member in members:
            name = member.record.worker_id
            candidate = Candidate(member.record, member.read_at, check.header(member.record))
            if why := known.why_unplaceable(member, now):
                unusable[name] = why
                if known.still_serves_kv(member, now) and not breakers.why_not(name, now):
                    leaving.append(candidate)
            elif why := breakers.why_not(name, now):
                unusable[name] = why
                excluded.append(candidate)
            else:
                usable.append(candidate)
        if not usable:  # a worker that fails often is better than none
            usable = excluded
            for candidate in excluded:
                del unusable[candidate.record.worker_id]
        sides[role] = usable
    return sides, unusable, leaving

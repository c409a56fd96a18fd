"""The client of a world: its requests, and the permitted outcomes of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from handoff_sim import reference
from handoff_sim.laws import Law

from diptych.common.errors import (
    DiptychError,
    InternalError,
    RequestCancelledError,
    RequestDeadlineError,
)
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import decode_pb2, router_pb2
from diptych.worker import wire

if TYPE_CHECKING:
    from handoff_sim.world import World

_POLICIES = (
    router_pb2.FAILURE_POLICY_RETRY,
    router_pb2.FAILURE_POLICY_RETRY,
    router_pb2.FAILURE_POLICY_RECOMPUTE,
    router_pb2.FAILURE_POLICY_FAIL,
)


@dataclass
class Ask:
    """One request and its outcome."""

    name: str
    family: int
    length: int
    seed: int
    max_tokens: int
    policy: int
    remaining_s: float
    local: bool
    token_ids: list[int] = field(default_factory=list)
    sent_at: float = 0.0
    cancelled: bool = False
    lost: bool = False
    """Its decode worker was killed."""
    ended: int = 0
    error: DiptychError | None = None
    notes: list[str] = field(default_factory=list)


def draw_ask(rng: Random, number: int) -> Ask:
    short = rng.random() < 0.15
    return Ask(
        name=f"r{number}",
        family=rng.choice(reference.FAMILIES),
        length=rng.choice(reference.LENGTHS),
        seed=rng.choice(reference.SEEDS),
        max_tokens=rng.randint(1, reference.MAX_TOKENS),
        policy=rng.choice(_POLICIES),
        remaining_s=rng.uniform(0.01, 0.4) if short else 30.0,
        local=rng.random() < 0.1,
    )


class Client:
    """One session with the world's decode worker."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.asks = [draw_ask(world.rng, i) for i in range(world.rng.randint(1, 4))]
        if world.sizes.windows:  # the same prompt again, later: whether decode has what its windows need
            for ask in self.asks[1:]:
                ask.family, ask.length = self.asks[0].family, self.asks[0].length

    def submit(self, ask: Ask) -> None:
        ask.sent_at = self._world.loop.time()
        if self._world.decode.node.dead:
            ask.lost = True
            return
        candidates = [node.ref for node in self._world.prefill.values()]
        self._world.rng.shuffle(candidates)
        ids = reference.prompt(ask.family, ask.length)
        message = decode_pb2.Submit(
            attempt=ask.name,
            request_id=ask.name,
            prompt_token_ids=ids,
            sampling=sampling_to_proto(reference.sampling(ask.seed, ask.max_tokens)),
            placement=decode_pb2.Placement(
                decode=wire.ref_to_proto(self._world.decode.ref),
                prefill=[wire.ref_to_proto(ref) for ref in candidates],
                local_prefill=ask.local,
                local_prefill_max_tokens=100 if ask.local else 0,
            ),
            remaining_s=ask.remaining_s,
            failure_policy=ask.policy,
        )
        if self._world.files is not None:
            self._world.files.before_ask()
        self._world.sources.name(message.placement, ask)
        self._world.session.on_command(decode_pb2.Command(submit=message))

    def cancel(self, ask: Ask) -> None:
        if not ask.sent_at or ask.ended or self._world.decode.node.dead:
            return
        ask.cancelled = True
        self._world.trouble.trail.append(f"{ask.name} cancelled at {self._world.loop.num_callbacks}")
        self._world.session.on_command(decode_pb2.Command(cancel=decode_pb2.Cancel(attempt=ask.name)))

    async def read(self, session: Any) -> None:
        by_name = {ask.name: ask for ask in self.asks}
        while (batch := await session.outbox.next_batch()) is not None:
            for event in batch.events:
                self._on_event(by_name[event.attempt], event)

    def _on_event(self, ask: Ask, event: decode_pb2.Event) -> None:
        if ask.ended:
            self._world.report(Law.ENDS_ONCE, f"{ask.name}: {event.WhichOneof('event')} after its end")
        match event.WhichOneof("event"):
            case "tokens":
                if event.tokens.offset != len(ask.token_ids):
                    self._world.report(
                        Law.ENDS_ONCE, f"{ask.name}: tokens at {event.tokens.offset}, expected {len(ask.token_ids)}"
                    )
                ask.token_ids.extend(event.tokens.token_ids)
                sizes = self._world.sizes
                right = reference.tokens(ask.family, ask.length, ask.seed, sizes.windows, ranks=sizes.ranks is not None)
                if tuple(ask.token_ids) != right[: len(ask.token_ids)]:
                    self._world.report(Law.VERIFIED, f"{ask.name}: wrong tokens {ask.token_ids}, right are {right}")
            case "end":
                ask.ended += 1
                self._on_end(ask, event.end)

    def _on_end(self, ask: Ask, end: decode_pb2.End) -> None:
        if self._world.loop.time() > ask.sent_at + ask.remaining_s + 0.5:
            self._world.report(
                Law.ENDS_ONCE, f"{ask.name}: ended {self._world.loop.time() - ask.sent_at:.3f} s after it was sent"
            )
        if not end.HasField("failure"):
            ask.notes = list(end.finished.explanation.notes)
            if len(ask.token_ids) != ask.max_tokens:
                self._world.report(Law.ENDS_ONCE, f"{ask.name}: {len(ask.token_ids)} of {ask.max_tokens} tokens")
            if any("INTERNAL" in note for note in ask.notes):
                self._world.report(Law.NO_OWN_ERROR, f"{ask.name}: an error of our own: {ask.notes}")
            return
        ask.error = error = from_failure(end.failure)
        if isinstance(error, InternalError):
            self._world.report(Law.NO_OWN_ERROR, f"{ask.name}: an error of our own: {error}")
        allowed = (
            (ask.cancelled and isinstance(error, RequestCancelledError))
            or (ask.remaining_s < 1.0 and isinstance(error, RequestDeadlineError))
            or (ask.policy == router_pb2.FAILURE_POLICY_FAIL and self._anything_wrong())
            or ask.lost
        )
        if not allowed:
            self._world.report(Law.ENDS_ONCE, f"{ask.name}: failed though nothing forbids its success: {error!r}")

    def _anything_wrong(self) -> bool:
        """Whether the schedule contains anything that may cost a leg. Short leases and read deadlines do, with delays."""
        return (
            self._world.profile != "calm"
            or self._world.files is not None
            or self._world.wires.faults.forge > 0
            or self._world.wires.faults.twice > 0
            or (min(self._world.sizes.read_base_s, self._world.sizes.lease_s) < 0.9)
        )

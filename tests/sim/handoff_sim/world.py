"""One schedule: a few requests, a few workers, and everything that a seed makes go wrong. `run(seed)` tells what broke.

Requests, faults and the moments of both are drawn from the seed alone, so a seed is a reproducer. A cancel or a fault comes
either at a time or after the n-th callback of the loop: between any two things that the code does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from handoff_sim import reference
from handoff_sim.links import Links
from handoff_sim.loop import Deadlock, VirtualLoop
from handoff_sim.nodes import Context, DecodeNode, PrefillNode, Sizes
from handoff_sim.wire import Faults, Wires

from diptych.common.errors import (
    DiptychError,
    InternalError,
    RequestCancelledError,
    RequestDeadlineError,
)
from diptych.engine.messages import UnpackRange
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import decode_pb2, router_pb2
from diptych.worker import wire

PROFILES = (
    "calm", "calm", "lossy", "damaged", "killed", "vanished", "stopped", "partitioned", "everything", "everything",
)  # fmt: skip
_POLICIES = (
    router_pb2.FAILURE_POLICY_RETRY,
    router_pb2.FAILURE_POLICY_RETRY,
    router_pb2.FAILURE_POLICY_RECOMPUTE,
    router_pb2.FAILURE_POLICY_FAIL,
)
_HORIZON_S = 60.0


@dataclass
class Ask:
    """One request of the client and what came of it."""

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


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.loop = VirtualLoop()
        self.profile = rng.choice(PROFILES)
        self.problems: list[str] = []
        wild = self.profile == "everything"
        self.links = Links(self.loop, rng, rng.choice((0.002, 0.02, 0.3 if self.profile != "calm" else 0.05)))
        faults = Faults(
            lose=rng.choice((0.02, 0.15)) if wild or self.profile == "lossy" else 0.0,
            stick=rng.choice((0.0, 0.2)) if wild or self.profile == "lossy" else 0.0,
            twice=rng.choice((0.0, 0.2)),
            damage=rng.choice((0.05, 0.3)) if wild or self.profile == "damaged" else 0.0,
            forge=rng.choice((0.0, 0.5)),
        )
        self.sizes = Sizes(
            num_slabs=rng.randint(2, 4),
            num_blocks=rng.choice((12, 16, 24, 40)),
            chunk=rng.choice((4, 8, 16)),
            lease_s=3.0 if self.profile == "calm" else rng.choice((0.1, 0.3, 1.0, 3.0)),
            read_base_s=rng.choice((0.05, 0.3, 1.0)),
            silence_s=rng.choice((0.3, 1.0)),
            quota=rng.randint(1, 3),
            cap=rng.randint(1, 2),
            grant_quota=rng.randint(1, 3),
        )
        self.asks = [self._draw_ask(i) for i in range(rng.randint(1, 4))]
        self.wires = Wires(self.links, rng, faults, self.report)
        self.context = Context(self.loop, rng, self.links, self.wires, self.sizes, self.report, self._check_unpack)
        self.prefill: dict[str, PrefillNode] = {}
        self.lives = 0
        self._restarts = 0
        self._triggers: list[tuple[int, Callable[[], None]]] = []
        self._trail: list[str] = []

    def _draw_ask(self, number: int) -> Ask:
        rng = self.rng
        short = rng.random() < 0.15
        return Ask(
            name=f"r{number}",
            family=rng.randint(0, 1),
            length=rng.choice(reference.LENGTHS),
            seed=rng.randint(0, 2),
            max_tokens=rng.randint(1, reference.MAX_TOKENS),
            policy=rng.choice(_POLICIES),
            remaining_s=rng.uniform(0.01, 0.4) if short else 30.0,
            local=rng.random() < 0.1,
        )

    # ---- reports ----

    def report(self, problem: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(f"{self.loop.time() - 1000.0:.6f} s, callback {self.loop.num_callbacks}: {problem}")

    def told(self) -> str:
        """The schedule in words."""
        asks = "; ".join(
            f"{a.name}: {a.length} tokens, {a.max_tokens} out, ended {a.ended} with {a.error!r}, notes {a.notes}"
            for a in self.asks
        )
        return f"seed {self.seed} ({self.profile}, {self.sizes}, {self.wires.faults})\n  {asks}\n  " + ", ".join(
            self._trail
        )

    def _check_unpack(self, command: UnpackRange) -> None:
        ask = next(a for a in self.asks if a.name == command.attempt)
        ids = reference.prompt(ask.family, ask.length)
        right = reference.kv(ids, command.first_token, command.num_tokens)
        if bytes(command.payload) != right:
            self.report(f"{ask.name}: wrong KV is unpacked at token {command.first_token}")

    # ---- the run ----

    def run(self) -> list[str]:
        loop = self.loop
        asyncio.set_event_loop(None)
        loop.after_callback = self._after_callback
        try:
            loop.run_until_complete(self._main())
        except Deadlock:
            self.report(
                f"deadlock: nothing will ever happen any more; {[a.name for a in self.asks if not a.ended]} wait"
            )
        except TimeoutError:
            self.report("the schedule does not come to an end")
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            try:
                loop.run_until_complete(asyncio.sleep(0.5))
                loop.run_until_complete(loop.shutdown_asyncgens())
            except Deadlock:
                pass
            loop.close()
        for error in loop.errors:
            self.report(f"unhandled: {error}")
        return self.problems

    def _after_callback(self) -> None:
        while self._triggers and self._triggers[-1][0] <= self.loop.num_callbacks:
            self._triggers.pop()[1]()

    def _at(self, call: Callable[[], None], within_s: float) -> None:
        """At a moment of the seed's choice: a time or a callback."""
        if self.rng.random() < 0.5:
            self.loop.call_later(self.rng.random() * within_s, call)
        else:
            self._triggers.append((self.rng.randint(1, 700), call))
            self._triggers.sort(key=lambda trigger: -trigger[0])

    async def _main(self) -> None:
        async with asyncio.timeout(_HORIZON_S):
            for i in range(self.rng.randint(1, 2)):
                self._start_prefill(f"p{i}")
            self.decode = DecodeNode(self.context, "d0", "d-life-0", self._find)
            self.session = self.decode.intake.open_session()
            reader = asyncio.create_task(self._read(self.session))
            for ask in self.asks:
                self.loop.call_later(self.rng.random() ** 2 * 0.1, self._submit, ask)
                if self.rng.random() < 0.35:
                    self._at(lambda a=ask: self._cancel(a), 0.4)
            faulty = self._plan_faults()
            await self._until_all_ended()
            if self.profile == "calm" and not faulty:
                await self._settle(1.0)
            else:
                await asyncio.sleep(1.5)
                self._heal()
                await self._settle(2 * self.sizes.lease_s + 4.0)
            self._check_end()
            reader.cancel()
            await self._close()

    async def _settle(self, within_s: float) -> None:
        """Until everything is free, and a moment longer; what is not by then shows in the checks."""
        limit = self.loop.time() + within_s
        quiet = 0
        while quiet < 2 and self.loop.time() < limit:  # twice: a worker may have started again just now
            await asyncio.sleep(
                0.1
            )  # before the look: what a fault of this moment leaves behind is not the end's fault
            quiet = 0 if self._left_over() else quiet + 1

    async def _until_all_ended(self) -> None:
        limit = self.loop.time() + 32.0
        while any(not a.ended and not a.lost for a in self.asks):
            await asyncio.sleep(0.05)
            if self.loop.time() > limit:
                waiting = [a.name for a in self.asks if not a.ended]
                self.report(f"{waiting} never end; states {self.decode.intake.states()}")
                return

    async def _close(self) -> None:
        for node in [*self.prefill.values(), self.decode]:
            node.transfer.stop()
        self.decode.intake.fail_all()
        for node in self.prefill.values():
            node.handoffs.fail_all()
        await asyncio.sleep(0)

    # ---- faults ----

    def _plan_faults(self) -> bool:
        p, rng = self.profile, self.rng
        wild = p == "everything"
        planned = False
        if p == "killed" or (wild and rng.random() < 0.4):
            for _ in range(rng.randint(1, 2)):
                self._at(self._kill_prefill, 0.4)
                planned = True
            if rng.random() < 0.4:
                self._at(lambda: self._kill_decode(unnoticed=rng.random() < 0.5), 0.4)
        if p == "vanished":
            self._at(lambda: self._kill_decode(unnoticed=True), 0.2)
            planned = True
        if p == "stopped" or (wild and rng.random() < 0.4):
            self._at(self._stop_prefill, 0.4)
            planned = True
        if p == "partitioned" or (wild and rng.random() < 0.4):
            self._at(self._partition, 0.4)
            planned = True
        if wild and rng.random() < 0.3:
            self._at(self._break, 0.4)
            planned = True
        return planned

    def _kill_prefill(self) -> None:
        victim = self.rng.choice(list(self.prefill.values()))
        self._trail.append(f"{victim.ref.worker_id} killed at {self.loop.num_callbacks}")
        if not victim.node.dead:
            victim.die()
            self._restarts += 1
            self.loop.call_later(self.rng.choice((0.0, 0.05, 2.0)), self._restart, victim.ref.worker_id)

    def _restart(self, worker_id: str) -> None:
        self._restarts -= 1
        self._start_prefill(worker_id)

    def _start_prefill(self, worker_id: str) -> None:
        self.lives += 1
        node = self.prefill[worker_id] = PrefillNode(self.context, worker_id, f"life-{self.lives}")
        node.readers = lambda: [self.decode]

    def _kill_decode(self, *, unnoticed: bool) -> None:
        if self.decode.node.dead:
            return
        self._trail.append(f"d0 killed at {self.loop.num_callbacks}")
        for ask in self.asks:
            ask.lost = ask.lost or not ask.ended
        self.decode.die(unnoticed=unnoticed)

    def _stop_prefill(self) -> None:
        victim = self.rng.choice(list(self.prefill.values()))
        self._trail.append(f"{victim.ref.worker_id} stopped at {self.loop.num_callbacks}")
        victim.node.stopped = True
        self.loop.call_later(self.rng.choice((0.1, 1.0, 5.0)), self._resume, victim)

    def _resume(self, victim: PrefillNode) -> None:
        victim.node.stopped = False
        for call in victim.node.on_resume:
            call()
        self.links.flush()

    def _partition(self) -> None:
        other = self.rng.choice(list(self.prefill.values()))
        self._trail.append(f"{other.ref.worker_id} partitioned at {self.loop.num_callbacks}")
        self.links.partition(other.node, self.decode.node)
        self.loop.call_later(self.rng.choice((0.1, 1.0, 5.0)), self.links.heal)

    def _break(self) -> None:
        """The KV connections break, both processes live."""
        self._trail.append(f"connections broken at {self.loop.num_callbacks}")
        transport = self.decode.transfer.transport
        for conn in list(transport._out.values()):
            side = self.rng.choice((conn.reader, conn.source))
            side.lose(conn, "connection reset")

    def _heal(self) -> None:
        for node in self.prefill.values():
            if node.node.stopped:
                self._resume(node)
        self.links.heal()

    def _find(self, address: str) -> PrefillNode | None:
        worker_id = address.partition(":")[0]
        node = self.prefill.get(worker_id)
        return node if node is not None and not node.node.dead else None

    # ---- the client ----

    def _submit(self, ask: Ask) -> None:
        ask.sent_at = self.loop.time()
        if self.decode.node.dead:
            ask.lost = True
            return
        candidates = [node.ref for node in self.prefill.values()]
        self.rng.shuffle(candidates)
        ids = reference.prompt(ask.family, ask.length)
        message = decode_pb2.Submit(
            attempt=ask.name,
            request_id=ask.name,
            prompt_token_ids=ids,
            sampling=sampling_to_proto(reference.sampling(ask.seed, ask.max_tokens)),
            placement=decode_pb2.Placement(
                decode=wire.ref_to_proto(self.decode.ref),
                prefill=[wire.ref_to_proto(ref) for ref in candidates],
                local_prefill=ask.local,
                local_prefill_max_tokens=100 if ask.local else 0,
            ),
            remaining_s=ask.remaining_s,
            failure_policy=ask.policy,
        )
        self.session.on_command(decode_pb2.Command(submit=message))

    def _cancel(self, ask: Ask) -> None:
        if not ask.sent_at or ask.ended or self.decode.node.dead:
            return
        ask.cancelled = True
        self._trail.append(f"{ask.name} cancelled at {self.loop.num_callbacks}")
        self.session.on_command(decode_pb2.Command(cancel=decode_pb2.Cancel(attempt=ask.name)))

    async def _read(self, session: Any) -> None:
        by_name = {ask.name: ask for ask in self.asks}
        while (batch := await session.outbox.next_batch()) is not None:
            for event in batch.events:
                self._on_event(by_name[event.attempt], event)

    def _on_event(self, ask: Ask, event: decode_pb2.Event) -> None:
        if ask.ended:
            self.report(f"{ask.name}: {event.WhichOneof('event')} after its end")
        match event.WhichOneof("event"):
            case "tokens":
                if event.tokens.offset != len(ask.token_ids):
                    self.report(f"{ask.name}: tokens at {event.tokens.offset}, expected {len(ask.token_ids)}")
                ask.token_ids.extend(event.tokens.token_ids)
                right = reference.tokens(ask.family, ask.length, ask.seed)
                if tuple(ask.token_ids) != right[: len(ask.token_ids)]:
                    self.report(f"{ask.name}: wrong tokens {ask.token_ids}, right are {right}")
            case "end":
                ask.ended += 1
                self._on_end(ask, event.end)

    def _on_end(self, ask: Ask, end: decode_pb2.End) -> None:
        if self.loop.time() > ask.sent_at + ask.remaining_s + 0.5:
            self.report(f"{ask.name}: ended {self.loop.time() - ask.sent_at:.3f} s after it was sent")
        if not end.HasField("failure"):
            ask.notes = list(end.finished.explanation.notes)
            if len(ask.token_ids) != ask.max_tokens:
                self.report(f"{ask.name}: {len(ask.token_ids)} of {ask.max_tokens} tokens")
            if any("INTERNAL" in note for note in ask.notes):
                self.report(f"{ask.name}: an error of our own: {ask.notes}")
            return
        ask.error = error = from_failure(end.failure)
        if isinstance(error, InternalError):
            self.report(f"{ask.name}: an error of our own: {error}")
        allowed = (
            (ask.cancelled and isinstance(error, RequestCancelledError))
            or (ask.remaining_s < 1.0 and isinstance(error, RequestDeadlineError))
            or (ask.policy == router_pb2.FAILURE_POLICY_FAIL and self._anything_wrong())
            or ask.lost
        )
        if not allowed:
            self.report(f"{ask.name}: failed though nothing forbids its success: {error!r}")

    def _anything_wrong(self) -> bool:
        """Whether the schedule has anything that may cost a leg. Short leases and deadlines of reads do, under delay."""
        return (
            self.profile != "calm"
            or self.wires.faults.forge > 0
            or self.wires.faults.twice > 0
            or (min(self.sizes.read_base_s, self.sizes.lease_s) < 0.9)
        )

    # ---- the end ----

    def _left_over(self) -> list[str]:
        nodes = [node for node in (*self.prefill.values(), self.decode) if not node.node.dead]
        coming = [f"{self._restarts} workers are starting again"] if self._restarts else []
        return [*coming, *(left for node in nodes for left in node.left_over())]

    def _check_end(self) -> None:
        for left in self._left_over():
            self.report(left)
        for ask in self.asks:
            if ask.ended != 1 and not ask.lost:
                self.report(f"{ask.name}: ended {ask.ended} times")


def run(seed: int) -> tuple[list[str], World]:
    """The problems of one schedule; none is what must come out."""
    world = World(seed)
    return world.run(), world

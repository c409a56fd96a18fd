"""The router's live view of the cluster: leases are polled, event streams read and workers probed in the background.

Requests use only this view. While the store is unavailable or read-only, the last view is kept; see `degraded`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError, NoWorkerError, WorkerLostError
from diptych.common.grammar import Grammar
from diptych.common.ids import new_incarnation
from diptych.common.request import IDEMPOTENCY, RESUME, Prompt
from diptych.common.store.interface import Store, StoreError
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tls import ClusterTls
from diptych.router.adapters.operations import LoadedAdapter, able_to_serve
from diptych.router.adapters.turns import AdapterTurns
from diptych.router.cluster.breaker import Breakers, is_fault
from diptych.router.cluster.compatibility import RouterCheck, pair_differences
from diptych.router.cluster.decode_stream import Attempt, DecodeStream
from diptych.router.cluster.event_watch import EventWatch
from diptych.router.cluster.index_follow import IndexFollower
from diptych.router.cluster.loop_uptime import LoopUptime
from diptych.router.cluster.members import Member, Members
from diptych.router.cluster.startup_grace import StartupGrace
from diptych.router.cluster.token_pace import TokenPace
from diptych.router.cluster.usable import usable_by_role
from diptych.router.cluster.worker_link import WorkerLink
from diptych.router.fairness.admission import Admission, AdmissionDecision, Verdict
from diptych.router.fairness.wait_queue import WaitQueue
from diptych.router.observe.status_view import cluster_status
from diptych.router.placement.adapters import AdapterNeed
from diptych.router.placement.cost import CHEAPEST, choose_placement
from diptych.router.placement.index import BlockIndex, IndexMode
from diptych.router.placement.native.library import Library
from diptych.router.placement.pending import PendingShare
from diptych.router.placement.placer import Incarnation, Placer, PromptBlocks
from diptych.router.placement.recent import Decisions
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.rollout import CANARY, OTHER_GROUP, STABLE, Groups, Rollout
from diptych.router.placement.types import Placement, PlacementRequest, Rejected
from diptych.router.placement.what_if import pool_snapshot
from diptych.router.placement.worker_arrays import ClusterSnapshot
from diptych.router.requests.resume import worker_mark
from diptych.router.requests.retry_budget import RetryBudget
from diptych.router.requests.slow_grammars import SlowGrammars
from diptych.rpc.convert import grammar_to_proto
from diptych.rpc.v1 import decode_pb2

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1.0


def new_router_id() -> str:
    return f"router-{new_incarnation()}"


class Cluster:
    """The view of one model's workers.

    Args:
        check: what workers must share with this router.
        poll_s: pause between two polls of the leases, two probes of a worker, and two looks at who is silent.
        dead_s: seconds without an answer, while this process could receive, after which a worker is not used.
        policy: name of the placement policy.
        require_prefill: not ready before a prefill worker was usable once.
        turn_window_s: see WaitQueue.
        hot_prefix_copies, kv_pulls, library: see Placer.
        rollout: canary and shadow workers.
        settle_s: see StartupGrace.
        router_id: see PendingShare; "": a new one.
        is_mine: selects the workers of this model.
        call_key: see WorkerLink.
    """

    def __init__(
        self,
        store: Store,
        check: RouterCheck,
        *,
        clock: Clock,
        rng: random.Random,
        poll_s: float = 0.25,
        dead_s: float = 2.0,
        settle_s: float = 5.0,
        policy: str = "cost",
        require_prefill: bool = True,
        admission: Admission | None = None,
        rollout: Rollout = Rollout(),  # noqa: B008 - frozen
        router_id: str = "",
        is_mine: Callable[[WorkerRecord], bool] = lambda _: True,
        open_link: Callable[[WorkerRecord], WorkerLink] | None = None,
        tls: ClusterTls | None = None,
        call_key: bytes = b"",
        turn_window_s: float = 0.0,
        hot_prefix_copies: bool = False,
        kv_pulls: bool = True,
        library: Library | None = None,
    ) -> None:
        self._tls = tls
        self._call_key = call_key
        self._store = store
        self._check = check
        self._clock = clock
        self._listening = LoopUptime(clock.now)
        self._rng = rng
        self._poll_s = poll_s
        self._pace = TokenPace()
        self._changed = asyncio.Event()
        self._members: Members[WorkerLink] = Members(open_link or self._open_link, check.why_not, dead_s)
        self._dead_s = dead_s
        self.settling = StartupGrace(clock, settle_s)
        self._index = BlockIndex()
        self._pairs: dict[tuple[Incarnation, Incarnation], list[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.reservations = Reservations(clock.now)
        self.placer = Placer.of(
            self._index,
            self.reservations,
            rng,
            policy=policy,
            hot_prefix_copies=hot_prefix_copies,
            kv_pulls=kv_pulls,
            library=library,
        )
        self.admission = admission or Admission("off")
        backlog = self.reservations.backlog
        self.wait_queue = WaitQueue(
            self._has_room,
            window_s=turn_window_s,
            placed=backlog.left,
            tenants=lambda: backlog.tenants,
            wait_s=self._wait_s,
            admission=self.admission,
            speeds=self.placer.speeds,
            now=clock.now,
        )
        self.reservations.on_less = self.wait_queue.let_in
        in_use = self.reservations.adapters
        self.adapter_turns = AdapterTurns(self._decode_records, in_use.running, in_use.own, clock.now)
        in_use.on_free = self.adapter_turns.let_in
        self._least_context: int | None = None
        self._groups = Groups(rollout)
        self._fleet_is_old = True
        self._pending = PendingShare(store, self.reservations, router_id or new_router_id(), clock=clock)
        self._is_mine = is_mine
        self.breakers = Breakers()
        self.retry_budget = RetryBudget()
        self.decisions = Decisions()
        self.slow_grammars = SlowGrammars()
        self._event_watch = EventWatch()
        self._follower = IndexFollower(
            store, self._index, self._members, self._event_watch, clock=clock, poll_s=poll_s, dead_s=dead_s
        )
        self.untracked_workers: dict[str, str] = {}
        """Workers whose cache events do not arrive, and the reason."""
        self._old_view = ""
        """Why the view may be stale, or ""."""
        self._pair_seen = not require_prefill
        self._wants_prefill = require_prefill
        """Whether a missing prefill worker is a reason: it was required, or there was one."""
        self.on_ticket_status: Callable[[decode_pb2.TicketStatus], None] = lambda _: None

    def _open_link(self, record: WorkerRecord) -> WorkerLink:
        return WorkerLink(
            record,
            receiving_s=self._listening.receiving_s,
            probe_s=self._poll_s,
            dead_s=self._dead_s,
            pace=self._pace,
            on_change=self._on_change,
            on_ticket_status=lambda news: self.on_ticket_status(news),
            tls=self._tls,
            call_key=self._call_key,
        )

    def _on_change(self) -> None:
        self._fleet_is_old = True
        self._changed.set()
        for grammar, worker in self.slow_grammars.on_change(self._decode_incarnations()):
            self._compile_at(grammar, worker)

    # ---- start and stop ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._listening.run(), name="cluster-listening"),
            asyncio.create_task(self._poll_loop(), name="cluster-poll"),
            asyncio.create_task(self._watch_silence(), name="cluster-silence"),
            asyncio.create_task(self._follower.run(), name="cluster-tail"),
            asyncio.create_task(self._pending.run(), name="cluster-pending"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._follower.close()
        self._tasks = []
        self.wait_queue.close()
        links = [member.link.close("the router is stopping") for member in self._members.all()]
        await asyncio.gather(*links, *self._closing, return_exceptions=True)

    async def _poll_loop(self) -> None:
        while True:
            try:
                records = await self._store.list_workers()
                self._set_old_view("")
                self._fold_records(records)
            except StoreError as err:
                self._set_old_view(f"the store is unavailable, the view of the cluster may be stale ({err})")
            if self.placer.policy.name == CHEAPEST.name:  # other policies do not use the index
                self.untracked_workers = self._follower.find_untracked(self.untracked_workers)
            self._follower.fetch_snapshots()
            await asyncio.sleep(self._poll_s)

    async def _watch_silence(self) -> None:
        """Apart from the polls, since the store may take long to answer."""
        while True:
            for member in self._members.given_up(self._clock.now()):
                if member.link.decode is not None and member.link.decode.num_attempts:
                    member.link.decode.fail_attempts(member.link.why_not() or "its lease ended")
            self._fleet_is_old = True  # silence and breakers depend on time alone
            await asyncio.sleep(self._poll_s)

    @property
    def degraded(self) -> str:
        """What is wrong with the store, or "": the view may be stale, or this router's rows cannot be written."""
        return self._old_view or (
            self._pending.failing and f"the store rejects this router's rows ({self._pending.failing})"
        )

    def _set_old_view(self, why: str) -> None:
        if bool(why) != bool(self._old_view):
            log.warning("store is unavailable", why=why) if why else log.info("store is available again")
        if self._old_view and not why:
            self._follower.after_outage()
        self._old_view = why

    def _fold_records(self, all_workers: Sequence[WorkerRecord]) -> None:
        records = [record for record in all_workers if self._is_mine(record)]
        now = self._clock.now()
        new, lost = self._members.on_records(records, now)
        for member in lost:
            known = {"worker": member.record.worker_id, "incarnation": member.record.incarnation}
            if self._members.left_gracefully(member, now):
                log.info("worker left", **known)
            else:
                log.warning("worker lost", **known)
            self.breakers.forget(member.record.worker_id)
            self._event_watch.forget(member.record.worker_id)
            if self._members.get(member.record.worker_id) is None:
                self._follower.forget(member.record.worker_id)
            task = asyncio.create_task(member.link.close("its incarnation ended"))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for member in new:
            record = member.record
            log.info("worker found", worker=record.worker_id, role=record.role, address=record.address)
            if why := self._check.why_not(record):
                log.error("worker is incompatible", worker=record.worker_id, why=why)
            self._follower.begin(record.worker_id)
            member.link.start()
        for record in records:
            position = (record.event_epoch, *record.event_sequences)
            self._index.register(record.worker_id, record.incarnation, *position)
            self._follower.watch_tail(record, now)
        self._fleet_is_old = True
        self.adapter_turns.let_in()
        if new or lost:
            self._changed.set()

    # ---- questions -----------------------------------------------------------------------------------------------

    def _refresh(self) -> Placer:
        """The placer with the workers that are usable now."""
        if self._fleet_is_old:
            sides, unusable, leaving = usable_by_role(self._members, self.breakers, self._check, self._clock.now())
            incompatible = {
                (p.record.worker_id, d.record.worker_id): differences
                for p in sides["prefill"]
                for d in sides["decode"]
                if (differences := self._pair(p.record, d.record))
            }
            self.placer.set_workers(sides["prefill"], sides["decode"], incompatible, unusable, leaving)
            fleet = self.placer.fleet
            self._least_context = min((r.max_model_len for r in fleet.records), default=None)
            self._decode_pools = {(r.num_blocks, r.block_size) for r in fleet.records[fleet.num_prefill :]}
            self.settling.saw(len(sides["decode"]))
            self._groups.refresh((c.record.worker_id, c.record.incarnation) for c in sides["decode"])
            self._fleet_is_old = False
        return self.placer

    def _has_room(
        self, window_s: float, tenant: str, tokens: int, beside: float = 0.0, *, doubtful: bool = False
    ) -> bool:
        return self._refresh().has_room(window_s, tenant, tokens, beside, doubtful=doubtful)

    def _wait_s(self, tenant: str, tokens: int, beside: float = 0.0) -> float:
        return self._refresh().wait_s(tenant, tokens, beside)

    def snapshot(
        self, prompt: PromptBlocks | None = None, exclude: frozenset[Incarnation] = frozenset()
    ) -> ClusterSnapshot:
        """Usable workers with this prompt's hits. `exclude`: incarnations that must not be chosen as decode."""
        return self._refresh().snapshot(prompt, exclude)

    def uncached_tokens(self, prompt: PromptBlocks) -> int:
        """See Placer."""
        return self._refresh().uncached_tokens(prompt)

    def _pair(self, prefill: WorkerRecord, decode: WorkerRecord) -> list[str]:
        if self._groups.apart(prefill.worker_id, decode.worker_id):
            return [OTHER_GROUP]
        key = ((prefill.worker_id, prefill.incarnation), (decode.worker_id, decode.incarnation))
        if key not in self._pairs:
            if len(self._pairs) > 10_000:
                self._pairs.clear()
            self._pairs[key] = pair_differences(prefill.compat, decode.compat)
        return self._pairs[key]

    def ready(self) -> tuple[bool, list[str]]:
        """Whether a request could be placed, and the reasons against it or for being degraded.

        The first time a compatible prefill and decode worker are needed (see require_prefill); later decode alone is
        enough. Without require_prefill a cluster that never had a prefill worker is not degraded: it is colocated.
        """
        view = self.snapshot()
        reasons = [f"{worker_id} {why}" for worker_id, why in sorted(view.unusable.items())]
        unfit = {pair: why for pair, why in view.incompatible.items() if list(why) != [OTHER_GROUP]}
        reasons += [f"{p} and {d} are incompatible: {'; '.join(why)}" for (p, d), why in unfit.items()]
        reasons += [f"{worker_id} {why}" for worker_id, why in sorted(self.untracked_workers.items())]
        if self.degraded:
            reasons.append(self.degraded)
        pair = len(view.prefill) * len(view.decode) > len(view.incompatible)
        self._pair_seen = self._pair_seen or pair
        self._wants_prefill = self._wants_prefill or any(m.record.role == "prefill" for m in self._members.all())
        for role, missing in (
            ("decode", not view.decode),
            ("prefill", self._wants_prefill and not view.prefill),
        ):
            if missing:
                reasons.insert(0, f"no usable {role} worker")
        return bool(view.decode) and self._pair_seen, reasons

    def may_come(self, exclude: frozenset[Incarnation]) -> bool:
        """Whether a decode worker that is not usable may become so within a moment: it has a lease, and its address did
        not refuse the last connection. `exclude`: incarnations that do not count."""
        return any(
            member.link.decode is not None and not member.link.refused and member.record.state == "ready"
            for member in self._members.all()
            if (member.record.worker_id, member.record.incarnation) not in exclude
            and not self._check.why_not(member.record)
        )

    def max_model_len(self) -> int | None:
        """The smallest context of the usable workers; None: there is none."""
        self._refresh()
        return self._least_context

    def pool_tokens(self, num_beams: int) -> int | None:
        """Tokens of KV that the smallest pool of the usable decode workers holds, for each of `num_beams` beams without
        shared blocks; None: there is no worker."""
        self._refresh()
        return min((blocks // num_beams * size for blocks, size in self._decode_pools), default=None)

    def index_mode(self, placement: Placement) -> IndexMode:
        """The least exact mode among the placement's workers."""
        chosen = placement.chosen
        mode = self._index.mode(chosen.decode.worker_id)
        if chosen.prefill is not None and mode is not IndexMode.GUESS:
            other = self._index.mode(chosen.prefill.worker_id)
            mode = mode if other is IndexMode.EXACT else other
        return IndexMode.STALE if self._old_view and mode is IndexMode.EXACT else mode

    def name_blocks(self, prompt: PromptBlocks) -> None:
        """Compute block identities before `place`, which else would."""
        self._refresh().name_blocks(prompt)

    def place(
        self, request: PlacementRequest, prompt: PromptBlocks, exclude: frozenset[Incarnation] = frozenset()
    ) -> Placement:
        """Raises: NoWorkerError with the reasons."""
        placer, now = self._refresh(), self._clock.now()
        older = placer.without_fields(request.request_fields)
        exclude |= older
        answer = placer.place(request, prompt, now, exclude | self._groups.others(request.group))
        if isinstance(answer, Rejected) and request.group == CANARY:
            answer = placer.place(request, prompt, now, exclude | self._groups.others(STABLE))
            if isinstance(answer, Placement):
                answer = replace(answer, notes=(*answer.notes, "no canary worker is usable: placed on a stable worker"))
        if isinstance(answer, Rejected):
            unknown = f"decode workers that do not know {', '.join(sorted(request.request_fields))}: {len(older)}"
            text = "; ".join((*answer.reasons, *([unknown] if older else []))) or "no worker has registered"
            raise NoWorkerError(f"no worker can serve this request: {text}", retry_after_s=RETRY_AFTER_S)
        return answer

    def what_if(self, request: PlacementRequest, pool: str) -> Placement:
        """The placement in another pool of workers. Raises: InvalidRequestError, NoWorkerError."""
        now = self._clock.now()
        placer = self._refresh()
        answer = choose_placement(
            request, pool_snapshot(pool, placer.fleet.records, now), now, self._rng, placer.policy
        )
        if isinstance(answer, Rejected):
            raise NoWorkerError("; ".join(answer.reasons))
        return answer

    def certain_if_late(self, prompt: PromptBlocks, at: float) -> int:
        """See Placer.certain_tokens; 0 if the whole prompt could be computed by then."""
        placer = self._refresh()
        fits = self._clock.now() + placer.speeds.least_s(len(prompt.prompt.token_ids)) <= at
        return 0 if fits else placer.certain_tokens(prompt)

    def on_first_token(self, placement: Placement | None, num_tokens: int, seconds: float) -> None:
        """A request's first token came so long after its placement, with `num_tokens` of its prompt computed for it."""
        if placement is not None:
            computed = placement.chosen.prefill or placement.decode
            self.placer.speeds.on_computed(computed.worker_id, num_tokens, seconds)

    def judge_pace(self, judgement: AdmissionDecision, placement: Placement) -> AdmissionDecision:
        """An admitted request's decision, with the pace of its placement."""
        if judgement.verdict is not Verdict.ADMITTED:
            return judgement
        tpot_s = placement.decode.record.load.decode_step_s
        return self.admission.judge(judgement.bound_s, judgement.ttft_s, judgement.ttft_limit_s, tpot_s)

    def open(self, placement: Placement, submit: decode_pb2.Submit, tenant: str) -> Attempt:
        """Send the attempt to decode and count it as pending until `reservations.release`. Raises: WorkerLostError."""
        attempt = self._stream_of(placement).open(submit)
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        self.hold(placement, attempt.id, tenant, num_tokens, adapter=submit.adapter)
        return attempt

    def keeper_of(self, mark: bytes) -> Incarnation | None:
        """The decode worker of this worker_mark that takes Command.resume; None: there is none."""
        for member in self._members.all():
            record = member.record
            if record.role == "decode" and worker_mark(record.worker_id, record.incarnation) == mark:
                return (record.worker_id, record.incarnation) if RESUME in record.request_fields else None
        return None

    async def find(self, key: bytes) -> str:
        """The ref of an answer that a decode worker keeps under this hash of an idempotency key (Decode.Find); "": none has
        said so within FIND_S."""
        links = [
            member.link
            for member in self._members.all()
            if member.link.decode is not None and member.link.decode.up and IDEMPOTENCY in member.record.request_fields
        ]
        asked = [asyncio.ensure_future(link.find(key)) for link in links]
        try:
            for answer in asyncio.as_completed(asked):
                if ref := await answer:
                    return ref
        finally:
            for one in asked:
                one.cancel()
        return ""

    def only(self, incarnation: Incarnation) -> frozenset[Incarnation]:
        """All decode incarnations but this one: to be excluded from a placement that must choose it."""
        return frozenset((member.record.worker_id, member.record.incarnation) for member in self._members.all()) - {
            incarnation
        }

    def resume(self, placement: Placement, attempt: str, prompt: Prompt, tenant: str) -> Attempt:
        """Go on with an attempt of another router at the placement's decode worker. It is pending as in `open`. Raises:
        WorkerLostError."""
        opened = self._stream_of(placement).resume(attempt, prompt.cache_salt)
        self.hold(placement, attempt, tenant, 0, adapter=prompt.adapter)
        return opened

    def _stream_of(self, placement: Placement) -> DecodeStream:
        record = placement.decode.record
        member = self._members.get(record.worker_id)
        if member is None or member.link.incarnation != record.incarnation or member.link.decode is None:
            raise WorkerLostError(f"decode worker {record.worker_id} is gone")
        return member.link.decode

    def is_idle_for(self, tenant: str, num_tokens: int, adapter: AdapterNeed | None = None) -> bool:
        """Whether a prompt would be placed at once, and nothing waits."""
        has_slot = adapter is None or self.adapter_turns.may_pass(adapter)
        return has_slot and self.wait_queue.may_pass(tenant, num_tokens)

    async def release_session(self, session: bytes) -> tuple[int, list[str]]:
        """End a session's claims at every worker that has a lease. Returns: tokens whose KV was freed, and the workers that did
        not answer: there the claims end by their time."""
        links = [member.link for member in self._members.all()]
        freed = await asyncio.gather(*(link.release_session(session) for link in links))
        unreached = [link.worker_id for link, tokens in zip(links, freed, strict=True) if tokens is None]
        return sum(filter(None, freed)), unreached

    async def load_adapter(self, folder: str) -> dict[str, LoadedAdapter | DiptychError]:
        """See AdapterWorkers. Without a usable decode worker it waits as requests do. A worker that is lost meanwhile, or is
        silent for so long that requests would not be given to it, is in the answer only where no other one is left. One that
        takes smaller ranks only is not in it where a decode worker could load the adapter: requests are not given to it."""
        while not self.snapshot().decode and (left_s := self.settling.left_s()) > 0:
            await self.wait_for_change(min(left_s, 0.1))
        able = [member for member in self._members.all() if member.record.max_loras]
        unusable = {member.link.worker_id: self._why_unplaceable(member) for member in able}
        loads = {
            asyncio.create_task(member.link.load_adapter(folder), name=f"load at {member.link.worker_id}"): member
            for member in able
            if not unusable[member.link.worker_id]
        }
        if able and not loads:
            why = "; ".join(f"{worker_id} {reason}" for worker_id, reason in sorted(unusable.items()))
            raise NoWorkerError(f"no worker that takes adapters is usable now: {why}", retry_after_s=RETRY_AFTER_S)
        silent: dict[str, str] = {}
        try:
            pending = set(loads)
            while pending:
                _, pending = await asyncio.wait(pending, timeout=self._poll_s)
                for load in list(pending):
                    if why := self._why_unplaceable(loads[load]):
                        silent[loads[load].link.worker_id] = why
                        pending.discard(load)
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        answers: dict[str, LoadedAdapter | DiptychError] = {}
        lost: dict[str, LoadedAdapter | DiptychError] = {}
        for load, member in loads.items():
            worker_id = member.link.worker_id
            if worker_id in silent:
                text = f"{silent[worker_id]}, and has not answered"
                lost[worker_id] = NoWorkerError(text, retry_after_s=RETRY_AFTER_S)
            else:
                (lost if member.link.closed else answers)[worker_id] = load.result()
        records = {member.link.worker_id: member.record for member in loads.values()}
        return able_to_serve(answers, records) or lost

    def _why_unplaceable(self, member: Member[WorkerLink]) -> str:
        return self._members.why_unplaceable(member, self._clock.now())

    async def unload_adapter(self, adapter_id: str) -> None:
        """See AdapterWorkers."""
        links = [member.link for member in self._members.all() if member.record.max_loras]
        await asyncio.gather(*(link.unload_adapter(adapter_id) for link in links))

    def on_grammar_compiled(self, grammar: Grammar, at: Incarnation, took_s: float) -> None:
        """An attempt with a grammar was accepted after so many seconds: see SlowGrammars."""
        for worker in self.slow_grammars.on_accepted(grammar, at, took_s, self._decode_incarnations()):
            self._compile_at(grammar, worker)

    def _compile_at(self, grammar: Grammar, worker: Incarnation) -> None:
        member = self._members.get(worker[0])
        if member is not None and member.link.decode is not None:
            member.link.decode.prepare(decode_pb2.Prepare(grammar=grammar_to_proto(grammar)))

    def _decode_incarnations(self) -> list[Incarnation]:
        """Of the usable decode workers."""
        return [(record.worker_id, record.incarnation) for record in self._decode_records()]

    def _decode_records(self) -> Sequence[WorkerRecord]:
        fleet = self._refresh().fleet
        return fleet.records[fleet.num_prefill :]

    def without_grammar(self, grammar: Grammar) -> frozenset[Incarnation]:
        """Usable decode workers that would have to compile this slow grammar first; empty: it is not slow."""
        compiled = self.slow_grammars.compiled_at(grammar)
        return frozenset(self._decode_incarnations()) - compiled if compiled else frozenset()

    def hold(
        self,
        placement: Placement,
        attempt: str,
        tenant: str,
        num_prompt_tokens: int,
        *,
        adapter: str = "",
        doubtful: bool = False,
    ) -> None:
        """Count the attempt as pending on its workers until `reservations.release`. `adapter`, `doubtful`: see Reservations."""
        record = placement.decode.record
        computes = placement.chosen.prefill or placement.decode
        num_tokens = max(0, num_prompt_tokens - placement.chosen.computed_from)
        kv_tokens = max(0, num_prompt_tokens - placement.decode.hit_tokens)
        reservation = Reservation(computes.worker_id, record.worker_id, num_tokens, tenant, kv_tokens, adapter)
        self.reservations.reserve(attempt, reservation, doubtful=doubtful)
        now = self._clock.now()
        for worker_id in {computes.worker_id, record.worker_id}:
            if self.breakers.on_placed(worker_id, now):
                self._fleet_is_old = True

    def direct_endpoint(self, incarnation: Incarnation) -> decode_pb2.DirectEndpoint | None:
        """Where clients may redeem tickets for this incarnation of a decode worker; None: nowhere, or it is gone."""
        member = self._members.get(incarnation[0])
        if member is None or member.link.incarnation != incarnation[1] or member.link.decode is None:
            return None
        return member.link.decode.direct_endpoint

    def is_member(self, incarnation: Incarnation) -> bool:
        """Whether it has a lease, and no other incarnation has taken its place."""
        member = self._members.get(incarnation[0])
        return member is not None and member.link.incarnation == incarnation[1]

    def on_outcome(self, worker_id: str, reason: str) -> None:
        """Record how a request ended at a worker. `reason`: of the error, or "". An inconclusive outcome only ends a
        probe."""
        now = self._clock.now()
        if reason and not is_fault(reason):
            changed = self.breakers.on_inconclusive(worker_id, now)
        else:
            changed = self.breakers.on_outcome(worker_id, fault=bool(reason), now=now)
            if changed:
                log.warning("breaker", worker=worker_id, state=self.breakers.state(worker_id, now).value)
        self._fleet_is_old |= changed

    def on_computed(self, worker_id: str, num_tokens: int) -> None:
        """A worker computed this many tokens of a prompt."""
        member = self._members.get(worker_id)
        if member is not None and num_tokens >= member.record.block_size:
            self._event_watch.computed(worker_id, self._clock.now())

    def kv_usage(self) -> float:
        """Mean share of KV blocks in use on the decode workers that have a lease."""
        usage = [member.record.load.kv_usage for member in self._members.all() if member.record.role == "decode"]
        return sum(usage) / len(usage) if usage else 0.0

    @property
    def num_routers(self) -> int:
        """Routers in the last exchange, including this one."""
        return self._pending.num_others + 1

    def status(self, owner: bytes) -> dict[str, Any]:
        """Data of the status page. `owner`: the tenant whose requests are included."""
        view = self.snapshot()
        return cluster_status(
            self._members.all(),
            view=view,
            index=self._index,
            untracked_workers=self.untracked_workers,
            degraded=self.degraded,
            policy=self.placer.policy.name,
            breakers=self.breakers,
            reservations=self.reservations,
            decisions=self.decisions.latest(owner),
            now=self._clock.now(),
        )

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until a worker joins, leaves or changes its usability, or until the timeout."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

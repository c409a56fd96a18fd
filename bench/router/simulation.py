"""A cluster in virtual time around the production placer: index, reservations, costs, policies, the colocated margin,
admission and the tenants' turns are the router's code.

    trace --gate--> refused | placer.place --> queue --compute--> first token --KV--> decode --answer--> caches, events --> index

A worker computes prompts at a fixed rate, in steps and in the engine's order (common/equal_shares.py); a decode worker
only its local ones, and its step grows with its sequences. Where its pool is bounded, a request waits there for blocks before
its prompt is computed anywhere. Of a request with an adapter both load it if they lack it, and give it a slot by the engine's
policy (simulated_adapters.py); the router's turns for adapters are left out. Both keep a prefix cache with the engine's order
of evictions and claims (engine.sched.cache.retention), and publish its events; leases are read every `lease_s`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from diptych.bench.router.simulated_adapters import WorkerAdapters
from diptych.bench.router.trace import BLOCK_SIZE, HEADER, TraceRequest
from diptych.common.equal_shares import EqualShares
from diptych.common.request import CacheClaim, Prompt
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.engine.config import EngineConfig
from diptych.engine.sched.cache.retention import Claims, EvictionOrder
from diptych.router.fairness.admission import Admission, AdmissionDecision, Verdict
from diptych.router.fairness.capacity_gate import CapacityGate
from diptych.router.fairness.fair_queue import Entry
from diptych.router.fairness.wait_queue import REFUSE_S
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.cost import PlacementPolicy
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.pulls import FIELD, FIXED_MS, PlannedPull
from diptych.router.placement.replication import Replication
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import Placement, PlacementRequest
from diptych.router.requests.submission import COLOCATED_MARGIN

_NO_BOUND = 10**6
"""Blocks, more than any run holds."""
_POLL_S = 1e-6
"""Of an engine for commands of pulls: what they wait for is in `pull_fixed_s`."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    num_prefill: int = 4
    num_decode: int = 4
    cache_blocks: int = 8192
    decode_blocks: tuple[int, ...] = ()
    """Of each decode worker's pool, for prompts and answers that run; empty: no request waits for blocks."""
    prefill_tokens_per_s: float = 8000.0
    prefill_fixed_s: float = 0.005
    least_step_s: float = 0.0
    step_tokens: int = 2048
    max_step_s: float = 0.5
    fill_s: float = 0.05
    step_s: float = 0.010
    step_per_sequence_s: float = 0.0002
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 10e9
    event_delay_s: float = 0.02
    lease_s: float = 0.25
    local_prefill_max_tokens: int = 64
    replication: bool = False
    kv_pulls: bool = False
    pull_fixed_s: float = FIXED_MS / 1000.0
    hint_after_s: float = 0.0
    """After every answer its client says that prompt and answer come next (`prefetch`); 0.0: it does not."""
    turn_window_s: float = 2.0
    admission: str = "on"
    max_ttft_s: float = 0.0
    claim_share: float = EngineConfig(num_blocks=1).claim_share
    max_loras: int = 0
    """Slots for adapters of each worker; 0: none takes adapters."""
    max_lora_rank: int = 64
    max_cpu_loras: int = 64


@dataclass(slots=True)
class Outcome:
    """refused: the decision, of a request that was refused; left: its client left, or its deadline passed, in the gate; computed:
    tokens of its prompt; held: leading ones that some worker had when it was placed."""

    request: TraceRequest
    predicted_cached: int = 0
    refused: AdmissionDecision | None = None
    refused_at: float = 0.0
    left: bool = False
    would_refuse: bool = False
    finished_s: float = 0.0
    cached: int = 0
    computed: int = 0
    held: int = 0
    predicted_ttft_s: float = 0.0
    ttft_s: float = 0.0
    queued_s: float = 0.0


@dataclass(slots=True)
class _Job:
    request: TraceRequest
    placement: Placement
    attempt: str
    outcome: Outcome
    arrived: float
    judgement: AdmissionDecision | None = None
    placed_at: float = 0.0
    left: int = -1
    """Tokens to compute; -1: not started."""
    expected: int = 0
    """Tokens to compute, as of its arrival at the worker."""
    blocks: int = 0
    """That decode holds for it."""


@dataclass(slots=True)
class _Worker:
    worker_id: str
    role: str
    capacity: int
    claim_share: float = 0.0
    cache: EvictionOrder[bytes] = field(default_factory=EvictionOrder)
    queue: dict[str, _Job] = field(default_factory=dict)
    shares: EqualShares = field(default_factory=EqualShares)
    busy: bool = False
    running: int = 0
    sequence: int = 0
    pool: int = 0
    """Blocks for what runs on decode; 0: no bound."""
    used: int = 0
    blocked: deque[_Job] = field(default_factory=deque)
    claims: Claims[bytes] = field(init=False)
    adapters: WorkerAdapters | None = None

    def __post_init__(self) -> None:
        self.claims = Claims(int(self.claim_share * self.capacity), self._moved)

    def _moved(self, key: bytes, level: int) -> None:
        if key in self.cache:
            self.cache.remove(key)
            self.cache.add(key, level)

    def hit_blocks(self, keys: Sequence[bytes]) -> int:
        for length, key in enumerate(keys):
            if key not in self.cache:
                return length
        return len(keys)

    def store(self, keys: Sequence[bytes], tenant: str, claim: CacheClaim | None, now: float) -> list[KvEvent]:
        """Hold these blocks; the ends of chains are evicted first."""
        cache, claims = self.cache, self.claims
        fresh = tuple(key for key in keys if key not in cache)
        claims.expire(now)
        if claim is not None:
            claims.make(reversed(keys), tenant, claim, now)
        for key in reversed(keys):
            if key in cache:
                cache.remove(key)
            cache.add(key, claims.level(key))
        gone = tuple(islice(cache, max(0, len(cache) - self.capacity)))
        for key in gone:
            claims.gone(key, evicted=True)
            cache.remove(key)
        return [self._event(kind, changed) for kind, changed in (("stored", fresh), ("evicted", gone)) if changed]

    def _event(self, kind: str, keys: tuple[bytes, ...]) -> KvEvent:
        self.sequence += 1
        return KvEvent("i", 0, self.sequence, kind, keys)


@dataclass(slots=True)
class _Waiting:
    request: TraceRequest
    judgement: AdmissionDecision | None = None
    gone: bool = False


class Simulation:
    """The simulated cluster.

    Args:
        policy: picks among the candidates; the request's number is its `affinity` if `by_session` is False.
        excused: numbers of requests that are admitted though admission would refuse them.
        retry: what a client sends after a refusal, and never before; None: nothing.
    """

    def __init__(
        self,
        config: SimConfig,
        policy: PlacementPolicy,
        seed: int = 0,
        *,
        by_session: bool = True,
        excused: Collection[int] = (),
        retry: Callable[[TraceRequest, float], TraceRequest | None] = lambda request, retry_after_s: None,
    ) -> None:
        self._excused = excused
        self._retry = retry
        self._config = config
        self._by_session = by_session
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._index = BlockIndex()
        self._reservations = Reservations(lambda: self.now)
        self.replication = Replication() if config.replication else None
        self._placer = Placer(self._index, self._reservations, random.Random(seed), policy, self.replication)
        backlog = self._reservations.backlog
        self.admission = Admission(config.admission, config.max_ttft_s)
        self.gate: CapacityGate[_Waiting] = CapacityGate(
            self._placer.has_room,
            self._let_in,
            window_s=config.turn_window_s,
            placed=backlog.left,
            tenants=lambda: backlog.tenants,
            wait_s=self._placer.wait_s,
            admission=self.admission,
            speeds=self._placer.speeds,
            now=lambda: self.now,
        )
        self._reservations.on_less = self.gate.let_in
        names = [f"p{i}" for i in range(config.num_prefill)] + [f"d{i}" for i in range(config.num_decode)]
        self._workers = {
            name: _Worker(name, "prefill" if name[0] == "p" else "decode", config.cache_blocks, config.claim_share)
            for name in names
        }
        for worker in self._workers.values() if config.max_loras else ():
            after = lambda seconds, action: self._at(self.now + seconds, action)  # noqa: E731
            worker.adapters = WorkerAdapters(config.max_loras, config.max_cpu_loras, after)
        for i, blocks in enumerate(config.decode_blocks):
            self._workers[f"d{i}"].pool = blocks
        for name in names:
            self._index.register(name, "i", 0, 0)
        self._bases = {name: self._record(worker) for name, worker in self._workers.items()}
        self.outcomes: list[Outcome] = []
        self._left = self._num_requests = 0

    def run(self, trace: Sequence[TraceRequest]) -> list[Outcome]:
        self._left = self._num_requests = len(trace)
        for request in trace:
            self._at(request.at, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._read_leases()
        self._look()
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
        return [outcome for outcome in self.outcomes if not outcome.request.hint]

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._due, (when, self._counter, action))

    # ---- what the router sees ------------------------------------------------------------------------------------

    def _record(self, worker: _Worker) -> WorkerRecord:
        config = self._config
        return WorkerRecord(
            worker_id=worker.worker_id,
            incarnation="i",
            role=worker.role,
            address="127.0.0.1:1",
            pid=1,
            model="model",
            compat={"model_revision": "m"},
            request_fields=(FIELD,) if config.kv_pulls else (),
            kv_bytes_per_token=config.kv_bytes_per_token,
            num_blocks=worker.pool or _NO_BOUND,
            block_size=BLOCK_SIZE,
            max_model_len=131_072,
            max_num_seqs=256,
            event_epoch=0,
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank if config.max_loras else 0,
        )

    def _read_leases(self) -> None:
        sides: dict[str, list[Candidate]] = {"prefill": [], "decode": []}
        config = self._config
        for name, worker in self._workers.items():
            load = WorkerLoad(
                num_running=worker.running,
                num_waiting=len(worker.queue) + len(worker.blocked),
                kv_usage=worker.used / worker.pool if worker.pool else 0.0,
                waiting_prompt_tokens=sum(
                    job.request.num_tokens - job.outcome.predicted_cached if job.left < 0 else job.left
                    for job in worker.queue.values()
                ),
                prefill_tokens_per_s=config.prefill_tokens_per_s,
                decode_step_s=self._step_s(worker),
                poll_interval_s=_POLL_S,
                link_bytes_per_s=dict.fromkeys(self._workers, config.link_bytes_per_s)
                if worker.role == "decode"
                else {},
                adapters=worker.adapters.counts() if worker.adapters is not None else {},
            )
            record = msgspec.structs.replace(self._bases[name], load=load)
            sides[worker.role].append(Candidate(record, self.now, HEADER))
        self._placer.set_workers(sides["prefill"], sides["decode"], {}, {})
        self.gate.let_in()
        if self._left:
            self._at(self.now + config.lease_s, self._read_leases)

    def _publish(self, worker: _Worker, keys: Sequence[bytes], request: TraceRequest) -> None:
        if events := worker.store(keys, request.tenant, request.claim, self.now):
            self._at(self.now + self._config.event_delay_s, lambda: self._index.apply_all(worker.worker_id, events))

    # ---- a request's life ----------------------------------------------------------------------------------------

    def _arrive(self, request: TraceRequest) -> None:
        limit = self.admission.limit(self.now, self.now + request.within_s, request.num_answer)
        prompt, judgement = self._prompt(request), None
        if limit is not None:
            limit.certain = self._placer.certain_tokens(prompt)
            limit.excused = request.number in self._excused  # from the beginning, or one of a sample
        if self.gate.may_pass(request.tenant, request.num_tokens, limit):
            if limit is not None:
                judgement = self.gate.judge(request.tenant, request.num_tokens, limit, self.now)
            if judgement is not None and judgement.error is not None:
                self._refuse(request, judgement)
            else:
                self._place(request, judgement, prompt)
            return
        waiting = _Waiting(request)
        tokens = self._placer.uncached_tokens(prompt)
        entry, waiting.judgement = self.gate.wait(
            request.tenant, tokens, waiting, priority=0, limit=limit, arrived=self.now
        )
        if entry is None:
            assert waiting.judgement is not None
            self._refuse(request, waiting.judgement)
            return
        self._placer.begin(str(request.number), prompt, request.num_answer)
        self.gate.let_in()
        self._at(self.now + min(request.within_s, request.patience_s), lambda: self._leave(entry))
        self._watch(entry)

    def _watch(self, entry: Entry[_Waiting]) -> None:
        """Ask admission when the time of a waiting request may be over."""
        if entry.limit is not None and (at := self.gate.too_late_at(entry.limit)) < math.inf:
            self._at(max(self.now, at) + 1e-3, lambda: self._judge_again(entry))

    def _judge_again(self, entry: Entry[_Waiting]) -> None:
        if entry.gone or entry.item.gone:
            return
        decision = self.gate.judge_again(entry)
        if decision.error is None:
            self._watch(entry)
        else:
            self._leave(entry, decision)

    def _leave(self, entry: Entry[_Waiting], decision: AdmissionDecision | None = None) -> None:
        """Refused, or its client gives up, while it waits."""
        if entry.gone or entry.item.gone:
            return
        entry.item.gone = True
        self.gate.leave(entry)
        request = entry.item.request
        self._placer.end(str(request.number), self.now)
        if decision is not None:
            self._refuse(request, decision)
        else:
            self.outcomes.append(Outcome(request, left=True))
            self._left -= 1

    def _refuse(self, request: TraceRequest, decision: AdmissionDecision) -> None:
        self.outcomes.append(Outcome(request, refused=decision, refused_at=self.now))
        assert decision.error is not None
        again = self._retry(request, decision.error.retry_after_s or 0.0)
        if again is None:
            self._left -= 1
        else:
            self._at(max(self.now, again.at), lambda: self._arrive(again))

    def _look(self) -> None:
        """What the router's wait queue does while requests wait."""
        self.gate.let_in()
        for entry, decision in self.gate.refusals():
            self._leave(entry, decision)
        if self._left:
            self._at(self.now + REFUSE_S, self._look)

    def _let_in(self, entry: Entry[_Waiting]) -> bool:
        if entry.item.gone:
            return False

        def place() -> None:
            self.gate.arrived(entry)
            self._place(entry.item.request, entry.item.judgement, self._prompt(entry.item.request))

        self._at(self.now, place)
        return True

    @staticmethod
    def _prompt(request: TraceRequest) -> PromptBlocks:
        prompt = PromptBlocks(Prompt(range(request.num_tokens)))
        prompt.know(HEADER, request.array)
        return prompt

    def _place(self, request: TraceRequest, judgement: AdmissionDecision | None, prompt: PromptBlocks) -> None:
        name = request.session if self._by_session else request.number
        wish = PlacementRequest(
            request.num_tokens,
            0 if request.hint else self._config.local_prefill_max_tokens,
            needs_kv=not request.hint,
            colocated_margin=COLOCATED_MARGIN,
            affinity=name.to_bytes(8, "little"),
            tenant=request.tenant,
            adapter=request.adapter,
        )
        placement = self._placer.place(wish, prompt, self.now)
        assert isinstance(placement, Placement)
        chosen = placement.chosen
        computes = (chosen.prefill or chosen.decode).worker_id
        outcome = Outcome(request, chosen.cached_tokens, predicted_ttft_s=chosen.ttft_ms / 1000.0)
        outcome.held = request.num_tokens - min(self._uncached(one, request) for one in self._workers.values())
        outcome.would_refuse = judgement is not None and judgement.verdict is Verdict.WOULD_REFUSE
        self.outcomes.append(outcome)
        job = _Job(request, placement, str(request.number), outcome, request.at, judgement, self.now)
        self._placer.begin(job.attempt, prompt, request.num_answer)
        uncached = request.num_tokens - chosen.computed_from
        self._reservations.reserve(
            job.attempt,
            Reservation(
                computes,
                chosen.decode.worker_id,
                uncached,
                request.tenant,
                request.num_tokens - chosen.decode.hit_tokens,
                "" if request.adapter is None else request.adapter.adapter_id,
            ),
        )
        decode = self._workers[chosen.decode.worker_id]
        job.blocks = -(-(self._uncached(decode, request) + request.num_answer) // BLOCK_SIZE) if decode.pool else 0
        decode.blocked.append(job)
        self._admit(decode)

    def _admit(self, decode: _Worker) -> None:
        """What has blocks on decode is computed."""
        while decode.blocked and decode.used + decode.blocked[0].blocks <= decode.pool:
            job = decode.blocked.popleft()
            decode.used += job.blocks
            self._with_adapter(decode, job, lambda job=job: self._compute(job))  # type: ignore[misc]

    @staticmethod
    def _with_adapter(worker: _Worker, job: _Job, then: Callable[[], None]) -> None:
        """Once the worker has its adapter in a slot; at once without one."""
        need = job.request.adapter
        if need is None:
            then()
        else:
            assert worker.adapters is not None
            worker.adapters.enter(job.attempt, need, then)

    def _compute(self, job: _Job) -> None:
        chosen, snapshot = job.placement.chosen, job.placement.snapshot
        worker = self._workers[(chosen.prefill or chosen.decode).worker_id]

        def begin() -> None:
            if chosen.pull is None:
                self._queue(worker, job)
            else:
                self._pull(worker, self._workers[snapshot.record(chosen.pull.holder).worker_id], job, chosen.pull)

        if chosen.prefill is None:
            begin()  # decode, which has the adapter
        else:
            self._with_adapter(worker, job, begin)

    @staticmethod
    def _leave_adapter(worker: _Worker, job: _Job) -> None:
        if worker.adapters is not None:
            worker.adapters.leave(job.attempt)

    @property
    def adapters(self) -> list[WorkerAdapters]:
        """Of each worker, if they take any."""
        return [worker.adapters for worker in self._workers.values() if worker.adapters is not None]

    def _pull(self, worker: _Worker, holder: _Worker, job: _Job, pull: PlannedPull) -> None:
        """Take what the holder still has, then queue."""
        config, request = self._config, job.request
        blocks = min(holder.hit_blocks(request.keys), pull.num_tokens // BLOCK_SIZE)
        moved = max(0, blocks * BLOCK_SIZE - pull.first_token) * config.kv_bytes_per_token

        def arrived() -> None:
            self._publish(worker, request.keys[:blocks], request)
            self._queue(worker, job)

        self._at(self.now + config.pull_fixed_s + moved / config.link_bytes_per_s, arrived)

    def _queue(self, worker: _Worker, job: _Job) -> None:
        request = job.request
        worker.queue[job.attempt] = job
        job.expected = self._uncached(worker, request)
        worker.shares.add(job.attempt, request.tenant, job.expected)
        self._start(worker)

    def _uncached(self, worker: _Worker, request: TraceRequest) -> int:
        usable = min(worker.hit_blocks(request.keys), (request.num_tokens - 1) // BLOCK_SIZE)
        return request.num_tokens - usable * BLOCK_SIZE

    def _start(self, worker: _Worker) -> None:
        if worker.busy or not worker.queue:
            return
        worker.busy = True
        config = self._config
        budget, ended, computed = (
            min(config.step_tokens, int(config.max_step_s * config.prefill_tokens_per_s)),
            False,
            0,
        )
        chunks: list[tuple[_Job, int]] = []
        for name in sorted(worker.queue, key=worker.shares.due):
            job = worker.queue[name]
            if job.left < 0:
                self._begin(worker, job)
            if ended and job.left > budget:
                budget = min(budget, int(config.fill_s * config.prefill_tokens_per_s))
            chunk = min(job.left, budget)
            if chunk <= 0:
                break
            chunks.append((job, chunk))
            budget, computed = budget - chunk, computed + chunk
            ended |= chunk == job.left
        fixed_s = config.prefill_fixed_s if worker.role == "prefill" else self._step_s(worker)
        took = max(config.least_step_s, fixed_s + computed / config.prefill_tokens_per_s)
        self._at(self.now + took, lambda: self._stepped(worker, chunks))

    def _begin(self, worker: _Worker, job: _Job) -> None:
        job.outcome.queued_s = self.now - job.arrived
        job.left = job.outcome.computed = self._uncached(worker, job.request)
        worker.shares.less(job.attempt, job.expected - job.left)
        decode = self._workers[job.placement.decode.worker_id]
        job.outcome.cached = job.request.num_tokens - min(job.left, self._uncached(decode, job.request))

    def _stepped(self, worker: _Worker, chunks: Sequence[tuple[_Job, int]]) -> None:
        worker.busy = False
        worker.shares.computed(sum(chunk for _, chunk in chunks))
        for job, chunk in chunks:
            job.left -= chunk
            if not job.left:
                self._computed(worker, job)
        if not worker.queue:
            worker.shares.clear()
        self._start(worker)

    def _computed(self, worker: _Worker, job: _Job) -> None:
        del worker.queue[job.attempt]
        worker.shares.forget(job.attempt)
        self._publish(worker, job.request.keys, job.request)
        self._first_token(job)
        decode = self._workers[job.placement.decode.worker_id]
        if decode is not worker:
            self._leave_adapter(worker, job)
        if job.request.hint:  # its only token needs no KV on decode
            decode.running += 1
            self._finished(decode, job)
            return
        moved = 0 if decode is worker else self._uncached(decode, job.request) * self._config.kv_bytes_per_token
        self._at(self.now + moved / self._config.link_bytes_per_s, lambda: self._decode(decode, job))

    def _first_token(self, job: _Job) -> None:
        job.outcome.ttft_s = self.now - job.arrived
        computed = job.placement.chosen.prefill or job.placement.decode
        num_tokens = job.request.num_tokens - job.outcome.cached
        self._placer.speeds.on_computed(computed.worker_id, num_tokens, self.now - job.placed_at)
        if job.judgement is not None:
            self.admission.on_first_token(job.judgement, job.outcome.ttft_s)
        self._reservations.prompt_computed(job.attempt)

    def _step_s(self, worker: _Worker) -> float:
        return self._config.step_s + self._config.step_per_sequence_s * worker.running

    def _decode(self, worker: _Worker, job: _Job) -> None:
        worker.running += 1
        self._publish(worker, job.request.keys, job.request)
        self._at(self.now + job.request.num_answer * self._step_s(worker), lambda: self._finished(worker, job))

    def _finished(self, worker: _Worker, job: _Job) -> None:
        worker.running -= 1
        worker.used -= job.blocks
        self._leave_adapter(worker, job)
        self._admit(worker)
        self._left -= 1
        job.outcome.finished_s = self.now - job.arrived
        if job.judgement is not None:
            self.admission.on_answer(job.judgement, job.request.num_answer, job.outcome.finished_s - job.outcome.ttft_s)
        self._reservations.release(job.attempt)
        self._placer.end(job.attempt, self.now)
        self.gate.written(job.request.tenant, job.request.num_answer)
        self._publish(worker, job.request.later_keys, job.request)
        if self._config.hint_after_s and not job.request.hint:
            self._hint(job.request)

    def _hint(self, request: TraceRequest) -> None:
        """As its client sends it: the answer has one token, which nobody reads."""
        self._left += 1
        hint = replace(
            request, number=request.number + self._num_requests, at=self.now + self._config.hint_after_s,
            num_tokens=request.num_tokens + request.num_answer, num_answer=1, keys=request.later_keys,
            array=as_keys(list(request.later_keys)), later_keys=(), hint=True,
        )  # fmt: skip
        self._at(hint.at, lambda: self._arrive(hint))

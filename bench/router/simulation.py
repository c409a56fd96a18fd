"""A cluster in virtual time around the production placer: index, reservations, costs, policies, the colocated margin
and the tenants' turns are the router's code.

    trace --gate--> placer.place --> queue --compute--> first token --KV--> decode --answer--> caches, events --> index

A worker computes prompts at a fixed rate, in steps and in the engine's order (common/equal_shares.py); a decode worker
only its local ones, and its step grows with its sequences. Both keep an LRU prefix cache and publish its events; leases
are read every `lease_s`.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from diptych.bench.router.trace import BLOCK_SIZE, HEADER, TraceRequest
from diptych.common.equal_shares import EqualShares
from diptych.common.request import Prompt
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.router.fairness.capacity_gate import CapacityGate
from diptych.router.fairness.fair_queue import Entry
from diptych.router.placement.cost import PlacementPolicy
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.replication import Replication
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import Placement, PlacementRequest
from diptych.router.requests.submission import COLOCATED_MARGIN


@dataclass(frozen=True, slots=True)
class SimConfig:
    num_prefill: int = 4
    num_decode: int = 4
    cache_blocks: int = 8192
    prefill_tokens_per_s: float = 8000.0
    prefill_fixed_s: float = 0.005
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
    turn_window_s: float = 2.0


@dataclass(slots=True)
class Outcome:
    request: TraceRequest
    predicted_cached: int
    cached: int = 0
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
    left: int = -1
    """Tokens to compute; -1: not started."""
    expected: int = 0
    """Tokens to compute, as of its arrival at the worker."""


@dataclass(slots=True)
class _Worker:
    worker_id: str
    role: str
    capacity: int
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    queue: dict[str, _Job] = field(default_factory=dict)
    shares: EqualShares = field(default_factory=EqualShares)
    busy: bool = False
    running: int = 0
    sequence: int = 0

    def hit_blocks(self, keys: Sequence[bytes]) -> int:
        for length, key in enumerate(keys):
            if key not in self.cache:
                return length
        return len(keys)

    def store(self, keys: Sequence[bytes]) -> list[KvEvent]:
        """Hold these blocks; the ends of chains are evicted first."""
        fresh = tuple(key for key in keys if key not in self.cache)
        for key in reversed(keys):
            self.cache[key] = None
            self.cache.move_to_end(key)
        gone = tuple(self.cache.popitem(last=False)[0] for _ in range(max(0, len(self.cache) - self.capacity)))
        return [self._event(kind, changed) for kind, changed in (("stored", fresh), ("evicted", gone)) if changed]

    def _event(self, kind: str, keys: tuple[bytes, ...]) -> KvEvent:
        self.sequence += 1
        return KvEvent("i", 0, self.sequence, kind, keys)


class Simulation:
    """The simulated cluster. `policy`: picks among the candidates; the request's number is its `affinity` if
    `by_session` is False."""

    def __init__(self, config: SimConfig, policy: PlacementPolicy, seed: int = 0, *, by_session: bool = True) -> None:
        self._config = config
        self._by_session = by_session
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._index = BlockIndex()
        self._reservations = Reservations(lambda: self.now)
        self.replication = Replication() if config.replication else None
        self._placer = Placer(self._index, self._reservations, random.Random(seed), policy, self.replication)
        self.gate: CapacityGate[TraceRequest] = CapacityGate(
            self._placer.has_room,
            self._let_in,
            window_s=config.turn_window_s,
            placed=self._reservations.backlog.left,
        )
        self._reservations.on_less = self.gate.let_in
        names = [f"p{i}" for i in range(config.num_prefill)] + [f"d{i}" for i in range(config.num_decode)]
        self._workers = {
            name: _Worker(name, "prefill" if name[0] == "p" else "decode", config.cache_blocks) for name in names
        }
        for name in names:
            self._index.register(name, "i", 0, 0)
        self._bases = {name: self._record(worker) for name, worker in self._workers.items()}
        self.outcomes: list[Outcome] = []
        self._left = 0

    def run(self, trace: Sequence[TraceRequest]) -> list[Outcome]:
        self._left = len(trace)
        for request in trace:
            self._at(request.at, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._read_leases()
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
        return self.outcomes

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
            compat={},
            kv_bytes_per_token=config.kv_bytes_per_token,
            num_blocks=config.cache_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=131_072,
            max_num_seqs=256,
            event_epoch=0,
        )

    def _read_leases(self) -> None:
        sides: dict[str, list[Candidate]] = {"prefill": [], "decode": []}
        config = self._config
        for name, worker in self._workers.items():
            load = WorkerLoad(
                num_running=worker.running,
                num_waiting=len(worker.queue),
                waiting_prompt_tokens=sum(
                    job.request.num_tokens - job.outcome.predicted_cached if job.left < 0 else job.left
                    for job in worker.queue.values()
                ),
                prefill_tokens_per_s=config.prefill_tokens_per_s,
                decode_step_s=self._step_s(worker),
                link_bytes_per_s=dict.fromkeys(self._workers, config.link_bytes_per_s)
                if worker.role == "decode"
                else {},
            )
            record = msgspec.structs.replace(self._bases[name], load=load)
            sides[worker.role].append(Candidate(record, self.now, HEADER))
        self._placer.set_workers(sides["prefill"], sides["decode"], {}, {})
        self.gate.let_in()
        if self._left:
            self._at(self.now + config.lease_s, self._read_leases)

    def _publish(self, worker: _Worker, keys: Sequence[bytes]) -> None:
        if events := worker.store(keys):
            self._at(self.now + self._config.event_delay_s, lambda: self._index.apply_all(worker.worker_id, events))

    # ---- a request's life ----------------------------------------------------------------------------------------

    def _arrive(self, request: TraceRequest) -> None:
        if self.gate.may_pass(request.tenant, request.num_tokens):
            self._place(request)
        else:
            tokens = self._placer.uncached_tokens(self._prompt(request))
            self.gate.wait(request.tenant, tokens, request, priority=0)
            self.gate.let_in()

    def _let_in(self, entry: Entry[TraceRequest]) -> bool:
        def place() -> None:
            self.gate.arrived(entry)
            self._place(entry.item)

        self._at(self.now, place)
        return True

    @staticmethod
    def _prompt(request: TraceRequest) -> PromptBlocks:
        prompt = PromptBlocks(Prompt(range(request.num_tokens)))
        prompt.know(HEADER, request.array)
        return prompt

    def _place(self, request: TraceRequest) -> None:
        prompt = self._prompt(request)
        name = request.session if self._by_session else request.number
        wish = PlacementRequest(
            request.num_tokens,
            self._config.local_prefill_max_tokens,
            colocated_margin=COLOCATED_MARGIN,
            affinity=name.to_bytes(8, "little"),
            tenant=request.tenant,
        )
        placement = self._placer.place(wish, prompt, self.now)
        assert isinstance(placement, Placement)
        chosen = placement.chosen
        computes = (chosen.prefill or chosen.decode).worker_id
        outcome = Outcome(request, chosen.cached_tokens, predicted_ttft_s=chosen.ttft_ms / 1000.0)
        self.outcomes.append(outcome)
        job = _Job(request, placement, str(request.number), outcome, request.at)
        uncached = request.num_tokens - (chosen.prefill or chosen.decode).hit_tokens
        self._reservations.reserve(
            job.attempt, Reservation(computes, chosen.decode.worker_id, uncached, request.tenant)
        )
        worker = self._workers[computes]
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
        took = fixed_s + computed / config.prefill_tokens_per_s
        self._at(self.now + took, lambda: self._stepped(worker, chunks))

    def _begin(self, worker: _Worker, job: _Job) -> None:
        job.outcome.queued_s = self.now - job.arrived
        job.left = self._uncached(worker, job.request)
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
        self._publish(worker, job.request.keys)
        self._first_token(job)
        decode = self._workers[job.placement.decode.worker_id]
        moved = 0 if decode is worker else self._uncached(decode, job.request) * self._config.kv_bytes_per_token
        self._at(self.now + moved / self._config.link_bytes_per_s, lambda: self._decode(decode, job))

    def _first_token(self, job: _Job) -> None:
        job.outcome.ttft_s = self.now - job.arrived
        self._reservations.prompt_computed(job.attempt)

    def _step_s(self, worker: _Worker) -> float:
        return self._config.step_s + self._config.step_per_sequence_s * worker.running

    def _decode(self, worker: _Worker, job: _Job) -> None:
        worker.running += 1
        self._publish(worker, job.request.keys)
        self._at(self.now + job.request.num_answer * self._step_s(worker), lambda: self._finished(worker, job))

    def _finished(self, worker: _Worker, job: _Job) -> None:
        worker.running -= 1
        self._left -= 1
        self._reservations.release(job.attempt)
        self.gate.written(job.request.tenant, job.request.num_answer)
        self._publish(worker, job.request.later_keys)

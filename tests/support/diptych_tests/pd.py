"""Prefill and decode workers of one process: real engines with a fake model, in-process KV transport, real gRPC servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client.samples import Sample

from diptych.cli.worker_roles import services_of
from diptych.common.clock import Clock, MonotonicClock
from diptych.common.compat import Compat, identified
from diptych.common.errors import DiptychError
from diptych.common.sampling import SamplingParams
from diptych.common.secret import call_key, call_token, load_secret
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import RangePacked, ScheduledSeq
from diptych.prefill.sessions import PrefillSession
from diptych.rpc.channels import open_channel
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.errors import from_failure
from diptych.rpc.stubs import DecodeStub, WorkerStub
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2, worker_pb2
from diptych.worker import wire
from diptych.worker.config import WorkerConfig
from diptych.worker.model import LoadedModel
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

if TYPE_CHECKING:
    import pytest  # not by the child processes that use this module

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
SECRET_FILE = Path(__file__).with_name("cluster_secret")
CALL_KEY = call_key(load_secret(SECRET_FILE))
BLOCK = 16
VOCAB = 1000
DEADLINE_S = 60.0
"""For what takes milliseconds on an idle machine."""
NEVER_S = 3600.0
"""A bound that no test reaches: what should be noticed otherwise is not noticed by it."""


def fake_model(**runner: object) -> LoadedModel:
    made = FakeRunner(**{"num_blocks": 64, "block_size": BLOCK, "vocab_size": VOCAB, **runner})  # type: ignore[arg-type]
    compat = Compat(
        model="fake",
        model_revision="model-1",
        tokenizer_revision="tokenizer-1",
        kv=made.kv,
        compute_dtype="int8",
        attention_version="fake-1",
        sampler_version="fake-1",
        backend="fake",
    )
    identity, compat = identified(compat, bytes(32))
    return LoadedModel(made, compat, identity, None)


def worker_config(role: str, worker_id: str, **changes: object) -> WorkerConfig:
    settings: dict[str, object] = {
        "role": role,
        "worker_id": worker_id,
        "transport": "inproc",
        "dtype": "float32",
        "block_size": BLOCK,
        "max_num_batched_tokens": 32,
        "max_step_time_s": 0.0,
        "mixed_step_time_s": 0.0,
        "slab_bytes": 4096,
        "num_slabs": 4,
        "read_base_s": NEVER_S,
        "slab_lease_s": NEVER_S,
        "drain_s": NEVER_S,
        "stall_bound_s": NEVER_S,
        "kv_overlap": "on",  # the fake model's KV is too small to be worth a message
        "check_invariants": True,
        "insecure": True,
        "secret_file": str(SECRET_FILE),
    }
    return WorkerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def worker_channel(address: str) -> grpc.aio.Channel:
    """A channel with the token that a worker of `worker_config` expects."""
    return open_channel(address, token=call_token(CALL_KEY, address))


class Gate:
    """Holds a fake model before a step of a request's attempt, from its `after`-th such step on."""

    def __init__(self, after: int = 0) -> None:
        self._open = threading.Event()
        self._left = after
        self.reached = threading.Event()

    def __call__(self, seqs: Sequence[ScheduledSeq]) -> None:
        if all(seq.attempt == "warm-up" for seq in seqs):
            return
        if self._left:
            self._left -= 1
            return
        self.reached.set()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()

    def close(self, after: int) -> None:
        """Hold from the `after`-th step from now on; of no effect once it was opened."""
        self._left = after

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, DEADLINE_S)


class SkippingClock:
    """Real time plus the time that a model skips: its steps take their nominal time on a machine of any speed."""

    def __init__(self) -> None:
        self._real, self._skipped_s = MonotonicClock(), 0.0

    def now(self) -> float:
        return self._real.now() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


@dataclass
class Answer:
    """Events of one attempt."""

    token_ids: list[int] = field(default_factory=list)
    accepted: bool = False
    finished: router_pb2.Finished | None = None
    error: DiptychError | None = None

    @property
    def explanation(self) -> types_pb2.Explanation:
        assert self.finished is not None, self.error
        return self.finished.explanation


class FakeRouter:
    """One Attach stream."""

    def __init__(self, address: str) -> None:
        self._channel = worker_channel(address)
        self._commands: asyncio.Queue[decode_pb2.Command | None] = asyncio.Queue()
        self._answers: dict[str, tuple[Answer, asyncio.Event, asyncio.Event]] = {}
        self._call: grpc.aio.StreamStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self.num_batches = 0

    async def __aenter__(self) -> FakeRouter:
        self._call = DecodeStub(self._channel).Attach(self._outgoing())
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.break_stream()
        await self._channel.close()

    async def break_stream(self) -> None:
        assert self._call is not None
        assert self._reader is not None
        self._call.cancel()
        self._commands.put_nowait(None)  # where the worker ended the stream, cancelling does not end the sender
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def submit(self, message: decode_pb2.Submit) -> Answer:
        answer = Answer()
        self._answers[message.attempt] = (answer, asyncio.Event(), asyncio.Event())
        self._commands.put_nowait(decode_pb2.Command(submit=message))
        return answer

    def cancel(self, attempt: str) -> None:
        self._commands.put_nowait(decode_pb2.Command(cancel=decode_pb2.Cancel(attempt=attempt)))

    async def find(self, key: bytes) -> str:
        answer = await DecodeStub(self._channel).Find(decode_pb2.FindRequest(idempotency=key), timeout=DEADLINE_S)
        return str(answer.resume_ref)

    def resume(self, attempt: str, cache_salt: bytes = b"") -> Answer:
        answer = Answer()
        self._answers[attempt] = (answer, asyncio.Event(), asyncio.Event())
        self._commands.put_nowait(decode_pb2.Command(resume=decode_pb2.Resume(attempt=attempt, cache_salt=cache_salt)))
        return answer

    async def run(self, message: decode_pb2.Submit) -> Answer:
        answer = self.submit(message)
        await self.ended(message.attempt)
        return answer

    async def ended(self, attempt: str) -> None:
        await self._happened(self._answers[attempt][2])

    async def first_token(self, attempt: str) -> None:
        await self._happened(self._answers[attempt][1])

    async def _happened(self, event: asyncio.Event) -> None:
        """Raises: TimeoutError; what ended the stream, after which nothing comes."""
        assert self._reader is not None
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((waiting, self._reader), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if event.is_set():
                return
            if not self._reader.done():
                raise TimeoutError(f"nothing came for {DEADLINE_S:g} s")
            self._reader.result()
            raise EOFError("the worker ended the stream")
        finally:
            waiting.cancel()

    async def _outgoing(self) -> AsyncIterator[decode_pb2.Command]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self) -> None:
        assert self._call is not None
        async for batch in self._call:
            self.num_batches += 1
            for event in batch.events:
                self._on_event(event)

    def _on_event(self, event: decode_pb2.Event) -> None:
        answer, first, end = self._answers[event.attempt]
        match event.WhichOneof("event"):
            case "accepted":
                answer.accepted = True
            case "tokens":
                assert event.tokens.offset == len(answer.token_ids)
                answer.token_ids.extend(event.tokens.token_ids)
                first.set()
            case "end":
                if event.end.HasField("failure"):
                    answer.error = from_failure(event.end.failure)
                else:
                    answer.finished = event.end.finished
                first.set()
                end.set()


def submit_message(
    decode: WorkerRuntime,
    prefill: Sequence[WorkerRuntime],
    *,
    attempt: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    local: bool = False,
    local_max: int = 0,
    remaining_s: float = NEVER_S,
    policy: int = router_pb2.FAILURE_POLICY_UNSPECIFIED,
    ignore_eos: bool = True,
    seed: int = 7,
) -> decode_pb2.Submit:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.0, ignore_eos=ignore_eos)
    return decode_pb2.Submit(
        attempt=attempt,
        request_id=f"req-{attempt}",
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(sampling),
        placement=decode_pb2.Placement(
            decode=wire.ref_to_proto(decode.ref),
            prefill=[wire.ref_to_proto(worker.ref) for worker in prefill],
            local_prefill=local,
            local_prefill_max_tokens=local_max,
        ),
        remaining_s=remaining_s,
        failure_policy=policy,
    )


async def samples(worker: WorkerRuntime) -> list[Sample]:
    """All series of a worker, read as its exporter does: by another thread than the event loop's, which answers a part of them.
    On the loop's thread each reading would wait until the loop's answer is given up."""
    families = await asyncio.to_thread(lambda: list(worker.metrics.registry.collect()))
    return [sample for family in families for sample in family.samples]


@dataclass
class Cluster:
    decode: WorkerRuntime
    prefill: list[WorkerRuntime]
    gate: Gate | None = None
    """For decode's steps, if a test uses one."""

    @property
    def workers(self) -> list[WorkerRuntime]:
        return [self.decode, *self.prefill]

    def submit_message(self, **arguments: object) -> decode_pb2.Submit:
        return submit_message(self.decode, arguments.pop("prefill", self.prefill), **arguments)  # type: ignore[arg-type]

    async def nothing_left(self) -> None:
        """Both sides give everything back, without new work and long before a lease ends: no attempt, no block held, no slab
        out."""
        for worker in self.workers:
            await self.settle(worker)

    @staticmethod
    async def settle(worker: WorkerRuntime) -> None:
        async def settled() -> bool:
            audit = await worker.audit(full=True)
            slabs = audit.slabs
            busy = (
                sum(audit.attempts.values()),
                *(blocks.running + blocks.reserved for blocks in (audit.blocks, *audit.more_blocks)),
                slabs.packed + slabs.in_flight + slabs.settled + slabs.quarantined,
            )
            assert not list(audit.violations), audit
            return not any(busy)

        try:
            await waiting.until(settled, deadline_s=DEADLINE_S)
        except TimeoutError:
            raise AssertionError(f"{worker.worker_id}: {await worker.audit(full=True)}") from None


async def slabs_lent(worker: WorkerRuntime) -> None:
    """The step thread has slabs. The transfer thread lends them after the start: a prompt that is computed before goes in one
    piece, and no range of it early."""

    async def lent() -> bool:
        return await worker.engine._query(lambda core: core.scheduler.packing.slabs_held, DEADLINE_S) > 0

    await waiting.until(lent, f"{worker.worker_id} has slabs", deadline_s=DEADLINE_S)


@asynccontextmanager
async def cluster(
    *,
    num_prefill: int = 1,
    decode: Callable[[], LoadedModel] = fake_model,
    prefill: Callable[[], LoadedModel] = fake_model,
    decode_config: dict[str, object] | None = None,
    prefill_config: dict[str, object] | None = None,
    decode_clock: Clock | None = None,
    prefill_clock: Clock | None = None,
) -> AsyncIterator[Cluster]:
    started: list[WorkerRuntime] = []
    try:
        for i in range(num_prefill):
            config = worker_config("prefill", f"prefill-{i}", **(prefill_config or {}))
            worker = WorkerRuntime(
                config, prefill(), make_transfer=make_transfer, make_services=services_of, clock=prefill_clock
            )
            await worker.start()
            started.append(worker)
            await slabs_lent(worker)
        config = worker_config("decode", "decode-0", **(decode_config or {}))
        worker = WorkerRuntime(
            config, decode(), make_transfer=make_transfer, make_services=services_of, clock=decode_clock
        )
        await worker.start()
        started.append(worker)
        yield Cluster(worker, started[:-1])
    finally:
        for worker in reversed(started):
            await worker.close()


async def undisturbed(known: dict[str, list[int]]) -> list[int]:
    if "tokens" not in known:
        async with cluster(num_prefill=0) as alone, FakeRouter(alone.decode.address) as router:
            known["tokens"] = (await router.run(alone.submit_message(attempt="local", prompt=PROMPT))).token_ids
    return known["tokens"]


async def get_info(worker: WorkerRuntime) -> worker_pb2.GetInfoResponse:
    async with worker_channel(worker.address) as channel:
        return await WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=DEADLINE_S)


async def start_grpc() -> None:
    """grpc.aio's poller thread belongs to the process, not to the first test that needs it."""
    grpc.aio.init_grpc_aio()


_publish = PrefillSession._publish


def note_published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Returns: a list that grows by the part, first layer and number of layers of each range that prefill publishes."""
    sent: list[tuple[int, int, int]] = []

    def noted(session: PrefillSession, packed: RangePacked) -> None:
        sent.append((packed.part, packed.first_layer, packed.num_layers))
        _publish(session, packed)

    monkeypatch.setattr(PrefillSession, "_publish", noted)
    return sent


def withhold(monkeypatch: pytest.MonkeyPatch, which: Callable[[RangePacked], bool]) -> None:
    """Prefill publishes none of these ranges, but all others; in place of what was withheld before."""

    def without(session: PrefillSession, packed: RangePacked) -> None:
        if which(packed):
            session._publisher.return_grant(packed.slab)
        else:
            _publish(session, packed)

    monkeypatch.setattr(PrefillSession, "_publish", without)

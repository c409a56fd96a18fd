"""Hand-offs over the ipc transport between whole workers of a fake model, whose memory for slabs stands in for a GPU's: slabs
come unasked, and copies run beside the steps."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import DeviceRange, ScheduledSeq, StepResult
from diptych.kernels.kv_sum import kv_sum
from diptych.kvtransfer.fabric import registry
from diptych.kvtransfer.fabric.self_test import run_ipc_self_test
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.layout import RingSpec
from diptych.kvtransfer.transports.ipc import IpcTransport
from diptych.worker.model import LoadedModel
from diptych_tests.host_memory import HostMemory
from diptych_tests.waiting import until

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
MEMORY = HostMemory()


class Counting(IpcTransport):
    """Of all workers."""

    offers = 0

    def offer(self, *args: Any) -> int:
        Counting.offers += 1
        return super().offer(*args)


HOST_IPC = registry.TransportSpec(
    name="host-ipc",
    summary="ipc without GPUs",
    make=lambda worker_id, incarnation, site: Counting(worker_id, incarnation, host=site.host, memory=MEMORY),
    self_test=lambda make, site: run_ipc_self_test(make, MEMORY, RingSpec(1, site.ring.slab_bytes)),
    make_ring=lambda site, quotas: GpuRing(site.ring, *MEMORY.allocate(site.ring.total_bytes)),
)


class Copy:
    """See engine.runner.CopyHandle: the bytes are there, verified or not, when its worker's gate is open."""

    def __init__(self, gate: threading.Event, begin: Callable[[], str]) -> None:
        self._gate, self._begin = gate, begin
        self._error: str | None = None

    def done(self) -> bool:
        if self._error is None and self._gate.is_set():
            self._error = self._begin()
        return self._error is not None

    def wait(self) -> None:
        if self._error is None:
            self._error = self._begin()

    def error(self) -> str:
        assert self._error is not None
        return self._error


class DeviceFake(FakeRunner):
    """Packs into memory of its own, and unpacks out of a peer's beside the steps. `gate`: closed, no copy ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_blocks": 64, "block_size": 16, "vocab_size": 1000, **options})
        self.gate = threading.Event()
        self.gate.set()
        self.damage = 0
        self.copies = 0
        self.computed: set[str] = set()

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        self.computed |= {seq.attempt for seq in seqs} - {"warm-up"}
        return super().execute(seqs, should_abort)

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: Any, layers: range | None = None, group: int = 0
    ) -> int:
        if not isinstance(out, DeviceRange):
            return super().pack(block_ids, num_tokens, out, layers, group)
        size = num_tokens * self.kv_bytes_per_token * len(layers or range(self.num_layers)) // self.num_layers
        data = bytearray(size)
        FakeRunner.pack(self, block_ids, num_tokens, memoryview(data), layers, group)
        ctypes.memmove(out.address, bytes(data), size)
        return kv_sum(np.frombuffer(bytes(data), np.uint8))

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: Any, layers: range | None = None, group: int = 0
    ) -> Any:
        if not isinstance(src, DeviceRange):
            return super().unpack(block_ids, num_tokens, src, layers, group)
        self.copies += 1
        ids = list(block_ids)

        def begin() -> str:
            data = bytearray(ctypes.string_at(src.address, src.nbytes))
            if self.damage:
                self.damage -= 1
                data[len(data) // 2] ^= 1
            FakeRunner.unpack(self, ids, num_tokens, memoryview(data), layers, group)
            found = kv_sum(np.frombuffer(bytes(data), np.uint8))
            return "" if found == src.checksum else f"checksum {found:016x}, not {src.checksum or 0:016x}"

        return Copy(self.gate, begin)


class Pair:
    """`hold`: prefill's model waits before its first step, from which on all its ranges are expected."""

    def __init__(self, pd: ModuleType, cluster: Any, router: Any, decode: DeviceFake, hold: Any) -> None:
        self.pd, self.cluster, self.router, self.decode, self.hold = pd, cluster, router, decode, hold

    def submit(self, attempt: str = "a", **fields: Any) -> Any:
        return self.router.submit(self.cluster.submit_message(attempt=attempt, prompt=PROMPT, **fields))

    @property
    def refused(self) -> dict[Any, int]:
        return dict(self.cluster.prefill[0].transfer._publisher._ledger.refused)

    async def expected(self, count: int = 1) -> None:
        """Until decode expects the ranges of so many attempts; then prefill goes on."""
        transport = self.cluster.prefill[0].transfer._transport

        async def subscribed() -> bool:
            return sum(len(link.subscribed) for link in transport._in) >= count

        await self.hold.wait()
        await until(subscribed)
        self.hold.open()


@pytest.fixture
def host_ipc() -> Iterator[None]:
    registry.transports()
    registry.register(HOST_IPC)
    yield
    registry.unregister(HOST_IPC.name)


@pytest.fixture
async def pair(pd: ModuleType, host_ipc: None) -> AsyncIterator[Pair]:
    hold = pd.Gate()
    decode, whole = DeviceFake(), pd.fake_model()

    def model(runner: FakeRunner) -> LoadedModel:
        return LoadedModel(runner, whole.compat, whole.identity, None)

    config = {"transport": "host-ipc"}
    async with (
        pd.cluster(
            prefill=lambda: model(DeviceFake(before_execute=hold)),
            decode=lambda: model(decode),
            prefill_config=config,
            decode_config=config,
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        Counting.offers = 0
        yield Pair(pd, cluster, router, decode, hold)
        hold.open()
        decode.gate.set()


async def test_kv_comes_unasked_and_the_tokens_are_those_of_one_worker(pair) -> None:
    answer = pair.submit()
    await pair.expected()
    await pair.router.ended("a")
    assert answer.token_ids == await pair.pd.undisturbed({})
    assert answer.explanation.kv_bytes == len(PROMPT) * pair.decode.kv_bytes_per_token
    assert answer.explanation.transport == "ipc:host"
    assert Counting.offers == pair.decode.copies > 1
    assert not pair.refused
    await pair.cluster.nothing_left()


async def test_of_many_at_once_all_are_right(pair) -> None:
    """More than there are slabs: some ranges wait for one."""
    names = [f"a{number}" for number in range(6)]
    answers = [pair.submit(name) for name in names]
    await pair.expected(len(names))
    for name in names:
        await pair.router.ended(name)
    [*tokens] = await pair.pd.undisturbed({})
    assert [answer.token_ids for answer in answers] == [tokens] * len(names)
    assert Counting.offers == pair.decode.copies
    assert not pair.refused
    await pair.cluster.nothing_left()


async def test_no_token_is_computed_before_the_last_copy_has_ended(pair) -> None:
    pair.decode.gate.clear()
    answer = pair.submit()
    await pair.expected()
    await pair.router.first_token("a")
    for _ in range(3):
        await pair.cluster.decode.audit(full=True)  # answered between two steps: there was time for one
    assert len(answer.token_ids) == 1
    assert not pair.decode.computed
    pair.decode.gate.set()
    await pair.router.ended("a")
    assert answer.token_ids == await pair.pd.undisturbed({})
    await pair.cluster.nothing_left()


async def test_damage_is_noticed_before_a_token_is_computed_from_it(pair) -> None:
    pair.decode.damage = 1
    answer = pair.submit(policy=1)
    await pair.expected()
    await pair.router.ended("a")
    assert answer.error is not None or answer.token_ids == await pair.pd.undisturbed({})
    assert answer.error is None or "damaged" in answer.error.message
    await pair.cluster.nothing_left()


@pytest.mark.parametrize("late", ["before a range came", "while ranges are copied"])
async def test_a_cancelled_request_holds_no_slab(pair, late) -> None:
    pair.decode.gate.clear()
    pair.submit()
    if late == "while ranges are copied":
        await pair.expected()
        await pair.router.first_token("a")
    else:
        await pair.hold.wait()
    pair.router.cancel("a")
    await pair.router.ended("a")
    pair.hold.open()
    pair.decode.gate.set()
    await pair.cluster.nothing_left()
    again = pair.submit("b")
    await pair.router.ended("b")
    assert again.token_ids == await pair.pd.undisturbed({})


async def test_a_peer_that_offers_nothing_is_read_as_before(pair, monkeypatch) -> None:
    """A prefill worker of an earlier version does not know what a subscription is."""
    monkeypatch.setattr(IpcTransport, "subscriber", lambda self, peer, attempt: "")
    answer = pair.submit()
    await pair.hold.wait()
    pair.hold.open()
    await pair.router.ended("a")
    assert answer.token_ids == await pair.pd.undisturbed({})
    assert not Counting.offers
    await pair.cluster.nothing_left()

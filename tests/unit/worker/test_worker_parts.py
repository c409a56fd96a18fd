"""Settings, liveness, pool size and handles of a worker."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from diptych.common.errors import ConfigError, TransferError
from diptych.common.kv_format import full_format, windowed_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import split
from diptych.engine.config import EngineConfig
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineStats
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.worker import model, wire
from diptych.worker.config import WorkerConfig
from diptych.worker.liveness import why_not_live
from diptych.worker.model import choose_num_blocks, make_grammars
from diptych.worker.runtime import warm_up_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", "both"), ("port", 70_000), ("block_size", 0), ("lease_s", 0.0), ("drain_s", -1.0), ("heartbeat_s", 9.0)],
)
def test_a_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_names_have_defaults() -> None:
    config = WorkerConfig(role="prefill", model="/models/Smol")
    assert (config.effective_worker_id, config.model_name) == ("prefill-0", "Smol")


def test_live_means_progress() -> None:
    assert not why_not_live(EngineStats(), 100.0, stall_bound_s=5.0)
    assert not why_not_live(EngineStats(busy_since=95.5), 100.0, stall_bound_s=5.0)
    assert "6.0 s" in why_not_live(EngineStats(busy_since=94.0), 100.0, stall_bound_s=5.0)
    assert "ended" in why_not_live(EngineStats(alive=False), 100.0, stall_bound_s=5.0)


FULL = full_format(1, 1, 32, block_size=16, dtype="int8")
"""A block of 1,024 bytes."""


def test_pool_size() -> None:
    def blocks(available: int = 1 << 40, **settings: int) -> int:
        config = WorkerConfig(**settings)  # type: ignore[arg-type]
        return choose_num_blocks(config, FULL, PoolDemand(), max_model_len=160, available_bytes=available)

    assert blocks(num_blocks=7) == 7
    assert blocks(kv_memory_bytes=9999) == 9
    assert blocks() == (1 << 30) // 1024
    assert blocks(available=20_000) == 11, "one whole context at least"
    with pytest.raises(ConfigError):
        blocks(kv_memory_bytes=999)
    gib = 1 << 30
    config = WorkerConfig(enable_lora=True, lora_dir=("/adapters",), max_loras=3)

    def beside(lora_bytes: int) -> int:
        return choose_num_blocks(
            config, FULL, PoolDemand(), max_model_len=160, available_bytes=gib, lora_bytes=lora_bytes
        )

    assert beside(gib // 2) == blocks(available=gib // 2) < beside(0), "adapters' slots are in the same memory"
    with pytest.raises(ConfigError, match=r"max_loras=3: takes 1.5 GiB, and 1.0 GiB are free"):
        beside(3 * gib // 2)
    for name, value in (("num_blocks", 2**31 - 1), ("num_host_blocks", 2**31 - 1), ("kv_memory_bytes", 9 * gib)):
        with pytest.raises(ConfigError, match=rf"{name}={value}: takes [0-9,.]+ GiB, and 8.0 GiB are free"):
            blocks(available=8 * gib, **{name: value})


def test_the_memory_is_divided_among_kv_groups() -> None:
    """Item 17: of a model with windows a block of each group is counted, and no more window blocks than sequences use."""
    kv = windowed_format([0, 64, 64, 64], 1, 32, block_size=16, dtype="int8")  # 1 KiB and 3 KiB
    demand = PoolDemand(max_num_seqs=4, max_num_batched_tokens=32)  # at most 22 window blocks

    def blocks(**settings: int) -> int:
        config = WorkerConfig(**settings)  # type: ignore[arg-type]
        return choose_num_blocks(config, kv, demand, max_model_len=160, available_bytes=1 << 20)

    assert blocks(kv_memory_bytes=40 * 1024) == 10
    assert demand.group_blocks(kv, blocks(kv_memory_bytes=1000 * 1024)) == (1000 - 3 * 22, 22)
    with pytest.raises(ConfigError, match="one block takes 4096 bytes"):
        blocks(kv_memory_bytes=4095)
    with pytest.raises(ConfigError, match="num_blocks=1000"):
        blocks(num_blocks=1000)


def test_23_the_memory_of_all_stages_is_divided_among_kv_groups() -> None:
    """A stage without the full group holds a window's blocks, however many the others have."""
    kv = windowed_format([0, 0, 64, 64], 1, 32, block_size=16, dtype="int8")  # 2 KiB and 2 KiB
    demand = PoolDemand(max_num_seqs=4, max_num_batched_tokens=32)  # at most 22 window blocks
    for degrees, size_bytes in (({"pipeline": 2}, 1000 * 1024), ({"tensor_parallel": 2, "pipeline": 2}, 2000 * 1024)):
        parts = split(kv, **degrees)  # heads are replicated
        found = choose_num_blocks(
            WorkerConfig(kv_memory_bytes=size_bytes),
            kv,
            demand,
            max_model_len=160,
            available_bytes=1 << 30,
            parts=parts,
        )
        assert demand.group_blocks(kv, found) == (500 - 22, 22)


def test_handles_there_and_back() -> None:
    handle = SlabHandle("p0", "i", "a/1", 3, 9, 16, 32, 0, 2, 2**64 - 1, 4096, 2**63, 5, b"mac")
    assert wire.handle_from_proto(wire.handle_to_proto(handle)) == handle
    for change in ({"attempt": ""}, {"num_tokens": 0}, {"size_bytes": 0}, {"mac": b""}):
        with pytest.raises(TransferError):
            wire.handle_from_proto(wire.handle_to_proto(dataclasses.replace(handle, **change)))


@pytest.mark.parametrize(
    ("settings", "reachable"),
    [
        ({}, True),
        ({"host": "0.0.0.0", "advertise_host": "10.0.0.5", "kv_host": "10.0.0.5"}, True),
        ({"host": "127.0.0.1", "advertise_host": "10.0.0.5"}, False),
        ({"host": "10.0.0.5", "kv_host": "127.0.0.1"}, False),
        ({"host": "10.0.0.5", "kv_host": "localhost"}, False),
    ],
)
def test_a_loopback_kv_address_is_never_advertised_beside_one_that_others_reach(settings, reachable):
    if reachable:
        assert WorkerConfig(role="prefill", insecure=True, **settings).effective_kv_host
        return
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(role="prefill", insecure=True, **settings)
    assert "kv_host" in str(caught.value)


@pytest.mark.parametrize(("warm_up", "called"), [(True, ["process", "auto"]), (False, [])])
def test_18_3_grammar_libraries_are_imported_while_the_model_is_loaded(monkeypatch, warm_up, called) -> None:
    """Not on a thread beside the first requests, whose steps it delayed for four seconds. The compiling process comes up
    meanwhile: begun after the weights, it kept an 8B worker from being ready for 1.5 s."""
    calls: list[str] = []
    monkeypatch.setattr(model.Loaders, "warm_up", lambda self, backend: calls.append(backend))
    monkeypatch.setattr(model, "TokenBytes", lambda tokenizer: None)
    tokenizer = SimpleNamespace(eos_token_ids=(2,), vocab_size=8)
    config = WorkerConfig(grammar_warm_up=warm_up)
    assert make_grammars(config, tokenizer, lambda _: calls.append("process")) is not None  # type: ignore[arg-type]
    assert calls == called


def test_18_3_the_warm_up_is_a_whole_step_on_a_gpu() -> None:
    def tokens(num_blocks: int = 512, max_model_len: int = 8192, **settings: object) -> int:
        runner = FakeRunner(num_blocks=num_blocks, block_size=16, max_model_len=max_model_len)
        config = WorkerConfig(max_num_batched_tokens=2048, block_size=16, **settings)  # type: ignore[arg-type]
        return warm_up_tokens(config, runner)

    assert tokens(device="cpu") == 32
    assert tokens(device="cuda") == 2048
    assert tokens(device="cuda", max_model_len=1000) == 998, "two tokens come out of it"
    assert tokens(device="cuda", num_blocks=20) == 160, "half of the pool"


def test_a_setting_reaches_a_package_by_its_name_there() -> None:
    """Each setting of the engine and of the transfer that a worker has under the same name, at another value than the default."""
    config = WorkerConfig(
        block_size=8, max_num_seqs=7, max_num_batched_tokens=99, max_step_time_s=0.2, mixed_step_time_s=0.1,
        max_mixed_prefill_tokens=33,
        enable_prefix_caching=False, scheduling_policy="fcfs", long_prefill_token_threshold=5, tenant_cache_share=0.5,
        claim_share=0.75, num_host_blocks=3, preemption_mode="swap", steps_ahead=False, check_invariants=True, transport="inproc",
        tier_eviction="value", slab_bytes=1 << 20, num_slabs=5, verify_checksum=False,
    )  # fmt: skip
    engine = config.options(EngineConfig, num_blocks=11)
    assert engine == EngineConfig(
        11, 8, 7, 99, 0.2, 0.1, 33, enable_prefix_caching=False, scheduling_policy="fcfs", long_prefill_token_threshold=5,
        tenant_cache_share=0.5, claim_share=0.75, num_host_blocks=3, tier_eviction="value", preemption_mode="swap",
        steps_ahead=False, check_invariants=True,
    )  # fmt: skip
    transfer = config.options(TransferConfig, host="h", lease_s=9.0)
    assert (transfer.host, transfer.lease_s, transfer.num_slabs, transfer.slab_bytes) == ("h", 9.0, 5, 1 << 20)
    assert not transfer.verify_checksum
    shared = {field.name for field in dataclasses.fields(EngineConfig)} & {
        field.name for field in dataclasses.fields(WorkerConfig)
    }
    assert all(getattr(engine, name) != getattr(EngineConfig(1), name) for name in shared), "each is looked at above"


def test_a_new_setting_needs_no_copy() -> None:
    with_disk = dataclasses.make_dataclass(
        "WithDisk", [("num_disk_blocks", int, 4)], bases=(WorkerConfig,), frozen=True
    )
    options = dataclasses.make_dataclass("Options", [("num_disk_blocks", int, 0), ("other", int, 2)])
    assert dataclasses.astuple(with_disk().options(options)) == (4, 2)

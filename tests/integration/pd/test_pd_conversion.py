"""Prefill and decode whose KV lies differently: converted where that is allowed, refused by name where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from diptych.common.compat import identified
from diptych.common.errors import IncompatibleWorkersError
from diptych.common.kv_format import Shard, full_format
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import DTYPES, TorchModelRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import ScheduledSeq
from diptych.rpc.v1 import router_pb2
from diptych.worker.model import LoadedModel
from diptych_tests.scripts import load_script

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
FAIL = router_pb2.FAILURE_POLICY_FAIL


def model(pd: ModuleType, block_size: int, **facts: Any) -> Any:
    """The fake runner's slots are four bytes a head: one float32."""
    made = pd.fake_model(block_size=block_size)
    shape: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 1,
        "block_size": block_size,
        "dtype": "float32",
    }
    kv = full_format(**shape | {name: facts.pop(name) for name in list(facts) if name in {*shape, "shard", "order"}})
    identity, compat = identified(replace(made.compat, kv=kv, compute_dtype=kv.dtypes[0], **facts), bytes(32))
    return replace(made, compat=compat, identity=identity)


def settings(block_size: int, *, allow: bool = True) -> dict[str, object]:
    return {"block_size": block_size, "allow_kv_conversion": allow, "max_num_batched_tokens": 48}


async def undisturbed(pd: ModuleType, prompt: list[int]) -> list[int]:
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        return (await router.run(alone.submit_message(attempt="local", prompt=prompt))).token_ids


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 32), (32, 16), (8, 24), (24, 8)])
async def test_tokens_are_the_same_across_unequal_block_sizes(pd: ModuleType, p_size: int, d_size: int) -> None:
    expected = await undisturbed(pd, PROMPT)
    longer = [*PROMPT[:100], *PROMPT[:70][::-1]]
    expected_longer = await undisturbed(pd, longer)
    async with (
        pd.cluster(
            prefill=lambda: model(pd, p_size), decode=lambda: model(pd, d_size),
            prefill_config=settings(p_size), decode_config=settings(d_size),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert answer.token_ids == expected
        assert not answer.explanation.local_prefill
        assert answer.explanation.kv_bytes > 0
        assert "was converted" in answer.explanation.notes[-1]
        # A prefix cached on decode in blocks of its own size: the transfer begins at a block of prefill's.
        again = await router.run(cluster.submit_message(attempt="b", prompt=longer, policy=FAIL))
        assert again.token_ids == expected_longer
        assert again.explanation.cached_tokens_decode > 0
        await cluster.nothing_left()


@pytest.mark.parametrize(
    ("p_facts", "allow", "named"),
    [
        ({}, False, "block_size"),
        ({"dtype": "bfloat16"}, False, "kv_dtype"),
        ({"num_kv_heads": 2}, True, "num_kv_heads"),
        ({"attention_version": "other"}, True, "attention_version"),
        ({"method": "int4"}, True, "method"),
        ({"shard": Shard(0, 2), "num_kv_heads": 2}, True, "tensor_parallel_size"),
    ],
)
async def test_what_must_not_or_cannot_be_converted_is_refused_by_name(
    pd: ModuleType, p_facts: dict[str, Any], allow: bool, named: str
) -> None:
    async with (
        pd.cluster(
            prefill=lambda: model(pd, 32, **p_facts), decode=lambda: model(pd, 16),
            prefill_config=settings(32), decode_config=settings(16, allow=allow),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert isinstance(answer.error, IncompatibleWorkersError)
        assert named in answer.error.message
        local = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT))
        assert local.token_ids == await undisturbed(pd, PROMPT)
        assert local.explanation.local_prefill
        await cluster.nothing_left()


# ---- order of heads ----


class HeadsFirst(FakeRunner):
    """Its blocks lie heads first: [num_layers, 2, heads, slots, head_dim], two heads of four bytes."""

    HEADS, BYTES = 2, 4

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: memoryview, layers: range | None = None, group: int = 0
    ) -> int:
        super().pack(block_ids, num_tokens, out, layers, group)
        size = self._swap(out, num_tokens, layers, to_heads_first=True)
        return xxhash.xxh3_64_intdigest(bytes(out[:size]))

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: memoryview, layers: range | None = None, group: int = 0
    ) -> None:
        copy = bytearray(src)
        self._swap(memoryview(copy), num_tokens, layers, to_heads_first=False)
        super().unpack(block_ids, num_tokens, memoryview(copy), layers, group)

    def _swap(self, raw: memoryview, num_tokens: int, layers: range | None, *, to_heads_first: bool) -> int:
        rows = 2 * (self.num_layers if layers is None else len(layers))
        flat = np.frombuffer(raw, dtype=np.uint8)
        at = 0
        for first in range(0, num_tokens, self.block_size):
            slots = min(self.block_size, num_tokens - first)
            size = rows * slots * self.HEADS * self.BYTES
            shape = (rows, slots, self.HEADS) if to_heads_first else (rows, self.HEADS, slots)
            part = flat[at : at + size]
            part[:] = part.reshape(*shape, self.BYTES).swapaxes(1, 2).reshape(-1).copy()
            at += size
        return at


def two_heads(pd: ModuleType, block_size: int, layout: str) -> Any:
    made = model(pd, block_size, num_kv_heads=2, order=layout)
    kind = HeadsFirst if layout.endswith("hnd") else FakeRunner
    runner = kind(num_blocks=64, block_size=block_size, vocab_size=pd.VOCAB, head_dim=8)
    return replace(made, runner=runner)


@pytest.mark.parametrize(
    ("p_layout", "d_layout", "d_size"),
    [
        ("block-major-hnd", "block-major", 16),
        ("block-major", "block-major-hnd", 16),
        ("block-major-hnd", "block-major", 24),
    ],
)
async def test_tokens_are_the_same_across_orders_of_heads(
    pd: ModuleType, p_layout: str, d_layout: str, d_size: int
) -> None:
    async with (
        pd.cluster(num_prefill=0, decode=lambda: two_heads(pd, 16, "block-major")) as alone,
        pd.FakeRouter(alone.decode.address) as router,
    ):
        expected = (await router.run(alone.submit_message(attempt="local", prompt=PROMPT))).token_ids
    async with (
        pd.cluster(
            prefill=lambda: two_heads(pd, 16, p_layout), decode=lambda: two_heads(pd, d_size, d_layout),
            prefill_config=settings(16), decode_config=settings(d_size),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert answer.error is None
        assert answer.token_ids == expected
        assert "was converted" in answer.explanation.notes[-1]
        await cluster.nothing_left()


# ---- dtype, on a real model ----

LENGTH = 101
WORDS = [(11 * i + 5) % 310 for i in range(LENGTH)]
SAMPLING = SamplingParams(max_tokens=8, seed=7, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    exec_kit = load_script("tests/unit/engine_exec/conftest.py")
    made: Path = exec_kit.tiny_model_dir(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    return made


def tiny(folder: Path, dtype: str) -> TorchModelRunner:
    return TorchModelRunner.load(folder, dtype=dtype, num_blocks=24, block_size=16, backend="torch")


def tiny_model(pd: ModuleType, runner: TorchModelRunner) -> LoadedModel:
    made = pd.fake_model()
    facts = replace(made.compat, kv=runner.pool.kv, compute_dtype=runner.kv_dtype)
    identity, compat = identified(facts, bytes(32))
    return LoadedModel(runner, compat, identity, None)


def step(runner: TorchModelRunner, tokens: list[int], start: int, table: list[int], index: int) -> int:
    [[token]] = runner.execute([ScheduledSeq("a", tokens, start, (table,), True, SAMPLING, index)]).token_ids
    assert token is not None
    return token


def expected_of(folder: Path, p_dtype: str, d_dtype: str) -> tuple[list[int], torch.Tensor]:
    """By hand: the prompt in prefill's dtype, its KV cast by torch, the rest in decode's. Tokens and the transferred
    KV."""
    source, target = tiny(folder, p_dtype), tiny(folder, d_dtype)
    table = list(range(-(-(LENGTH + 8) // 16)))
    out = [step(source, WORDS, 0, table, 0)]
    target.pool.tensor[table] = source.pool.tensor[table].to(DTYPES[d_dtype])
    crossed = target.pool.tensor[table].clone()
    for index in range(1, 8):
        out.append(step(target, [out[-1]], LENGTH + index - 1, table, index))
    return out, crossed


@pytest.mark.parametrize(
    ("p_dtype", "d_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
)
async def test_kv_of_another_dtype_arrives_as_torch_casts_it(
    pd: ModuleType, folder: Path, p_dtype: str, d_dtype: str
) -> None:
    """Bit for bit; and the tokens are those that the two models give together by hand."""
    tokens, crossed = expected_of(folder, p_dtype, d_dtype)
    decode = tiny(folder, d_dtype)
    unpack, seen = decode.unpack, []

    def watched(
        block_ids: Sequence[int], num_tokens: int, src: Any, layers: range | None = None, group: int = 0
    ) -> None:
        seen.append((list(block_ids), num_tokens))
        unpack(block_ids, num_tokens, src, layers, group)

    decode.unpack = watched  # type: ignore[method-assign]
    # One step, as by hand: torch's sums depend on the shape of a step, and a busy machine gets smaller ones.
    one_piece = {
        "slab_bytes": 1 << 20, "kv_overlap": "off", "max_num_batched_tokens": 2 * LENGTH, "max_step_time_s": 0.0,
    }  # fmt: skip
    async with (
        pd.cluster(
            prefill=lambda: tiny_model(pd, tiny(folder, p_dtype)), decode=lambda: tiny_model(pd, decode),
            prefill_config={**settings(16), **one_piece}, decode_config={**settings(16), **one_piece},
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=WORDS, policy=FAIL))
        assert answer.error is None
        assert answer.token_ids == tokens
        assert "was converted" in answer.explanation.notes[-1]
        [(blocks, num_tokens)] = seen
        assert num_tokens == LENGTH
        for i, block in enumerate(blocks):
            slots = min(16, LENGTH - 16 * i)
            assert torch.equal(decode.pool.tensor[block][:, :, :slots], crossed[i][:, :, :slots])
        # Converted KV never answers for KV that decode computes itself.
        alone = tiny(folder, d_dtype)
        native = [step(alone, WORDS, 0, table := list(range(-(-(LENGTH + 8) // 16))), 0)]
        for index in range(1, 8):
            native.append(step(alone, [native[-1]], LENGTH + index - 1, table, index))
        local = await router.run(cluster.submit_message(attempt="b", prompt=WORDS, prefill=[]))
        assert local.explanation.local_prefill
        assert local.explanation.cached_tokens_decode == 0
        assert local.token_ids == native
        await cluster.nothing_left()

"""Quantized KV across two workers, on a real model: the tokens of one worker, fewer bytes, and refusals by name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diptych.common.compat import identified
from diptych.common.errors import IncompatibleWorkersError
from diptych.common.kv_format import QUANTIZED_KV
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.messages import ScheduledSeq
from diptych.engine.sched.lifecycle import restores
from diptych.rpc.v1 import router_pb2
from diptych.worker.model import LoadedModel
from diptych_tests import waiting
from diptych_tests.pd_moves import check_tokens_of_a_pair
from diptych_tests.scripts import load_script

LENGTH = 101
PROMPTS = [[(11 * i + 5 + 37 * k) % 310 for i in range(LENGTH - 9 * k)] for k in range(4)]
FAIL = router_pb2.FAILURE_POLICY_FAIL
SAMPLING = SamplingParams(max_tokens=8, seed=7, temperature=1.0, ignore_eos=True)
KV_DTYPES = sorted(QUANTIZED_KV)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    exec_kit = load_script("tests/unit/engine_exec/conftest.py")
    made: Path = exec_kit.tiny_model_dir(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", head_dim=64)
    return made


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "native":
        request.getfixturevalue("compiler")
    return name


def runner(
    folder: Path, kv_dtype: str, backend: str = "torch", dtype: str = "float32", num_blocks: int = 48
) -> TorchModelRunner:
    return TorchModelRunner.load(
        folder,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=16,
        backend=backend,
        num_threads=1,
        kv_cache_dtype=kv_dtype,
    )


def loaded(pd: ModuleType, made: TorchModelRunner, computes: str = "float32") -> LoadedModel:
    facts = replace(pd.fake_model().compat, kv=made.pool.kv, compute_dtype=computes, backend=made.backend)
    identity, compat = identified(facts, bytes(32))
    return LoadedModel(made, compat, identity, None)


def settings(**more: object) -> dict[str, object]:
    return {"slab_bytes": 1 << 17, "max_num_batched_tokens": 48, **more}


async def alone(pd: ModuleType, made: TorchModelRunner, *, max_tokens: int = 8, **more: object) -> list[list[int]]:
    """Tokens of each prompt on one worker, one after the other."""
    async with (
        pd.cluster(num_prefill=0, decode=lambda: loaded(pd, made), decode_config=settings(**more)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        return [
            (await router.run(cluster.submit_message(attempt=f"{i}", prompt=prompt, max_tokens=max_tokens))).token_ids
            for i, prompt in enumerate(PROMPTS)
        ]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
async def test_tokens_across_two_workers_are_those_of_one(
    pd: ModuleType, folder: Path, kv_dtype: str, backend: str
) -> None:
    """Colocated in chunks of 48 tokens and whole, over P/D in other chunks, from P's cache, and all at once."""
    expected = await alone(pd, runner(folder, kv_dtype, backend))
    assert await alone(pd, runner(folder, kv_dtype, backend), max_num_batched_tokens=256) == expected
    async with (
        pd.cluster(
            prefill=lambda: loaded(pd, runner(folder, kv_dtype, backend)),
            decode=lambda: loaded(pd, runner(folder, kv_dtype, backend)),
            prefill_config=settings(max_num_batched_tokens=32), decode_config=settings(),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        for i, prompt in enumerate(PROMPTS):
            answer = await router.run(cluster.submit_message(attempt=f"a{i}", prompt=prompt, policy=FAIL))
            assert answer.error is None
            assert answer.token_ids == expected[i]
            assert not answer.explanation.notes
            assert answer.explanation.kv_bytes == len(prompt) * cluster.decode.compat.kv.bytes_per_token
        messages = [
            cluster.submit_message(attempt=f"b{i}", prompt=prompt, policy=FAIL) for i, prompt in enumerate(PROMPTS)
        ]
        answers = await asyncio.gather(*(router.run(message) for message in messages))
        assert [answer.token_ids for answer in answers] == expected
        assert all(answer.explanation.cached_tokens_decode for answer in answers), "from D's own cache"
        await cluster.nothing_left()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
async def test_preempted_and_moved_answers_have_the_tokens_of_undisturbed_ones(
    pd: ModuleType, folder: Path, kv_dtype: str, backend: str
) -> None:
    """Also of those whose KV another decode worker reads out of the prefix cache of the one that they leave."""
    await check_tokens_of_a_pair(
        pd, lambda num_blocks=48: loaded(pd, runner(folder, kv_dtype, backend, num_blocks=num_blocks))
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
async def test_files_of_quantized_blocks_serve_a_worker_that_starts_again(
    pd: ModuleType, folder: Path, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "restore_is_cheaper", lambda num_tokens, rates: True)
    monkeypatch.setattr(restores, "LEAST_S", 60.0)  # no restore is given up on a loaded machine
    answers = []
    for _ in range(2):
        more = settings(disk_kv_dir=str(tmp_path))
        async with (
            pd.cluster(
                num_prefill=0, decode=lambda: loaded(pd, runner(folder, kv_dtype)), decode_config=more
            ) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):
            answers.append(await router.run(cluster.submit_message(attempt="a", prompt=PROMPTS[0])))
            num_blocks = (LENGTH + 8 - 1) // 16

            def written() -> bool:
                [tier] = [tier for tier in cluster.decode.engine.stats().tiers if tier.name == "disk"]  # noqa: B023
                size: int = cluster.decode.model.compat.kv.block_bytes  # noqa: B023
                return tier.used_bytes == num_blocks * size  # noqa: B023

            await waiting.until(written)
    cold, warm = answers
    assert warm.token_ids == cold.token_ids
    assert [(part.tier, part.tokens) for part in warm.explanation.cached_tiers_decode] == [("disk", LENGTH // 16 * 16)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
async def test_bytes_on_the_wire_are_at_most_55_percent_of_bfloat16(
    pd: ModuleType, folder: Path, kv_dtype: str
) -> None:
    """By the reader's counter, scales included."""
    counted = []
    for name, dtype in (("auto", "bfloat16"), (kv_dtype, "float32")):
        async with (
            pd.cluster(
                prefill=lambda: loaded(pd, runner(folder, name, dtype=dtype)),  # noqa: B023
                decode=lambda: loaded(pd, runner(folder, name, dtype=dtype)),  # noqa: B023
                prefill_config=settings(), decode_config=settings(),
            ) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):  # fmt: skip
            answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPTS[0], policy=FAIL))
            assert answer.error is None
            counted.append(answer.explanation.kv_bytes)
    assert counted[0] == LENGTH * 3 * 2 * 2 * 64 * 2
    assert counted[1] == LENGTH * 3 * 2 * 2 * (64 + 4)
    assert counted[1] <= 0.55 * counted[0]


@pytest.mark.parametrize(
    ("p_dtype", "d_dtype", "allow", "named"),
    [
        ("int8", "auto", False, "kv_dtype: mine float32, theirs int8"),
        ("auto", "fp8_e4m3", False, "kv_dtype: mine float8_e4m3fn, theirs float32"),
        ("fp8_e5m2", "fp8_e4m3", False, "kv_dtype: mine float8_e4m3fn, theirs float8_e5m2"),
        ("int8", "fp8_e4m3", True, "kv_dtype: int8 and float8_e4m3fn: KV is quantized once"),
    ],
)
async def test_workers_of_two_kv_dtypes_are_refused_by_name(
    pd: ModuleType, folder: Path, p_dtype: str, d_dtype: str, allow: bool, named: str
) -> None:
    async with (
        pd.cluster(
            prefill=lambda: loaded(pd, runner(folder, p_dtype)), decode=lambda: loaded(pd, runner(folder, d_dtype)),
            prefill_config=settings(), decode_config=settings(allow_kv_conversion=allow),
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPTS[0], policy=FAIL))
        assert isinstance(answer.error, IncompatibleWorkersError)
        assert named in answer.error.message
        await cluster.nothing_left()


@pytest.mark.parametrize(
    ("p_dtype", "d_dtype", "computes"),
    [
        ("auto", "int8", "float32"),
        ("fp8_e4m3", "auto", "float32"),
        ("auto", "fp8_e5m2", "bfloat16"),
        ("int8", "auto", "bfloat16"),
        ("auto", "fp8_e4m3", "float16"),
        ("fp8_e5m2", "auto", "float16"),
    ],
)
async def test_converted_kv_is_quantized_once_labelled_and_answers_for_no_other(
    pd: ModuleType, folder: Path, p_dtype: str, d_dtype: str, computes: str
) -> None:
    """Decode's blocks hold the codes of what prefill computed, or the elements of its codes; the tokens are those that the two
    give together by hand."""
    tokens, crossed = by_hand(folder, p_dtype, d_dtype, computes)
    decode = runner(folder, d_dtype, dtype=computes)
    # One step, as by hand: torch's sums depend on the shape of a step, and a busy machine gets smaller ones.
    one_piece = {
        "kv_overlap": "off",
        "max_num_batched_tokens": 2 * LENGTH,
        "max_step_time_s": 0.0,
        "slab_bytes": 1 << 20,
    }
    more = settings(allow_kv_conversion=True) | one_piece
    async with (
        pd.cluster(
            prefill=lambda: loaded(pd, runner(folder, p_dtype, dtype=computes), computes),
            decode=lambda: loaded(pd, decode, computes),
            prefill_config=more, decode_config=more,
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):  # fmt: skip
        seen: list[list[int]] = []
        unpack = decode.unpack

        def watched(block_ids: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(list(block_ids))
            return unpack(block_ids, *args, **kwargs)

        decode.unpack = watched  # type: ignore[method-assign]
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPTS[0], policy=FAIL))
        assert answer.error is None
        assert "was converted" in answer.explanation.notes[-1]
        assert answer.token_ids == tokens
        blocks = [block for some in seen for block in some]
        found = elements(decode, blocks)
        assert torch.equal(found[:, :, :LENGTH], crossed)
        again = await router.run(cluster.submit_message(attempt="b", prompt=PROMPTS[0], prefill=[]))
        assert again.explanation.cached_tokens_decode == 0
        await cluster.nothing_left()


def elements(made: TorchModelRunner, table: list[int]) -> torch.Tensor:
    """[layers, 2, tokens, heads, dim] of a sequence, decoded."""
    group = made.pool.groups[0]
    blocks = group.tensor[table]
    if group.codec is not None:
        blocks = group.codec.decode(blocks.squeeze(4), torch.float32)
    return blocks.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)


def by_hand(folder: Path, p_dtype: str, d_dtype: str, computes: str) -> tuple[list[int], torch.Tensor]:
    """The prompt on prefill, its KV encoded or decoded by torch, the rest on decode. Tokens and the transferred KV."""
    source, target = runner(folder, p_dtype, dtype=computes), runner(folder, d_dtype, dtype=computes)
    table = list(range(-(-(LENGTH + 8) // 16)))

    def step(made: TorchModelRunner, ids: list[int], start: int, index: int) -> int:
        [[token]] = made.execute([ScheduledSeq("a", ids, start, (table,), True, SAMPLING, index)]).token_ids
        assert token is not None
        return token

    out = [step(source, PROMPTS[0], 0, 0)]
    theirs, mine = source.pool.groups[0], target.pool.groups[0]
    if theirs.codec is None:
        assert mine.codec is not None
        flat = theirs.tensor[table].flatten(0, 3)
        mine.tensor[table] = mine.codec.encode(flat).view(len(table), *mine.tensor.shape[1:])
    else:
        elements_of = theirs.codec.decode(theirs.tensor[table].squeeze(4), torch.float32)
        mine.tensor[table] = elements_of.to(mine.tensor.dtype)
    crossed = elements(target, table)[:, :, :LENGTH].clone()
    for index in range(1, 8):
        out.append(step(target, [out[-1]], LENGTH + index - 1, index))
    return out, crossed

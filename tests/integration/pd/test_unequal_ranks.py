"""Live pairs whose ranks differ: a rank's KV is cut into heads and layers for several ranks, or put together from several. The
tokens are those of a worker of one rank alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from diptych.common.errors import IncompatibleWorkersError
from diptych.common.kv_groups import expected_ranges
from diptych.common.kv_parts import degrees
from diptych.rpc.v1 import router_pb2, types_pb2
from diptych.worker import wire
from diptych_tests.fake_ranks import LAYERS, sharded_model

FAIL = router_pb2.FAILURE_POLICY_FAIL
PROMPT = [(7 * i + 3) % 1000 for i in range(90)]
LONGER = [*PROMPT[:70], *PROMPT[:40][::-1]]
"""It shares leading blocks with PROMPT."""
SIDES = [(1, 1), (2, 1), (4, 1), (2, 2)]
"""Tensor parallel and pipeline."""
_alone: dict[str, list[list[int]]] = {}


async def alone(pd: ModuleType, **kind: Any) -> list[list[int]]:
    """The answers of one rank, which computes the prompts itself."""
    key = str(sorted(kind.items()))
    if key not in _alone:
        async with (
            pd.cluster(num_prefill=0, decode=lambda: sharded_model(**kind)) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):
            _alone[key] = [
                (await router.run(cluster.submit_message(attempt=f"l{n}", prompt=prompt))).token_ids
                for n, prompt in enumerate((PROMPT, LONGER))
            ]
    return _alone[key]


async def hand_offs(pd: ModuleType, decode: tuple[int, int], sizes: tuple[int, int] = (16, 16), **kind: Any) -> None:
    """From workers of all SIDES to one of `decode`, two prompts each, the second with a prefix that is there. `sizes`: of the
    blocks of both."""
    want = await alone(pd, **kind)
    models = (sharded_model(*side, block_size=sizes[0], **kind) for side in SIDES)
    settings: dict[str, Any] = {"allow_kv_conversion": sizes[0] != sizes[1], "slab_bytes": 8192, "num_slabs": 32}
    for number, side in enumerate(SIDES):
        async with (
            pd.cluster(
                prefill=lambda: next(models), decode=lambda: sharded_model(*decode, block_size=sizes[1], **kind),
                prefill_config=settings | {"block_size": sizes[0]}, decode_config=settings | {"block_size": sizes[1]},
            ) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
        ):  # fmt: skip
            mine, theirs = (degrees(worker.compat.parts) for worker in (cluster.decode, cluster.prefill[0]))
            for n, prompt in enumerate((PROMPT, LONGER)):
                answer = await router.run(cluster.submit_message(attempt=f"r{number}.{n}", prompt=prompt, policy=FAIL))
                assert answer.finished is not None, (side, decode, answer.error)
                assert answer.token_ids == want[n], (side, decode)
                why = answer.explanation
                held, kv = why.cached_tokens_decode // sizes[0] * sizes[0], cluster.decode.compat.kv
                windows = any(group.window for group in kv.groups)
                assert why.cached_tokens_decode == (64 if n and not windows else 0)
                assert why.kv_bytes == sum(
                    part.num_tokens * kv.groups[part.group].bytes_per_token(kv.shard)
                    for part in expected_ranges(kv, held, len(prompt), reusable=windows)
                ), "each head once, and of windows what is seen"
                regrouped = [f"KV of prefill-0 ({theirs}) was put together for the ranks here ({mine})"]
                assert [note for note in why.notes if "put together" in note] == (regrouped if side != decode else [])
            await cluster.nothing_left()


@pytest.mark.parametrize(("decode", "some"), [((2, 1), True), ((2, 2), False)], ids=str)
async def test_each_ranks_last_range_is_sent_in_groups_of_layers_to_equal_ranks(
    pd: ModuleType, monkeypatch: pytest.MonkeyPatch, decode: tuple[int, int], some: bool
) -> None:
    """While they are computed. With pipeline stages a layer's number is another one on each rank: their ranges are whole."""
    sent = pd.note_published(monkeypatch)
    [want, _] = await alone(pd)
    model = lambda: sharded_model(*decode)  # noqa: E731
    async with (
        pd.cluster(prefill=model, decode=model, prefill_config={"num_slabs": 32}) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert answer.token_ids == want
        await cluster.nothing_left()
    layers = LAYERS // decode[1]
    assert {part for part, _, number in sent if number < layers} == ({0, 1} if some else set())


@pytest.mark.parametrize("decode", SIDES, ids=str)
async def test_every_pair_gives_the_tokens_of_one_rank(pd: ModuleType, decode: tuple[int, int]) -> None:
    await hand_offs(pd, decode)


@pytest.mark.slow
@pytest.mark.parametrize("decode", SIDES, ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        {"heads": 2}, {"hnd": True}, {"hnd": True, "heads": 2}, {"quantized": True}, {"quantized": True, "heads": 2},
        {"sizes": (8, 16)}, {"sizes": (16, 8), "heads": 2}, {"sizes": (24, 8), "hnd": True},
        {"sizes": (8, 16), "quantized": True}, {"windows": (0, 30, 30, 0)}, {"windows": (30, 0, 0, 12), "quantized": True},
    ],
    ids=str,
)  # fmt: skip
async def test_and_in_every_layout(pd: ModuleType, decode: tuple[int, int], kind: dict[str, Any]) -> None:
    """With two heads the ranks of a degree of four hold each of them twice."""
    await hand_offs(pd, decode, **kind)


async def test_heads_on_several_ranks_cross_once_and_quantized_heads_keep_their_scales(pd: ModuleType) -> None:
    """A quick cut of the table above."""
    await hand_offs(pd, (4, 1), heads=2, quantized=True)


@pytest.mark.parametrize("windows", [(0, 0, 30, 12), pytest.param((30, 12, 12, 0), marks=pytest.mark.slow)], ids=str)
async def test_23_stages_have_some_of_the_windows_and_give_them_to_others(
    pd: ModuleType, windows: tuple[int, ...]
) -> None:
    """Each of two stages has KV groups that the other one has not."""
    await hand_offs(pd, (2, 2), heads=2, windows=windows)


async def test_what_a_rank_does_not_send_is_never_decoded_on(pd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    [want, _] = await alone(pd)
    pd.withhold(monkeypatch, lambda packed: packed.part == 1)
    async with (
        pd.cluster(decode=lambda: sharded_model(4), prefill=lambda: sharded_model(2)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="r", prompt=PROMPT))
        assert answer.token_ids == want
        assert answer.explanation.local_prefill
        [note] = [note for note in answer.explanation.notes if "before all KV had arrived" in note]
        assert "full of rank 2, full of rank 3" in note, "ranks of decode that take their heads from it"
        await cluster.nothing_left()


@pytest.mark.parametrize(
    ("prefill", "decode"), [((2, 1), (4, 1)), ((4, 1), (1, 1)), ((2, 2), (2, 1))], ids=["P < D", "P > D", "stages"]
)
async def test_cached_blocks_are_pulled_between_unequal_ranks(
    pd: ModuleType, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    """From decode's cache, into which its answer went, to prefill."""
    async with (
        pd.cluster(decode=lambda: sharded_model(*decode), prefill=lambda: sharded_model(*prefill)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        first = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=40, policy=FAIL))
        history = [*PROMPT, *first.token_ids]
        held, turn_2 = (len(history) - 1) // 16 * 16, [*history, *LONGER[-9:]]
        message = cluster.submit_message(attempt="b", prompt=turn_2, policy=FAIL)
        message.placement.prefill_source.CopyFrom(
            types_pb2.KvSource(holder=wire.ref_to_proto(cluster.decode.ref), num_tokens=held, compute_s=pd.NEVER_S)
        )
        answer = await router.run(message)
        [pull] = answer.explanation.pulls
        assert (pull.holder, pull.note, pull.first_token + pull.num_tokens) == ("decode-0", "", held)
        assert pull.kv_bytes == pull.num_tokens * cluster.decode.compat.kv.bytes_per_token > 0
        assert answer.explanation.cached_tokens_prefill == held
        await cluster.nothing_left()
    async with (
        pd.cluster(num_prefill=0, decode=sharded_model) as one,
        pd.FakeRouter(one.decode.address) as router,
    ):
        want = await router.run(one.submit_message(attempt="l", prompt=turn_2))
        assert answer.token_ids == want.token_ids


async def test_under_batch_invariance_unequal_degrees_are_refused_by_name(pd: ModuleType) -> None:
    make = lambda degree: lambda: sharded_model(degree, batch_invariant=True)  # noqa: E731
    async with (
        pd.cluster(decode=make(1), prefill=make(2)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert isinstance(answer.error, IncompatibleWorkersError)
        assert "numerics: mine tp1, theirs tp2" in answer.error.message
        await cluster.nothing_left()

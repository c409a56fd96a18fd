"""Whatever happens to an answer of a pair, its tokens are those of one worker that nothing happened to: with a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from diptych.cli.worker_roles import services_of
from diptych.rpc.v1 import router_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.model import LoadedModel
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime

COUNT = 24
PROMPTS = [[(11 * i + 5 + 37 * k) % 310 for i in range(44 - 3 * k)] for k in range(4)]
SETTINGS: dict[str, Any] = {"slab_bytes": 1 << 18, "max_num_seqs": 4}
SMALL_POOL = 13
"""Blocks: the four prompts fit, at three each, and their answers do not."""


async def check_tokens_of_a_pair(pd: ModuleType, load: Callable[..., LoadedModel]) -> None:
    """Cold, warm, preempted and moved to another decode worker, in chunks of 16 and 48 tokens beside those of 32 alone.

    Args:
        load: a model with blocks of 16 tokens, of `num_blocks` of them where that is given.
    """
    expected = await _alone(pd, load)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "or nothing would be compared"
    async with (
        pd.cluster(
            prefill=load,
            decode=lambda: load(num_blocks=SMALL_POOL),
            prefill_config={**SETTINGS, "max_num_batched_tokens": 16},
            decode_config={**SETTINGS, "max_num_batched_tokens": 48},
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        prefill, decode = cluster.prefill[0], cluster.decode
        for attempt in ("cold", "warm"):
            answer = await router.run(_message(pd, decode, [prefill], attempt, PROMPTS[0]))
            assert answer.error is None
            assert answer.token_ids == expected[0], attempt
            assert not answer.explanation.notes
            assert (answer.explanation.cached_tokens_decode > 0) == (attempt == "warm")
        assert decode.engine.stats().preemptions_total == 0
        messages = [_message(pd, decode, [prefill], f"beside others {i}", prompt) for i, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*(router.run(message) for message in messages))
        assert [answer.token_ids for answer in answers] == expected
        assert decode.engine.stats().preemptions_total > 0
        await _check_moved(pd, load, cluster, router, expected[1])
        await cluster.nothing_left()


async def _alone(pd: ModuleType, load: Callable[..., LoadedModel]) -> list[list[int]]:
    """Each prompt on one worker, one after the other."""
    async with (
        pd.cluster(num_prefill=0, decode=load, decode_config=SETTINGS) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        messages = [_message(pd, cluster.decode, [], f"{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        return [(await router.run(message)).token_ids for message in messages]


async def _check_moved(
    pd: ModuleType, load: Callable[..., LoadedModel], cluster: Any, router: Any, expected: list[int]
) -> None:
    """An answer goes on at another decode worker, with the KV of the one that it left."""
    sent, block = expected[: COUNT // 2], pd.BLOCK
    answer = await router.run(_message(pd, cluster.decode, cluster.prefill, "left", PROMPTS[1]))
    assert answer.token_ids == expected
    other = WorkerRuntime(
        pd.worker_config("decode", "decode-1", **SETTINGS),
        load(),
        make_transfer=make_transfer,
        make_services=services_of,
    )
    await other.start()
    try:
        async with pd.FakeRouter(other.address) as to_other:
            message = _message(pd, other, [], "moved", PROMPTS[1], local=True, local_max=64)
            message.output_token_ids.extend(sent)
            held = (len(PROMPTS[1]) + len(sent) - 1) // block * block
            source = types_pb2.KvSource(holder=wire.ref_to_proto(cluster.decode.ref), num_tokens=held, compute_s=3600.0)
            message.placement.decode_source.CopyFrom(source)
            rest = to_other.submit(message)
            rest.token_ids.extend(sent)  # the client has them
            await to_other.ended("moved")
            assert rest.token_ids == expected
            [pull] = rest.explanation.pulls
            assert (pull.num_tokens, pull.note) == (held, "")
            await cluster.settle(other)
    finally:
        await other.close()


def _message(
    pd: ModuleType,
    decode: WorkerRuntime,
    prefill: Sequence[WorkerRuntime],
    attempt: str,
    prompt: list[int],
    **more: Any,
) -> Any:
    policy = router_pb2.FAILURE_POLICY_FAIL if prefill else router_pb2.FAILURE_POLICY_UNSPECIFIED
    return pd.submit_message(decode, prefill, attempt=attempt, prompt=prompt, max_tokens=COUNT, policy=policy, **more)

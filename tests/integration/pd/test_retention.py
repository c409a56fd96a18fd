"""Claims on the caches of both workers: real engines, gRPC and ledgers, in process."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import decode_pb2, types_pb2, worker_pb2
from diptych_tests import waiting

PROMPT = [(7 * i + 3) % 1000 for i in range(100)]
SESSION = b"s" * 16


def submit(
    cluster: Any, attempt: str, prompt: list[int], claim: types_pb2.CacheClaim | None = None
) -> decode_pb2.Submit:
    message: decode_pb2.Submit = cluster.submit_message(attempt=attempt, prompt=prompt, max_tokens=4)
    if claim is not None:
        message.claim.CopyFrom(claim)
    return message


async def flood(cluster: Any, router: Any, name: str) -> None:
    """Twice as many tokens of other prompts as a pool holds."""
    for i in range(12):
        prompt = [(11 * i + 17 * j + len(name)) % 1000 for j in range(100)]
        assert (await router.run(submit(cluster, f"{name}{i}", prompt))).error is None


async def release(pd: ModuleType, worker: Any, session: bytes) -> int:
    async with pd.worker_channel(worker.address) as channel:
        answer = await WorkerStub(channel).ReleaseSession(
            worker_pb2.ReleaseSessionRequest(session=session), timeout=pd.DEADLINE_S
        )
    return int(answer.freed_tokens)


def claimed(worker: Any) -> int:
    return sum(blocks for _, blocks in worker.engine.stats().claims.by_rank)


async def test_a_claimed_chat_survives_a_flood_on_both_workers_and_a_closed_one_is_gone(pd: ModuleType) -> None:
    model = lambda: pd.fake_model(num_blocks=40)  # noqa: E731
    async with (
        pd.cluster(decode=model, prefill=model) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        claim = types_pb2.CacheClaim(ttl_s=3600.0, priority=50, session=SESSION)
        first = await router.run(submit(cluster, "a", PROMPT, claim))
        assert (first.explanation.claim.ttl_s, first.explanation.claim.kept_tokens_prefill) == (3600.0, 0)
        await cluster.nothing_left()
        assert [claimed(worker) for worker in cluster.workers] == [6, 6]
        await flood(cluster, router, "f")
        again = await router.run(submit(cluster, "b", PROMPT, claim))
        assert again.token_ids == first.token_ids
        report = again.explanation.claim
        assert (report.kept_tokens_prefill, report.kept_tokens_decode) == (96, 96)
        await cluster.nothing_left()
        assert [await release(pd, worker, SESSION) for worker in cluster.workers] == [96, 96]
        # The engine's figures are those of its last step or visit.
        await waiting.until(lambda: [claimed(worker) for worker in cluster.workers] == [0, 0], "no claim is left")
        last = await router.run(submit(cluster, "c", PROMPT))
        assert last.token_ids == first.token_ids
        assert last.explanation.cached_tokens_prefill == last.explanation.cached_tokens_decode == 0
        assert not last.explanation.HasField("claim")
        await cluster.nothing_left()


async def test_without_a_claim_the_flood_takes_it(pd: ModuleType) -> None:
    model = lambda: pd.fake_model(num_blocks=40)  # noqa: E731
    async with (
        pd.cluster(decode=model, prefill=model) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        first = await router.run(submit(cluster, "a", PROMPT))
        await flood(cluster, router, "f")
        again = await router.run(submit(cluster, "b", PROMPT))
        assert again.explanation.cached_tokens_prefill == again.explanation.cached_tokens_decode == 0
        assert again.token_ids == first.token_ids


async def test_a_claim_out_of_range_is_refused_by_name(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        for field, claim in (
            ("claim.ttl_s", types_pb2.CacheClaim(ttl_s=0.0)),
            ("claim.priority", types_pb2.CacheClaim(ttl_s=1.0, priority=101)),
            ("claim.session", types_pb2.CacheClaim(ttl_s=1.0, session=b"short")),
        ):
            answer = await router.run(submit(cluster, field, PROMPT, claim))
            assert answer.error is not None
            assert answer.error.param == field


async def series(pd: ModuleType, worker: Any, name: str) -> dict[str, float]:
    """By the label that is not the worker's own."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for sample in await pd.samples(worker)
        if sample.name == name
    }


async def test_the_metrics_move(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        worker = cluster.decode
        assert await series(pd, worker, "diptych_kv_claimed_bytes") == {}
        claim = types_pb2.CacheClaim(ttl_s=3600.0, priority=50, session=SESSION, rank=2)
        await router.run(submit(cluster, "a", PROMPT, claim))
        await cluster.nothing_left()
        size = 6.0 * worker.metrics.block_bytes
        assert await series(pd, worker, "diptych_kv_claimed_bytes") == {"2": size}
        assert await series(pd, worker, "diptych_kv_claims_total") == {"": size}
        await release(pd, worker, SESSION)
        await cluster.nothing_left()
        assert await series(pd, worker, "diptych_kv_claimed_bytes") == {"2": 0.0}
        ended = {"expired": 0.0, "pressure": 0.0, "share": 0.0, "closed": size}
        assert await series(pd, worker, "diptych_kv_claims_ended_total") == ended
        assert await series(pd, worker, "diptych_kv_claim_kept_tokens_total") == {"": 0.0}

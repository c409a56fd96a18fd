"""Cancel, deadline, lost and faulty prefill workers: the answer is right or typed, and nothing stays behind."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from diptych.common.errors import (
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    PromptTooLongError,
    RequestCancelledError,
    RequestDeadlineError,
    StaleReferenceError,
    TransferError,
    WorkerLostError,
)
from diptych.rpc.v1 import router_pb2, types_pb2

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
FAIL = router_pb2.FAILURE_POLICY_FAIL
RECOMPUTE = router_pb2.FAILURE_POLICY_RECOMPUTE


async def expected_tokens(pd: ModuleType, prompt: list[int] = PROMPT) -> list[int]:
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        return (await router.run(alone.submit_message(attempt="local", prompt=prompt))).token_ids


async def test_one_token_moves_no_kv(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        steps = cluster.decode.engine.stats().generation_tokens_total
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=1))
        assert len(answer.token_ids) == 1
        assert answer.explanation.kv_bytes == 0
        assert answer.explanation.transport == "none"
        assert answer.explanation.prefill == "prefill-0"
        assert cluster.decode.engine.stats().generation_tokens_total == steps + 1
        await cluster.nothing_left()


async def test_eos_first_takes_no_decode_step(pd: ModuleType) -> None:
    probe = await expected_tokens(pd)
    model = lambda: pd.fake_model(eos_token_ids=(probe[0],))  # noqa: E731
    async with pd.cluster(decode=model, prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        computed = cluster.decode.model.runner.computed_tokens
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, ignore_eos=False))
        assert answer.token_ids == probe[:1]
        assert answer.finished.finish_reason == types_pb2.FINISH_REASON_STOP
        assert cluster.decode.model.runner.computed_tokens == computed
        await cluster.nothing_left()


async def test_a_prompt_beyond_the_prefill_pool_is_computed_by_decode(pd: ModuleType) -> None:
    model = lambda: pd.fake_model(num_blocks=4)  # noqa: E731
    async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        assert answer.token_ids == await expected_tokens(pd)
        assert "this worker's KV pool holds 64" in " ".join(answer.explanation.notes)
        await cluster.nothing_left()


@pytest.mark.parametrize("after", [0, 2])
async def test_cancel_while_prefill_computes(pd: ModuleType, after: int) -> None:
    gate = pd.Gate(after)
    model = lambda: pd.fake_model(before_execute=gate)  # noqa: E731
    async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
        await gate.wait()
        router.cancel("a")
        await router.ended("a")
        gate.open()
        assert isinstance(answer.error, RequestCancelledError)
        await cluster.nothing_left()
        again = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT))
        assert again.finished is not None


async def test_cancel_while_decoding(pd: ModuleType) -> None:
    gate = pd.Gate(2)
    model = lambda: pd.fake_model(before_execute=gate)  # noqa: E731
    async with pd.cluster(decode=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=50))
        await gate.wait()
        router.cancel("a")
        await router.ended("a")
        gate.open()
        assert isinstance(answer.error, RequestCancelledError)
        assert 1 <= len(answer.token_ids) < 50
        await cluster.nothing_left()


async def test_a_broken_stream_cancels_all_its_attempts(pd: ModuleType) -> None:
    gate = pd.Gate(1)
    model = lambda: pd.fake_model(before_execute=gate)  # noqa: E731
    async with pd.cluster(prefill=model) as cluster:
        async with pd.FakeRouter(cluster.decode.address) as router:
            for name in ("a", "b", "c"):
                router.submit(cluster.submit_message(attempt=name, prompt=PROMPT))
            await gate.wait()
        gate.open()
        await cluster.nothing_left()


async def test_the_deadline_ends_a_request_everywhere(pd: ModuleType) -> None:
    gate = pd.Gate(1)
    model = lambda: pd.fake_model(before_execute=gate)  # noqa: E731
    async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, remaining_s=0.3, policy=FAIL))
        gate.open()
        assert isinstance(answer.error, RequestDeadlineError)
        await cluster.nothing_left()


@pytest.mark.parametrize(
    ("policy", "how"),
    [(0, "trying prefill-1"), (RECOMPUTE, "local prefill"), (FAIL, "")],
    ids=["retry", "recompute", "fail"],
)
async def test_prefill_errs_after_it_accepted(pd: ModuleType, policy: int, how: str) -> None:
    expected = await expected_tokens(pd)
    async with pd.cluster(num_prefill=2) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        cluster.prefill[0].model.runner.bad_attempts.add("a/1")
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=policy))
        if policy == FAIL:
            assert isinstance(answer.error, InternalError)
        else:
            assert answer.token_ids == expected
            assert how in answer.explanation.notes[0]
            assert answer.explanation.local_prefill == (policy == RECOMPUTE)
        await cluster.nothing_left()


@pytest.mark.parametrize("after", [0, 2])
async def test_prefill_lost_while_it_computes(pd: ModuleType, after: int) -> None:
    expected = await expected_tokens(pd)
    gate = pd.Gate(after)
    models = iter([pd.fake_model(before_execute=gate), pd.fake_model()])
    async with (
        pd.cluster(num_prefill=2, prefill=lambda: next(models)) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
        await gate.wait()
        await cluster.prefill[0]._server.stop(None)  # its sockets are gone, as after a kill
        await router.ended("a")
        gate.open()
        assert answer.token_ids == expected
        assert answer.explanation.prefill == "prefill-1"
        # Whichever is noticed first: the call that broke, a slab that prefill took back, or a read of it that was refused.
        assert answer.explanation.notes[0].startswith(
            tuple(f"prefill prefill-0 failed ({code}" for code in ("WORKER_LOST", "TRANSFER", "STALE_REFERENCE"))
        )
        await cluster.nothing_left()


async def test_a_token_that_was_sent_is_not_sampled_again(pd: ModuleType) -> None:
    """The last of five slabs is damaged, when the first token is out already: the second leg must not draw it again."""
    expected = await expected_tokens(pd)
    async with (
        pd.cluster(num_prefill=2, decode_config={"fault_corrupt_every": 5}) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        assert answer.token_ids == expected
        assert "trying prefill-1" in answer.explanation.notes[0]
        await cluster.nothing_left()


async def test_damage_fails_typed_when_the_policy_says_so(pd: ModuleType) -> None:
    async with (
        pd.cluster(decode_config={"fault_corrupt_every": 1}) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL))
        assert isinstance(answer.error, TransferError)
        await cluster.nothing_left()


async def test_no_prefill_worker_listens(pd: ModuleType) -> None:
    expected = await expected_tokens(pd)
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        message = cluster.submit_message(attempt="a", prompt=PROMPT)
        message.placement.prefill[0].address = "127.0.0.1:1"
        answer = await router.run(message)
        assert answer.token_ids == expected
        assert answer.explanation.local_prefill
        assert "cannot be reached" in answer.explanation.notes[0]
        message = cluster.submit_message(attempt="b", prompt=PROMPT, policy=FAIL)
        message.placement.prefill[0].address = "127.0.0.1:1"
        assert isinstance((await router.run(message)).error, WorkerLostError)
        message = cluster.submit_message(attempt="c", prompt=PROMPT, policy=FAIL, prefill=[])
        assert isinstance((await router.run(message)).error, NoWorkerError)
        await cluster.nothing_left()


async def test_another_life_of_prefill_is_refused(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        message = cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL)
        message.placement.prefill[0].incarnation = "former"
        assert isinstance((await router.run(message)).error, StaleReferenceError)


async def test_a_pair_that_does_not_match_is_refused_with_the_difference(pd: ModuleType) -> None:
    import dataclasses

    def other() -> object:
        model = pd.fake_model()
        return dataclasses.replace(model, compat=dataclasses.replace(model.compat, model_revision="model-2"))

    async with pd.cluster(prefill=other) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        assert answer.explanation.local_prefill
        assert "model_revision: mine model-1, theirs model-2" in answer.explanation.notes[0]


async def test_bad_submissions_never_reach_the_engine(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        steps = cluster.decode.engine.stats().steps

        async def refused(expected: type[Exception], param: str | None, **changes: object) -> None:
            prompt = changes.pop("prompt", PROMPT)
            message = cluster.submit_message(attempt=f"x{param}{expected.__name__}", prompt=prompt)
            for name, value in changes.items():
                setattr(
                    message.sampling if name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name else message,
                    name,
                    value,
                )
            answer = await router.run(message)
            assert type(answer.error) is expected
            assert answer.error.param == param
            assert not answer.accepted

        await refused(InvalidRequestError, "prompt", prompt=[1000])
        await refused(InvalidRequestError, "temperature", temperature=float("nan"))
        await refused(InvalidRequestError, "max_tokens", max_tokens=-1)
        await refused(InvalidRequestError, "remaining_s", remaining_s=float("inf"))
        await refused(PromptTooLongError, "prompt", prompt=[1] * 4096)
        message = cluster.submit_message(attempt="old", prompt=PROMPT)
        message.placement.decode.incarnation = "former"
        assert isinstance((await router.run(message)).error, StaleReferenceError)
        assert cluster.decode.engine.stats().steps == steps


async def test_cancel_storm_leaves_nothing(pd: ModuleType) -> None:
    import random

    rng = random.Random(5)
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        for i in range(40):
            router.submit(cluster.submit_message(attempt=f"s{i}", prompt=PROMPT[: rng.randint(1, 150)], max_tokens=30))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.01)  # sleep: cancels at any moment, whichever it is
            router.cancel(f"s{rng.randint(0, i)}")
        for i in range(40):
            router.cancel(f"s{i}")
            await router.ended(f"s{i}")
        await cluster.nothing_left()


async def test_drain_lets_running_requests_finish(pd: ModuleType) -> None:
    expected = await expected_tokens(pd)
    gate = pd.Gate(1)
    model = lambda: pd.fake_model(before_execute=gate)  # noqa: E731
    async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = router.submit(cluster.submit_message(attempt="a", prompt=PROMPT))
        await gate.wait()
        drains = [asyncio.create_task(worker.drain()) for worker in cluster.workers]
        late = await router.run(cluster.submit_message(attempt="late", prompt=PROMPT))
        assert isinstance(late.error, NoWorkerError)
        assert cluster.decode.record().state == "draining"
        gate.open()
        await router.ended("a")
        await asyncio.gather(*drains)
        assert answer.token_ids == expected

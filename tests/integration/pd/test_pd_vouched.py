"""KV and tokens from a prefill worker that computed another prompt never reach the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import pytest

from diptych.common.compat import PROTOCOL_VERSION, differences
from diptych.common.errors import TransferError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.messages import EngineRequest, KvMode, ScheduledSeq
from diptych.engine.sched import scheduler as sched
from diptych.prefill import sessions as handoff
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.v1 import prefill_pb2, router_pb2

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
FAIL = router_pb2.FAILURE_POLICY_FAIL
RECOMPUTE = router_pb2.FAILURE_POLICY_RECOMPUTE


async def expected(pd: ModuleType, prompt: Sequence[int] = PROMPT) -> list[int]:
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        return (await router.run(alone.submit_message(attempt="local", prompt=prompt))).token_ids


def change_a_token(seqs: Sequence[ScheduledSeq]) -> None:
    """Change a row of the step, behind the scheduler."""
    for seq in seqs:
        if seq.start <= 70 < seq.start + len(seq.token_ids):
            seq.token_ids = [*seq.token_ids]
            seq.token_ids[70 - seq.start] ^= 1


@pytest.fixture
def shorter_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scheduler of a prefill worker loses the prompt's last token, and computes a whole prompt all the same."""
    real = sched.Request

    def lossy(engine_request: EngineRequest, *rest: object) -> sched.Request:
        prompt = engine_request.prompt.token_ids
        if engine_request.mode is KvMode.PREFILL and len(prompt) == len(PROMPT):
            engine_request = replace(engine_request, prompt=Prompt(prompt[:-1]))
        return real(engine_request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sched, "Request", lossy)
    return iter(())


@pytest.fixture
def swapped_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scheduler of a prefill worker gives the runner the tokens of another place."""
    real = sched.Scheduler._add_chunk

    def elsewhere(self: sched.Scheduler, out: object, request: sched.Request, budget: int) -> int:
        count = real(self, out, request, budget)  # type: ignore[arg-type]
        if request.mode is KvMode.PREFILL and request.seq.start == 32:
            request.seq.token_ids = request.token_ids[: len(request.seq.token_ids)]
        return count

    monkeypatch.setattr(sched.Scheduler, "_add_chunk", elsewhere)
    return iter(())


async def refused(pd: ModuleType, model: Callable[[], object], why: str, **submit: object) -> None:
    """Every leg is refused before anything goes out; with a policy that may, decode computes the right answer."""
    want = await expected(pd)
    async with pd.cluster(num_prefill=2, prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        failed = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL, **submit))
        assert isinstance(failed.error, TransferError)
        assert why in failed.error.message
        assert failed.token_ids == []
        await cluster.nothing_left()
        answer = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT, **submit))
        notes = " ".join(answer.explanation.notes)
        assert "prefill-0 failed (TRANSFER_FAILED" in notes
        assert "prefill-1 failed (TRANSFER_FAILED" in notes
        assert answer.token_ids == want
        await cluster.nothing_left()


async def test_a_first_token_of_a_shorter_prompt_is_not_streamed(pd: ModuleType, shorter_prompts: None) -> None:
    await refused(pd, pd.fake_model, "computed 149 tokens, 150 were requested")


async def test_a_first_token_of_a_changed_prompt_is_not_streamed(pd: ModuleType) -> None:
    model = lambda: pd.fake_model(before_execute=change_a_token)  # noqa: E731
    await refused(pd, model, "computed 150 tokens that differ from the requested ones")


async def test_a_first_token_of_tokens_in_other_places_is_not_streamed(pd: ModuleType, swapped_chunks: None) -> None:
    await refused(pd, pd.fake_model, "computed 150 tokens that differ from the requested ones")


async def test_a_wrong_block_in_the_prefix_cache_is_reported(pd: ModuleType) -> None:
    """The rows of this request are right; a block that it finds in the cache was computed from something else."""
    faulty = [True]

    def before(seqs: Sequence[ScheduledSeq]) -> None:
        if faulty[0]:
            change_a_token(seqs)

    model = lambda: pd.fake_model(before_execute=before)  # noqa: E731
    async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        for attempt in ("poisons", "hits"):
            answer = await router.run(cluster.submit_message(attempt=attempt, prompt=PROMPT, policy=FAIL))
            assert isinstance(answer.error, TransferError)
            assert answer.token_ids == []
            faulty[0] = False
        assert cluster.prefill[0].engine.stats().cached_tokens_total == 144
        await cluster.nothing_left()


def message(pd: ModuleType, cluster: object, attempt: str, sampling: SamplingParams, **fields: object) -> object:
    submit = cluster.submit_message(attempt=attempt, prompt=PROMPT, policy=FAIL, **fields)  # type: ignore[attr-defined]
    submit.sampling.CopyFrom(sampling_to_proto(sampling))
    return submit


SEVERAL = {
    "choices": SamplingParams(max_tokens=6, seed=3, n=3, ignore_eos=True),
    "one token": SamplingParams(max_tokens=1, seed=3, ignore_eos=True),
    "beams": SamplingParams(max_tokens=6, beam_width=2, n=2, temperature=0.0, ignore_eos=True),
    "prompt logprobs": SamplingParams(max_tokens=6, seed=3, prompt_logprobs=1, ignore_eos=True),
}


@pytest.mark.parametrize("kind", SEVERAL)
async def test_every_kind_of_answer_is_vouched_for(pd: ModuleType, kind: str) -> None:
    for model, right in ((pd.fake_model, True), (lambda: pd.fake_model(before_execute=change_a_token), False)):
        async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
            seen: list[str] = []
            reported = router._on_event

            def note(event: object, reported: Callable[[object], None] = reported, seen: list[str] = seen) -> None:
                seen.append(event.WhichOneof("event"))  # type: ignore[attr-defined]
                if seen[-1] in ("end", "accepted"):
                    reported(event)

            router._on_event = note
            answer = await router.run(message(pd, cluster, "a", SEVERAL[kind]))
            if right:
                assert answer.finished is not None
                assert answer.explanation.prefill == "prefill-0"
                assert "tokens" in seen
                assert ("prompt_logprobs" in seen) == (kind == "prompt logprobs")
            else:
                assert isinstance(answer.error, TransferError)
                assert seen == ["accepted", "end"]
            await cluster.nothing_left()


@pytest.mark.parametrize("right", [True, False])
async def test_a_retry_with_sent_tokens_decodes_on_vouched_kv_only(pd: ModuleType, right: bool) -> None:
    """Prefill samples nothing: its KV alone must match the request, including the sent tokens."""
    want = await expected(pd)
    model = pd.fake_model if right else (lambda: pd.fake_model(before_execute=change_a_token))
    async with pd.cluster(prefill=model) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        submit = cluster.submit_message(attempt="a", prompt=PROMPT, policy=FAIL)
        submit.output_token_ids.extend(want[:3])
        seen: list[int] = []

        def note(event: object) -> None:
            if event.WhichOneof("event") == "tokens":  # type: ignore[attr-defined]
                seen.extend(event.tokens.token_ids)  # type: ignore[attr-defined]
            else:
                reported(event)

        reported, router._on_event = router._on_event, note
        answer = await router.run(submit)
        assert seen == (want[3:] if right else [])
        assert (answer.error is None) == right
        await cluster.nothing_left()


async def test_cached_prefixes_and_chunks_are_vouched_for(pd: ModuleType) -> None:
    """The same prompt again, and one that shares a prefix: hits on prefill; decode's own cache is emptied between them."""
    other = [*PROMPT[:100], *range(40)]
    want = [await expected(pd), await expected(pd), await expected(pd, other)]
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        for number, prompt in enumerate([PROMPT, PROMPT, other]):
            await cluster.decode.engine.reset_cache()
            answer = await router.run(cluster.submit_message(attempt=f"a{number}", prompt=prompt, policy=FAIL))
            assert answer.token_ids == want[number]
            assert answer.explanation.prefill == "prefill-0"
        assert cluster.prefill[0].engine.stats().cached_tokens_total == 144 + 96


async def test_a_worker_that_does_not_say_what_it_computed_is_refused(
    pd: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_first = handoff.PrefillSession._send_first_tokens

    def silent(self: handoff.PrefillSession, first: prefill_pb2.FirstTokens) -> None:
        self._computed = None
        say_first(self, first)

    monkeypatch.setattr(handoff.PrefillSession, "_send_first_tokens", silent)
    await refused(pd, pd.fake_model, "does not report the tokens that it computed")


def test_protocol_versions_must_match(pd: ModuleType) -> None:
    """A worker from before first tokens were vouched for is no peer."""
    now = pd.fake_model().compat
    assert differences(now, replace(now, protocol_version=1)) == [
        f"protocol_version: mine {PROTOCOL_VERSION}, theirs 1"
    ]

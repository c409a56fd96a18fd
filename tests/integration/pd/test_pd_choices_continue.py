"""A choice of an answer with several goes on alone, after the tokens that were sent: its draws are those of its number."""

from __future__ import annotations

from types import ModuleType

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import SamplingParams
from diptych.rpc.convert import sampling_to_proto

NUM_TOKENS, N = 8, 3


def sampling(n: int):
    return sampling_to_proto(SamplingParams(max_tokens=NUM_TOKENS, seed=7, temperature=1.0, n=n, ignore_eos=True))


async def tokens_of(router, submit) -> dict[int, list[int]]:
    """Token ids by choice; offsets are checked."""
    seen: dict[int, list[int]] = {}
    begun = len(submit.output_token_ids)
    reported = router._on_event

    def note(event) -> None:
        if event.WhichOneof("event") == "tokens":
            outputs = seen.setdefault(event.tokens.choice, [])
            assert event.tokens.offset == begun + len(outputs)
            outputs.extend(event.tokens.token_ids)
        elif event.WhichOneof("event") != "choice_finished":
            reported(event)

    router._on_event = note
    answer = await router.run(submit)
    router._on_event = reported
    if answer.error is not None:
        raise answer.error
    return seen


@pytest.mark.parametrize("local", [False, True])
async def test_each_choice_goes_on_as_it_would_have(pd: ModuleType, local: bool) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:

        def submit(attempt: str, n: int):
            limit = len(pd.PROMPT) if local else 0
            message = cluster.submit_message(attempt=attempt, prompt=pd.PROMPT, local=local, local_max=limit)
            message.sampling.CopyFrom(sampling(n))
            return message

        whole = await tokens_of(router, submit("whole", N))
        assert len({tuple(ids) for ids in whole.values()}) == N, "the choices do not differ: the test shows nothing"
        for choice in range(N):
            for sent in (1, 5, NUM_TOKENS):
                part = submit(f"part {choice} {sent}", 1)
                part.output_token_ids.extend(whole[choice][:sent])
                part.choice = choice
                assert (await tokens_of(router, part)).get(choice, []) == whole[choice][sent:]
        await cluster.nothing_left()


@pytest.mark.parametrize(("n", "outputs", "choice"), [(1, [], 1), (2, [5], 1), (1, [5], 16)])
async def test_what_cannot_be_a_part_is_refused(pd: ModuleType, n: int, outputs: list[int], choice: int) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        message = cluster.submit_message(attempt="a", prompt=pd.PROMPT)
        message.sampling.CopyFrom(sampling(n))
        message.output_token_ids.extend(outputs)
        message.choice = choice
        with pytest.raises(InvalidRequestError) as caught:
            await tokens_of(router, message)
        assert caught.value.param == "choice"


async def test_the_tokens_so_far_count_where_it_is_decided_who_computes(pd: ModuleType) -> None:
    """Of a continuation decode needs the KV of the prompt and of all its tokens but the last one. Nothing is cached at first;
    then all but the last block is."""
    limit = len(pd.PROMPT) + 3
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        reported = router._on_event
        router._on_event = lambda event: event.HasField("tokens") or reported(event)

        async def is_local(prompt: list[int], num_sent: int, limit: int) -> bool:
            attempt = f"{prompt[0]} {num_sent} {limit}"
            message = cluster.submit_message(
                attempt=attempt, prompt=prompt, local=True, local_max=limit, max_tokens=NUM_TOKENS
            )
            message.output_token_ids.extend(range(20, 20 + num_sent))
            answer = await router.run(message)
            assert answer.error is None
            return answer.explanation.local_prefill

        assert await is_local([901, *pd.PROMPT[1:]], 4, limit)
        assert not await is_local([902, *pd.PROMPT[1:]], 5, limit)
        assert await is_local([902, *pd.PROMPT[1:]], 5, limit=pd.BLOCK)
        await cluster.nothing_left()

"""Prefill -> decode in one process: the hand-off changes nothing about the tokens, and its checks can fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import ModuleType

import pytest

from diptych.common.sampling import SamplingParams
from diptych.engine.messages import ScheduledSeq
from diptych.kvtransfer.wrappers.ciphers import CIPHERS
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.v1 import types_pb2
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]


async def local_answer(pd: ModuleType, prompt: list[int], **arguments: object) -> list[int]:
    """The undisturbed run: one engine does it all."""
    async with pd.cluster(num_prefill=0) as alone, pd.FakeRouter(alone.decode.address) as router:
        answer = await router.run(alone.submit_message(attempt="local", prompt=prompt, **arguments))
        assert answer.explanation.local_prefill
        return answer.token_ids


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 150])
async def test_remote_equals_local(pd: ModuleType, num_tokens: int) -> None:
    prompt = PROMPT[:num_tokens]
    expected = await local_answer(pd, prompt)
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=prompt))
        assert answer.token_ids == expected
        explanation = answer.explanation
        assert not explanation.local_prefill
        assert (explanation.prefill, explanation.decode) == ("prefill-0", "decode-0")
        assert (explanation.transport, explanation.backend) == ("inproc", "fake")
        assert explanation.kv_bytes == num_tokens * cluster.decode.model.runner.kv_bytes_per_token
        assert explanation.kv_ranges >= 1
        assert explanation.prefill_pid == explanation.decode_pid == os.getpid()
        assert list(explanation.notes) == []
        assert 0 < explanation.reserved_s <= explanation.first_token_s
        assert answer.finished is not None
        assert answer.finished.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert answer.finished.usage.completion_tokens == 8
        await cluster.nothing_left()


@pytest.mark.parametrize("max_tokens", [1, 9])
async def test_beam_search_hands_its_first_candidates_over(pd: ModuleType, max_tokens: int) -> None:
    prompt = PROMPT[:37]
    sampling = SamplingParams(
        max_tokens, temperature=0.0, beam_width=3, ignore_eos=True, stop_token_ids=tuple(range(0, 1000, 7)), logprobs=1
    )
    tokens = []
    for num_prefill in (0, 1):
        async with pd.cluster(num_prefill=num_prefill) as cluster, pd.FakeRouter(cluster.decode.address) as router:
            message = cluster.submit_message(attempt="a", prompt=prompt)
            message.sampling.CopyFrom(sampling_to_proto(sampling))
            answer = await router.run(message)
            tokens.append(answer.token_ids)
            assert answer.explanation.local_prefill is (num_prefill == 0)
            assert answer.finished is not None
            assert answer.finished.usage.completion_tokens == len(answer.token_ids) > 0
            await cluster.nothing_left()
    assert tokens[0] == tokens[1]


async def test_sixteen_at_once_equal_local(pd: ModuleType) -> None:
    prompts = [[(i * j + 5) % 1000 for j in range(10 + 9 * i)] for i in range(16)]
    big = lambda: pd.fake_model(num_blocks=256)  # noqa: E731
    async with (
        pd.cluster(num_prefill=0, decode=big) as alone,
        pd.FakeRouter(alone.decode.address) as router,
    ):
        expected = [
            (await router.run(alone.submit_message(attempt=f"l{i}", prompt=prompt))).token_ids
            for i, prompt in enumerate(prompts)
        ]
    async with pd.cluster(decode=big, prefill=big) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answers = [
            router.submit(cluster.submit_message(attempt=f"r{i}", prompt=prompt)) for i, prompt in enumerate(prompts)
        ]
        for i in range(16):
            await router.ended(f"r{i}")
        assert [answer.token_ids for answer in answers] == expected
        assert all(answer.explanation.kv_bytes for answer in answers)
        await cluster.nothing_left()


async def read_and_settled(reader: WorkerRuntime, publisher: WorkerRuntime) -> bool:
    """KV arrived, and its publisher got the acknowledgement: no slab is in use."""
    if not (await reader.transfer.audit()).bytes_received:
        return False
    slabs = (await publisher.transfer.audit()).slabs
    return slabs.free == slabs.total


async def test_reads_overlap_with_compute(pd: ModuleType) -> None:
    """The last chunks are not computed before the first ones' KV has been read."""
    arrived, steps = threading.Event(), []

    def hold(seqs: Sequence[ScheduledSeq]) -> None:
        steps.extend(seq.attempt for seq in seqs if seq.attempt != "warm-up")
        if len(steps) > 10:
            assert arrived.wait(300)

    held = lambda: pd.fake_model(before_execute=hold)  # noqa: E731
    async with pd.cluster(prefill=held) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        prompt = [(3 * i) % 1000 for i in range(640)]
        answer = router.submit(cluster.submit_message(attempt="a", prompt=prompt))
        try:
            await waiting.until(lambda: read_and_settled(cluster.decode, cluster.prefill[0]), "KV arrives")
        finally:
            arrived.set()
        await router.ended("a")
        assert answer.explanation.kv_ranges_overlapped > 0
        assert answer.explanation.kv_ranges > answer.explanation.kv_ranges_overlapped


async def test_a_repeated_prompt_moves_only_the_rest(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        first = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        again = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT))
        local = await router.run(cluster.submit_message(attempt="c", prompt=PROMPT, local=True, local_max=64))
        whole = 16 * ((len(PROMPT) - 1) // 16)
        per_token = cluster.decode.model.runner.kv_bytes_per_token
        assert first.token_ids == again.token_ids == local.token_ids
        assert again.explanation.cached_tokens_decode == again.explanation.cached_tokens_prefill == whole
        assert again.explanation.kv_bytes == (len(PROMPT) - whole) * per_token
        assert local.explanation.local_prefill
        assert local.explanation.transport == "none"
        for answer in (again, local):
            assert answer.finished.usage.cached_tokens == whole
        await cluster.nothing_left()


async def test_a_flipped_byte_without_checksum_changes_the_tokens(pd: ModuleType) -> None:
    """The check of token identity can fail: this is what it would catch."""
    expected = await local_answer(pd, PROMPT)
    faults = {"verify_checksum": False, "fault_corrupt_every": 1}
    async with pd.cluster(decode_config=faults) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        assert not answer.explanation.local_prefill
        assert answer.token_ids[0] == expected[0], "the first token does not depend on decode's KV"
        assert answer.token_ids != expected


async def test_a_damaged_slab_is_noticed_and_made_good(pd: ModuleType) -> None:
    expected = await local_answer(pd, PROMPT)
    faults = {"fault_corrupt_every": 3}
    async with (
        pd.cluster(num_prefill=2, decode_config=faults) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        assert answer.token_ids == expected
        assert any("TRANSFER_FAILED" in note for note in answer.explanation.notes)
        await cluster.nothing_left()


async def test_local_prefill_over_the_limit_is_overruled(pd: ModuleType) -> None:
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, local=True, local_max=64))
        assert not answer.explanation.local_prefill
        assert "overruled" in answer.explanation.notes[0]
        short = await router.run(cluster.submit_message(attempt="b", prompt=[1] * 64, local=True, local_max=64))
        assert short.explanation.local_prefill


async def test_a_step_of_many_requests_is_one_message(pd: ModuleType) -> None:
    async with pd.cluster(num_prefill=0) as cluster, pd.FakeRouter(cluster.decode.address) as router:
        for i in range(8):
            router.submit(cluster.submit_message(attempt=f"a{i}", prompt=[i + 1, 2, 3], max_tokens=32))
        for i in range(8):
            await router.ended(f"a{i}")
        assert router.num_batches < 8 * 32 / 2


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("cipher", CIPHERS)
async def test_encrypted_kv_yields_the_same_tokens_also_where_some_of_it_is_damaged(
    pd: ModuleType, cipher: str, every: int
) -> None:
    expected = await local_answer(pd, PROMPT)
    config = {"kv_encryption": cipher}
    async with (
        pd.cluster(prefill_config=config, decode_config=config | {"fault_corrupt_every": every}) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT))
        assert answer.token_ids == expected
        damaged = any("TRANSFER_FAILED" in note for note in answer.explanation.notes)
        assert (damaged, answer.explanation.local_prefill) == (every > 0, every > 0)
        await cluster.nothing_left()

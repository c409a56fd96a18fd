from __future__ import annotations

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.errors import InternalError, PromptTooLongError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest, KvMode
from diptych.engine.offline import OfflineEngine

BLOCK = 16


def make_engine(**fields):
    clock = FakeClock()
    runner = FakeRunner(64, BLOCK, before_execute=lambda seqs: clock.advance(0.1))
    identity = IdentityHeader(b"k" * 32, "model", "tokenizer", "uint8", BLOCK)
    return OfflineEngine(LocalExecutor(runner), EngineConfig(num_blocks=64, **fields), identity, clock=clock)


def make_request(attempt, num_prompt=20, max_tokens=5, **fields):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(attempt, Prompt(tuple((9 + i) % 1000 for i in range(num_prompt))), sampling, **fields)


def test_arrivals_count_steps_and_results_keep_the_order_of_the_requests():
    results = make_engine().generate([make_request("late"), make_request("early", 7)], arrivals=[50, 0])
    assert [r.attempt for r in results] == ["late", "early"]
    assert [len(r.token_ids) for r in results] == [5, 5]
    assert results[1].token_times == pytest.approx([1000.1 + 0.1 * i for i in range(5)])
    assert results[0].added_at == pytest.approx(1000.5)


def test_a_refused_request_has_its_error_and_the_others_run():
    bad, good = make_engine().generate([make_request("bad", 2000), make_request("good")])
    assert isinstance(bad.error, PromptTooLongError)
    assert good.finished is not None


def test_a_request_that_no_worker_can_serve_is_an_error():
    with pytest.raises(InternalError, match="nothing moves"):
        make_engine().generate([make_request("a", mode=KvMode.REMOTE)])


def test_the_fake_runner_feels_a_flipped_byte():
    engine = make_engine()
    runner = engine.core._executor.runner
    (good,) = engine.generate([make_request("a")])
    runner.pool[engine.core.scheduler.kv.pool.find(engine.core.scheduler.kv.pool.dump().tiers[0].keys)[0], 0, 0, 3] ^= 1
    (bad,) = engine.generate([make_request("b")])
    assert bad.num_cached_tokens == 16
    assert bad.token_ids != good.token_ids


def test_pack_and_unpack_are_inverse_and_leave_the_rest_of_the_tail_block():
    runner = FakeRunner(8, 4)
    runner.pool[:] = 7
    source = FakeRunner(8, 4)
    source.pool[:] = 9
    out = memoryview(bytearray(6 * source.kv_bytes_per_token))
    checksum = source.pack([2, 5], 6, out)
    assert checksum == source.pack([5, 2], 6, out)
    runner.unpack([1, 3], 6, out)
    assert (runner.pool[1] == 9).all()
    assert (runner.pool[3, :, :, :2] == 9).all()
    assert (runner.pool[3, :, :, 2:] == 7).all()

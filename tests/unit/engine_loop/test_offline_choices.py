from __future__ import annotations

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine


def test_choices_and_logprobs_are_kept_apart():
    identity = IdentityHeader(b"k" * 32, "model", "tokenizer", "uint8", 16)
    engine = OfflineEngine(LocalExecutor(FakeRunner(64)), EngineConfig(num_blocks=64), identity, clock=FakeClock())
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, n=3, logprobs=1, prompt_logprobs=0)
    several = EngineRequest("a", Prompt(tuple(range(9))), sampling)
    plain = EngineRequest("b", Prompt(tuple(range(9))), SamplingParams(max_tokens=5, ignore_eos=True))
    [result, alone] = engine.generate([several, plain])
    assert result.token_ids == alone.token_ids
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert {choice: len(ids) for choice, ids in result.other_choices.items()} == {1: 5, 2: 5}
    assert [entry.token_id for entry in result.prompt_logprobs] == list(range(1, 9))
    assert result.finished is not None
    assert result.finished.num_output_tokens == 15

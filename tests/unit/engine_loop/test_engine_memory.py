"""A step that finds no memory ends the newcomers, typed; whoever decodes goes on, with the tokens it would have had."""

from __future__ import annotations

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.errors import OverloadedError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest, Failed, Finished, TokensOut
from diptych.engine.runner import OutOfDeviceMemory


def run(with_newcomer: bool):
    """Tokens of "a", and how each attempt ended."""

    def no_room(seqs):
        if any(seq.attempt == "big" for seq in seqs):
            raise OutOfDeviceMemory("tried to allocate 4 GiB")

    runner = FakeRunner(32, 4, before_execute=no_room)
    config = EngineConfig(num_blocks=32, block_size=4, check_invariants=True)
    core = EngineCore(LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "uint8", 4), FakeClock())
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    core.handle(EngineRequest("a", Prompt((1, 2, 3)), params))
    core.step()
    if with_newcomer:
        core.handle(EngineRequest("big", Prompt(tuple(range(20))), params))
    tokens, ends = [], {}
    for _ in range(10):
        core.step()
        for event in core.take_events():
            if isinstance(event, TokensOut):
                tokens += event.token_ids
            elif isinstance(event, (Finished, Failed)):
                ends[event.attempt] = event
    assert core.scheduler.kv.pool.counts.running == 0
    return tokens, ends


def test_the_newcomer_fails_typed_and_the_others_go_on():
    undisturbed, _ = run(False)
    tokens, ends = run(True)
    assert tokens == undisturbed
    assert isinstance(ends["a"], Finished)
    assert isinstance(ends["big"].error, OverloadedError)
    assert ends["big"].error.retry_after_s

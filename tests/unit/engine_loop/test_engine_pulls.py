"""KV that is copied beside the steps: blocks stay the request's until the copy has ended, and damage is told."""

from __future__ import annotations

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    AllGiven,
    Cancel,
    DeviceRange,
    EngineRequest,
    Failed,
    FirstToken,
    KvComplete,
    KvMode,
    RangeUnpacked,
    RunLocally,
    TokensOut,
    UnpackRange,
)


class Copy:
    def __init__(self, error: str = "") -> None:
        self.ended, self.waited, self._error = False, 0, error

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.waited += 1
        self.ended = True

    def error(self) -> str:
        return self._error


class PullingRunner(FakeRunner):
    """Answers every unpack of a DeviceRange with the next of `copies`."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.copies: list[Copy] = []

    def unpack(self, block_ids, num_tokens, src, layers=None, group=0):
        if not isinstance(src, DeviceRange):
            return super().unpack(block_ids, num_tokens, src, layers, group)
        return self.copies.pop(0)


@pytest.fixture
def core():
    runner = PullingRunner(num_blocks=16, block_size=4)
    config = EngineConfig(num_blocks=16, block_size=4, check_invariants=True)
    core = EngineCore(LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "float32", 4), FakeClock())
    core.handle(EngineRequest("a", Prompt(tuple(range(1, 9))), SamplingParams(max_tokens=3), mode=KvMode.REMOTE))
    core.step()
    core.take_events()
    core.runner = runner
    return core


def unpack(core, copy, job=1, first=0, count=8):
    core.runner.copies.append(copy)
    size = count * core.runner.kv_bytes_per_token
    core.handle(UnpackRange("a", job, first, count, DeviceRange(4096, size, 7)))


def unpacked(core):
    return [event for event in core.take_events() if isinstance(event, RangeUnpacked)]


def test_steps_go_on_while_kv_comes_and_the_request_joins_when_it_is_there(core):
    copy = Copy()
    unpack(core, copy)
    core.handle(EngineRequest("b", Prompt((1, 2, 3)), SamplingParams(max_tokens=2)))
    assert core.step()
    assert core.is_copying
    assert not unpacked(core)
    copy.ended = True
    assert unpacked(core) == [RangeUnpacked("a", 1, True)]
    assert not core.is_copying
    core.handle(FirstToken("a", 5))
    core.handle(KvComplete("a"))
    core.step()
    assert any(isinstance(event, TokensOut) and event.attempt == "a" for event in core.take_events())
    assert not copy.waited


def test_damage_is_reported_and_does_not_count_as_arrived(core):
    copy = Copy("checksum 1, not 7")
    unpack(core, copy)
    copy.ended = True
    assert unpacked(core) == [RangeUnpacked("a", 1, False, "checksum 1, not 7")]
    core.handle(FirstToken("a", 5))
    core.handle(KvComplete("a"))
    assert any(isinstance(event, Failed) for event in core.take_events())


def test_after_the_last_range_the_request_runs_at_once(core):
    first, second = Copy(), Copy()
    unpack(core, first, job=1, count=4)
    core.runner.copies.append(second)
    core.handle(UnpackRange("a", 2, 4, 4, DeviceRange(4096, 4 * core.runner.kv_bytes_per_token, 7), last=True))
    core.handle(FirstToken("a", 5))
    first.ended = second.ended = True
    assert [event.unpacked for event in unpacked(core)] == [True, True]
    core.step()
    assert [event.offset for event in core.take_events() if isinstance(event, TokensOut)] == [1]
    core.handle(KvComplete("a"))  # comes from the event loop, too


def tokens_of_a_step(core):
    core.step()
    return [event.offset for event in core.take_events() if isinstance(event, TokensOut)]


def test_the_request_runs_at_once_after_ranges_that_were_vouched_for_when_all_were_given(core):
    first, second = Copy(), Copy()
    unpack(core, first, job=1, count=4)
    unpack(core, second, job=2, first=4, count=4)
    core.handle(FirstToken("a", 5))
    first.ended = True
    assert tokens_of_a_step(core) == [0], "only prefill's own token: half of the KV is missing"
    core.handle(AllGiven("a"))
    assert tokens_of_a_step(core) == []
    second.ended = True
    assert tokens_of_a_step(core) == [1]
    core.handle(KvComplete("a"))  # comes from the event loop, too


def test_nothing_runs_on_what_was_not_vouched_for(core):
    first = Copy()
    unpack(core, first)
    core.handle(FirstToken("a", 5))
    first.ended = True
    assert tokens_of_a_step(core) == [0]
    assert tokens_of_a_step(core) == []
    core.handle(AllGiven("a"))  # nothing is being copied any more: the event loop knows, and says KvComplete
    assert tokens_of_a_step(core) == []
    core.handle(KvComplete("a"))
    assert tokens_of_a_step(core) == [1]


def test_a_replacement_of_a_damaged_range_has_to_be_vouched_for_again(core):
    first, second, again = Copy("checksum 1, not 7"), Copy(), Copy()
    unpack(core, first, job=1, count=4)
    unpack(core, second, job=2, first=4, count=4)
    core.handle(FirstToken("a", 5))
    core.handle(AllGiven("a"))
    first.ended = True
    assert [event.unpacked for event in unpacked(core)] == [False]
    unpack(core, again, job=3, count=4)  # another worker's, before that one has vouched
    second.ended = again.ended = True
    assert [event.unpacked for event in unpacked(core)] == [True, True]
    assert tokens_of_a_step(core) == []
    core.handle(KvComplete("a"))
    assert tokens_of_a_step(core) == [1]


def test_a_last_range_completes_nothing_while_another_is_damaged(core):
    first, second = Copy("checksum 1, not 7"), Copy()
    unpack(core, first, job=1, count=4)
    core.runner.copies.append(second)
    core.handle(UnpackRange("a", 2, 4, 4, DeviceRange(4096, 4 * core.runner.kv_bytes_per_token, 7), last=True))
    first.ended = second.ended = True
    assert [event.unpacked for event in unpacked(core)] == [False, True]
    assert not any(isinstance(event, Failed) for event in core.take_events())


@pytest.mark.parametrize("command", [Cancel("a"), RunLocally("a")])
def test_blocks_change_hands_only_after_the_copy(core, command):
    copy = Copy()
    unpack(core, copy)
    core.handle(command)
    assert copy.waited == 1
    assert unpacked(core) == [RangeUnpacked("a", 1, False)]
    assert not core.is_copying


def test_answers_come_in_the_order_of_the_copies(core):
    first, second = Copy(), Copy()
    unpack(core, first, job=1, count=4)
    unpack(core, second, job=2, first=4, count=4)
    second.ended = True
    assert not unpacked(core)
    first.ended = True
    assert [event.job for event in unpacked(core)] == [1, 2]

"""The gate that holds a worker's steps for tests: where it holds, what opens it, and that a held step can be given up."""

from __future__ import annotations

import threading

import pytest

from diptych.engine.fake_runner import FakeRunner
from diptych.engine.runner import StepAborted
from diptych.worker.config import WorkerConfig
from diptych.worker.step_gate import hold_steps
from diptych_tests.waiting import wait_until


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "decode-0"


@pytest.fixture
def runner(gate):
    made = FakeRunner(4, 16)
    hold_steps(made, gate)
    return made


def test_nothing_is_held_without_the_setting_or_the_file(runner, gate):
    assert WorkerConfig().fault_step_gates == ""
    assert runner.execute([]).token_ids == []
    gate.write_text("2")
    assert runner.execute([]).token_ids == []
    assert not gate.with_name("decode-0.held").exists()


def test_a_step_waits_until_the_file_names_more_or_is_gone(runner, gate):
    sign = gate.with_name("decode-0.held")
    for opens in (lambda: gate.write_text("9"), gate.unlink):
        gate.write_text(str(runner.executed_steps))
        before = runner.executed_steps
        thread = threading.Thread(target=runner.execute, args=([],))
        thread.start()
        wait_until(sign.exists, what="the step waits")
        assert runner.executed_steps == before
        opens()
        thread.join(60)
        assert not sign.exists()
        assert runner.executed_steps == before + 1


def test_a_held_step_is_given_up_when_no_request_needs_it(runner, gate):
    gate.write_text("0")
    sign = gate.with_name("decode-0.held")
    with pytest.raises(StepAborted):
        runner.execute([], sign.exists)
    assert runner.executed_steps == 0
    assert not sign.exists()
    gate.write_text("1")  # the one that was given up had begun
    with pytest.raises(StepAborted):
        runner.execute([], sign.exists)


def test_a_step_waits_while_the_file_is_being_written(runner, gate):
    gate.write_text("")
    thread = threading.Thread(target=runner.execute, args=([],))
    thread.start()
    wait_until(gate.with_name("decode-0.held").exists, what="the step waits")
    gate.unlink()
    thread.join(60)
    assert runner.executed_steps == 1

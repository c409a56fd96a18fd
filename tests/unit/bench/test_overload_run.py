"""`make bench-overload-http`: what it refuses at once, and a machine that was too slow for any good answer."""

from __future__ import annotations

import pytest

from diptych_tests.overload_run import SETTLED_S, Attempt, figures, main


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--modes", "off"], "--modes off: on, and then others of"),
        (["--modes", "on,on"], "--modes on,on"),
        (["--modes", "on,never"], "--modes on,never"),
        (["--seconds", "5"], "--seconds 5: must be above 5"),
        (["--surge-s", "2"], "--surge-s 2: must be above 5"),
    ],
)
def test_19_what_would_fail_after_minutes_is_refused_at_once(flags, words, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--out", str(tmp_path / "out.json")])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_19_no_good_answer_at_all_is_a_record_and_no_crash() -> None:
    """The peak of a machine that is too busy is 0."""
    phases = [(15.0, 1.0), (SETTLED_S + 5.0, 5.0), (30.0, 1.0)]
    late = [Attempt(float(at), 100, 200, ttft_s=9.0) for at in range(60)]
    found = figures(late, phases, (0.0, 0.0))
    assert found["goodput_of_peak"] is None
    assert found["tokens_of_peak"] is None
    assert found["accepted_in_time"] == 0.0
    good = [Attempt(float(at), 100, 200, ttft_s=1.0) for at in range(60)]
    assert figures(good, phases, (1.0, 100.0))["goodput_of_peak"] == 1.0

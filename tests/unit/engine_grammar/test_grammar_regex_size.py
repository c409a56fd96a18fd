from __future__ import annotations

import pytest

from diptych.engine.grammar.regex_size import MAX_REPEATS, repeats


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("", 1),
        ("abc", 1),
        ("[a-c]{30}", 30),
        ("a{2,}b{3}", 3),
        ("(a{2}b){3,5}", 10),
        ("((a{4})|b){5}c{6}", 20),
        (r"\(a{7}\){8}", 8),
        (r"[](){9}]{2}", 2),
        (r"[^\]{9}]{2}", 2),
        ("a{x}{,3}{}", 1),
        ("(a{3}){2}{2}", 12),
        ("a{99", 1),
        ("((a{5}", 5),
        ("))a{5}", 5),
        ("[a{5}", 1),
        ("a\\", 1),
        ("((((a{1,99}){1,99}){1,99}){1,99}){1,99}", 99**5),
    ],
)
def test_counts_within_counts_multiply(pattern: str, most: int) -> None:
    assert repeats(pattern) == most


def test_a_long_text_may_be_asked_for() -> None:
    assert repeats("[a-z]{1,5000}( [a-z]{1,16}){1,2000}") < MAX_REPEATS

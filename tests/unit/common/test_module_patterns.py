"""Patterns over names of modules: what `re` matches, with work that is counted."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.adapters.module_patterns import MAX_PATTERN_CHARS, MAX_STEPS, ModuleNames, PatternError

LAYERS = [
    f"model.layers.{layer}.{module}"
    for layer in range(12)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
] + ["visual.blocks.1.q_proj", "q_proj"]

atoms = st.sampled_from(
    ["a", "b", "1", "_", r"\.", ".", "[ab]", "[^a]", r"[^\d_]", r"\d", r"\w", r"\W", "[0-9.]",
     "^", "$", r"\b", r"\B", r"\Z", "(?!)"]
)  # fmt: skip
repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,3}", "{2,}"])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return (
        st.lists(inner, min_size=2, max_size=4).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
        | st.tuples(inner, repeats).map(lambda parts: f"(?:{parts[0]}){parts[1]}")
        | st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda parts: f"{parts[0]}{parts[1]})")
        | st.tuples(st.sampled_from(["(?<=", "(?<!"]), atoms).map(lambda parts: f"{parts[0]}{parts[1]})")
    )


patterns = st.recursive(atoms, larger, max_leaves=6)
short_names = st.lists(st.text("ab1._é", min_size=1, max_size=6), min_size=1, max_size=5, unique=True)


def whole_by_re(pattern: str, names: list[str]) -> set[int]:
    return {number for number, name in enumerate(names) if re.fullmatch(pattern, name)}


def ending_by_re(pattern: str, names: list[str]) -> set[int]:
    return {number for number, name in enumerate(names) if re.match(rf"(.*\.)?({pattern})$", name)}


@settings(max_examples=150, deadline=None)
@given(patterns, short_names)
def test_random_patterns_match_what_re_matches(pattern: str, texts: list[str]) -> None:
    names = ModuleNames(texts)
    assert names.whole(pattern) == whole_by_re(pattern, texts)
    assert set(names.ending(pattern)) == ending_by_re(pattern, texts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", ".", r"\.", "1", "_"]), min_size=1, max_size=5).map("".join), short_names)
def test_names_match_what_re_matches_dots_for_any_character_included(pattern: str, texts: list[str]) -> None:
    names = ModuleNames(texts, max_steps=200)
    assert set(names.ending(pattern)) == ending_by_re(pattern, texts)


@pytest.mark.parametrize(
    ("pattern", "num_whole"),
    [
        (r".*\.(q_proj|v_proj)$", 25),
        (r"model\.layers\.(1|2)\..*(q|k)_proj", 4),
        (r"model\.layers\.(?:[0-3])\.(?:self_attn|mlp)\.(?:q_proj|up_proj)", 8),
        (r"^(?!.*visual).*(?:q_proj|k_proj)", 25),
        (
            r"(?:.*?(?:language|model).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp)",
            24,
        ),
        (r".*(?<!layers)\.1\.q_proj", 1),
        ("q_proj", 1),
        ("", 0),
    ],
)
def test_patterns_as_people_write_them(pattern: str, num_whole: int) -> None:
    names = ModuleNames(LAYERS)
    assert len(names.whole(pattern)) == num_whole
    assert names.whole(pattern) == whole_by_re(pattern, LAYERS)
    for part in (
        pattern,
        "q_proj",
        r"self_attn\..*",
        "0.self_attn.q_proj",
        "self.attn.q_proj",
        "[qv]_proj",
        "a)|(model",
    ):
        assert set(names.ending(part)) == ending_by_re(part, LAYERS)


@pytest.mark.parametrize(
    "pattern",
    ["(.|.|.|.)*!", "(a*)*" * 50 + "!", "((((((.*)*)*)*)*)*)*!", "(.{1000}){1000}", "((.?){60000}){60000}!", ".*" * 400 + "!",
     "(?=(?=(?=.*)*)*)*!", "(?:(?:x?y?)*z?)*!"],
)  # fmt: skip
def test_no_pattern_takes_more_steps_than_it_has_parts_times_the_longest_name(pattern: str) -> None:
    """With `re`, each of these holds the interpreter until the process is killed, or would for a longer name."""
    names = ModuleNames(LAYERS)
    assert not names.whole(pattern)
    longest = max(map(len, LAYERS))
    assert MAX_STEPS - names.steps_left <= 10 * len(pattern) * (longest + 2)


def test_what_takes_more_steps_than_there_are_is_refused() -> None:
    names = ModuleNames(LAYERS, max_steps=5000)
    for number in range(5):
        names.ending(f"{number}.*x")
    with pytest.raises(PatternError, match="too much work"):
        [names.ending(f"{number}.*x") for number in range(5000)]
    plain = ModuleNames(LAYERS, max_steps=5000)
    for number in range(2000):
        assert not plain.ending(f"{number}.self_attn.x_proj")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(z)\1", "groupref"),
        ("(z)?(?(1)a|b)", "groupref exists"),
        ("(?>z)", "flags|atomic|no regular expression"),
        ("(?i)q_proj", "flags"),
        ("z(?i:q_proj)", "flags"),
        ("(", "no regular expression"),
        ("a{" + "9" * 5000 + "}", "no regular expression"),
        ("(" * 3000 + ")" * 3000, "nested too deep"),
        ("a" * (MAX_PATTERN_CHARS + 1), "longer than"),
    ],
)
def test_what_is_not_matched_here_is_refused(pattern: str, why: str) -> None:
    names = ModuleNames(LAYERS)
    with pytest.raises(PatternError, match=why):
        names.whole(pattern)
    with pytest.raises(PatternError, match=why):
        names.ending(pattern)

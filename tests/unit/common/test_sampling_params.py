from __future__ import annotations

import dataclasses
import math

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import MAX_CHOICES, SAMPLING, SamplingParams, check_sampling, with_seed

VOCAB = 100


def check(**fields):
    return check_sampling(max_tokens=fields.pop("max_tokens", 10), vocab_size=VOCAB, **fields)


def test_defaults_are_neutral():
    params = check()
    assert params == SamplingParams(max_tokens=10)
    assert not params.constrained
    assert params.num_choices == 1


@pytest.mark.parametrize("name", ["n", "best_of", "beam_width"])
def test_4_one_bound_of_choices_holds_everywhere(name: str) -> None:
    more = {"temperature": 0.0} if name == "beam_width" else {}
    assert getattr(check(**{name: MAX_CHOICES}, **more), name) == MAX_CHOICES
    with pytest.raises(InvalidRequestError, match=rf"{name} must be between .* and {MAX_CHOICES}, got 17") as caught:
        check(**{name: MAX_CHOICES + 1}, **more)
    assert caught.value.param == name
    assert f"at most {MAX_CHOICES}" in SAMPLING[name].text or name == "best_of"


def test_everything_at_once():
    params = check(
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={"7": 3, 2: -100.0},
        allowed_token_ids=[1, 2, 7],
        bad_words=[[1], [2, 7]],
        min_tokens=10,
        include_stop_str_in_output=True,
        n=2,
        best_of=3,
        logprobs=0,
        prompt_logprobs=20,
    )
    assert params.logit_bias == ((2, -100.0), (7, 3.0))
    assert params.bad_words == ((1,), (2, 7))
    assert params.constrained
    assert params.num_choices == 3
    assert (params.logprobs, params.prompt_logprobs) == (0, 20)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [NAN, INF, -0.1, 2.1, "hot", True, 10**400]),
        ("top_p", [0.0, 1.01, NAN, None]),
        ("top_k", [-2, 2**31, 1.5, True]),
        ("min_p", [-0.1, 1.1, NAN, "x"]),
        ("presence_penalty", [-2.1, 2.1, NAN, INF]),
        ("frequency_penalty", [-2.1, 2.1, NAN, False]),
        ("repetition_penalty", [0.0, -1.0, 10.5, NAN, INF]),
        ("seed", [-(2**63) - 1, 2**64, 1.0]),
        ("max_tokens", [0, -1, 2**63]),
        ("min_tokens", [-1, 11, 1.0, 2**63]),
        ("n", [0, -1, 65, 10**9, 1.0, True]),
        ("best_of", [-1, 65, 10**9]),
        ("logprobs", [-1, 21, 1.5, True]),
        ("prompt_logprobs", [-1, 21, "3"]),
        ("ignore_eos", [1, None]),
        ("include_stop_str_in_output", [0, "no"]),
        ("stop_token_ids", [[VOCAB], [-1], [1.0], "1", [2**63]]),
        ("allowed_token_ids", [[VOCAB], [-1], [True], 5]),
        ("bad_words", [[[VOCAB]], [[-1]], [[]], ["word"], [[1] * 65], [[1]] * 257, 3]),
        (
            "logit_bias",
            [{VOCAB: 1.0}, {-1: 1.0}, {"x": 1}, {1: NAN}, {1: 101}, {1: "2"}, [1, 2], {1: 0.0, "1": 0.0}, 7],
        ),
        ("stop", [[""], ["x" * 257], ["a"] * 17, [5], "\ud800", ["\ud800"]]),
    ],
)
def test_what_is_out_of_range_is_named(name, values):
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            check(**{name: value})
        assert caught.value.param == name
        assert name in caught.value.message or name.split("_", maxsplit=1)[0] in caught.value.message


def test_best_of_is_at_least_n():
    with pytest.raises(InvalidRequestError) as caught:
        check(n=3, best_of=2)
    assert caught.value.param == "best_of"


def test_minus_zero_is_zero():
    assert math.copysign(1, check(temperature=-0.0).temperature) == 1
    assert check(temperature=-0.0).greedy


def test_another_seed_and_nothing_else():
    params = check_sampling(temperature=0.5, stop=["a"], seed=3, max_tokens=7, logit_bias={1: 2.0}, vocab_size=9)
    other = with_seed(params, 11)
    assert (params.seed, other.seed) == (3, 11)
    assert other == dataclasses.replace(params, seed=11)
    assert hash(other) == hash(dataclasses.replace(params, seed=11))

"""vLLM's fields of beam search, old and new, become those of the engine."""

from __future__ import annotations

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.router.preprocess.beam_options import beam_fields
from diptych.router.requests.messages import UncheckedRequest


def spec_of(given):
    sampling = {name: value for name, value in given.items() if name != "use_beam_search"}
    return UncheckedRequest(use_beam_search=given.get("use_beam_search"), sampling=sampling)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, {}),
        ({"use_beam_search": False, "n": 3}, {}),
        ({"beam_width": 0}, {}),
        ({"beam_width": 4, "n": 2}, {}),
        ({"use_beam_search": True, "beam_width": 4, "best_of": 6}, {}),  # best_of is refused later
        ({"use_beam_search": True, "best_of": 5, "n": 2}, {"beam_width": 5, "best_of": 0}),
        ({"use_beam_search": True, "n": 3}, {"beam_width": 3, "best_of": 0}),
        ({"use_beam_search": True}, {"beam_width": 1, "best_of": 0}),
    ],
)
def test_which_width(given, fields):
    assert beam_fields(spec_of(given)) == fields


@pytest.mark.parametrize(
    ("given", "named"),
    [({"use_beam_search": "yes"}, "use_beam_search"), ({"use_beam_search": False, "beam_width": 2}, "beam_width")],
)
def test_what_makes_no_sense_is_named(given, named):
    with pytest.raises(InvalidRequestError) as caught:
        beam_fields(spec_of(given))
    assert caught.value.param == named

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.common.text.detokenizer import StopChecker
from diptych.engine.sched.requests.admission import ModelLimits, make_output
from diptych.engine.sched.requests.output import OutputProcessor

EOS = 0


@dataclass
class Piece:
    text: str
    stop: str | None = None


class ToyDetokenizer:
    """Token i is the character chr(i); a token above 1000 is held back until the next one comes."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._held = ""
        self._stops = StopChecker(sampling.stop)

    def push(self, token_id: int) -> Piece:
        if token_id > 1000:
            self._held += chr(token_id - 1000)
            return Piece("")
        text, self._held = self._held + chr(token_id), ""
        return Piece(*self._stops.push(text))

    def finish(self) -> Piece:
        text, stop = self._stops.push(self._held)
        return Piece(text, stop) if stop is not None else Piece(text + self._stops.flush())


def make(max_outputs: int = 99, **fields: object) -> OutputProcessor:
    sampling = replace(SamplingParams(max_tokens=max_outputs), **fields)  # type: ignore[arg-type]
    return OutputProcessor(sampling, frozenset({EOS}), max_outputs, ToyDetokenizer(sampling))


def feed(output: OutputProcessor, text: str) -> list[str]:
    pieces = []
    for char in text:
        assert output.finish is None
        pieces.append(output.push(ord(char)))
    return pieces


def test_text_comes_token_by_token_and_eos_is_counted_but_not_shown():
    output = make()
    assert feed(output, "hi") == ["h", "i"]
    assert output.push(EOS) == ""
    assert output.finish is not None
    assert (output.finish.reason, output.finish.stop_token_id, output.num_outputs) == (FinishReason.STOP, None, 3)


def test_ignore_eos_goes_on():
    output = make(ignore_eos=True)
    output.push(EOS)
    assert output.finish is None


def test_a_stop_token_is_named():
    output = make(stop_token_ids=(65,))
    assert output.push(65) == ""
    assert output.finish is not None
    assert output.finish.stop_token_id == 65


def test_what_was_held_back_comes_at_the_end():
    output = make()
    assert output.push(1065) == ""
    assert output.push(EOS) == "A"
    output = make(max_outputs=1)
    assert output.push(1065) == "A"
    assert output.finish is not None
    assert output.finish.reason is FinishReason.LENGTH


def test_a_stop_string_cuts_exactly_and_counts_its_tokens():
    output = make(stop=("END",))
    pieces = feed(output, "abEEND")
    assert "".join(pieces) == "abE"
    assert output.finish is not None
    assert (output.finish.reason, output.finish.stop_string, output.num_outputs) == (FinishReason.STOP, "END", 6)


def test_half_a_stop_string_is_shown_when_the_output_ends():
    output = make(max_outputs=4, stop=("END",))
    assert "".join(feed(output, "abEN")) == "abEN"
    assert output.finish is not None
    assert output.finish.reason is FinishReason.LENGTH


def test_a_held_character_can_complete_a_stop_string_at_the_end():
    output = make(max_outputs=2, stop=("B",))
    assert output.push(65) == "A"
    assert output.push(1066) == ""
    assert output.finish is not None
    assert output.finish.stop_string == "B"


@pytest.mark.parametrize("sent", range(6))
def test_a_resumed_output_shows_what_the_first_one_would_have_shown_next(sent):
    whole = make(stop=("END",))
    pieces = feed(whole, "aENbEN")
    resumed = make(stop=("END",))
    resumed.prime(ord(c) for c in "aENbEN"[:sent])
    assert feed(resumed, "aENbEN"[sent:]) == pieces[sent:]


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        OutputProcessor(SamplingParams(max_tokens=1, stop=("x",)), frozenset(), 1, None)


def test_the_real_detokenizer_fits_the_protocol():
    from diptych.common.text.detokenizer import RequestDetokenizer as Real
    from diptych.engine.sched.requests.output import RequestDetokenizer

    names = [n for n in vars(RequestDetokenizer) if not n.startswith("_")]
    assert names
    assert all(callable(getattr(Real, n)) for n in names)


def test_a_detokenizer_that_breaks_ends_its_request_alone(kit):
    class Broken:
        def push(self, token_id):
            raise ValueError("no such token")

    engine = kit.make_engine()
    engine.core.scheduler.live.detokenizer_factory = lambda sampling, prompt: Broken()
    forced, fresh = engine.generate([kit.make_request("forced", output_token_ids=(5,)), kit.make_request("fresh")])
    assert "no such token" in str(forced.error)
    assert "no such token" in str(fresh.error)
    assert engine.core.scheduler.kv.pool.counts.running == 0


def test_the_stop_string_is_shown_when_asked_for():
    output = make(stop=("END",), include_stop_str_in_output=True)
    assert "".join(feed(output, "abEND")) == "abEND"
    assert output.finish is not None
    assert output.finish.stop_string == "END"
    output = make(stop_token_ids=(65,), include_stop_str_in_output=True)
    assert output.push(65) == "A"
    assert output.finish is not None
    assert output.finish.stop_token_id == 65


@pytest.mark.parametrize("sent", range(4))
def test_stop_strings_count_from_min_tokens_on(sent):
    def make_late():
        sampling = SamplingParams(max_tokens=20, stop=("ab",), min_tokens=4)
        limits = ModelLimits(100, 2000, frozenset({EOS}), 1)
        return make_output(sampling, (), limits, 20, ToyDetokenizer)

    output = make_late()
    assert "".join(feed(output, "ababxab")) == "ababx"
    assert output.finish is not None
    assert (output.finish.stop_string, output.num_outputs) == ("ab", 7)
    resumed = make_late()
    resumed.prime(ord(c) for c in "ababxab"[:sent])
    assert "".join(feed(resumed, "ababxab"[sent:])) == "ababx"[sent:]


def test_a_stop_string_may_end_at_the_min_tokens_th_token():
    limits = ModelLimits(100, 2000, frozenset({EOS}), 1)
    output = make_output(SamplingParams(max_tokens=20, stop=("b",), min_tokens=2), (), limits, 20, ToyDetokenizer)
    assert "".join(feed(output, "bb")) == "b"
    assert output.finish is not None

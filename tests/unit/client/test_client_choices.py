"""Several choices and logprobs, and their request fields."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from diptych.client import Delta, GenerateOptions, InvalidRequestError, RetryPolicy, StreamBrokenError, TokenLogprobs
from diptych.client.exchange import Attempts, Exchange
from diptych.client.request import build_request
from diptych.client.types import Explanation, KvPull, PlacementTerms, explanation_from
from diptych.common.clock import FakeClock
from diptych.rpc.v1 import router_pb2, types_pb2

ENTRY = types_pb2.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=[5, 6], top_logprobs=[-0.5, -2.0])


def message(**event: Any) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(**event)


def started_exchange() -> Exchange:
    exchange = Exchange(Attempts(10.0, RetryPolicy(), FakeClock().now, Random(7)))
    exchange.on_message(message(started=router_pb2.Started(request_id="req-1")))
    return exchange


def tokens(choice: int, offset: int, text: str) -> router_pb2.GenerateResponse:
    delta = router_pb2.TokenDelta(offset=offset, token_ids=[5], text=text, choice=choice, logprobs=[ENTRY])
    return message(tokens=delta)


def ended(choice: int, reason: types_pb2.FinishReason, stop: str = "") -> router_pb2.GenerateResponse:
    return message(choice_finished=types_pb2.ChoiceFinished(choice=choice, finish_reason=reason, stop_string=stop))


def test_choices_grow_apart() -> None:
    exchange = started_exchange()
    prompt = types_pb2.PromptLogprobs(first_token=1, logprobs=[ENTRY])
    assert exchange.on_message(message(prompt_logprobs=prompt)) is None
    known = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -2.0)))
    assert exchange.on_message(tokens(1, 0, "b")) == Delta(0, (5,), "b", 1, (known,))
    exchange.on_message(tokens(0, 0, "a"))
    exchange.on_message(ended(1, types_pb2.FINISH_REASON_STOP, "!"))
    exchange.on_message(tokens(0, 1, "A"))
    exchange.on_message(ended(0, types_pb2.FINISH_REASON_LENGTH))
    exchange.on_message(message(finished=router_pb2.Finished(finish_reason=types_pb2.FINISH_REASON_LENGTH)))
    exchange.on_end()
    result = exchange.result()
    assert [(c.index, c.text, c.finish_reason, c.stop_string) for c in result.choices] == [
        (0, "aA", "length", ""),
        (1, "b", "stop", "!"),
    ]
    assert (result.text, result.finish_reason, len(result.logprobs)) == ("aA", "length", 2)
    assert result.prompt_logprobs == (known,)


def test_a_choice_that_ended_gets_no_more_tokens_and_gaps_are_seen_by_choice() -> None:
    exchange = started_exchange()
    exchange.on_message(tokens(1, 0, "b"))
    exchange.on_message(ended(1, types_pb2.FINISH_REASON_STOP))
    with pytest.raises(StreamBrokenError, match="after its end"):
        exchange.on_message(tokens(1, 1, "b"))
    exchange = started_exchange()
    exchange.on_message(tokens(1, 0, "b"))
    with pytest.raises(StreamBrokenError, match="a gap"):
        exchange.on_message(tokens(0, 1, "a"))


def test_every_sampling_field_reaches_the_wire() -> None:
    options: GenerateOptions = {
        "prompt": "a",
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {7: -100.0},
        "allowed_token_ids": [1, 2],
        "bad_words": ["x"],
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "n": 2,
        "best_of": 3,
        "beam_width": 4,
        "length_penalty": 0.5,
        "logprobs": 0,
        "prompt_logprobs": 1,
    }
    sampling = build_request(options).sampling
    for name, value in options.items():
        if name == "prompt":
            continue
        found = getattr(sampling, name)
        plain = dict(found) if isinstance(value, dict) else list(found) if isinstance(value, list) else found
        assert plain == value, name
    assert sampling.HasField("logprobs")
    for early, wanted in ((True, types_pb2.EARLY_STOPPING_ON), ("never", types_pb2.EARLY_STOPPING_NEVER)):
        assert build_request({"prompt": "a", "early_stopping": early}).sampling.early_stopping == wanted
    with pytest.raises(InvalidRequestError) as caught:
        build_request({"prompt": "a", "early_stopping": "soon"})
    assert caught.value.param == "early_stopping"
    bare = build_request({"prompt": "a"}).sampling
    assert not any(bare.HasField(name) for name in ("logprobs", "n", "min_p", "min_tokens"))


@pytest.mark.parametrize("value", [{"a": 1.0}, {-1: 1.0}, 5])
def test_a_bias_that_cannot_be_sent_names_its_field(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request({"prompt": "a", "logit_bias": value})
    assert caught.value.param == "logit_bias"


def test_a_pull_shows_the_holders_tiers_by_name() -> None:
    message = types_pb2.Explanation()
    message.pulls.add(holder="d0", num_tokens=96, source_tiers=[types_pb2.TierTokens(tier="disk", tokens=48)])
    [pull] = explanation_from(message).pulls
    assert (pull.holder, pull.num_tokens, pull.source_tiers) == ("d0", 96, {"disk": 48})


def test_the_explanation_has_every_field_of_the_wire() -> None:
    kinds = (
        (Explanation, types_pb2.Explanation),
        (PlacementTerms, types_pb2.PlacementTerms),
        (KvPull, types_pb2.KvPull),
    )
    for cls, wire in kinds:
        names = {field.name for field in wire.DESCRIPTOR.fields}
        assert set(cls.__dataclass_fields__) == names - {"candidates"} | ({"placement"} & {*cls.__dataclass_fields__})

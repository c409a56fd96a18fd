"""A body of millions of bad elements costs one error, not millions; what is too long is refused before anything reads it."""

import gc

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import check_sampling
from diptych.common.sampling_table import MAX_STOP_TOKEN_IDS
from diptych.router.api.openai.requests import ChatCompletionRequest, CompletionRequest, validate
from diptych.router.api.openai.tokenize import DetokenizeRequest
from diptych.router.cluster.decode_stream import DecodeStream
from diptych.rpc.channels import MAX_MESSAGE_BYTES
from diptych.rpc.v1 import decode_pb2

MANY = 1_000_000


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (ChatCompletionRequest, {"messages": [1] * MANY}, "messages"),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], "stop": [1] * MANY}, "stop"),
        (CompletionRequest, {"prompt": [""] * MANY + [1]}, "prompt"),
        (CompletionRequest, {"prompt": [[]] * MANY + [""]}, "prompt"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * MANY}, "stop_token_ids"),
        (DetokenizeRequest, {"tokens": [None] * MANY}, "tokens"),
    ],
)
def test_bad_elements_cost_one_error(model, body, param):
    gc.collect()
    before = len(gc.get_objects())
    with pytest.raises(InvalidRequestError) as caught:
        validate(model, body)
    assert caught.value.param == param
    assert len(gc.get_objects()) - before < 10_000


@pytest.mark.parametrize("param", ["stop_token_ids", "allowed_token_ids"])
def test_too_many_ids_are_refused_unread(param):
    class Unread(list):
        def __iter__(self):
            raise AssertionError("somebody looked at each of them")

    with pytest.raises(InvalidRequestError, match="at most") as caught:
        check_sampling(**{param: Unread([1] * MANY)}, vocab_size=10)
    assert caught.value.param == param


def test_as_many_ids_as_allowed():
    params = check_sampling(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS, vocab_size=10)
    assert len(params.stop_token_ids) == MAX_STOP_TOKEN_IDS


def test_a_submit_that_gRPC_would_break_the_stream_over_is_refused_alone():
    stream = DecodeStream.__new__(DecodeStream)  # only `open` is called, and it must not touch anything else
    stream._worker_id, stream._commands = "d0", object()
    submit = decode_pb2.Submit(attempt="a", prompt_token_ids=[2**31] * (MAX_MESSAGE_BYTES // 5))
    with pytest.raises(InvalidRequestError, match="bytes on the wire"):
        stream.open(submit)

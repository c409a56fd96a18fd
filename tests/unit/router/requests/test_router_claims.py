"""A ticket's claims, put together out of pieces, are the message that they stand for."""

from array import array
from dataclasses import replace

import pytest

from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.router.api.packed_ids import PackedIds
from diptych.router.placement.types import Placement, Terms, WorkerView
from diptych.router.requests.messages import ValidatedRequest
from diptych.router.requests.submission import claims_of, submit_of
from diptych.rpc.v1 import decode_pb2, router_pb2


class Record:
    worker_id, incarnation, address = "d0", "i1", "127.0.0.1:7"


class Snapshot:
    def record(self, index):
        return Record


def placement():
    return Placement(Terms(None, WorkerView(Record), 1.0, 2.0, 0.0, 0.0, 0.0), Snapshot(), (0, 1), list)


@pytest.mark.parametrize("count", [1, 3, 200, 5000])
@pytest.mark.parametrize("known", [False, True])
def test_claims_are_the_message(count, known):
    ids = [(7919 * i) % 50_000 for i in range(count)]
    sampling = SamplingParams(4)
    request = ValidatedRequest(
        "req", "", "m", Prompt(tuple(ids), b"salt"), sampling, False, 0, 0, 0.0, 9.0, traceparent="00-ab"
    )
    expected = decode_pb2.TicketClaims(submit=submit_of(request, placement(), "att", 5.0, "00-ab"), epoch=3)
    assert list(expected.submit.prompt_token_ids) == ids
    assert [ref.worker_id for ref in expected.submit.placement.prefill] == ["d0", "d0"]
    if known:
        packed = PackedIds.of(router_pb2.TokenIdsInput(token_ids=ids))
        request = replace(request, prompt=Prompt(array("I", ids), b"salt"), packed=packed, repeated=sampling)
    claims = claims_of(request, placement(), "att", 5.0, 3)
    assert decode_pb2.TicketClaims.FromString(claims) == expected


def test_a_repeated_request_keeps_its_own_seed():
    first = SamplingParams(4, seed=1)
    request = ValidatedRequest(
        "r", "", "m", Prompt((1,)), replace(first, seed=2), False, 0, 0, 0.0, 9.0, repeated=first
    )
    assert submit_of(request, placement(), "att", 5.0).sampling.seed == 2
    assert submit_of(replace(request, repeated=None, sampling=first), placement(), "att", 5.0).sampling.seed == 1

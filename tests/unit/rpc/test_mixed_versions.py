"""A roll-out runs workers of two versions: a sampling parameter that a worker does not know is never ignored silently."""

from __future__ import annotations

import random

import pytest

from diptych.common import sampling as table
from diptych.common.clock import FakeClock
from diptych.common.errors import IncompatibleWorkersError, InvalidRequestError, NoWorkerError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams, later_fields
from diptych.common.store.memory import MemoryStore
from diptych.router.api.grpc.requests import spec_from
from diptych.router.cluster.cluster import Cluster
from diptych.router.cluster.compatibility import RouterCheck
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.types import Placement, PlacementRequest
from diptych.router.requests.messages import ModelFeatures
from diptych.rpc import convert
from diptych.rpc.v1 import prefill_pb2, router_pb2, types_pb2
from diptych_tests.records import worker_record

LATER = "include_stop_str_in_output"
"""Stands for a parameter that older workers do not know."""
FIELD_999 = b"\xb8\x3e\x01"
"""A varint of field 999."""


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This version has a later parameter."""
    for module in (table, convert):
        monkeypatch.setattr(module, "LATER_FIELDS", (LATER,))


@pytest.mark.parametrize("in_grammar", [False, True])
def test_a_field_of_a_later_version_is_refused(in_grammar: bool) -> None:
    message = convert.sampling_to_proto(SamplingParams(4))
    assert not convert.unknown_fields(message)
    if in_grammar:
        message.grammar.MergeFromString(FIELD_999)
    else:
        message.MergeFromString(FIELD_999)
    with pytest.raises(IncompatibleWorkersError, match="field 999"):
        convert.sampling_from_proto(message, vocab_size=10)


def test_a_client_of_a_later_version_learns_what_the_router_does_not_know() -> None:
    request = router_pb2.GenerateRequest(prompt="a", sampling=types_pb2.SamplingParams.FromString(FIELD_999))
    with pytest.raises(InvalidRequestError, match="999"):
        spec_from(request, 5.0, ModelFeatures())


def test_a_later_parameter_is_sent_only_where_it_is_set(newer: None) -> None:
    plain, changed = SamplingParams(4), SamplingParams(4, include_stop_str_in_output=True)
    assert [later_fields(params) for params in (plain, changed)] == [frozenset(), {LATER}]
    for params in (plain, changed):
        message = convert.sampling_to_proto(params)
        for adapter, more in (("", set()), ("french", {"adapter", "adapter_folder"})):
            request = prefill_pb2.PrefillRequest(sampling=message, adapter=adapter)
            assert convert.later_fields_of(request) == later_fields(params) | more
        assert convert.sampling_from_proto(message, vocab_size=10) == params


def placer_of(cluster: Cluster, *decode: tuple[str, tuple[str, ...]]) -> Placer:
    records = [worker_record(name, request_fields=fields) for name, fields in decode]
    cluster.placer.set_workers([], [Candidate(record, 0.0, None) for record in records], {}, {})
    return cluster.placer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(MemoryStore(FakeClock()), RouterCheck("", "t", bytes(32)), clock=FakeClock(), rng=random.Random(0))
    monkeypatch.setattr(Cluster, "_refresh", lambda self: self.placer)
    return made


def test_a_request_goes_only_to_a_decode_worker_that_announces_its_parameters(cluster: Cluster) -> None:
    placer_of(cluster, ("d0", ()), ("d1", ("top_a", "top_b")), ("d2", ("top_b",)))
    prompt = PromptBlocks(Prompt((1, 2, 3)))
    chosen = set()
    for wanted in ({"top_a"}, {"top_b", "top_a"}):
        for _ in range(8):
            placed = cluster.place(PlacementRequest(3, 64, request_fields=frozenset(wanted)), prompt)
            assert isinstance(placed, Placement)
            chosen.add(placed.decode.worker_id)
    assert chosen == {"d1"}
    with pytest.raises(NoWorkerError, match="do not know top_c: 3"):
        cluster.place(PlacementRequest(3, 64, request_fields=frozenset({"top_c"})), prompt)
    assert cluster.place(PlacementRequest(3, 64), prompt)

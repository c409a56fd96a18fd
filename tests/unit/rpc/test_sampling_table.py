"""The table of sampling parameters matches the proto message."""

from __future__ import annotations

import pytest

from diptych.common.sampling import DEFAULTS, SAMPLING, check_sampling
from diptych.rpc.v1 import types_pb2

FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
CPP_TYPES = {"float": ("DOUBLE",), "int": ("INT32", "INT64", "UINT32", "UINT64"), "bool": ("BOOL",)}


def test_each_proto_field_is_a_row():
    assert set(FIELDS.keys()) == {*SAMPLING, "bad_word_ids"}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_row_and_its_proto_field_agree(name):
    row, field = SAMPLING[name], FIELDS[name]
    if row.scalar:
        assert field.cpp_type in [getattr(field, f"CPPTYPE_{kind}") for kind in CPP_TYPES[row.check.type_name]]
        assert field.has_presence == (row.check.type_name != "bool")
    assert bool(row.at_most) == field.is_repeated
    assert not row.required or field.has_presence


@pytest.mark.parametrize("name", SAMPLING)
def test_a_default_passes_its_own_check(name):
    value = DEFAULTS[name]
    assert getattr(check_sampling(vocab_size=10, **{name: value}), name) == value


def test_an_unknown_parameter_is_a_bug_of_the_caller():
    with pytest.raises(TypeError, match="top_x"):
        check_sampling(vocab_size=10, top_x=1.0)

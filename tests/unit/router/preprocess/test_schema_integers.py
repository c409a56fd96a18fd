"""Integers in a JSON schema: what 64 bits hold is written as it is, anything larger would become the nearest double."""

from __future__ import annotations

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.router.preprocess.structured import schema_grammar


@pytest.mark.parametrize("value", [1 << 64, 10**30, -(1 << 63) - 1])
@pytest.mark.parametrize("schema", ['{"const": %d}', '{"items": {"enum": [1, {"a": [%d]}]}}'])
def test_larger_ones_are_refused_by_the_fields_name(schema: str, value: int) -> None:
    with pytest.raises(InvalidRequestError, match="more than 64 bits") as error:
        schema_grammar(schema % value, "guided_json")
    assert error.value.param == "guided_json"


@pytest.mark.parametrize("value", [(1 << 64) - 1, -(1 << 63), 9007199254740993])
def test_what_fits_stays(value: int) -> None:
    assert str(value) in schema_grammar(f'{{"const": {value}}}', "guided_json").source

"""Each row of the table of sampling parameters can be given on every face, and arrives as it was given."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.client.request import build_request
from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import SAMPLING
from diptych.common.sampling_table import Number, Row
from diptych.router.api.grpc.requests import spec_from
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.requests import chat_call, completion_call
from diptych.router.api.openai.responses import responses_call
from diptych.router.requests.messages import ModelFeatures, UncheckedRequest

VALUES: dict[str, Any] = {
    "Sequence[int]": [5, 7],
    "Sequence[str]": ["sky"],
    "str | Sequence[str]": ["!"],
    "Mapping[int, float]": {5: 2.5},
    "int": 3,
    "bool": True,
    "bool | str": "never",
}
FEATURES, REFUSED = ModelFeatures(), UnknownFields(refuse=True)
MESSAGES = [{"role": "user", "content": "a"}]
NAMES = [name for name, row in SAMPLING.items() if row.check.type_name != "Grammar"]
OWN_FORM = {"logprobs", "max_tokens"}
"""Chat and responses pass these in another form."""


def value_of(row: Row) -> Any:
    return row.check.high * 0.75 if isinstance(row.check, Number) else VALUES[row.check.type_name]


def plain(value: Any) -> Any:
    """JSON has lists, and strings as keys; checks take both."""
    if isinstance(value, dict):
        return {int(key): entry for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else getattr(value, "value", value)


def http(name: str, value: Any) -> list[UncheckedRequest]:
    sent = {name: {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else value}
    calls = [completion_call({"prompt": "a", **sent}, features=FEATURES, unknown=REFUSED)]
    if name not in OWN_FORM:
        calls.append(chat_call({"messages": MESSAGES, **sent}, features=FEATURES, unknown=REFUSED))
    if SAMPLING[name].responses and name != "beam_width":
        calls.append(responses_call({"input": "a", **sent}, features=FEATURES, unknown=REFUSED))
    return [call.spec for call in calls]


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_can_be_given_in_every_api(name: str) -> None:
    value = value_of(SAMPLING[name])
    options: Any = {"prompt": "a", name: value}
    specs = [spec_from(build_request(options), 5.0, FEATURES)[0], *http(name, value)]
    assert [plain(spec.sampling[name]) for spec in specs] == [value] * len(specs)


@pytest.mark.parametrize("name", NAMES)
def test_a_null_is_not_given_and_a_wrong_type_is_named(name: str) -> None:
    assert name not in completion_call({"prompt": "a", name: None}, features=FEATURES, unknown=REFUSED).spec.sampling
    with pytest.raises(InvalidRequestError) as caught:
        completion_call({"prompt": "a", name: [{}]}, features=FEATURES, unknown=REFUSED)
    assert caught.value.param == name

"""Untrusted bytes to a JSON object."""

from __future__ import annotations

import json
import math

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.router.api import json_body
from diptych.router.api.json_body import parse_object


def test_numbers_that_no_field_takes_get_through_to_the_field() -> None:
    body = parse_object(
        b'{"a": NaN, "b": 1e999, "c": -Infinity, "d": 18446744073709551615, "e": -' + b"9" * 9000 + b"}"
    )
    assert math.isnan(body["a"])
    assert (body["b"], body["c"], body["d"]) == (math.inf, -math.inf, 2**64 - 1)
    assert body["e"] == -(10**40)


def test_paired_surrogates_and_nul_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00\\u0000"}') == {"a": "\U0001f600\0"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": ["\\uD800"]}', "a"),
        (b'{"a": {"\\uDFFF": 1}}', "a"),
        (b'{"a": "\\ude00\\ud83d"}', "a"),
        (b'{"\\ud800": 1}', "?"),
    ],
)
def test_lone_surrogates_are_named(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        parse_object(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body", [b"", b"nul", b"{", b"[]", b'"a"', b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 50_000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_object(body)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 123456789012345678901234567890}', b'{"a": -9223372036854775809}', b'{"a": -0}', b'{"a": -0.0}',
        b'{"a": 1e400}', b'{"a": 1e-400}', b'{"a": 9007199254740993.0}', b'{"a": 0123}', b'{"a": NaN}', b'{"a": .5}',
        b'{"a": "\\ud800"}', b'{"a": "\\ud83d\\ude00"}', b'{"a": "x\x01y"}', b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}',
        b'{"a": 1, "a": 2}', b'{"a": 1,}', b'{"a": 1} x', b'\xef\xbb\xbf{"a": 1}', b'{"a": ' + b"9" * 41 + b"}", b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_the_quick_parser_takes_has_the_value_that_the_exact_one_gives(text: bytes) -> None:
    quick = json_body._quickly(text)
    assert quick is None or repr(quick) == repr(json.loads(text.decode("utf-8")))
    assert json_body._quickly(b'{"a": [1, 2.5, "x"]}') == {"a": [1, 2.5, "x"]}

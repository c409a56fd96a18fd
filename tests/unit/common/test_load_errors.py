"""What callers read of an adapter's load that failed: no path, no worker, no id."""

from __future__ import annotations

import pytest

from diptych.common.adapters.load_errors import without_details
from diptych.common.errors import DiptychError, InternalError, InvalidRequestError, NoWorkerError, OverloadedError

WORDS = "worker d0 did not load the adapter in /srv/lora/poems-1"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoWorkerError(WORDS, param="adapter", retry_after_s=2.0), "adapter 'poems' cannot be loaded"),
        (
            OverloadedError(WORDS, param="adapter", retry_after_s=2.0),
            "there is no room for adapter 'poems': requests use all that a worker keeps",
        ),
        (InternalError(WORDS, param="adapter", retry_after_s=2.0), "loading adapter 'poems' failed"),
    ],
)
def test_an_error_of_a_load_keeps_its_kind_and_loses_its_words(error: DiptychError, text: str) -> None:
    shown = without_details(error, "adapter 'poems'")
    assert (type(shown), shown.message, shown.param, shown.retry_after_s) == (type(error), text, "adapter", 2.0)


@pytest.mark.parametrize(
    "error",
    [NoWorkerError("no worker"), OverloadedError("full"), InvalidRequestError("no such adapter", param="adapter")],
)
def test_other_errors_are_left_alone(error: DiptychError) -> None:
    assert without_details(error) is error

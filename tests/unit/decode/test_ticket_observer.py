"""What a client with a ticket, who has no router in between, reads of errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.common.errors import DiptychError, NoWorkerError
from diptych.decode.direct_server import TicketObserver
from diptych.rpc.errors import to_failure
from diptych.rpc.v1 import decode_pb2


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoWorkerError("worker d0: /srv/lora/poems: No such file", param="adapter"), "the adapter cannot be loaded"),
        (NoWorkerError("no prefill worker is usable"), "no prefill worker is usable"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_shows_a_client_no_path_and_no_worker(error: DiptychError, text: str) -> None:
    """The client of a ticket read the worker's words, which the router keeps from its callers."""
    ends: list[decode_pb2.End] = []
    outbox: Any = SimpleNamespace(
        accepted=None, prompt_logprobs=None, choice_finished=None, end=lambda attempt, end: ends.append(end)
    )
    news: list[decode_pb2.TicketStatus] = []
    TicketObserver(outbox, news.append).end("a", decode_pb2.End(failure=to_failure(error)))
    assert [(end.failure.message, end.failure.reason) for end in ends] == [(text, "NO_WORKER")]
    assert [(one.attempt, one.ended, one.reason) for one in news] == [("a", True, "NO_WORKER")]

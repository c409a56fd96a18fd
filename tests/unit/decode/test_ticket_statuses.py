"""What a router's new stream begins with."""

from diptych.decode.ticket_statuses import KEPT_S, MAX_ENDED, TicketStatuses
from diptych.rpc.v1 import decode_pb2


def test_everything_of_those_that_run_and_of_those_that_ended_lately() -> None:
    statuses = TicketStatuses()
    for attempt in "ab":
        statuses.add(decode_pb2.TicketStatus(attempt=attempt, taken=True), 0.0)
        statuses.add(decode_pb2.TicketStatus(attempt=attempt, first_token=True, cached_tokens=16), 1.0)
    statuses.add(decode_pb2.TicketStatus(attempt="a", ended=True, completion_tokens=5), 2.0)
    running = decode_pb2.TicketStatus(attempt="b", taken=True, first_token=True, cached_tokens=16)
    ended = decode_pb2.TicketStatus(
        attempt="a", taken=True, first_token=True, cached_tokens=16, ended=True, completion_tokens=5
    )
    assert statuses.recent(2.0 + KEPT_S) == [running, ended]
    assert statuses.recent(2.1 + KEPT_S) == [running]


def test_a_bounded_number_of_ended_ones() -> None:
    statuses = TicketStatuses()
    for number in range(MAX_ENDED + 3):
        statuses.add(decode_pb2.TicketStatus(attempt=f"a{number}", ended=True), 0.0)
    assert [status.attempt for status in statuses.recent(0.0)] == [f"a{number}" for number in range(3, MAX_ENDED + 3)]

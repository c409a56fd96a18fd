"""The stream's promises, the retries and the deadline, without a channel."""

from __future__ import annotations

from random import Random

import pytest

from diptych.client import (
    Completion,
    Delta,
    DuplicateRequestError,
    InvalidRequestError,
    NoWorkerError,
    RequestDeadlineError,
    RetryPolicy,
    StreamBrokenError,
    UnreachableError,
    WorkerLostError,
)
from diptych.client.exchange import MAX_TIMEOUT_S, Attempts, Exchange, checked_timeout
from diptych.common.clock import FakeClock
from diptych.rpc.v1 import router_pb2, types_pb2


def make_attempts(
    clock: FakeClock | None = None, timeout_s: float = 10.0, retry: RetryPolicy | None = None
) -> Attempts:
    return Attempts(timeout_s, retry or RetryPolicy(), (clock or FakeClock()).now, Random(7))


def started() -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(started=router_pb2.Started(request_id="req-1", model="m", prompt_tokens=3))


def tokens(offset: int, ids: list[int], text: str = "") -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(tokens=router_pb2.TokenDelta(offset=offset, token_ids=ids, text=text))


def finished() -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(
        finished=router_pb2.Finished(
            finish_reason=types_pb2.FINISH_REASON_STOP,
            stop_token_id=0,
            usage=types_pb2.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1),
        )
    )


def test_a_whole_answer() -> None:
    exchange = Exchange(make_attempts())
    assert exchange.on_message(started()) is None
    assert exchange.request_id == "req-1"
    assert exchange.on_message(tokens(0, [5], "a")) == Delta(0, (5,), "a")
    assert exchange.on_message(tokens(1, [6, 7], "bc")) == Delta(1, (6, 7), "bc")
    assert exchange.on_message(finished()) is None
    exchange.on_end()
    result = exchange.result()
    assert isinstance(result, Completion)
    assert (result.text, result.token_ids, result.finish_reason) == ("abc", (5, 6, 7), "stop")
    assert (result.usage.total_tokens, result.usage.cached_tokens) == (6, 1)
    assert (result.stop_token_id, result.stop_string, result.explanation) == (0, "", None)


@pytest.mark.parametrize(
    "deltas",
    [
        [(0, [5], "a"), (1, [6, 7], "bc"), (3, [], "d"), (3, [8], "")],
        [(0, [5], "a"), None, (0, [5, 6], "ab"), (2, [7], "c")],  # repeated by a resumed stream
        [(0, [5], "a"), None, (0, [9], "a")],
        [(0, [5], "a"), (2, [7], "c")],
    ],
)
def test_tokens_that_are_not_looked_at_make_the_same_answer(deltas: list[tuple[int, list[int], str] | None]) -> None:
    reported: list[object] = []
    for unseen in (False, True):
        exchange = Exchange(make_attempts())
        exchange.on_message(started())
        try:
            for delta in deltas:
                if delta is None:
                    exchange.resume()
                    exchange.on_message(started())
                elif unseen:
                    exchange.on_unseen_tokens(tokens(*delta).tokens)
                else:
                    exchange.on_message(tokens(*delta))
            exchange.on_message(finished())
            reported.append(exchange.result())
        except StreamBrokenError as error:
            reported.append(str(error))
    assert reported[0] == reported[1]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([started(), tokens(0, [1]), tokens(2, [1])], "a gap"),
        ([started(), tokens(0, [1, 2]), tokens(1, [2])], "a repeat"),
        ([tokens(0, [1])], "tokens arrived while the stream was waiting"),
        ([started(), started()], "started arrived"),
        ([started(), finished(), tokens(0, [1])], "tokens arrived while the stream was finished"),
        ([started(), router_pb2.GenerateResponse()], "an unknown event"),
    ],
)
def test_a_broken_promise_raises(messages: list[router_pb2.GenerateResponse], words: str) -> None:
    exchange = Exchange(make_attempts())
    for message in messages[:-1]:
        exchange.on_message(message)
    with pytest.raises(StreamBrokenError, match=words):
        exchange.on_message(messages[-1])
    with pytest.raises(StreamBrokenError):
        exchange.result()


@pytest.mark.parametrize("messages", [[], [started()], [started(), tokens(0, [1])]])
def test_an_end_without_finished_raises(messages: list[router_pb2.GenerateResponse]) -> None:
    exchange = Exchange(make_attempts())
    for message in messages:
        exchange.on_message(message)
    with pytest.raises(StreamBrokenError, match="without Finished"):
        exchange.on_end()


def test_unavailable_is_tried_again_with_growing_pauses() -> None:
    exchange = Exchange(make_attempts(retry=RetryPolicy(max_tries=3, base_s=0.1)))
    first = exchange.on_error(UnreachableError("gone"))
    second = exchange.on_error(NoWorkerError("none"))
    assert 0.05 <= first <= 0.1 <= second <= 0.2
    with pytest.raises(UnreachableError):
        exchange.on_error(UnreachableError("gone"))


def test_the_servers_advice_is_the_least_pause() -> None:
    assert Exchange(make_attempts()).on_error(NoWorkerError("none", retry_after_s=1.5)) == 1.5


@pytest.mark.parametrize("error", [InvalidRequestError("bad", param="top_p"), WorkerLostError("lost")])
def test_other_errors_are_final(error: Exception) -> None:
    with pytest.raises(type(error)):
        Exchange(make_attempts()).on_error(error)  # type: ignore[arg-type]


def test_nothing_is_tried_again_after_the_first_message() -> None:
    exchange = Exchange(make_attempts())
    exchange.on_message(started())
    with pytest.raises(UnreachableError):
        exchange.on_error(UnreachableError("gone"))


def test_pauses_stay_within_budget_and_deadline() -> None:
    with pytest.raises(NoWorkerError):
        make_attempts(retry=RetryPolicy(budget_s=1.0)).pause_after(NoWorkerError("none", retry_after_s=2.0))
    with pytest.raises(NoWorkerError):
        make_attempts(timeout_s=1.0).pause_after(NoWorkerError("none", retry_after_s=1.0))


def test_the_deadline_counts_over_all_tries() -> None:
    clock = FakeClock()
    attempts = make_attempts(clock, timeout_s=2.0)
    assert attempts.remaining_s() == 2.0
    clock.advance(1.5)
    assert attempts.remaining_s() == 0.5
    clock.advance(0.5)
    with pytest.raises(RequestDeadlineError, match="timeout_s=2"):
        attempts.remaining_s()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), "a", True, None])
def test_a_call_without_a_usable_deadline_is_refused_by_name(timeout_s):
    with pytest.raises(InvalidRequestError) as caught:
        checked_timeout(timeout_s)
    assert caught.value.param == "timeout_s"


@pytest.mark.parametrize("timeout_s", [1e10, 1e300, 10**400])
def test_a_deadline_beyond_what_grpc_can_carry_is_a_long_one(timeout_s):
    """gRPC took it for one that had passed."""
    assert checked_timeout(timeout_s) == MAX_TIMEOUT_S
    assert checked_timeout(30) == 30.0


def finish(exchange: Exchange) -> Completion:
    exchange.on_message(router_pb2.GenerateResponse(finished=router_pb2.Finished()))
    exchange.on_end()
    return exchange.result()


@pytest.mark.parametrize("pieces", [[1, 1, 1, 1, 1, 1], [6], [2, 4], [3, 3], [4, 2]])
def test_a_resumed_answer_goes_on_where_it_was(pieces: list[int]) -> None:
    exchange = Exchange(make_attempts())
    exchange.on_message(started())
    exchange.on_message(tokens(0, [0, 1], text="ab"))
    exchange.on_message(tokens(2, [2], text=""))
    exchange.resume()
    exchange.on_message(started())
    texts = ["a", "b", "", "cd", "e", "f"]
    seen, at = [], 0
    for size in pieces:
        delta = exchange.on_message(tokens(at, list(range(at, at + size)), text="".join(texts[at : at + size])))
        seen += [delta] if delta is not None else []
        at += size
    assert [token for delta in seen for token in delta.token_ids] == [3, 4, 5]
    assert seen[0].offset == 3
    whole = finish(exchange)
    assert whole.token_ids == (0, 1, 2, 3, 4, 5)
    assert whole.text == "abcdef"


def test_a_resumed_answer_with_other_tokens_is_broken() -> None:
    exchange = Exchange(make_attempts())
    exchange.on_message(started())
    exchange.on_message(tokens(0, [0, 1]))
    exchange.resume()
    exchange.on_message(started())
    with pytest.raises(StreamBrokenError, match="differs from the first one"):
        exchange.on_message(tokens(0, [0, 9]))


def test_a_finished_choice_may_be_repeated_and_not_go_on() -> None:
    exchange = Exchange(make_attempts())
    exchange.on_message(started())
    exchange.on_message(tokens(0, [5], text="x"))
    exchange.on_message(router_pb2.GenerateResponse(choice_finished=types_pb2.ChoiceFinished(choice=0)))
    exchange.resume()
    exchange.on_message(started())
    assert exchange.on_message(tokens(0, [5], text="x")) is None
    with pytest.raises(StreamBrokenError, match="after its end"):
        exchange.on_message(tokens(1, [6]))


def test_a_finished_answer_cannot_be_resumed() -> None:
    exchange = Exchange(make_attempts())
    exchange.on_message(started())
    finish(exchange)
    with pytest.raises(StreamBrokenError):
        exchange.resume()


def test_a_stream_that_was_cut_goes_on_behind_its_tokens() -> None:
    asked = router_pb2.GenerateRequest(prompt="a", idempotency_key="k")
    exchange = Exchange(make_attempts(), asked, resume=True)
    begin = started()
    begin.started.seed = 77
    exchange.on_message(begin)
    assert exchange.request is asked
    exchange.on_message(tokens(0, [5, 6], "ab"))
    for number, error in enumerate((UnreachableError("cut"), WorkerLostError("gone")), 1):
        assert exchange.on_error(error) > 0
        rest = exchange.request
        assert (list(rest.resume_after.token_ids), rest.sampling.seed) == ([5, 6], 77)
        assert rest.idempotency_key == f"k~{number}"
        exchange.on_message(begin)
    assert exchange.on_message(tokens(2, [7], "c")) == Delta(2, (7,), "c")
    exchange.on_message(finished())
    exchange.on_end()
    result = exchange.result()
    assert (result.text, result.token_ids, result.seed) == ("abc", (5, 6, 7), 77)
    assert list(asked.resume_after.token_ids) == []


@pytest.mark.parametrize("error", [InvalidRequestError("no"), RequestDeadlineError("late"), StreamBrokenError("gap")])
def test_only_a_cut_is_resumed(error) -> None:
    exchange = Exchange(make_attempts(), resume=True)
    exchange.on_message(started())
    exchange.on_message(tokens(0, [5], "a"))
    with pytest.raises(type(error)):
        exchange.on_error(error)


def test_resumptions_have_a_budget_of_their_own() -> None:
    """A worker took 18 s to come back: the 5 s and 4 tries of a call that never began were too few."""
    policy = RetryPolicy(max_tries=2, budget_s=0.1, resume_budget_s=30.0)
    exchange = Exchange(make_attempts(timeout_s=600.0, retry=policy), resume=True)
    exchange.on_message(started())
    exchange.on_message(tokens(0, [5], "a"))
    waited = exchange.on_error(UnreachableError("cut"))
    while waited < 28.0:
        waited += exchange.on_error(NoWorkerError("not back yet"))
    with pytest.raises(NoWorkerError):
        exchange.on_error(NoWorkerError("not back yet", retry_after_s=2.0))


def test_a_call_that_never_began_keeps_its_budget_with_resume() -> None:
    exchange = Exchange(make_attempts(retry=RetryPolicy(max_tries=2)), resume=True)
    exchange.on_error(UnreachableError("gone"))
    with pytest.raises(UnreachableError):
        exchange.on_error(UnreachableError("gone"))


def test_a_duplicate_is_waited_for_only_after_a_try_of_our_own() -> None:
    exchange = Exchange(make_attempts())
    with pytest.raises(DuplicateRequestError):
        exchange.on_error(DuplicateRequestError("runs"))
    exchange = Exchange(make_attempts())
    exchange.on_error(UnreachableError("cut"))
    assert exchange.on_error(DuplicateRequestError("runs")) > 0


def test_the_rest_of_an_answer_that_another_stream_began() -> None:
    request = router_pb2.GenerateRequest(prompt="a")
    request.resume_after.token_ids.extend([5, 6])
    exchange = Exchange(make_attempts(), request, resume=True)
    exchange.on_message(started())
    assert exchange.on_message(tokens(2, [7], "c")) == Delta(2, (7,), "c")
    exchange.on_error(UnreachableError("cut"))
    assert list(exchange.request.resume_after.token_ids) == [5, 6, 7]


def begun(adapter: str = "", version: int = 0) -> router_pb2.GenerateResponse:
    message = started()
    message.started.adapter, message.started.adapter_version = adapter, version
    return message


@pytest.mark.parametrize("by", ["adapter", "model"])
def test_what_goes_on_with_an_answer_names_the_version_that_began_it(by: str) -> None:
    exchange = Exchange(make_attempts(), router_pb2.GenerateRequest(**{by: "poems"}), resume=True)
    exchange.on_message(begun("poems", 3))
    exchange.on_message(tokens(0, [5]))
    exchange.on_error(UnreachableError("gone"))
    assert (exchange.request.adapter, exchange.request.adapter_version) == ("poems", 3)


def test_a_router_that_ignores_the_adapter_is_found_out() -> None:
    exchange = Exchange(make_attempts(), router_pb2.GenerateRequest(adapter="poems"))
    with pytest.raises(InvalidRequestError, match="knows no adapters") as caught:
        exchange.on_message(begun())
    assert caught.value.param == "adapter"

"""The terminal chat, with a scripted client."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from diptych.cli.chat import Conversation, _turn, chat_on_terminal, chat_piped, summary
from diptych.client import Completion, Delta, Explanation, InvalidRequestError, Usage, WorkerLostError


def make_completion(*texts: str, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "text": "".join(texts),
        "token_ids": tuple(range(len(texts))),
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=10, completion_tokens=len(texts), cached_tokens=0),
        "request_id": "req-1",
        "model": "m",
    }
    return Completion(**(values | changes))


class FakeStream:
    def __init__(self, steps: list[str | BaseException]) -> None:
        self._steps = steps
        self.result = make_completion(*(step for step in steps if isinstance(step, str)))

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __iter__(self) -> Iterator[Delta]:
        for offset, step in enumerate(self._steps):
            if isinstance(step, BaseException):
                raise step
            yield Delta(offset, (offset,), step)


class FakeClient:
    def __init__(self, *answers: list[str | BaseException]) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def stream(self, **options: Any) -> FakeStream:
        self.asked.append(options)
        return FakeStream(self._answers.pop(0))


def test_piped_lines_are_turns_of_one_conversation() -> None:
    client = FakeClient(["Hel", "lo"], ["Bye"])
    out = io.StringIO()
    code = chat_piped(client, Conversation(system="Be brief", max_tokens=5), ["Hi\n", "\n", "Ciao\n"], out)  # type: ignore[arg-type]
    assert (code, out.getvalue()) == (0, "Hello\nBye\n")
    assert client.asked[0]["max_tokens"] == 5
    assert client.asked[1]["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Ciao"},
    ]


def test_where_the_context_leaves_less_that_is_the_bound() -> None:
    short = InvalidRequestError("max_tokens=5 is more than the 3 tokens that the context leaves", param="max_tokens")
    client = FakeClient([short], ["Hi"], [InvalidRequestError("no", param="messages")])
    out = io.StringIO()
    conversation = Conversation(max_tokens=5)
    assert chat_piped(client, conversation, ["Hello\n"], out) == 0  # type: ignore[arg-type]
    assert [asked["max_tokens"] for asked in client.asked] == [5, None]
    assert [message["content"] for message in conversation.messages] == ["Hello", "Hi"]
    assert chat_piped(client, conversation, ["Hello\n"], out) == 1  # type: ignore[arg-type]
    assert len(client.asked) == 3


def test_commands_in_a_pipe_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(["a"], ["b"])
    out = io.StringIO()
    lines = ["Hi", "/clear", "/usr/bin/env is what?", "/exit", "never"]
    assert chat_piped(client, Conversation(), lines, out) == 0  # type: ignore[arg-type]
    assert out.getvalue() == "a\nb\n"
    assert client.asked[1]["messages"] == [{"role": "user", "content": "/usr/bin/env is what?"}]
    assert chat_piped(client, Conversation(), ["/x"], out) == 1  # type: ignore[arg-type]
    assert "no such command: '/x'" in capsys.readouterr().err


def test_a_piped_failure_ends_with_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient([WorkerLostError("d0 is gone")])
    assert chat_piped(client, Conversation(), ["Hi"], io.StringIO()) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().err == "error: d0 is gone\n"


def test_an_interrupted_answer_is_kept_and_the_chat_goes_on() -> None:
    client = FakeClient(["Once ", KeyboardInterrupt()], [WorkerLostError("gone")], [KeyboardInterrupt()], ["\x1b[2Jok"])
    conversation = Conversation()
    console = Console(file=io.StringIO(), force_terminal=False)
    for text in ("tell", "more", "again", "well?"):
        _turn(client, conversation, text, console)  # type: ignore[arg-type]
    assert [message["content"] for message in conversation.messages] == ["tell", "Once ", "well?", "\x1b[2Jok"]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "interrupted" in shown
    assert "error: gone" in shown
    assert "\x1b" not in shown
    conversation.clear()
    assert conversation.messages == []


def test_an_unknown_command_does_not_reach_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["/help", "/", "/clear it", "/usr/bin/env is what?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    client = FakeClient(["A program."])
    assert chat_on_terminal(client, Conversation()) == 0  # type: ignore[arg-type]
    assert [asked["messages"][-1]["content"] for asked in client.asked] == ["/usr/bin/env is what?"]
    assert capsys.readouterr().out.count("no such command. Ctrl-C interrupts") == 3


def test_the_summary_says_who_computed_it() -> None:
    facts: dict[str, Any] = dict.fromkeys(Explanation.__dataclass_fields__, 0)
    facts |= {"prefill": "p0", "decode": "d0", "transport": "ucx:tcp", "kv_bytes": 1_500_000, "local_prefill": False}
    remote = make_completion("a", "b", "c", explanation=Explanation(**facts))
    assert summary(remote, 0.5, 1.5) == "3 tokens, first after 0.50 s, 2.0 tokens/s, p0 -> d0, 1.5 MB over ucx:tcp"
    local = make_completion("a", finish_reason="length", explanation=Explanation(**(facts | {"local_prefill": True})))
    assert summary(local, 0.5, 0.5) == "1 token, first after 0.50 s, d0 alone, cut at max_tokens"

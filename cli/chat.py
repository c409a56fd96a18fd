"""`diptych chat`: a conversation in the terminal over the gRPC SDK.

On a terminal answers are streamed, Ctrl-C interrupts an answer and Ctrl-D exits. When input or output is piped, every
line of the input is one message, and only the answers are written.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from diptych.client import Client, Completion, Tls

HELP = "Ctrl-C interrupts an answer, Ctrl-D exits; /clear starts a new conversation, /exit exits."

DEFAULT_MAX_TOKENS = 1024
"""Tokens of one answer. Small models may not stop before the context is full."""

# `/help me` is a command, `/usr/bin/env is what?` is a message.
_COMMAND = re.compile(r"/[\w?-]*")

# Control characters of the model's output must not reach the terminal.
_CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the sampling options."""

    model: str = ""
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def clear(self) -> None:
        self.messages.clear()

    def ask(self, client: Client, text: str, write: Callable[[str], None]) -> Completion:
        """Send one message; `write` receives the answer's text as it is streamed. max_tokens is limited by the context.

        A failed turn leaves the conversation unchanged; an interrupted one keeps the partial answer. Raises:
        DiptychError, KeyboardInterrupt.
        """
        from diptych.common.errors import InvalidRequestError

        try:
            return self._ask(client, text, write, self.max_tokens)
        except InvalidRequestError as error:
            if error.param != "max_tokens" or self.max_tokens is None:
                raise
        return self._ask(client, text, write, None)

    def _ask(self, client: Client, text: str, write: Callable[[str], None], max_tokens: int | None) -> Completion:
        turn = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        said: list[str] = []
        with client.stream(
            messages=system + turn,
            model=self.model,
            max_tokens=max_tokens,
            temperature=self.temperature,
            explain=True,
        ) as stream:
            try:
                for delta in stream:
                    said.append(delta.text)
                    write(delta.text)
            except KeyboardInterrupt:
                if said:
                    self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]
                raise
            self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]
            return stream.result


def run_chat(
    address: str,
    model: str = "",
    *,
    system: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    tls: Tls | None = None,
) -> int:
    """Chat with the router at `address` (host:port of its gRPC server).

    Args:
        model: empty: the cluster's only model.
        system: text of a system message; empty: none.
        max_tokens: of an answer; None: the rest of the context.
        temperature: None: the model's default.
        tls: None: the router does not use TLS.
    Returns: the exit code: 0, or 1 when a turn of a piped conversation failed.
    """
    from diptych.client import Client

    conversation = Conversation(model, system, max_tokens, temperature)
    client = Client(address, tls=tls)
    with client:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return chat_on_terminal(client, conversation)
        return chat_piped(client, conversation, sys.stdin, sys.stdout)


def chat_piped(client: Client, conversation: Conversation, lines: Iterable[str], out: TextIO) -> int:
    """One turn per line that is not empty, with the commands of a terminal; stops at the first failure."""
    from diptych.common.errors import DiptychError

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    for line in lines:
        if not (text := line.strip()):
            continue
        if text == "/exit":
            return 0
        if text == "/clear":
            conversation.clear()
            continue
        if _COMMAND.fullmatch(text.split(" ", 1)[0]):
            print(f"error: no such command: {text[:40]!r}; there are /clear and /exit", file=sys.stderr)
            return 1
        try:
            conversation.ask(client, text, write)
        except DiptychError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return 1
        write("\n")
    return 0


def chat_on_terminal(client: Client, conversation: Conversation) -> int:
    from rich.console import Console

    _switch_on_line_editing()
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[dim]{HELP}[/dim]")
    while True:
        try:
            text = console.input("[bold cyan]you> [/bold cyan]").strip()
        except EOFError:
            console.print()
            return 0
        except KeyboardInterrupt:
            console.print()
            continue
        if text == "/exit":
            return 0
        if text == "/clear":
            conversation.clear()
            console.print("[dim]forgotten[/dim]")
        elif _COMMAND.fullmatch(text.split(" ", 1)[0]):
            console.print(f"no such command. {HELP}", style="dim", markup=False)
        elif text:
            _turn(client, conversation, text, console)


def _turn(client: Client, conversation: Conversation, text: str, console: Console) -> None:
    from diptych.common.errors import DiptychError, PromptTooLongError

    first_at: list[float] = []

    def write(part: str) -> None:
        if not first_at:
            first_at.append(time.monotonic())
        console.print(part.translate(_CONTROLS), end="", markup=False)
        console.file.flush()

    began = time.monotonic()
    try:
        answer = conversation.ask(client, text, write)
    except KeyboardInterrupt:
        console.print("\n[dim]interrupted[/dim]")
    except PromptTooLongError as error:
        console.print(f"\nerror: {error.message}; /clear begins anew", style="red", markup=False)
    except DiptychError as error:
        console.print(f"\nerror: {error.message}", style="red", markup=False)
    else:
        ended = time.monotonic()
        line = summary(answer, (first_at or [ended])[0] - began, ended - began)
        console.print(f"\n{line}", style="dim", markup=False)


def summary(answer: Completion, first_s: float, total_s: float) -> str:
    """One line about an answer: its size, speed and workers.

    Args:
        first_s, total_s: seconds from the message to the first text and to the end.
    """
    num_tokens = len(answer.token_ids)
    parts = [f"{num_tokens} token{'s' * (num_tokens != 1)}", f"first after {first_s:.2f} s"]
    if num_tokens > 1 and total_s > first_s:
        parts.append(f"{(num_tokens - 1) / (total_s - first_s):.1f} tokens/s")
    if answer.usage.cached_tokens:
        parts.append(f"{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens cached")
    why = answer.explanation
    if why is not None and why.local_prefill:
        parts.append(f"{why.decode} alone")
    elif why is not None:
        parts.append(f"{why.prefill} -> {why.decode}, {why.kv_bytes / 1e6:.1f} MB over {why.transport}")
    if answer.finish_reason == "length":
        parts.append("cut at max_tokens")
    return ", ".join(parts)


def _switch_on_line_editing() -> None:
    """Enable arrow keys and history in `input`, where the platform has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what switches it on

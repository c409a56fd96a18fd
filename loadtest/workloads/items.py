"""Work items, one per request, and their file format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from diptych.common.errors import ConfigError


class CalledFunction(msgspec.Struct, frozen=True):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """As in the OpenAI API."""

    id: str
    function: CalledFunction
    type: str = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """As in the OpenAI API. tool_calls: of an assistant; tool_call_id: of role tool, the call that it answers."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


class WorkItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Exactly one of `token_ids`, `text` and `messages` is filled.

    Attributes:
        input_tokens: intended length of the new prompt tokens (without history); reports use the server's count.
        output_tokens: max_tokens.
        session, turn: requests of one session are sent in order, each after its predecessor's end.
        follows: put this session's history (prompts and real answers) before the prompt.
        delay_s: think or tool time between the predecessor's end and this send.
        arrival_s: intended send time from a trace, after scaling; None: by the schedule.
        cancel_after_tokens: cancel after this many output tokens; None: never.
        hash_ids: the trace's block ids, 512 tokens each.
    """

    index: int
    input_tokens: int
    output_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    kind: str = "random"
    session: str = ""
    turn: int = 0
    follows: bool = False
    delay_s: float = 0.0
    arrival_s: float | None = None
    tenant: str = ""
    cancel_after_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(WorkItem)


def write_jsonl(path: Path, items: Iterable[WorkItem]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(_encoder.encode(item) + b"\n" for item in items))


def read_jsonl(path: Path) -> list[WorkItem]:
    """Raises: ConfigError naming the invalid line."""
    items: list[WorkItem] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            try:
                items.append(_decoder.decode(line))
            except msgspec.DecodeError as error:
                raise ConfigError("dataset", f"{path}:{number}", f"is not a work item: {error}") from None
    if not items:
        raise ConfigError("dataset", str(path), "holds no work items")
    return items


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("dataset", str(path), f"cannot be read: {error.strerror}") from None


def sessions_of(items: Sequence[WorkItem]) -> dict[str, list[WorkItem]]:
    """Items by session in order of their turns; an item without a session is a separate one."""
    found: dict[str, list[WorkItem]] = {}
    for item in items:
        found.setdefault(item.session or f"#{item.index}", []).append(item)
    for turns in found.values():
        turns.sort(key=lambda item: item.turn)
    return found

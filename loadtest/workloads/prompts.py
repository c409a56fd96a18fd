"""Prompt material from a seed: token ids of an exact length, or text of about one token a word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from diptych.loadtest.workloads.items import CalledFunction, Message, ToolCall

Form = Literal["ids", "text", "messages"]

TOOL_NAME = "search"
_ARGUMENT_WORDS = 4

# Common English words: in almost every tokenizer each of them, with its leading space, is one token.
_TEXT = (
    "the of and to in is was for that on with as by at from they be this have or had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around another came come work "
    "three word must because does part even place well such here take why things help put years different away again "
    "off went old number great tell men say small every found still between name should home big give air line set "
    "own under read last never us left end along while might next sound below saw something thought both few those "
    "always looked show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took sometimes four head above kind began almost "
    "live page got earth need far hand high year mother light parts country father let night following picture being "
    "study second eyes soon times story boys since white days ever paper hard near sentence better best across during "
    "today others however sure means knew try told young miles sun ways thing whole hear example heard several change "
    "answer room sea against top turned learn point city play toward five using himself usually "
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of the three is set."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Generates prompts of a given length in tokens.

    Args:
        form: "ids" is exact; "text" and "messages" are approximate, and reports use the server's count.
        vocab: ids are from [low, high): exclude the special tokens at a vocabulary's start.
    """

    form: Form
    vocab: tuple[int, int] = (1000, 30000)

    def body(self, rng: Random, num_tokens: int) -> tuple[int, ...] | str:
        """Token ids or words; pieces can be joined with `join`."""
        if self.form == "ids":
            low, high = self.vocab
            span = high - low
            return tuple(low + int(rng.random() * span) for _ in range(num_tokens))
        return " ".join(rng.choices(WORDS, k=num_tokens))

    def join(self, pieces: Sequence[tuple[int, ...] | str], *, role: str = "user") -> Prompt:
        if self.form == "ids":
            return Prompt(token_ids=tuple(token for piece in pieces for token in piece if isinstance(token, int)))
        text = " ".join(piece for piece in pieces if isinstance(piece, str) and piece)
        return Prompt(text=text) if self.form == "text" else Prompt(messages=(Message(role, text),))

    def with_system(self, system: tuple[int, ...] | str, body: tuple[int, ...] | str) -> Prompt:
        """A shared prefix: a system message with messages, else the beginning of the prompt."""
        if self.form == "messages" and isinstance(system, str) and isinstance(body, str) and system:
            return Prompt(messages=(Message("system", system), Message("user", body)))
        return self.join((system, body))

    def tool_result(self, rng: Random, call_id: str, body: tuple[int, ...] | str) -> Prompt:
        """The result of a tool call. With messages: the assistant's call, whose content is its real answer once it is
        known, and a message of role tool; else a longer prompt."""
        if self.form != "messages" or not isinstance(body, str):
            return self.join((body,))
        arguments = json.dumps({"query": " ".join(rng.choices(WORDS, k=_ARGUMENT_WORDS))})
        call = ToolCall(call_id, CalledFunction(TOOL_NAME, arguments))
        return Prompt(messages=(Message("assistant", "", (call,)), Message("tool", body, tool_call_id=call_id)))

"""Registry of the parsers of tool calls and reasoning by name, and a guess from the model's chat template.

A plug-in is an entry point of group `diptych.tool_parsers`: its name is the parser's, its object a ToolFactory. With an
attribute `call_form`, calls can be enforced (tool_choice required or by name).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from itertools import count

from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.router.tools.choice_grammar import HERMES_FORM, LLAMA3_JSON_FORM, MISTRAL_FORM, CallForm
from diptych.router.tools.parsers import HermesParser, Llama3JsonParser, MistralParser
from diptych.router.tools.pieces import ToolParser

ToolFactory = Callable[[Collection[str], Callable[[], str]], ToolParser]
"""(names of the functions that were offered, maker of call ids) -> the parser of one answer."""

BUILT_IN: Mapping[str, ToolFactory] = {
    "hermes": HermesParser,
    "llama3-json": Llama3JsonParser,
    "mistral": MistralParser,
}
FORMS: Mapping[str, CallForm] = {
    "hermes": HERMES_FORM,
    "llama3-json": LLAMA3_JSON_FORM,
    "mistral": MISTRAL_FORM,
}
_CONTEXT = "diptych ids of tool calls"
GROUP = "diptych.tool_parsers"
_MARKS = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ('"parameters": dictionary', "llama3-json"))


def tool_factory(name: str) -> ToolFactory:
    """Raises: ConfigError for an unknown parser."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group=GROUP, name=name):
        factory: ToolFactory = point.load()
        return factory
    known = ", ".join([*BUILT_IN, *(point.name for point in entry_points(group=GROUP))])
    raise ConfigError("tool_call_parser", name, f"is unknown; known: auto, none, {known}")


def call_form(name: str) -> CallForm | None:
    """The form of calls that this parser reads; None: unknown. Raises: ConfigError as tool_factory."""
    if name in FORMS:
        return FORMS[name]
    form: CallForm | None = getattr(tool_factory(name), "call_form", None)
    return form


def guess_tool_parser(template: str) -> str:
    """The parser of the calls described in this chat template; "none" when it describes no known form."""
    return next((name for mark, name in _MARKS if mark in template), "none")


def id_maker(name: str, answer: str) -> Callable[[], str]:
    """Makes the ids of an answer's calls, one after the other. `answer`: no other answer has it; the same one has the same ids.
    Mistral's templates accept only nine letters and digits."""
    numbers = count()

    def new_id() -> str:
        digest: str = blake3(f"{answer}/{next(numbers)}".encode(), derive_key_context=_CONTEXT).hexdigest(12)
        return digest[:9] if name == "mistral" else f"call_{digest}"

    return new_id

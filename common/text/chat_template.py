"""A model's chat template, rendered as transformers renders it, in a sandbox and with bounded output.

The template comes with the model, never from a client; the messages are untrusted. Text in a message that spells a
special token (`<|im_end|>`) becomes that token: templates rely on it, and vLLM and SGLang do the same. To prevent
forged turns, filter the messages before this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.common.errors import ConfigError, InvalidRequestError
from diptych.common.text.valid_text import check_text

MAX_RENDERED_CHARS = 8 * 1024 * 1024
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the template's text.
        special_tokens: variables such as bos_token that the template may use.
        now: wall clock of `strftime_now`.
    Raises: ConfigError when the template does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("chat_template", source[:40] + "...", f"does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.variables: frozenset[str] = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        """Names of the variables that the template reads."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt's text.

        Args:
            messages: role and content each; content is text or a list of text parts (joined by line breaks). A call's
                arguments are an object, or text if an answer was cut in the middle of them. A template that cannot print text
                gets {"arguments": text}.
            tools: JSON schemas of functions, for templates that support tools.
            extra: further variables (`chat_template_kwargs`).
        Raises: InvalidRequestError naming the field: no messages, a wrong role or content, text that is not valid
            Unicode, an
            error raised by the template, or more than MAX_RENDERED_CHARS characters of output.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        if extra and (taken := sorted(_RESERVED & extra.keys())):
            raise InvalidRequestError(f"{taken[0]} cannot be set in chat_template_kwargs", param="chat_template_kwargs")
        checked = [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        variables = {
            **self._special_tokens,
            **(extra or {}),
            "messages": checked,
            "tools": list(tools) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            try:
                return self._rendered(variables)
            except InvalidRequestError:
                raise
            except Exception:
                if (wrapped := _with_wrapped_arguments(checked)) is None:
                    raise
                return self._rendered(variables | {"messages": wrapped})
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidRequestError(f"the model's chat template failed: {error}", param="messages") from error

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise InvalidRequestError(
                    f"the rendered prompt has more than {MAX_RENDERED_CHARS} characters", param="messages"
                )
            pieces.append(piece)
        return "".join(pieces)


def _with_wrapped_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages in which all call arguments are objects; None: they already are."""
    found = False
    out = [dict(message) for message in messages]
    for message in out:
        if not isinstance(calls := message.get("tool_calls"), Sequence):
            continue
        message["tool_calls"] = made = []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(text := function.get("arguments"), str):
                call = {**call, "function": {**function, "arguments": {"arguments": text}}}
                found = True
            made.append(call)
    return out if found else None


def _check_message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} must be an object", param=param)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{param}.role must be one of {', '.join(sorted(ROLES))}", param=f"{param}.role")
    content = message.get("content")
    if isinstance(content, str):
        check_text(content, f"{param}.content")
    elif isinstance(content, Sequence):
        content = "\n".join(_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content))
    elif content is not None:
        raise InvalidRequestError(f"{param}.content must be text or a list of parts", param=f"{param}.content")
    elif role != "assistant":  # an assistant message may consist of tool calls only
        raise InvalidRequestError(f"{param}.content is missing", param=f"{param}.content")
    return {**message, "content": content}


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{param} must be a part of type text", param=param)
    text: str = part["text"]
    check_text(text, f"{param}.text")
    return text

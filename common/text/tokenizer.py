"""Text to token ids and back; router, workers and tests share this implementation. No torch, no transformers.

tokenizer.json is used unchanged. Text that spells a special token becomes that token, in completions and in chat
messages (see common/text/chat_template.py). A chat prompt gets no further special tokens: the template contains them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from diptych.common.errors import ConfigError, InvalidRequestError, PromptTooLongError
from diptych.common.text.template_source import load_chat_template, load_tool_template, special_token_variables
from diptych.common.text.valid_text import check_text

if TYPE_CHECKING:
    from diptych.common.text.chat_template import ChatTemplate

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The library's thread pool is for batches. Requests encode one text each, and a pool does not survive a fork."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults recommended by the model's authors; None: not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class TextLimit:
    """A limit on the size of a prompt's text. `most_bytes`: most bytes of a text that may become a prompt, in UTF-8.
    `dropped`: byte values that do not count, because the tokenizer drops them."""

    most_bytes: int
    dropped: bytes = b""

    def check(self, encoded: bytes, param: str) -> None:
        """Raises: PromptTooLongError."""
        size = len(encoded)
        if size > self.most_bytes and self.dropped:
            size = len(encoded.translate(None, self.dropped))
        if size > self.most_bytes:
            raise PromptTooLongError(
                f"{param} has {size} bytes of text; more than {self.most_bytes} cannot fit into the context",
                param=param,
            )


class ModelTokenizer:
    """Tokenizer and chat template of one model folder. Thread-safe: immutable after the start.

    Args:
        path: folder with tokenizer.json and config.json.
        now: wall clock for templates that print the date.
        chat: with the chat templates. Processes that need none, as workers, start without what compiles them.
    Raises: ConfigError when a file is missing or invalid.
    """

    def __init__(self, path: Path | str, *, now: Callable[[], datetime] = datetime.now, chat: bool = True) -> None:
        path = Path(path)
        config = _read_json(path / "config.json")
        tokenizer_config = _read_json(path / "tokenizer_config.json", optional=True)
        if not (path / "tokenizer.json").is_file():
            raise ConfigError("model", str(path), "must hold a tokenizer.json")
        try:
            self._tokenizer = _load_tokenizer(path / "tokenizer.json")
        except Exception as error:  # the library raises plain Exception
            raise ConfigError("model", str(path), f"tokenizer.json cannot be used: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        """Ids that decode leaves out."""
        self.vocab_size: int = _vocab_size(config, path)
        """Rows of the model's embedding: every id is below it."""
        self.eos_token_ids: tuple[int, ...] = self._eos_ids(
            _read_json(path / "generation_config.json", optional=True), config, tokenizer_config
        )
        """Ids that end a generation, ascending; empty: the model names none."""

        self._template: ChatTemplate | None = None
        self._tool_template: ChatTemplate | None = None
        if chat:
            self._load_templates(path, tokenizer_config, now)

    def _load_templates(self, path: Path, tokenizer_config: Mapping[str, Any], now: Callable[[], datetime]) -> None:
        from diptych.common.text.chat_template import ChatTemplate  # jinja2

        variables = special_token_variables(tokenizer_config)
        source = load_chat_template(path, tokenizer_config)
        self._template = None if source is None else ChatTemplate(source, variables, now=now)
        source = load_tool_template(path, tokenizer_config)
        self._tool_template = None if source is None else ChatTemplate(source, variables, now=now)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._template

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The chat template for conversations with tools."""
        return self._tool_template or self._template

    @property
    def raw(self) -> Tokenizer:
        """The library's tokenizer, for common/text/detokenizer.py."""
        return self._tokenizer

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt", limit: TextLimit | None = None
    ) -> list[int]:
        """Token ids of `text`; may be empty. Releases the GIL.

        Args:
            add_special_tokens: let tokenizer.json add its special tokens (a BOS, for most models that have one).
            param: field of the request, for errors.
            limit: checked before the text is tokenized.
        Raises: InvalidRequestError for a lone surrogate or a token without an embedding in the model,
            PromptTooLongError.
        """
        encoded = check_text(text, param)
        if limit is not None:
            limit.check(encoded, param)
        # The fast variant computes no offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if ids and max(ids) >= self.vocab_size:
            raise InvalidRequestError(f"{param} contains a token without an embedding in this model", param=param)
        return ids

    def spans(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """(first character, end) of each token of `encode` in `text`.

        The spans leave no gap. A token that is part of a character spans all of it; a token that is not in the text
        spans nothing.

        Raises: as encode.
        """
        check_text(text, "prompt")
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        spans, reached = [], 0
        for (begin, end), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            if added:
                spans.append((reached, reached))
            else:  # the library's span may leave out leading white space of the token
                spans.append((min(begin, reached), max(end, reached)))
                reached = max(end, reached)
        return spans

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        limit: TextLimit | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's format.

        Args:
            continue_final_message: the prompt ends with the last message's content, which the answer continues.
            limit: see encode; applies to the rendered text.
        Raises: InvalidRequestError naming the field; see ChatTemplate.render.
        """
        text = self.render_chat(messages, add_generation_prompt, tools=tools, extra=extra)
        if continue_final_message:
            text = _cut_behind(text, messages[-1].get("content"))
        return self.encode(text, add_special_tokens=False, param="messages", limit=limit)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation in the model's format. Raises: InvalidRequestError naming the field."""
        template = self.tool_template if tools else self._template
        if template is None:
            raise InvalidRequestError("this model has no chat template: use completions", param="messages")
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _eos_ids(
        self, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
    ) -> tuple[int, ...]:
        found: set[int] = set()
        for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in ids):
                raise ConfigError("eos_token_id", value, f"must be ids below the vocabulary size {self.vocab_size}")
            found.update(ids)
        if not found and (token := special_token_variables(tokenizer_config).get("eos_token")):
            token_id = self._tokenizer.token_to_id(token)
            found.update([] if token_id is None else [token_id])
        return tuple(sorted(found))


def _cut_behind(text: str, content: object) -> str:
    """`text` up to the end of the last message's `content`, including its white space where the template keeps it.
    Raises: InvalidRequestError when the content is not found there."""
    whole = content if isinstance(content, str) else ""
    last = whole.strip()
    at = text.rfind(last) if last else -1
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message: the template changes the last message's content",
            param="continue_final_message",
        )
    begin = at - (len(whole) - len(whole.lstrip()))
    return text[: begin + len(whole)] if text.startswith(whole, max(begin, 0)) else text[: at + len(last)]


_TOOL_MARKS = frozenset(
    {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"}
)
"""Special tokens that are kept in the text: it would lose its tool calls or reasoning without them."""


def _load_tokenizer(file: Path) -> Tokenizer:
    """The library's tokenizer, with markers of calls and reasoning as ordinary added tokens."""
    tokenizer = Tokenizer.from_file(str(file))
    marks = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special} & _TOOL_MARKS
    if not marks:
        return tokenizer
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        if token["content"] in marks:
            token["special"] = False
    return Tokenizer.from_str(json.dumps(content))


def generation_defaults(path: Path | str) -> GenerationDefaults:
    """Sampling defaults in generation_config.json, with or without its `do_sample`. Raises: ConfigError when a value is
    not a finite number of the right kind."""
    values = _read_json(Path(path) / "generation_config.json", optional=True)

    def number(name: str) -> float | None:
        value = values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"generation_config.{name}", value, "must be a finite number")
        return float(value)

    top_k = number("top_k")
    return GenerationDefaults(
        temperature=number("temperature"), top_p=number("top_p"), top_k=None if top_k is None else int(top_k)
    )


def _vocab_size(config: Mapping[str, Any], path: Path) -> int:
    value = config.get("vocab_size")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("vocab_size", value, f"config.json of {path} must give a positive number")
    return value


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigError("model", str(file.parent), f"must hold a {file.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError("model", str(file.parent), f"{file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("model", str(file.parent), f"{file.name} must hold a JSON object")
    return value

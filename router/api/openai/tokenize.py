"""Bodies of /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from diptych.common.errors import InvalidRequestError
from diptych.router.api.openai.requests import Items, ending, validate
from diptych.router.requests.messages import ModelFeatures, UncheckedRequest
from diptych.router.tools.options import ChatMessage, Tool, template_messages, text_beside, tool_options


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    prompt: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    tokens: Items[int]


def tokenize_spec(body: dict[str, Any], features: ModelFeatures) -> tuple[UncheckedRequest, bool]:
    """(what to tokenize, whether to return the tokens' texts). Raises: InvalidRequestError naming the field."""
    request = validate(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give one of prompt and messages", param="prompt")
    tools = tool_options(request.tools, None, features).shown
    messages = None if request.messages is None else template_messages(request.messages)
    spec = UncheckedRequest(
        model=request.model,
        prompt=request.prompt,
        messages=messages,
        more_text=0 if messages is None else text_beside(messages, tools),
        tools=tools,
        add_special_tokens=request.add_special_tokens is not False,
        **ending(request.add_generation_prompt, request.continue_final_message),
    )
    return spec, bool(request.return_token_strs)

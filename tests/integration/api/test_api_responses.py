"""Bodies of coding agents at /v1/responses: unsupported parts are dropped with a warning, or rejected by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.requests.messages import ModelFeatures
from diptych_tests.http_api import http

PATH = "/v1/responses"
CALLER = ModelFeatures(tool_parser="hermes", reasoning=True, takes_tools=True)
SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


def said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX: dict[str, Any] = {
    "model": "",
    "instructions": "You are a coding agent.",
    "input": [
        said("developer", "<permissions/>"),
        said("user", "<environment_context/>"),
        said("user", "List the files"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "ls"}},
        said("assistant", "I look.", "output_text") | {"id": "msg_1", "status": "completed", "phase": "commentary"},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a.py"}]},
        {
            "type": "custom_tool_call",
            "call_id": "c2",
            "name": "apply_patch",
            "input": "*** Begin Patch",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"},
        {"type": "local_shell_call", "id": "l1", "call_id": None, "action": {"type": "exec", "command": ["pwd"]}},
        {"type": "local_shell_call_output", "id": "l1", "output": "/"},
        {"type": "shell_call", "call_id": "s1", "action": {"commands": ["id"]}},
        {"type": "shell_call_output", "call_id": "s1", "output": [{"stdout": "root"}]},
        said("user", "Go on"),
    ],
    "tools": [SHELL, PATCH, {"type": "local_shell"}, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "auto",
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"installation": "x"},
    "stream_options": {"include_obfuscation": False},
}


async def test_the_body_of_a_coding_agent() -> None:
    router_api = FakeRouterApi(hello_script())
    router_api.model_features = CALLER
    async with http(router_api) as client:
        answer = await client.post(PATH, json=CODEX)
        whole = (await client.post(PATH, json=CODEX | {"stream": False})).json()
    assert answer.status_code == 200, answer.text
    assert "response.completed" in answer.text
    spec = router_api.specs[0]

    def call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert spec.messages == [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "system", "content": "<permissions/>"},
        {"role": "user", "content": "<environment_context/>"},
        {"role": "user", "content": "List the files"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("c1", "shell", {"command": ["ls"]})]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "assistant", "content": "", "tool_calls": [call("c2", "apply_patch", {"input": "*** Begin Patch"})]},
        {"role": "tool", "tool_call_id": "c2", "content": "Done"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("l1", "local_shell", {"type": "exec", "command": ["pwd"]})],
        },
        {"role": "tool", "tool_call_id": "l1", "content": "/"},
        {"role": "assistant", "content": "", "tool_calls": [call("s1", "shell", {"commands": ["id"]})]},
        {"role": "tool", "tool_call_id": "s1", "content": '[{"stdout": "root"}]'},
        {"role": "user", "content": "Go on"},
    ]
    assert isinstance(spec.tools, list)
    assert [tool["function"]["name"] for tool in spec.tools] == ["shell"]
    assert [tool["name"] for tool in whole["tools"]] == ["shell"]
    assert answer.headers["x-diptych-warning"].split("; ") == [
        "tools.1: custom is not supported and ignored",
        "tools.2: local_shell is not supported and ignored",
        "tools.3: web_search is not supported and ignored",
        "input.4: web_search_call is ignored",
        "reasoning.effort is ignored: this model's chat template does not support it",
    ]


async def test_the_effort_reaches_a_template_that_knows_it() -> None:
    router_api = FakeRouterApi(hello_script())
    router_api.model_features = ModelFeatures(takes_effort=True)
    async with http(router_api) as client:
        answer = await client.post(PATH, json={"input": "Hi", "reasoning": {"effort": "low"}})
    assert "x-diptych-warning" not in answer.headers
    assert router_api.specs[0].chat_template_kwargs == {"reasoning_effort": "low"}


def one(**item: Any) -> dict[str, Any]:
    return {"input": [item, said("user", "Hi")]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (one(type="item_reference", id="msg_1"), "input", "input.0: nothing is stored here"),
        (one(type="computer_call_output", call_id="c"), "input", "input.0: items of type 'computer_call_output'"),
        (one(type="banana"), "input", "items of type 'banana' are not supported"),
        (one(type=3), "input", "items of type no text are not supported"),
        (one(role="robot", content="a"), "input", "input.0.role must be one of user, assistant"),
        (one(role="user"), "input", "input.0.content must be text or a list of parts"),
        (
            one(role="user", content=[{"type": "input_image", "image_url": "data:"}]),
            "input",
            "input.0.content.0: parts of type 'input_image' are not supported",
        ),
        (one(role="user", content=["a"]), "input", "input.0.content.0: parts of type without a type"),
        (one(type="function_call", call_id="c", name="f"), "input", "input.0.arguments must be text"),
        (one(type="function_call", name="f", arguments="{}"), "input", "input.0.call_id must be text"),
        (one(type="function_call_output", call_id="c", output=3), "input", "input.0.output must be text"),
        ({"input": ["a"]}, "input", "input must be a string or a list of items"),
        ({"input": [{"type": "reasoning"}]}, "input", "input is empty"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", "'message.output_text.logprobs'"),
        ({"input": "a", "include": "x"}, "include", "include"),
        ({"input": "a", "tools": [{"type": "fucntion"}]}, "tools", "tools.0: 'fucntion' is not a tool type"),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools", "tools.0: without a type is not a tool type"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools", "tools.0.name: Field required"),
        (
            {"input": "a", "tools": [SHELL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "tool_choice: web_search is not supported",
        ),
        (
            {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "there are no tools",
        ),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort"),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id", "previous_response_id"),
    ],
)
async def test_what_cannot_be_had_in_responses_is_named(body: dict[str, Any], param: str, words: str) -> None:
    router_api = FakeRouterApi(hello_script())
    router_api.model_features = CALLER
    async with http(router_api) as client:
        answer = await client.post(PATH, content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]

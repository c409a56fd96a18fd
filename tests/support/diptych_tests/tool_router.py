"""A router of a running cluster whose model folder has another chat template: one that knows tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych.cli.models.store import resolve_model
from diptych.client import AsyncClient
from diptych.common.text.revision import tokenizer_revision
from diptych.router import served_model
from diptych.router.config import RouterConfig
from diptych.router.frontend import Frontend
from diptych.router.server import ApiServers
from diptych_tests import waiting

WAIT_S = 300.0
_TURN = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}CALLS<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TOOLS = """{%- if tools %}<|im_start|>system
RULE
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}"""
_ONE = '{"name": call.function.name, "KEY": call.function.arguments} | tojson'


def template(rule: str, calls: str, key: str = "arguments") -> str:
    return _TOOLS.replace("RULE", rule) + _TURN.replace("CALLS", calls.replace("ONE", _ONE.replace("KEY", key)))


TEMPLATES = {
    "hermes": template(
        'Call a function by <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>. There are:',
        "{% for call in message.tool_calls or [] %}<tool_call>\n{{ ONE }}\n</tool_call>{% endfor %}",
    ),
    "llama3-json": template(
        'Call a function by {"name": function, "parameters": dictionary of its arguments}. There are:',
        "{% for call in message.tool_calls or [] %}{{ ONE }}{% if not loop.last %}; {% endif %}{% endfor %}",
        key="parameters",
    ),
    "mistral": template(
        'Call functions by [TOOL_CALLS][{"name": ..., "arguments": ...}]. There are:',
        "{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}{{ ONE }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}",
    ),
}


@dataclass(frozen=True)
class Face:
    http: openai.AsyncOpenAI
    sdk: AsyncClient
    frontend: Frontend
    model: str


def folder_with(root: Path, model: Path, source: str) -> Path:
    """The model's folder, with another chat template."""
    root.mkdir()
    for file in model.iterdir():
        (root / file.name).symlink_to(file)
    (root / "chat_template.jinja").unlink()
    (root / "chat_template.jinja").write_text(source, encoding="utf-8")
    return root


@asynccontextmanager
async def face(cluster: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Face]:
    """A router of the cluster with another chat template. Workers would reject it, since its prompts differ: here it
    reports their template."""
    model = resolve_model("smollm2")
    monkeypatch.setattr(served_model, "tokenizer_revision", lambda _: tokenizer_revision(model))
    config = RouterConfig(
        redis_url=cluster.state.redis_url,
        secret_file=str(cluster.folder.secret),
        model=str(folder_with(tmp_path / "model", model, TEMPLATES[name])),
        served_model_name=cluster.model,
    )
    servers, frontend = ApiServers("127.0.0.1", 0, 0), Frontend(config)
    try:
        await frontend.start()
        addresses = await servers.start(frontend, frontend.metrics)
        await waiting.until(lambda: frontend.ready()[0], "the router is ready")
        async with (
            openai.AsyncOpenAI(
                base_url=f"http://{addresses.http}/v1", api_key="none", max_retries=0, timeout=WAIT_S
            ) as http,
            AsyncClient(addresses.grpc, timeout_s=WAIT_S) as sdk,
        ):
            yield Face(http, sdk, frontend, cluster.model)
    finally:
        await servers.stop(1.0)
        await frontend.close()

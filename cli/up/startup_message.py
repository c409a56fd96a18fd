"""The text that `diptych up` prints after the first token."""

from __future__ import annotations

import json
from pathlib import Path


def has_chat_template(folder: Path) -> bool:
    """Whether the model folder has a chat template."""
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError):
        return False


def startup_message(
    *, http_url: str, grpc_address: str, model: str, logs: str, chat: bool, terminal: bool = True, keys: bool = False
) -> str:
    """Args:
    chat: the model has a chat template; else the snippets complete text.
    terminal: Ctrl-C reaches the cluster.
    keys: the API wants one; the snippets take it from where `up` and the SDK do.
    """
    imports = "import os\n" if keys else ""
    api_key = 'os.environ["DIPTYCH_API_KEY"]' if keys else '"none"'
    return f"""
Diptych serves {model}
  HTTP (OpenAI)  {http_url}
  gRPC (SDK)     {grpc_address}
  logs           {logs}

# over both pools; without local_prefill_max_tokens decode computes a prompt as short as this itself where that costs less
{curl_snippet(http_url, model, chat, keys=keys)}

# the OpenAI client (.venv/bin/pip install openai)
{imports}from openai import OpenAI
client = OpenAI(base_url="{http_url}/v1", api_key={api_key})
{openai_snippet(model, chat)}

# our SDK, with .venv/bin/python
{sdk_snippet(grpc_address, chat)}

{"In a terminal: .venv/bin/diptych chat        " if chat else ""}{"Ctrl-C or " if terminal else ""}`make down` stops everything.
"""


def curl_snippet(http_url: str, model: str, chat: bool = True, *, keys: bool = False) -> str:
    path, question = "completions", '"prompt": "The capital of France is"'
    if chat:
        path = "chat/completions"
        question = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    key = ' -H "authorization: Bearer $DIPTYCH_API_KEY"' if keys else ""
    return f"""curl {http_url}/v1/{path}{key} -H 'content-type: application/json' -H 'x-diptych-explain: 1' \\
  -d '{{"model": "{model}", {question},
       "temperature": 0, "max_tokens": 32, "local_prefill_max_tokens": 0}}'"""


def openai_snippet(model: str, chat: bool = True) -> str:
    if not chat:
        return f"""for chunk in client.completions.create(model="{model}", prompt="Once upon a time", stream=True,
                                       temperature=0, max_tokens=128):
    print(chunk.choices[0].text, end="", flush=True)"""
    return f"""for chunk in client.chat.completions.create(model="{model}", stream=True, temperature=0, max_tokens=128,
                                            messages=[{{"role": "user", "content": "Tell me a story."}}]):
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""


def sdk_snippet(grpc_address: str, chat: bool = True) -> str:
    source = 'messages=[{"role": "user", "content": "Tell me a story."}]' if chat else 'prompt="Once upon a time"'
    return f"""from diptych.client import Client
with Client("{grpc_address}") as client:
    for delta in client.stream({source}, temperature=0, max_tokens=64):
        print(delta.text, end="", flush=True)"""

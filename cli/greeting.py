"""What `diptych up` prints once a token was served."""

from __future__ import annotations


def greeting(*, http_url: str, grpc_address: str, model: str, logs: str) -> str:
    return f"""
Diptych serves {model}
  HTTP (OpenAI)  {http_url}
  gRPC (SDK)     {grpc_address}
  logs           {logs}

curl {http_url}/v1/chat/completions -H 'content-type: application/json' -H 'x-diptych-explain: 1' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

# the OpenAI client
from openai import OpenAI
client = OpenAI(base_url="{http_url}/v1", api_key="none")
for chunk in client.chat.completions.create(model="{model}", stream=True,
                                            messages=[{{"role": "user", "content": "Tell me a story."}}]):
    print(chunk.choices[0].delta.content or "", end="", flush=True)

# our SDK
{sdk_snippet(grpc_address)}

In a terminal: diptych chat        Ctrl-C or `make down` stops everything.
"""


def sdk_snippet(grpc_address: str) -> str:
    return f"""from diptych.client import Client
with Client("{grpc_address}") as client:
    for delta in client.stream(messages=[{{"role": "user", "content": "Tell me a story."}}], max_tokens=64):
        print(delta.text, end="", flush=True)"""

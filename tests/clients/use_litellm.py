"""LiteLLM against a server. Arguments: base URL, model. Prints the results as JSON."""

import asyncio
import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SETTINGS = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 16,
    "num_retries": 0,
    "timeout": 120,
}
reported = {"requests": 0, "tokens": 0, "texts": {}}

answer = litellm.completion(messages=ASK, **SETTINGS)
reported["requests"] += 1
reported["tokens"] += answer.usage.completion_tokens
reported["texts"]["chat"] = answer.choices[0].message.content

chunks = list(litellm.completion(messages=ASK, stream=True, stream_options={"include_usage": True}, **SETTINGS))
reported["requests"] += 1
reported["tokens"] += next(chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None))
reported["texts"]["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

text = litellm.text_completion(
    prompt="The capital of France is", **(SETTINGS | {"model": f"text-completion-openai/{MODEL}", "max_tokens": 4})
)
reported["requests"] += 1
reported["tokens"] += text.usage.completion_tokens
reported["texts"]["completion"] = text.choices[0].text


async def together() -> None:
    for answer in await asyncio.gather(*[litellm.acompletion(messages=ASK, **SETTINGS) for _ in range(3)]):
        reported["requests"] += 1
        reported["tokens"] += answer.usage.completion_tokens
        assert answer.choices[0].message.content == reported["texts"]["chat"]


asyncio.run(together())
print(json.dumps(reported))

"""The OpenAI package against a server. Arguments: base URL, model. Prints the results as JSON."""

import asyncio
import json
import sys

from openai import AsyncOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
reported = {"requests": 0, "tokens": 0, "prompt_tokens": 0, "texts": {}}


def count(usage) -> None:
    reported["requests"] += 1
    reported["tokens"] += usage.completion_tokens
    reported["prompt_tokens"] += usage.prompt_tokens


client = OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)
reported["models"] = [model.id for model in client.models.list()]

chat = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_completion_tokens=16)
count(chat.usage)
reported["texts"]["chat"] = chat.choices[0].message.content

pieces, usage = [], None
for chunk in client.chat.completions.create(
    model=MODEL, messages=ASK, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
):
    pieces += [choice.delta.content or "" for choice in chunk.choices]
    usage = chunk.usage or usage
count(usage)
reported["texts"]["stream"] = "".join(pieces)

several = client.chat.completions.create(
    model=MODEL, messages=ASK, n=3, seed=-5, max_tokens=8, logprobs=True, top_logprobs=2
)
count(several.usage)
reported["choices"] = [len(choice.logprobs.content) for choice in several.choices]

completion = client.completions.create(
    model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8, logprobs=1, echo=True
)
count(completion.usage)
reported["texts"]["completion"] = completion.choices[0].text

formed = client.chat.completions.create(model=MODEL, messages=ASK, response_format=SCHEMA, temperature=0, max_tokens=32)
count(formed.usage)
reported["texts"]["formed"] = formed.choices[0].message.content

response = client.responses.create(
    model=MODEL, input="What is the capital of France?", temperature=0, max_output_tokens=16
)
reported["requests"] += 1
reported["tokens"] += response.usage.output_tokens
reported["prompt_tokens"] += response.usage.input_tokens
reported["texts"]["response"] = response.output_text


async def together() -> None:
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120) as several:
        answers = [
            several.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=16) for _ in range(4)
        ]
        for answer in await asyncio.gather(*answers):
            count(answer.usage)
            assert answer.choices[0].message.content == reported["texts"]["chat"]


asyncio.run(together())
print(json.dumps(reported))

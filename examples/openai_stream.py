"""The official client of the OpenAI API against a Diptych router.

python examples/openai_stream.py [base URL]
"""

from __future__ import annotations

import os
import sys

from openai import APIConnectionError, OpenAI, OpenAIError


def main(base_url: str = "http://127.0.0.1:8000/v1") -> int:
    try:
        return show(base_url)
    except APIConnectionError:
        print(f"no answer from {base_url}; `make up` starts a cluster", file=sys.stderr)
    except OpenAIError as error:
        print(error, file=sys.stderr)
    return 1


def show(base_url: str) -> int:
    """Print an answer while it is streamed."""
    with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is a diptych?"}],
            max_completion_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 40},  # fields that OpenAI does not have
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Stream a chat answer over gRPC.

python examples/sdk_stream.py [host:port]
"""

from __future__ import annotations

import sys

from diptych.client import Client, DiptychError


def main(address: str = "127.0.0.1:50050") -> int:
    question = [{"role": "user", "content": "What is a diptych?"}]
    with Client(address) as client:
        try:
            with client.stream(messages=question, max_tokens=64, explain=True) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
        except DiptychError as error:
            print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
            return 1
    answer = stream.result
    print(f"\n{answer.usage.completion_tokens} tokens, ended by {answer.finish_reason}", file=sys.stderr)
    if answer.explanation is not None:
        why = answer.explanation
        print(f"prompt by {why.prefill}, answer by {why.decode}, {why.kv_bytes} bytes of KV moved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

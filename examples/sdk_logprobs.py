"""Probabilities of the tokens of an answer.

python examples/sdk_logprobs.py [host:port]
"""

from __future__ import annotations

import math
import sys

from diptych.client import Client, DiptychError


def main(address: str = "127.0.0.1:50050") -> int:
    with Client(address) as client:
        try:
            answer = client.generate(prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=3)
        except DiptychError as error:
            print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
            return 1
    for choice in answer.choices:
        print(f"choice {choice.index}: {choice.text!r} ({choice.finish_reason})")
        for entry in choice.logprobs:
            others = ", ".join(f"{token_id} {math.exp(logprob):.1%}" for token_id, logprob in entry.top)
            print(f"  token {entry.token_id}: {math.exp(entry.logprob):.1%}, rank {entry.rank}; likeliest: {others}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Send many requests at once over one connection.

python examples/sdk_many.py [host:port]
"""

from __future__ import annotations

import asyncio
import sys

from diptych.client import AsyncClient, DiptychError, OverloadedError

WORDS = ["sea", "sky", "sun", "wind", "rain", "snow", "stone", "tree"]


async def ask(client: AsyncClient, word: str) -> str:
    for _ in range(3):
        try:
            return (await client.generate(prompt=f"A line about the {word}:", max_tokens=16, timeout_s=60.0)).text
        except OverloadedError as error:  # shed before any work: the server says when to retry
            await asyncio.sleep(error.retry_after_s or 1.0)
    raise OverloadedError("given up: the cluster is full")


async def main(address: str = "127.0.0.1:50050") -> int:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, word) for word in WORDS), return_exceptions=True)
    failed = 0
    for word, answer in zip(WORDS, answers, strict=True):
        if isinstance(answer, str):
            print(f"{word}: {answer.strip()}")
        elif isinstance(answer, DiptychError):
            failed += 1
            print(f"{word}: {type(answer).__name__}: {answer.message}", file=sys.stderr)
        else:
            raise answer
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))

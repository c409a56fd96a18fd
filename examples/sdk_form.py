"""A constrained answer (JSON schema), and a stream that survives a broken connection.

python examples/sdk_form.py [host:port]
"""

from __future__ import annotations

import sys
import uuid

from diptych.client import Client, DiptychError

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Name a large city and its population, as JSON."}]


def main(address: str = "127.0.0.1:50050") -> int:
    with Client(address) as client:
        try:
            answer = client.generate(messages=ASK, json_schema=SCHEMA, max_tokens=64, temperature=0)
            print("fits the schema:", answer.text)
            # After a break the stream continues behind the received tokens; the key prevents that the request runs
            # twice.
            key = str(uuid.uuid4())  # one per request, the same for its retries
            for delta in client.stream(messages=ASK, max_tokens=64, resume=True, idempotency_key=key):
                print(delta.text, end="", flush=True)
            print()
        except DiptychError as error:
            print(f"\n{type(error).__name__}: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""An answer in a form of its own: a JSON schema that it fits, and a stream that survives a broken connection."""

import sys

from diptych.client import Client, DiptychError

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Name a large city and its population, as JSON."}]


def main() -> None:
    with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050") as client:
        answer = client.generate(messages=ASK, json_schema=SCHEMA, max_tokens=64, temperature=0)
        print("fits the schema:", answer.text)
        try:
            # A broken stream goes on behind the tokens that are here; the key keeps it from running twice.
            for delta in client.stream(messages=ASK, max_tokens=64, resume=True, idempotency_key="example-1"):
                print(delta.text, end="", flush=True)
            print()
        except DiptychError as error:
            print(f"\n{error.reason}: {error.message}", file=sys.stderr)


if __name__ == "__main__":
    main()

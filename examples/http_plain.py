"""Stream an answer over HTTP with the standard library only.

python examples/http_plain.py [base URL]
"""

from __future__ import annotations

import json
import os
import sys
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen


def main(base_url: str = "http://127.0.0.1:8000/v1") -> int:
    body = {"prompt": "Once upon a time", "max_tokens": 32, "stream": True}
    headers = {"content-type": "application/json"}
    if key := os.environ.get("DIPTYCH_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    request = Request(f"{base_url}/completions", json.dumps(body).encode(), headers)  # noqa: S310 - the caller's own URL
    try:
        return show(request)
    except HTTPError as error:  # rejected: the body has the reason
        print(json.loads(error.read())["error"]["message"], file=sys.stderr)
    except (URLError, OSError) as error:
        print(f"no answer from {base_url}: {error}; `make up` starts a cluster", file=sys.stderr)
    return 1


def show(request: Request) -> int:
    """Print the answer while it is streamed. Returns: 0, or 1 if it is incomplete."""
    with urlopen(request, timeout=60) as answer:  # noqa: S310
        for line in answer:
            name, _, data = line.decode().strip().partition(": ")
            if name != "data":  # a blank line, an event's id, or a comment that keeps the connection open
                continue
            if data == "[DONE]":
                print()
                return 0
            event = json.loads(data)
            if "error" in event:
                print(f"\n{event['error']['message']}", file=sys.stderr)
                return 1
            print(event["choices"][0]["text"], end="", flush=True)
    print("\nthe answer was cut", file=sys.stderr)  # no [DONE]: the answer is incomplete
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

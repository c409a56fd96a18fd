"""Whether a cluster serves: /ready checks its parts, one generated token proves it."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    text: str
    explanation: dict[str, object]


def _connection(host: str, port: int, timeout_s: float, tls_cert: Path | None) -> http.client.HTTPConnection:
    """`tls_cert`: exactly the certificate of this router; its names are not checked."""
    if tls_cert is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context(cafile=str(tls_cert))
    context.check_hostname = False  # pinned
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


def _key_header() -> dict[str, str]:
    key = os.environ.get("DIPTYCH_API_KEY", "")
    return {"authorization": f"Bearer {key}"} if key else {}


def is_ready(host: str, port: int, *, timeout_s: float = 1.0, tls_cert: Path | None = None) -> tuple[bool, str]:
    """(ready, reason if not) from GET /ready, with the key in DIPTYCH_API_KEY. No listener: "not listening yet"."""
    connection = _connection(host, port, timeout_s, tls_cert)
    try:
        connection.request("GET", "/ready", headers=_key_header())
        response = connection.getresponse()
        body = response.read(65_536).decode(errors="replace")
        return response.status == 200, body
    except OSError:
        return False, "not listening yet"
    finally:
        connection.close()


def unserved_adapters(body: str) -> list[str]:
    """From the body of /ready: a line for each adapter of --lora-modules that could not be loaded."""
    try:
        reasons = json.loads(body)["reasons"]
    except (ValueError, LookupError, TypeError):
        return []
    return [str(reason) for reason in reasons if str(reason).startswith("adapter ")]


_PROMPT = "France is"


class NotServingYet(RuntimeError):
    """The process that took the request has no worker for it. With several router processes another one said that it is
    ready, and this one finds the workers a moment later."""


def first_answer(
    host: str, port: int, *, timeout_s: float, tls_cert: Path | None = None, both_pools: bool = True
) -> FirstAnswer:
    """Generate two tokens: prefill samples the first, the second needs the KV on decode.

    Raises: RuntimeError with the server's answer when it is not a completion, NotServingYet where that is a 503; OSError
        when the server cannot be reached in time.
    """
    body = json.dumps(
        {
            "prompt": _PROMPT,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
        }
        # also where decode alone would be faster
        | ({"local_prefill_max_tokens": 0} if both_pools else {})
    )
    connection = _connection(host, port, timeout_s, tls_cert)
    try:
        headers = {"content-type": "application/json", "x-diptych-explain": "1"} | _key_header()
        connection.request("POST", "/v1/completions", body=body, headers=headers)
        response = connection.getresponse()
        raw = response.read().decode(errors="replace")
    finally:
        connection.close()
    if response.status == 503:
        raise NotServingYet(f"HTTP 503: {raw[:500]}")
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {raw[:500]}")
    answer = json.loads(raw)
    return FirstAnswer(answer["choices"][0]["text"], answer.get("diptych") or {})

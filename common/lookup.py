"""DNS lookup of one host, on a daemon thread, at most one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading


def is_name(host: str) -> bool:
    """Whether `host` needs a resolver."""
    if not host:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


class NameLookup:
    """A resolver that does not answer blocks its thread without limit. Concurrent callers share one lookup."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._answer: asyncio.Future[str] | None = None

    async def failure(self, timeout_s: float) -> str:
        """Resolve the name, waiting at most `timeout_s` seconds. Returns: the reason of the failure; "" on success."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            threading.Thread(
                target=self._resolve, args=(asyncio.get_running_loop(), self._answer), name="name lookup", daemon=True
            ).start()
        answer = self._answer
        await asyncio.wait({answer}, timeout=timeout_s)
        if not answer.done():
            return f"the resolver does not answer for {self._host}"
        if self._answer is answer:
            self._answer = None
        return answer.result()

    def _resolve(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[str]) -> None:
        why = ""
        try:
            socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            why = f"{self._host} cannot be looked up: {error}"

        def set_answer() -> None:
            if not answer.done():
                answer.set_result(why)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_answer)

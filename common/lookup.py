"""One look-up of a host's name at a time, on a thread that nobody waits for at the end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading


def is_name(host: str) -> bool:
    """Whether a resolver has to be asked."""
    if not host:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


class NameLookup:
    """A resolver that does not answer keeps a thread for as long as it likes. Whoever asks again meanwhile waits for the same
    answer, so that there is never more than one."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._answer: asyncio.Future[str] | None = None

    async def found(self, timeout_s: float) -> str:
        """Why the name cannot be had, or "". Waits `timeout_s` at most."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            threading.Thread(
                target=self._look, args=(asyncio.get_running_loop(), self._answer), name="name lookup", daemon=True
            ).start()
        answer = self._answer
        await asyncio.wait({answer}, timeout=timeout_s)
        if not answer.done():
            return f"the resolver does not answer for {self._host}"
        if self._answer is answer:
            self._answer = None
        return answer.result()

    def _look(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[str]) -> None:
        why = ""
        try:
            socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            why = f"{self._host} cannot be looked up: {error}"

        def tell() -> None:
            if not answer.done():
                answer.set_result(why)

        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(tell)

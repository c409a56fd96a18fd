import asyncio
import socket
import threading

import pytest

from diptych.common.lookup import NameLookup, is_name
from diptych.common.store.interface import StoreError
from diptych.common.store.redis_store import RedisStore


@pytest.mark.parametrize(
    ("host", "name"), [("redis", True), ("redis.example", True), ("127.0.0.1", False), ("::1", False), ("", False)]
)
def test_what_needs_a_resolver(host, name):
    assert is_name(host) is name


class Resolver:
    """Answers when the test lets it."""

    def __init__(self, monkeypatch):
        self.asked = 0
        self.answer = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)

    def _ask(self, host, port, *_, **__):
        self.asked += 1
        self.answer.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def resolver(monkeypatch):
    found = Resolver(monkeypatch)
    yield found
    found.answer.set()


async def test_all_wait_for_one_answer(resolver):
    lookup = NameLookup("nowhere", 6379)
    for _ in range(3):
        assert "does not answer" in await lookup.failure(0.01)
    assert resolver.asked == 1
    waiting = [asyncio.create_task(lookup.failure(60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    resolver.answer.set()
    assert all("cannot be looked up" in why for why in await asyncio.gather(*waiting))
    assert resolver.asked == 1


async def test_a_store_behind_a_dead_resolver_leaves_no_pile(resolver):
    store = RedisStore("redis://nowhere:6379/0", timeout_s=0.02)
    for _ in range(10):
        with pytest.raises(StoreError):
            await store.ping()
    assert resolver.asked <= 2  # the first call's own, and one look-up
    resolver.answer.set()
    await store.close()

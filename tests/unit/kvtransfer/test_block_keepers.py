"""What is asked of a keeper of blocks: a folder, and a Mooncake store, whose client is a dict here."""

from __future__ import annotations

import errno
import socket
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.errors import ConfigError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.disk_messages import DiskBlock, DiskReply
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Admitted,
    EngineEvent,
    EngineRequest,
    Finished,
    KvMode,
    TierStored,
    TokensOut,
)
from diptych.engine.offline import OfflineEngine
from diptych.kvtransfer.disk.block_file import HEAD_BYTES, BadBlockError, identity_of
from diptych.kvtransfer.disk.block_folder import BlockFolder
from diptych.kvtransfer.disk.block_store import DiskBlockStore
from diptych.kvtransfer.disk.keeper import BlockKeeper
from diptych.kvtransfer.disk.mooncake import MooncakeKeeper, connect
from diptych.kvtransfer.disk.store_address import StoreAddress
from diptych.worker.config import WorkerConfig
from diptych.worker.process import run_process

PIECES = (300, 200)
SIZE = sum(PIECES)
IDENTITY, OTHER = identity_of("model", 1), identity_of("model", 2)
TENANT = "a" * 32
DEADLINE_S = 30.0


class DictStore:
    """As the client of a Mooncake store. Put under a name that is there, bytes stay as they are."""

    def __init__(self, kept: dict[str, bytes] | None = None) -> None:
        self.kept = {} if kept is None else kept
        self.code = 0
        self.leased: set[str] = set()
        """What was read a moment ago."""
        self.is_closed = False

    def put_parts(self, key: str, *parts: memoryview) -> int:
        if not self.code:
            self.kept.setdefault(key, b"".join(parts))
        return self.code

    def get_buffer(self, key: str) -> bytes | None:
        self.leased.add(key)
        return self.kept.get(key)

    def is_exist(self, key: str) -> int:
        return int(key in self.kept)

    def remove(self, key: str, force: bool) -> int:
        if key in self.leased and not force:
            return -706
        return 0 if self.kept.pop(key, None) is not None else -704

    def close(self) -> int:
        assert not self.is_closed
        self.is_closed = True
        return 0


class Kept:
    """A keeper, and its bytes by name."""

    def __init__(self, root: Path, kind: str, identity: bytes = IDENTITY) -> None:
        self.root, self.kind = root, kind
        self.store = DictStore()
        self.keeper: BlockKeeper
        if kind == "folder":
            self.keeper = BlockFolder(root, "w", identity, SIZE)
        else:
            self.keeper = MooncakeKeeper(self.store, identity, SIZE)
        self.keeper.open()

    def change(self, block: DiskBlock, content: bytes | None = None, **swap: DiskBlock) -> None:
        """Its bytes become `content`, or those of another block; None and no other: it is lost."""
        if isinstance(self.keeper, BlockFolder):
            path = Path(self.keeper._path(block))
            if swap:
                path.write_bytes(Path(self.keeper._path(swap["by"])).read_bytes())
            elif content is None:
                path.unlink()
            else:
                path.write_bytes(content)
        else:
            assert isinstance(self.keeper, MooncakeKeeper)
            name = self.keeper.name(block)
            if swap:
                self.store.kept[name] = self.store.kept[self.keeper.name(swap["by"])]
            elif content is None:
                del self.store.kept[name]
            else:
                self.store.kept[name] = content

    def content(self, block: DiskBlock) -> bytes:
        if isinstance(self.keeper, BlockFolder):
            return Path(self.keeper._path(block)).read_bytes()
        assert isinstance(self.keeper, MooncakeKeeper)
        return self.store.kept[self.keeper.name(block)]


@pytest.fixture(params=["folder", "store"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    one = Kept(tmp_path, request.param)
    yield one
    one.keeper.close()
    one.keeper.close()


def block(number: int) -> DiskBlock:
    return DiskBlock(number.to_bytes(16, "big"), TENANT, number)


def pieces(number: int) -> list[memoryview]:
    return [memoryview(bytes([number + at]) * size) for at, size in enumerate(PIECES)]


def write(kept: Kept, *numbers: int) -> None:
    kept.keeper.sync(list({kept.keeper.write(block(number), pieces(number)) for number in numbers}))


def read(kept: Kept, number: int) -> list[bytes]:
    into = [memoryview(bytearray(size)) for size in PIECES]
    kept.keeper.read(block(number), into)
    return [bytes(piece) for piece in into]


def bad(kept: Kept, number: int) -> str:
    with pytest.raises(BadBlockError) as error:
        read(kept, number)
    return error.value.reason


def test_what_is_written_is_read_piece_by_piece(kept: Kept) -> None:
    write(kept, 1, 2)
    assert read(kept, 1) == [bytes(piece) for piece in pieces(1)]
    assert read(kept, 2) == [bytes(piece) for piece in pieces(2)]
    assert kept.keeper.has(block(1))
    assert not kept.keeper.has(block(3))
    kept.keeper.drop_cached(block(1))
    assert read(kept, 1) == [bytes(piece) for piece in pieces(1)]


def test_what_is_not_there_is_missing_and_removed_without_an_error(kept: Kept) -> None:
    assert bad(kept, 1) == "missing"
    kept.keeper.remove(block(1))
    write(kept, 1)
    kept.keeper.remove(block(1))
    assert bad(kept, 1) == "missing"
    write(kept, 1)
    kept.change(block(1))
    assert bad(kept, 1) == "missing"


def test_other_bytes_are_never_taken_for_the_block(kept: Kept, tmp_path: Path) -> None:
    write(kept, 1, 2)
    whole = kept.content(block(1))
    assert len(whole) == HEAD_BYTES + SIZE
    for at in (0, 9, 30, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + SIZE - 1):
        changed = bytearray(whole)
        changed[at] ^= 1
        kept.change(block(1), bytes(changed))
        assert bad(kept, 1) in ("corrupt", "foreign")
    for content in (b"", whole[:-1], whole + b"x"):
        kept.change(block(1), content)
        assert bad(kept, 1) == "truncated"
    kept.change(block(1), by=block(2))
    assert bad(kept, 1) == "foreign"
    other = Kept(tmp_path / "other", kept.kind, OTHER)
    write(other, 1)
    kept.change(block(1), other.content(block(1)))
    assert bad(kept, 1) == "foreign"
    other.keeper.close()
    kept.change(block(1), whole)
    assert read(kept, 1) == [bytes(piece) for piece in pieces(1)]


# ---- a shared store ----


@pytest.mark.parametrize(("code", "name"), [(-200, errno.ENOSPC), (-800, errno.EIO)])
def test_a_store_that_takes_nothing_is_an_error_of_the_disk(tmp_path: Path, code: int, name: int) -> None:
    kept = Kept(tmp_path, "store")
    kept.store.code = code
    with pytest.raises(OSError, match=str(code)) as error:
        write(kept, 1)
    assert error.value.errno == name


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://host",
        "mooncake://:1",
        "mooncake://host:0",
        "http://host:1",
        "mooncake://host:99999",
        "mooncake://[::1:1",
        "mooncake://me@host:1",
        "mooncake://host:1/path",
        "mooncake://host:1?segment_bytes=x",
        "mooncake://host:1?segment_bytes=-1",
        "mooncake://host:1?segment_bytes=",
        "mooncake://host:1?segment_bytes",
        "mooncake://host:1?colour=red",
    ],
)
def test_an_address_that_cannot_be_is_refused_by_the_settings_name(url: str) -> None:
    with pytest.raises(ConfigError, match="kv_store"):
        StoreAddress.parse(url)
    with pytest.raises(ConfigError, match="kv_store"):
        WorkerConfig(role="decode", kv_store=url)


def test_a_store_replaces_the_folder() -> None:
    with pytest.raises(ConfigError, match=r"kv_store.*disk_kv_dir"):
        WorkerConfig(role="decode", kv_store="mooncake://host:1", disk_kv_dir="kv")


class Setup(DictStore):
    """The package's client. `asked`: what it was set up with."""

    asked: ClassVar[list[object]] = []
    code_of_setup: ClassVar[int] = 0

    def setup(self, *args: object) -> int:
        self.asked.extend(args)
        return self.code_of_setup


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> type[Setup]:
    """As if it were installed."""
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = Setup  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(Setup, "asked", [])
    return Setup


@pytest.fixture
def master() -> Iterator[int]:
    """The port of one that is there, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def started(url: str, tmp_path: Path) -> None:
    """A worker process with these settings, whose model is nowhere: it is refused for that, if for nothing else."""
    config = WorkerConfig(role="decode", kv_store=url, model=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError) as error:
        run_process(config, make_services=lambda runtime: ())
    assert (error.value.field, error.value.value) == ("kv_store", url)
    raise error.value


def test_without_the_package_a_worker_is_refused_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, master: int
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="mooncake-transfer-engine"):
        started(f"mooncake://127.0.0.1:{master}", tmp_path)


def test_without_a_master_a_worker_is_refused_before_it_loads(package: type[Setup], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=f"no master can be reached at 127.0.0.1:{port}"):
        started(f"mooncake://127.0.0.1:{port}", tmp_path)
    assert not package.asked


def test_the_address_and_its_options_are_the_stores(package: type[Setup], master: int) -> None:
    url = f"mooncake://127.0.0.1:{master}?protocol=rdma&device=mlx5_0&segment_bytes=7&host=me&metadata=http://m/"
    assert isinstance(connect(url, SIZE), package)
    assert package.asked == ["me", "http://m/", 7, 16 << 20, "rdma", "mlx5_0", f"127.0.0.1:{master}"]


def test_a_store_that_refuses_us_is_named(package: type[Setup], master: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "code_of_setup", -1)
    with pytest.raises(ConfigError, match="kv_store.*answers -1"):
        connect(f"mooncake://127.0.0.1:{master}", SIZE)


def test_a_block_that_was_read_a_moment_ago_can_be_removed_and_written_anew(tmp_path: Path) -> None:
    """A store keeps what was just read, and what has a name keeps its bytes: a damaged block would stay."""
    kept = Kept(tmp_path, "store")
    write(kept, 1)
    kept.change(block(1), b"damaged")
    assert bad(kept, 1) == "truncated"
    kept.keeper.remove(block(1))
    write(kept, 1)
    assert read(kept, 1) == [bytes(piece) for piece in pieces(1)]


PROMPT = tuple(range(200, 241))
"""Ten blocks and a token."""
_HEADER = IdentityHeader(b"k" * 32, "model", "tokenizer", "uint8", 4)


class Worker:
    """An engine with a store that it shares with others by `kept`."""

    def __init__(self, kept: dict[str, bytes], num_disk_blocks: int = 100) -> None:
        runner = FakeRunner(64, 4)
        self.client = DictStore(kept)
        keeper = MooncakeKeeper(self.client, IDENTITY, 4 * runner.kv_bytes_per_token)
        self.store = DiskBlockStore(
            keeper, FakeClock(), buffer_bytes=64 * keeper.block_bytes
        )  # shipped: 64 MiB a store
        self.store.bytes_per_s = 1e12
        self.replies: SimpleQueue[DiskReply] = SimpleQueue()
        self.store.begin(self.replies.put)
        config = EngineConfig(
            num_blocks=64, block_size=4, num_disk_blocks=num_disk_blocks, check_invariants=True,
            initial_prefill_tokens_per_s=1.0,
        )  # fmt: skip
        self.engine = OfflineEngine(LocalExecutor(runner), config, _HEADER, clock=FakeClock(), disk=self.store)
        self.engine.core.open_disk()

    def answer(self, num_files: int, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], int]:
        """Tokens, and tokens that came from the store; until all is written, and so many blocks are in this worker's account."""
        self.engine.send(EngineRequest("a", Prompt(prompt), SamplingParams(max_tokens=8, ignore_eos=True, seed=1)))
        self.events: list[EngineEvent] = []
        core, disk = self.engine.core, self.engine.core.scheduler.kv.disk
        while (
            not any(isinstance(one, Finished) for one in self.events) or disk.has_offers or disk.num_held != num_files
        ):
            worked = core.step()
            self.events += core.take_events()
            if not worked:  # nothing to do, until the store has read or written something
                self.engine.send(self.replies.get(timeout=DEADLINE_S))
        self.events += core.take_events()
        [admitted] = [one for one in self.events if isinstance(one, Admitted)]
        tokens = [token for one in self.events if isinstance(one, TokensOut) for token in one.token_ids]
        return tokens, sum(count for _, count in admitted.tiers)


@dataclass
class Sharing:
    """Workers of one store, which end with the test."""

    kept: dict[str, bytes] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)

    def worker(self, num_disk_blocks: int = 100) -> Worker:
        self.workers.append(Worker(self.kept, num_disk_blocks))
        return self.workers[-1]


@pytest.fixture
def sharing() -> Iterator[Sharing]:
    sharing = Sharing()
    yield sharing
    for worker in sharing.workers:
        worker.store.close(DEADLINE_S)
        assert worker.client.is_closed
    assert all(name.startswith(f"diptych/{IDENTITY.hex()}/") for name in sharing.kept)


def test_a_worker_reads_what_another_has_written_without_knowing_of_it(sharing: Sharing) -> None:
    first, second = sharing.worker(), sharing.worker()
    cold, from_store = first.answer(12)
    assert (from_store, len(sharing.kept)) == (0, 12)
    warm, from_store = second.answer(12)
    assert warm == cold
    assert from_store == 40
    announced = [key for one in second.events if isinstance(one, TierStored) for key in one.keys]
    assert len(announced) == 12


@pytest.mark.parametrize(("own_tokens", "looks"), [(len(PROMPT), True), (len(PROMPT) - 1, False)])
def test_decode_looks_in_a_shared_store_where_it_computes_the_prompt_itself(
    sharing: Sharing, own_tokens: int, looks: bool
) -> None:
    """It does not know what others have written, and what is not there would delay the first token that prefill sends."""
    first, second = sharing.worker(), sharing.worker()
    first.answer(12)
    wanted = EngineRequest("b", Prompt(PROMPT), SamplingParams(max_tokens=8), mode=KvMode.REMOTE, own_tokens=own_tokens)
    restore = second.engine.core.scheduler.plan_restore(wanted, 0.0)
    assert (restore is not None) is looks
    if restore is not None:
        assert len(restore.blocks) == 10
        second.engine.core.scheduler.end_restore(restore.name)


def test_what_the_store_has_let_go_is_computed_and_written_again(sharing: Sharing) -> None:
    first, kept = sharing.worker(), sharing.kept
    cold, _ = first.answer(12)
    first.store.close(DEADLINE_S)
    names = sorted(kept, key=lambda name: int(name.rpartition("-")[2]))
    for name in names[5:]:
        del kept[name]
    second = sharing.worker()
    warm, from_store = second.answer(12)
    assert (warm, from_store) == (cold, 20)
    assert set(kept) == set(names)
    assert not second.engine.core.scheduler.kv.disk.errors


def test_a_small_account_forgets_and_removes_nothing(sharing: Sharing) -> None:
    worker = sharing.worker(num_disk_blocks=3)
    for number, prompt in enumerate((PROMPT[:5], PROMPT[10:15]), start=1):
        worker.answer(3, prompt)
        assert len(sharing.kept) == 3 * number
    assert worker.engine.core.scheduler.kv.disk.num_evicted == 3

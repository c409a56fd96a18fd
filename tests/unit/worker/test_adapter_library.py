"""The adapters that a worker has in memory: loads, holds, room, and what is refused."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych.common.adapters.peft import MAX_RANK, AdapterFacts, read_adapter
from diptych.common.errors import (
    AdapterError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
)
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Command, DropAdapter, KeepAdapter, LoadedAdapter
from diptych.worker.adapters import AdapterLibrary, NoAdapters
from diptych.worker.config import MOST, WorkerConfig
from diptych_tests.lora import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6)}
DEADLINE_S = 60.0
UNKNOWN = "0f" * 16
RUNNER = FakeRunner(4, 16, max_loras=2)


def adapter_in(folder: Path, seed: int = 0, **fields: object) -> str:
    """Write an adapter. Returns: its id."""
    write_adapter(folder, SHAPES, seed=seed, **fields)
    return read_adapter(folder).id


class Engine:
    """What an engine knows, by the commands that it gets."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.commands: list[Command] = []

    def send(self, command: Command) -> None:
        self.commands.append(command)
        match command:
            case KeepAdapter(adapter):
                self.known.add(adapter.id)
            case DropAdapter(adapter_id):
                self.known.remove(adapter_id)


class Reading:
    """A runner's read_adapter that a test can hold."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.folders: list[str] = []

    def __call__(self, folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        self.folders.append(folder.name)
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        return RUNNER.read_adapter(folder, facts)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=DEADLINE_S)


def library_of(
    root: Path,
    engine: Engine,
    read: Callable[[Path, AdapterFacts], LoadedAdapter] = RUNNER.read_adapter,
    *,
    max_adapters: int = 4,
    timeout_s: float = DEADLINE_S,
    free_bytes: int = 1 << 30,
) -> AdapterLibrary:
    return AdapterLibrary(
        "w0",
        [str(root)],
        max_adapters=max_adapters,
        max_rank=16,
        timeout_s=timeout_s,
        read=read,
        send=engine.send,
        free_bytes=lambda: free_bytes,
    )


@asynccontextmanager
async def open_library(root: Path, *args: object, **options: object) -> AsyncIterator[tuple[AdapterLibrary, Engine]]:
    engine = Engine()
    library = library_of(root, engine, *args, **options)  # type: ignore[arg-type]
    try:
        yield library, engine
    finally:
        await library.close()


async def test_a_load_makes_an_adapter_known_and_an_unload_forgets_it(tmp_path: Path) -> None:
    first, second = adapter_in(tmp_path / "a", 1), adapter_in(tmp_path / "b", 2, rank=8, base_model_name_or_path="tiny")
    async with open_library(tmp_path) as (library, engine):
        assert not library.hold(first)
        loaded = await library.load(str(tmp_path / "b"))
        assert (loaded.id, loaded.rank, loaded.base_model, loaded.num_requests) == (second, 8, "tiny", 0)
        await library.load(str(tmp_path / "a"), first)
        assert engine.known == {first, second}
        assert [one.id for one in library.resident()] == [first, second]
        assert library.hold(second)
        assert [one.num_requests for one in library.resident()] == [1, 0]
        assert library.unload(first) == (True, 0)
        assert library.unload(first) == (False, 0)
        assert engine.known == {second}
        assert library.counts.by_outcome["loaded"] == 2


async def test_an_adapter_that_is_here_is_not_read_again(tmp_path: Path) -> None:
    reading = Reading()
    adapter = adapter_in(tmp_path / "a")
    async with open_library(tmp_path, reading) as (library, _):
        for folder in ("a", "a", "gone"):  # what an id names never changes, wherever it lay
            assert (await library.load(str(tmp_path / folder), adapter)).id == adapter
        await library.load(str(tmp_path / "a"))
        assert reading.folders == ["a"]


async def test_an_unloaded_adapter_stays_for_the_requests_that_hold_it(tmp_path: Path) -> None:
    adapter = adapter_in(tmp_path / "a")
    async with open_library(tmp_path) as (library, engine):
        for _ in range(2):
            await library.load_and_hold(adapter, str(tmp_path / "a"))
        assert library.unload(adapter) == (True, 2)
        library.release(adapter)
        assert library.hold(adapter)  # a retry of a request from before
        library.release(adapter)
        assert engine.known == {adapter}
        library.release(adapter)
        assert engine.known == set()
        assert not library.resident()


async def test_a_load_takes_an_unload_back(tmp_path: Path) -> None:
    adapter = adapter_in(tmp_path / "a")
    async with open_library(tmp_path) as (library, engine):
        await library.load_and_hold(adapter, str(tmp_path / "a"))
        library.unload(adapter)
        await library.load(str(tmp_path / "a"), adapter)
        library.release(adapter)
        assert engine.known == {adapter}


async def test_requests_of_one_adapter_wait_for_one_load(tmp_path: Path) -> None:
    reading = Reading()
    reading.gate.clear()
    adapter, other = adapter_in(tmp_path / "a", 1), adapter_in(tmp_path / "b", 2)
    async with open_library(tmp_path, reading) as (library, engine):
        waiting = [asyncio.create_task(library.load_and_hold(adapter, str(tmp_path / "a"))) for _ in range(3)]
        await reading.begun()
        waiting[0].cancel()  # the first one leaves: the others get what it began
        assert not engine.known
        reading.gate.set()
        await library.load_and_hold(other, str(tmp_path / "b"))
        await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting[0].cancelled()
        assert reading.folders.count("a") == 1
        assert {one.id: one.num_requests for one in library.resident()} == {adapter: 2, other: 1}


async def test_one_folder_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    """A hung file system keeps its thread: the load ends typed, and others are read meanwhile."""
    gate = threading.Event()

    def read(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        if folder.name == "hangs":
            gate.wait(DEADLINE_S)
        return RUNNER.read_adapter(folder, facts)

    hangs, other = adapter_in(tmp_path / "hangs", 1), adapter_in(tmp_path / "b", 2)
    engine = Engine()
    slow = library_of(tmp_path, engine, read, timeout_s=0.05)
    with pytest.raises(NoWorkerError, match=r"w0 did not load the adapter in .*/hangs within 0\.05 s"):
        await slow.load_and_hold(hangs, str(tmp_path / "hangs"))
    assert slow.counts.by_outcome["timeout"] == 1
    slow._timeout_s = DEADLINE_S
    await slow.load_and_hold(other, str(tmp_path / "b"))
    gate.set()
    await slow.load_and_hold(hangs, str(tmp_path / "hangs"))
    assert engine.known == {hangs, other}
    await slow.close()


async def test_the_one_used_longest_ago_makes_room_and_never_one_that_is_held(tmp_path: Path) -> None:
    ids = [adapter_in(tmp_path / str(i), i) for i in range(4)]
    async with open_library(tmp_path, max_adapters=2) as (library, engine):
        await library.load_and_hold(ids[0], str(tmp_path / "0"))
        await library.load(str(tmp_path / "1"))
        await library.load(str(tmp_path / "2"))
        assert engine.known == {ids[0], ids[2]}
        library.release(ids[0])
        await library.load_and_hold(ids[2], str(tmp_path / "2"))
        await library.load(str(tmp_path / "3"))
        assert engine.known == {ids[2], ids[3]}
        assert library.counts.evicted == 2


async def test_a_load_waits_for_room_and_ends_typed_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [adapter_in(tmp_path / str(i), i) for i in range(2)]
    engine = Engine()
    library, waits = library_of(tmp_path, engine, max_adapters=1), asyncio.Event()
    wait = library._room.wait

    async def noted() -> bool:
        waits.set()
        return await wait()

    monkeypatch.setattr(library._room, "wait", noted)
    await library.load_and_hold(ids[0], str(tmp_path / "0"))
    waiting = asyncio.create_task(library.load_and_hold(ids[1], str(tmp_path / "1")))
    await waits.wait()
    library.release(ids[0])
    await waiting
    assert engine.known == {ids[1]}
    library._timeout_s = 0.05
    with pytest.raises(
        OverloadedError, match=r"1 adapters in memory, and requests use all of them \(--max-cpu-loras\)"
    ):
        await library.load_and_hold(ids[0], str(tmp_path / "0"))
    assert library.counts.by_outcome["full"] == 1
    assert engine.known == {ids[1]}
    await library.close()


@pytest.mark.parametrize("damage", ["gone", "changed", "cut", "no json"])
async def test_files_that_are_not_what_was_registered_are_not_served(tmp_path: Path, damage: str) -> None:
    """The request fails here, and may run on another worker. A load by an operator says what is wrong."""
    folder = tmp_path / "a"
    adapter = adapter_in(folder)
    tensors = folder / "adapter_model.safetensors"
    match damage:
        case "gone":
            folder.rename(tmp_path / "b")
        case "changed":
            adapter_in(folder, 5)
        case "cut":
            tensors.write_bytes(tensors.read_bytes()[:-7])
        case "no json":
            (folder / "adapter_config.json").write_text("{")
    async with open_library(tmp_path) as (library, engine):
        with pytest.raises(NoWorkerError, match=f"w0 cannot load the adapter {adapter}: .*a"):
            await library.load_and_hold(adapter, str(folder))
        with pytest.raises(AdapterError):
            await library.load(str(folder), adapter)
        assert not engine.commands
        assert library.counts.by_outcome["refused"] == 2


async def test_files_that_change_between_hash_and_load_are_not_served(tmp_path: Path) -> None:
    adapter = adapter_in(tmp_path / "a")

    def read(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        adapter_in(folder, 5)
        if read_adapter(folder).id != facts.id:
            raise AdapterError("another adapter lies there now", param="adapter")
        return RUNNER.read_adapter(folder, facts)

    async with open_library(tmp_path, read) as (library, engine):
        with pytest.raises(NoWorkerError, match="another adapter lies there now"):
            await library.load_and_hold(adapter, str(tmp_path / "a"))
        assert not engine.commands


async def test_only_allowed_folders_are_read_whatever_links_say(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "lora", tmp_path / "secret"
    adapter = adapter_in(allowed / "a")
    adapter_in(secret / "a")
    (allowed / "link").symlink_to(secret / "a")
    (allowed / "inner").symlink_to(allowed / "a")
    (allowed / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (allowed / "files" / name).symlink_to(secret / "a" / name)
    (allowed / "loop").symlink_to(allowed / "loop")
    (tmp_path / "lora-2").symlink_to(secret)  # a longer name is no folder below
    async with open_library(allowed) as (library, _):
        for folder in ("secret/a", "lora/../secret/a", "lora/link", "lora/files", "lora-2/a"):
            with pytest.raises(AdapterError, match=r"not in an allowed folder \(--lora-dir\)"):
                await library.load(f"{tmp_path}/{folder}")
        for folder, why in (
            ("lora/loop", "[Ss]ym"),
            ("lora/none", "No such file"),
            ("lora", "adapter_config.json"),
        ):
            with pytest.raises(AdapterError, match=why):
                await library.load(f"{tmp_path}/{folder}")
        assert (await library.load(str(allowed / "inner"))).id == adapter


async def test_what_is_no_file_or_too_large_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe waits for a writer."""
    adapter_in(tmp_path / "pipe")
    (tmp_path / "pipe/adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "pipe/adapter_model.safetensors")
    adapter_in(tmp_path / "large")
    async with open_library(tmp_path, free_bytes=200) as (library, _):
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is no file"):
            await library.load(str(tmp_path / "pipe"))
        with pytest.raises(AdapterError, match="200 bytes of memory are free"):
            await library.load(str(tmp_path / "large"))


async def test_a_rank_above_the_maximum_is_refused_with_the_numbers(tmp_path: Path) -> None:
    adapter = adapter_in(tmp_path / "a", rank=17)
    async with open_library(tmp_path) as (library, _):
        with pytest.raises(AdapterError, match="17.*16") as caught:
            await library.load(str(tmp_path / "a"))
        assert caught.value.param == "r"
        with pytest.raises(NoWorkerError, match="17.*16"):  # another worker may take it
            await library.load_and_hold(adapter, str(tmp_path / "a"))


async def test_what_is_no_id_or_has_no_folder_is_refused(tmp_path: Path) -> None:
    async with open_library(tmp_path) as (library, _):
        with pytest.raises(InvalidRequestError, match="'french' is no adapter's id"):
            await library.load_and_hold("french", str(tmp_path))
        with pytest.raises(NoWorkerError, match=f"w0 lacks the adapter {UNKNOWN}"):
            await library.load_and_hold(UNKNOWN, "")
        with pytest.raises(InvalidRequestError, match="folder"):
            await library.load("")
        with pytest.raises(InvalidRequestError, match="no adapter's id"):
            await library.load(str(tmp_path), "french")
        with pytest.raises(NoWorkerError, match="--enable-lora"):
            await NoAdapters().load_and_hold(UNKNOWN, str(tmp_path))


async def test_a_fault_of_the_reader_reaches_every_request_that_waits_and_the_next_load_is_anew(tmp_path: Path) -> None:
    adapter = adapter_in(tmp_path / "a")
    broken = [True]

    def read(folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        if broken.pop() if broken else False:
            raise MemoryError("no room")
        return RUNNER.read_adapter(folder, facts)

    async with open_library(tmp_path, read) as (library, engine):
        waiting = [library.load_and_hold(adapter, str(tmp_path / "a")) for _ in range(2)]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, InternalError)
            assert "no room" in outcome.message
        await library.load_and_hold(adapter, str(tmp_path / "a"))
        assert engine.known == {adapter}
        assert library.counts.by_outcome == {"loaded": 1, "refused": 0, "full": 0, "timeout": 0, "failed": 1}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"enable_lora": True}, "lora_dir"),
        ({"lora_dir": ("/",)}, "lora_dir"),
        ({"enable_lora": True, "lora_dir": ("",)}, "lora_dir"),
        ({"max_loras": 65}, "max_cpu_loras"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 65}, "max_lora_rank"),
        ({"lora_load_timeout_s": 0.0}, "lora_load_timeout_s"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        WorkerConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_largest_rank_is_that_of_the_readers(tmp_path: Path) -> None:
    assert MOST["max_lora_rank"] == MAX_RANK
    with pytest.raises(ConfigError, match="lora_dir.*is no folder"):
        library_of(tmp_path / "none", Engine())

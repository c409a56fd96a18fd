"""The LoRA adapters that this worker has in host memory, by id.

    unknown --load(folder)--> reading in a thread --its id is the expected one--> resident --KeepAdapter--> engine
    resident --hold--> held by requests --release--> resident
    resident --unload, or the least recently used one when another needs its room--> unknown     (DropAdapter)
    held     --unload--> leaving: dropped with the last request that holds it

Requests name an adapter by its id, a hash of its content, so what is loaded under an id is always the same. A request that
names one that is not here waits for its load, alone: others, and the engine, go on. Loads of the same adapter are one.

Everything but reading files runs on the event loop.
"""

from __future__ import annotations

import asyncio
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from diptych.common.adapters.peft import TENSORS_FILE, AdapterFacts, read_adapter
from diptych.common.errors import (
    AdapterError,
    DiptychError,
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
)
from diptych.common.model_files import ADAPTER_FILE
from diptych.common.request import ADAPTER, is_adapter_id
from diptych.engine.messages import Command, DropAdapter, KeepAdapter, LoadedAdapter
from diptych.worker.config import lora_folders

log = structlog.get_logger(__name__)
T = TypeVar("T")

OUTCOMES = ("loaded", "refused", "full", "timeout", "failed")
_MAX_THREADS = 2
"""That read at once. One that hangs, on a file system that does not answer, keeps its place."""
_TRIES = 3
"""An adapter that was loaded can be gone again before its request runs: others needed the room."""


class Adapters(Protocol):
    """What services need: adapters that requests hold."""

    def hold(self, adapter_id: str) -> bool:
        """Keep it in memory until `release`. False: it is not here."""
        ...

    async def load_and_hold(self, adapter_id: str, folder: str) -> None:
        """The same; an adapter that is not here is loaded first. Cancelling the caller leaves the load to others.

        Raises: InvalidRequestError for what is no id; NoWorkerError when this worker cannot load it, also not in time;
            OverloadedError when all adapters here are held; InternalError. All name the field ADAPTER, and contain words for
            operators: see common/adapters/load_errors.py.
        """
        ...

    def release(self, adapter_id: str) -> None:
        """Once for each hold."""
        ...


class NoAdapters:
    """Of a worker that serves none. Implements Adapters."""

    def hold(self, adapter_id: str) -> bool:
        return False

    async def load_and_hold(self, adapter_id: str, folder: str) -> None:
        raise NoWorkerError("this worker serves no adapters: start it with --enable-lora", param=ADAPTER)

    def release(self, adapter_id: str) -> None:
        raise AssertionError("nothing is held")


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """num_requests: that hold it."""

    id: str
    rank: int
    num_bytes: int
    base_model: str
    num_requests: int


@dataclass(slots=True)
class LoadCounts:
    """Since the start. by_outcome: "loaded", "refused" (for what lies in the folder), "full" (requests used all adapters in
    memory until the bound), "timeout" or "failed"."""

    by_outcome: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    evicted: int = 0


@dataclass(slots=True)
class _Entry:
    loaded: LoadedAdapter
    base_model: str
    num_holds: int = 0
    leaving: bool = False


class AdapterLibrary:
    """Implements Adapters.

    Args:
        worker_id: for messages.
        folders: adapters are read from these, and from folders in them. Raises ConfigError for one that is none.
        max_adapters: in memory at once, those that are being read included.
        max_rank: of an adapter.
        timeout_s: of one load, waiting for room included.
        read: what the engine's runner makes of an adapter. Called in a thread; may raise AdapterError.
        send: a command to the engine.
        on_loaded: called with the seconds of each load that succeeded.
        free_bytes: memory for the files of an adapter.
    """

    def __init__(
        self,
        worker_id: str,
        folders: Sequence[str],
        *,
        max_adapters: int,
        max_rank: int,
        timeout_s: float,
        read: Callable[[Path, AdapterFacts], LoadedAdapter],
        send: Callable[[Command], None],
        on_loaded: Callable[[float], None] = lambda seconds: None,
        free_bytes: Callable[[], int],
    ) -> None:
        self._worker_id = worker_id
        self._folders = lora_folders(folders)
        self._max_adapters, self._max_rank, self._timeout_s = max_adapters, max_rank, timeout_s
        self._read, self._send, self._on_loaded, self._free_bytes = read, send, on_loaded, free_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The least recently used one first."""
        self._num_reading = 0
        self._loads: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._room = asyncio.Event()
        self.counts = LoadCounts()

    # ---- for requests ----

    def hold(self, adapter_id: str) -> bool:
        """See Adapters."""
        entry = self._entries.get(adapter_id)
        if entry is None:
            return False
        self._entries.move_to_end(adapter_id)
        entry.num_holds += 1
        return True

    async def load_and_hold(self, adapter_id: str, folder: str) -> None:
        """See Adapters."""
        if not is_adapter_id(adapter_id):
            raise InvalidRequestError(f"{adapter_id!r} is no adapter's id", param="adapter")
        for _ in range(_TRIES):
            if self.hold(adapter_id):
                return
            if not folder:
                raise NoWorkerError(
                    f"worker {self._worker_id} lacks the adapter {adapter_id}, and has no folder of it", param=ADAPTER
                )
            try:
                await self._load_once(folder, adapter_id)
            except (AdapterError, InternalError) as error:
                # An AdapterError: it was one that can be served when it was registered.
                kind = NoWorkerError if isinstance(error, AdapterError) else InternalError
                what = f"worker {self._worker_id} cannot load the adapter {adapter_id}"
                raise kind(f"{what}: {error.message}", param=ADAPTER) from None
        if not self.hold(adapter_id):
            raise self._full()

    def release(self, adapter_id: str) -> None:
        """See Adapters."""
        entry = self._entries[adapter_id]
        entry.num_holds -= 1
        if entry.num_holds:
            return
        if entry.leaving:
            self._drop(adapter_id)
        self._room.set()

    # ---- for operators ----

    async def load(self, folder: str, expected_id: str = "") -> ResidentAdapter:
        """Read an adapter, and have it in memory. Nothing is read if the expected one is here.

        Raises: AdapterError naming the field, the file or the tensor; NoWorkerError when it takes too long; OverloadedError when
            all adapters here are held.
        """
        if expected_id and not is_adapter_id(expected_id):
            raise InvalidRequestError(f"{expected_id!r} is no adapter's id", param="expected_id")
        if not folder:
            raise InvalidRequestError("folder is not set", param="folder")
        adapter_id = expected_id
        for _ in range(_TRIES):
            if adapter_id in self._entries:
                entry = self._entries[adapter_id]
                self._entries.move_to_end(adapter_id)
                entry.leaving = False
                return _resident(adapter_id, entry)
            adapter_id = await self._load_once(folder, expected_id)
        raise self._full()

    def unload(self, adapter_id: str) -> tuple[bool, int]:
        """Returns: whether it was here, and how many requests hold it still."""
        entry = self._entries.get(adapter_id)
        if entry is None:
            return False, 0
        if entry.num_holds:
            entry.leaving = True
        else:
            self._drop(adapter_id)
            self._room.set()
        return True, entry.num_holds

    def resident(self) -> list[ResidentAdapter]:
        """Those in memory, the most recently used one first. From any thread."""
        return [_resident(adapter_id, entry) for adapter_id, entry in reversed(list(self._entries.items()))]

    async def close(self) -> None:
        """End the loads. Their threads are left behind."""
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    # ---- loading ----

    async def _load_once(self, folder: str, expected_id: str) -> str:
        """Join the load of this folder, or begin it. Returns: the id. Raises: as `load`."""
        key = (folder, expected_id)
        task = self._loads.get(key)
        if task is None:
            task = self._loads[key] = asyncio.create_task(self._load(folder, expected_id), name=f"load {folder}")
            task.add_done_callback(lambda done: self._on_load_ended(key, done))
        return await asyncio.shield(task)

    def _on_load_ended(self, key: tuple[str, str], task: asyncio.Task[str]) -> None:
        del self._loads[key]
        if not task.cancelled():
            task.exception()  # those that waited for it may be gone

    async def _load(self, folder: str, expected_id: str) -> str:
        began, outcome = asyncio.get_running_loop().time(), "failed"
        try:
            async with asyncio.timeout(self._timeout_s):
                path, facts = await self._in_thread(self._look_into, folder, expected_id)
                if facts.id not in self._entries:
                    outcome = "full"
                    await self._make_room()
                    outcome = "failed"
                    await self._read_into_memory(path, facts)
            outcome = "loaded"
        except AdapterError as error:
            outcome = "refused"
            log.warning("an adapter was not loaded", folder=folder, error=error.message)
            raise
        except TimeoutError:
            log.warning("loading an adapter took too long", folder=folder, timeout_s=self._timeout_s, why=outcome)
            if outcome == "full":
                raise self._full() from None
            outcome = "timeout"
            raise NoWorkerError(
                f"worker {self._worker_id} did not load the adapter in {folder} within {self._timeout_s:g} s",
                param=ADAPTER,
            ) from None
        finally:
            self.counts.by_outcome[outcome] += 1
        seconds = asyncio.get_running_loop().time() - began
        self._on_loaded(seconds)
        log.info("adapter loaded", folder=folder, id=facts.id, rank=facts.rank, seconds=round(seconds, 3))
        return facts.id

    async def _make_room(self) -> None:
        """For one more adapter; it is taken by the next one to read."""
        while len(self._entries) + self._num_reading >= self._max_adapters and not self._evict():
            self._room.clear()
            await self._room.wait()

    async def _read_into_memory(self, path: Path, facts: AdapterFacts) -> None:
        self._num_reading += 1
        try:
            loaded = await self._in_thread(self._read, path, facts)
        finally:
            self._num_reading -= 1
            self._room.set()
        if facts.id not in self._entries:  # from another folder, meanwhile
            self._entries[facts.id] = _Entry(loaded, facts.base_model)
            self._send(KeepAdapter(loaded))

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"worker {self._worker_id} has {len(self._entries)} adapters in memory, and requests use all of them "
            "(--max-cpu-loras)",
            param=ADAPTER,
            retry_after_s=1.0,
        )

    def _evict(self) -> bool:
        """Drop the least recently used adapter that no request holds. False: there is none."""
        unused = next((name for name, entry in self._entries.items() if not entry.num_holds), None)
        if unused is None:
            return False
        self._drop(unused)
        self.counts.evicted += 1
        return True

    def _drop(self, adapter_id: str) -> None:
        del self._entries[adapter_id]
        self._send(DropAdapter(adapter_id))

    # ---- in threads ----

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        """In a daemon thread: one that hangs must not keep the process from ending. Raises: a DiptychError of it, or
        InternalError."""
        await self._threads.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def resolve(value: T | None, error: DiptychError | None) -> None:
            self._threads.release()
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, failure = None, None
            try:
                value = function(*args)
            except DiptychError as error:
                failure = error
            except Exception as error:  # a bug must not leave requests waiting for the deadline
                log.exception("unexpected error in loading an adapter")
                failure = InternalError(f"unexpected error in loading an adapter: {error!r}")
            try:
                loop.call_soon_threadsafe(resolve, value, failure)
            except RuntimeError:
                log.debug("an adapter was read too late: the loop is closed")

        try:
            threading.Thread(target=work, name="load-adapter", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._threads.release()
            raise InternalError(f"no thread for loading an adapter: {error}") from None
        return await answer

    def _look_into(self, folder: str, expected_id: str) -> tuple[Path, AdapterFacts]:
        """What lies there. Raises: AdapterError, also for a folder that is not allowed, and for another adapter."""
        path = self._allowed(folder)
        facts = read_adapter(path, self._max_rank)
        if expected_id and facts.id != expected_id:
            raise AdapterError(f"{folder} holds the adapter {facts.id}, not {expected_id}", param="adapter")
        return path, facts

    def _allowed(self, folder: str) -> Path:
        """The folder without links. Raises: AdapterError when it, or a file in it, is not below the allowed ones or too large."""
        path = self._below("folder", Path(folder), folder)
        num_bytes = 0
        for name in (ADAPTER_FILE, TENSORS_FILE):
            try:
                (path / name).lstat()
            except OSError:
                continue  # the reader says why, and what lies there instead
            found = self._below(name, path / name, f"{folder}/{name}").stat()
            if not stat.S_ISREG(found.st_mode):
                raise AdapterError(f"{folder}/{name} is no file", param=name)
            num_bytes += found.st_size
        if num_bytes > (free := self._free_bytes()):
            raise AdapterError(
                f"{folder} holds {num_bytes:,} bytes, and {free:,} bytes of memory are free", param=TENSORS_FILE
            )
        return path

    def _below(self, what: str, path: Path, shown: str) -> Path:
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise AdapterError(f"{shown}: {why}", param=what) from None
        if not any(real.is_relative_to(allowed.resolve()) for allowed in self._folders):
            allowed = ", ".join(map(str, self._folders))
            raise AdapterError(f"{shown} is not in an allowed folder (--lora-dir): {allowed}", param=what)
        return real


def _resident(adapter_id: str, entry: _Entry) -> ResidentAdapter:
    loaded = entry.loaded
    return ResidentAdapter(adapter_id, loaded.rank, loaded.num_bytes, entry.base_model, entry.num_holds)

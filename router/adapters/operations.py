"""Loading, unloading and routing of adapters: at the workers first, then in the registry.

    load      every usable worker that takes adapters of this rank reads the folder, and all find the same id --> a version of
              the name
    unload    the name leaves the registry --> ids that no name has are dropped at the workers; running answers end with them
    route     another pointer: canary, promote, rollback; first the workers read the version's folder again, which must hold
              what it held

A request that was admitted before a change ends with the version that it has. One that is admitted after the answer to a
change sees it at every router, because the answer waits until the others have read the registry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from diptych.common.errors import DiptychError, InvalidRequestError, ModelNotFoundError, NoWorkerError
from diptych.common.request import is_adapter_id
from diptych.common.store.adapters import (
    MAX_FOLDER_CHARS,
    AdapterEntry,
    AdapterTable,
    AdapterVersion,
    check_load,
    check_name,
    check_share,
    newly_answering,
    other_base_models,
    promoted,
    rolled_back,
    unused_ids,
    with_canary,
    with_version,
)
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.adapters.base_model import other_base
from diptych.router.adapters.registry import AdapterRegistry, Change
from diptych.router.adapters.resolution import Allowed, anybody

log = structlog.get_logger(__name__)

CHANGE_TIMEOUT_S = 50.0
"""Of one change, waiting for its turn included: longer than a worker may take, shorter than operators' tools wait."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What a worker found in a folder. `rank`: the largest of its modules. `base_model`: as its configuration says."""

    adapter_id: str
    rank: int
    num_bytes: int
    base_model: str = ""


def able_to_serve(
    answers: Mapping[str, LoadedAdapter | DiptychError], records: Mapping[str, WorkerRecord]
) -> dict[str, LoadedAdapter | DiptychError]:
    """The answers without the errors of workers that take smaller ranks only, where a decode worker has loaded the adapter.
    Args: answers, records: by id of the worker."""
    decodes = [
        one for name, one in answers.items() if isinstance(one, LoadedAdapter) and records[name].role == "decode"
    ]
    rank = max((one.rank for one in decodes), default=0)
    return {
        name: one
        for name, one in answers.items()
        if isinstance(one, LoadedAdapter) or records[name].max_lora_rank >= rank
    }


class AdapterWorkers(Protocol):
    """The workers of one model, see Cluster."""

    async def load_adapter(self, folder: str) -> dict[str, LoadedAdapter | DiptychError]:
        """By id of every usable worker that takes adapters: what it found, or why it could not load it."""
        ...

    async def unload_adapter(self, adapter_id: str) -> None:
        """Workers that do not answer keep it until they need the room."""
        ...


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load an adapter; values are untrusted.

    Args:
        lora_path: the folder, as the workers open it.
        model: the base model's name; "": the only one.
        load_inplace: replace the stable version of a name that exists.
        canary_share: above 0: the loaded version answers this share of the requests, and the stable one stays.
    """

    lora_name: object = ""
    lora_path: object = ""
    model: object = ""
    load_inplace: object = False
    canary_share: object = 0.0


class AdapterOperations:
    """Operations of one router process.

    Args:
        registry: raises NoWorkerError before the router's start.
        workers: by name of the base model.
        others_read_s: how long a change takes to reach every other router; 0.0: there is none.
        wall: Unix seconds.
        timeout_s: of one change.
        names: of a base model, see base_model.py.
    """

    def __init__(
        self,
        registry: Callable[[], AdapterRegistry],
        workers: Callable[[], Mapping[str, AdapterWorkers]],
        *,
        others_read_s: Callable[[], float] = lambda: 0.0,
        wall: Callable[[], float] = time.time,
        timeout_s: float = CHANGE_TIMEOUT_S,
        names: Callable[[str], Collection[str]] = lambda model: (model,),
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._others_read_s = others_read_s
        self._wall = wall
        self._timeout_s = timeout_s
        self._names = names
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # while one is held or waited for
        self.may_use: Allowed = anybody
        """By (tenant, name of an adapter)."""

    def entries(self, tenant: str | None = None) -> list[AdapterEntry]:
        """Of the models of this router, by name. `tenant`: those that it may use; None: all."""
        models = self._workers()
        return [
            entry
            for _, entry in sorted(self._registry().table.entries.items())
            if entry.model in models and (tenant is None or self.may_use(tenant, entry.name))
        ]

    async def load(self, request: LoadRequest) -> AdapterEntry:
        """Raises: InvalidRequestError naming the field, also where a worker refuses the files or they differ between workers;
        ModelNotFoundError; NoWorkerError."""
        if not request.lora_name or not request.lora_path:
            param = "lora_path" if request.lora_name else "lora_name"
            raise InvalidRequestError("Both 'lora_name' and 'lora_path' must be provided.", param=param)
        name, folder, share = check_name(request.lora_name), request.lora_path, check_share(request.canary_share)
        if not isinstance(folder, str) or len(folder) > MAX_FOLDER_CHARS or not folder.isprintable():
            rule = f"lora_path must be a printable path of at most {MAX_FOLDER_CHARS} characters"
            raise InvalidRequestError(rule, param="lora_path")
        if not isinstance(request.load_inplace, bool):
            raise InvalidRequestError("load_inplace must be true or false", param="load_inplace")
        in_place = request.load_inplace
        if name in self._workers():
            raise InvalidRequestError(f"lora_name: {name} is the name of a model", param="lora_name")
        model, workers = self._model(request.model)

        def change(table: AdapterTable, found: LoadedAdapter) -> AdapterEntry:
            number, rank = table.next_number(name), max(1, found.rank)
            other = other_base(found.base_model, self._names(model))
            version = AdapterVersion(number, found.adapter_id, folder, rank, found.num_bytes, int(self._wall()), other)
            fresh = AdapterEntry(name, model, (version,), stable=number)
            return with_version(table.entries.get(name), fresh, in_place=in_place, canary_share=share)

        async with self._turn(name):
            await self._registry().refresh()
            # Before anything is loaded for it.
            check_load(self._registry().find(name), name, model, in_place=in_place, canary_share=share)
            found = _same(folder, await workers.load_adapter(folder))
            entry = await self._change(name, lambda _, table: change(table, found))
        assert entry is not None
        log.info("adapter loaded", adapter=name, adapter_id=found.adapter_id, stable=entry.stable, canary=entry.canary)
        if warning := other_base_models(model, [(one.number, one.other_base) for one in entry.versions]):
            log.warning("an adapter of another base model", adapter=name, warning=warning)
        return entry

    async def unload(self, lora_name: object) -> AdapterEntry:
        """Returns: its last entry. Raises: ModelNotFoundError; as `load`."""
        if not lora_name:
            raise InvalidRequestError("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
        name, gone = check_name(lora_name), None
        async with self._turn(name):

            def change(entry: AdapterEntry | None, table: AdapterTable) -> None:
                nonlocal gone
                gone = self._known(entry, name)

            await self._change(name, change)
            assert gone is not None
            workers = self._workers()[gone.model]
            unused = unused_ids(gone, None, self._registry().table)
            await asyncio.gather(*(workers.unload_adapter(one) for one in unused))
        log.info("adapter unloaded", adapter=name, num_ids=len(unused))
        return gone

    async def set_canary(self, lora_name: object, version: object, share: object) -> AdapterEntry:
        """Of a version that was loaded already. `share`: 0: no canary. Raises: as `unload`."""
        number, part = _number(version), check_share(share)
        return await self._route(lora_name, lambda entry: with_canary(entry, number or entry.canary, part))

    async def promote(self, lora_name: object) -> AdapterEntry:
        """The canary becomes the stable version. Raises: as `unload`."""
        return await self._route(lora_name, promoted)

    async def roll_back(self, lora_name: object, version: object = 0) -> AdapterEntry:
        """See common.store.adapters.rolled_back. Raises: as `unload`."""
        number = _number(version)
        return await self._route(lora_name, lambda entry: rolled_back(entry, number))

    async def _route(self, lora_name: object, change: Callable[[AdapterEntry], AdapterEntry]) -> AdapterEntry:
        name = check_name(lora_name)
        async with self._turn(name):
            await self._registry().refresh()
            before = self._known(await self._registry().look_up(name), name)
            for version in newly_answering(before, change(before)):
                await self._check_loads(before, version)
            entry = await self._change(name, lambda entry, _: change(self._known(entry, name)))
        assert entry is not None
        log.info("adapter routed", adapter=name, stable=entry.stable, canary=entry.canary, share=entry.canary_share)
        return entry

    async def _check_loads(self, entry: AdapterEntry, version: AdapterVersion) -> None:
        """Raises: InvalidRequestError where a worker finds no adapter in the folder, or another one; NoWorkerError where none
        answers. One that answers is enough: a rollback may be urgent."""
        found = await self._workers()[entry.model].load_adapter(version.folder)
        what = f"version: {version.number} of {entry.name} cannot be loaded from {version.folder} any more"
        for worker_id, one in sorted(found.items()):
            if isinstance(one, LoadedAdapter) and one.adapter_id != version.adapter_id:
                rule = f"{what}: worker {worker_id} finds other content there (adapter {one.adapter_id})"
                raise InvalidRequestError(rule, param="version")
            if isinstance(one, InvalidRequestError):
                raise InvalidRequestError(f"{what}: worker {worker_id}: {one.message}", param="version")
        if not any(isinstance(one, LoadedAdapter) for one in found.values()):
            _same(version.folder, found)

    async def _change(self, name: str, change: Change) -> AdapterEntry | None:
        before, after = await self._registry().change(name, change)
        if before != after and (wait_s := self._others_read_s()) > 0:
            await asyncio.sleep(wait_s)
        return after

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One change of a name at a time. Raises: NoWorkerError when it takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s), self._locks.setdefault(name, asyncio.Lock()):
                yield
        except TimeoutError:
            text = f"adapter {name}: not done within {self._timeout_s:.0f} s, waiting for other changes of it included"
            raise NoWorkerError(text, retry_after_s=1.0) from None

    def _known(self, entry: AdapterEntry | None, name: str) -> AdapterEntry:
        if entry is None or entry.model not in self._workers():
            raise ModelNotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        return entry

    def _model(self, model: object) -> tuple[str, AdapterWorkers]:
        models = self._workers()
        if not models:
            raise NoWorkerError("the router is not running")
        if model == "" and len(models) == 1:
            return next(iter(models.items()))
        if not isinstance(model, str) or not model:
            raise InvalidRequestError(f"model must be one of {', '.join(map(repr, models))}", param="model")
        if model not in models:
            shown = model[:128].encode("ascii", "replace").decode()
            raise ModelNotFoundError(f"the model {shown!r} does not exist", param="model")
        return model, models[model]


def _number(version: object) -> int:
    """Raises: InvalidRequestError."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidRequestError("version must be a whole number from 1", param="version")
    return version


def _same(folder: str, found: Mapping[str, LoadedAdapter | DiptychError]) -> LoadedAdapter:
    """What all workers found. Raises: the error of one of them; InvalidRequestError where they differ or there is none."""
    if not found:
        rule = "no usable worker takes adapters: start the workers with --enable-lora and --lora-dir"
        raise InvalidRequestError(rule, param="lora_path")
    for worker_id, one in sorted(found.items()):
        if isinstance(one, DiptychError):
            named = one.message.startswith(f"worker {worker_id} ")
            text = one.message if named else f"worker {worker_id}: {one.message}"
            raise type(one)(text, param="lora_path", retry_after_s=one.retry_after_s)
    loaded = {worker_id: one for worker_id, one in found.items() if isinstance(one, LoadedAdapter)}
    first_id, first = min(loaded.items())
    for worker_id, one in sorted(loaded.items()):
        if one.adapter_id != first.adapter_id:
            rule = f"lora_path: {folder} holds different files at {first_id} and at {worker_id}"
            raise InvalidRequestError(rule, param="lora_path")
        if not is_adapter_id(one.adapter_id):
            raise InvalidRequestError(f"worker {worker_id} names no adapter id", param="lora_path")
    return first

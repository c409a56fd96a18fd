"""Adapters that are loaded at the start: --lora-modules NAME=FOLDER.

wait until workers are usable -> each name that the registry does not have is loaded -> what failed is tried again

The pause between two tries doubles while the reasons stay the same: up to MAX_PAUSE_S where a worker refuses the files, which
only somebody who changes them can mend, and up to MAX_WAIT_S else.

A name that the registry has keeps its versions: a restart undoes no rollback. Where none of them is of the folder that is
named here, the log says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from diptych.common.errors import DiptychError, InvalidRequestError
from diptych.common.store.adapters import AdapterEntry
from diptych.router.adapters.operations import AdapterOperations, LoadRequest

log = structlog.get_logger(__name__)

WAIT_S = 0.1
RETRY_S = 2.0
MAX_WAIT_S = 10.0
MAX_PAUSE_S = 300.0
AT_ONCE = 8
"""Loads. Workers read two at once; what follows a load, until other routers have seen it, needs no worker."""


def next_pause(pause_s: float, *, changed: bool, refused: bool) -> float:
    """Seconds until the next try. `changed`: a reason is another one than at the last try. `refused`: all are refusals of the
    files."""
    return RETRY_S if changed else min(2 * pause_s, MAX_PAUSE_S if refused else MAX_WAIT_S)


class StartAdapters:
    """Call `run` while the router serves.

    Args:
        folders: by name.
        model: name of their base model.
        ready: whether the model's workers are usable.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        operations: AdapterOperations,
        folders: Mapping[str, str],
        model: str,
        ready: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._operations = operations
        self._folders = folders
        self._model = model
        self._ready = ready
        self._sleep = sleep
        self._refused: set[str] = set()
        """Names whose files a worker refused at the last try."""
        self.missing: dict[str, str] = dict.fromkeys(folders, "is not loaded yet")
        """Why a name is not served, by name."""
        self.tried = not folders
        """Every one was loaded, or refused, once."""

    def reasons(self, *, names: bool) -> list[str]:
        """For readers: a line for each name that is not served; without `names` one line with their number."""
        if names or not self.missing:
            return [f"adapter {name}: {why}" for name, why in self.missing.items()]
        return [
            f"adapter modules of --lora-modules: {len(self.missing)} not loaded; an admin's key reads which, and why"
        ]

    async def run(self) -> None:
        """Returns once all are loaded."""
        while not self._ready():
            await self._sleep(WAIT_S)
        pause_s = RETRY_S
        while self.missing:
            before = dict(self.missing)
            turns = asyncio.Semaphore(AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for name in self.missing:
                    group.create_task(self._load(name, turns))
            self.tried = True
            if self.missing:
                changed = any(before[name] != why for name, why in self.missing.items())
                pause_s = next_pause(pause_s, changed=changed, refused=self.missing.keys() <= self._refused)
                await self._sleep(pause_s)

    async def _load(self, name: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            await self._try(name)

    async def _try(self, name: str) -> None:
        folder = self._folders[name]
        if (entry := self._known(name)) is not None:
            folders = sorted({version.folder for version in entry.versions})
            if folder not in folders:
                log.warning(
                    "an adapter of --lora-modules keeps the versions that the registry has, of other folders; "
                    "`diptych adapters load --in-place` makes this folder the next one",
                    adapter=name, folder=folder, folders=folders,
                )  # fmt: skip
        else:
            try:
                await self._operations.load(LoadRequest(name, folder, self._model))
            except DiptychError as error:
                if self._known(name) is None:  # else another router loaded it at the same time
                    if self.missing[name] != error.message:
                        log.error("an adapter cannot be loaded", adapter=name, folder=folder, error=error.message)
                    self.missing[name] = error.message
                    (self._refused.add if isinstance(error, InvalidRequestError) else self._refused.discard)(name)
                    return
        del self.missing[name]

    def _known(self, name: str) -> AdapterEntry | None:
        return next((entry for entry in self._operations.entries() if entry.name == name), None)

"""Adapters that are loaded at the start: --lora-modules NAME=FOLDER.

wait until workers are usable -> each name that the registry does not have is loaded -> what failed is tried again

A name that the registry has keeps its versions: a restart undoes no rollback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from diptych.common.errors import DiptychError
from diptych.router.adapters.operations import AdapterOperations, LoadRequest

log = structlog.get_logger(__name__)

WAIT_S = 0.1
RETRY_S = 2.0


class StartAdapters:
    """Call `run` while the router serves.

    Args:
        folders: by name.
        model: name of their base model.
        ready: whether the model's workers are usable.
    """

    def __init__(
        self, operations: AdapterOperations, folders: Mapping[str, str], model: str, ready: Callable[[], bool]
    ) -> None:
        self._operations = operations
        self._folders = folders
        self._model = model
        self._ready = ready
        self.missing: dict[str, str] = dict.fromkeys(folders, "is not loaded yet")
        """Why a name is not served, by name."""
        self.tried = not folders
        """Every one was loaded, or refused, once."""

    async def run(self) -> None:
        """Returns once all are loaded."""
        while not self._ready():  # noqa: ASYNC110 - readiness is polled
            await asyncio.sleep(WAIT_S)
        while self.missing:
            for name in list(self.missing):
                await self._load(name)
            self.tried = True
            if self.missing:
                await asyncio.sleep(RETRY_S)

    async def _load(self, name: str) -> None:
        folder = self._folders[name]
        if not self._is_known(name):
            try:
                await self._operations.load(LoadRequest(name, folder, self._model))
            except DiptychError as error:
                if not self._is_known(name):  # else another router loaded it at the same time
                    if self.missing[name] != error.message:
                        log.error("an adapter cannot be loaded", adapter=name, folder=folder, error=error.message)
                    self.missing[name] = error.message
                    return
        del self.missing[name]

    def _is_known(self, name: str) -> bool:
        return any(entry.name == name for entry in self._operations.entries())

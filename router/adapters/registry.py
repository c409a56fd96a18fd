"""This process's view of the registry of adapters, and changes to it.

    every poll_s: read the registry, if its revision is another one
    a change:     read, compute the new entry, write it if nobody wrote meanwhile; else again
    the store has lost the registry, or its last changes: the first router that sees it writes what it knows

Requests are resolved from the view and wait for nothing. Only a name that is unknown here is looked for in the store once
more, since another router may have loaded it a moment ago. While the store cannot be read nobody knows whether it exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from diptych.common.errors import InvalidRequestError, NoWorkerError
from diptych.common.store.adapters import MAX_ADAPTERS, AdapterEntry, AdapterTable, is_adapter_name, restored
from diptych.common.store.interface import AdapterStore, StoreError

log = structlog.get_logger(__name__)

POLL_S = 0.1
"""A look is one small call, and whoever loads an adapter waits for two of them."""
RETRY_AFTER_S = 1.0
_MAX_TRIES = 16
"""Of a change that others forestall."""

Change = Callable[[AdapterEntry | None, AdapterTable], AdapterEntry | None]
"""From a name's entry (None: there is none) and the table to its new entry (None: remove it). Raises: InvalidRequestError."""


class AdapterRegistry:
    """Call `run` while the router serves. `on_change`: called with the table whenever it is another one."""

    def __init__(
        self,
        store: AdapterStore,
        *,
        poll_s: float = POLL_S,
        on_change: Callable[[AdapterTable], None] = lambda table: None,
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._on_change = on_change
        self._reading: asyncio.Future[None] | None = None
        """The read that runs."""
        self._next: asyncio.Future[None] | None = None
        """The one after it, which has not begun."""
        self._changing = asyncio.Lock()
        """Changes of this process would only forestall one another."""
        self.table = AdapterTable()
        self.failing = ""
        """Why the last read failed, or "": the view may be stale."""

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_s)

    async def refresh(self) -> None:
        """Read what has changed. Calls at the same time share a read that begins after them: what was written before a call is
        in the view after it. An unavailable store leaves the view as it is."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._reading))
            self._next.add_done_callback(self._read_ended)
        await asyncio.shield(self._next)

    async def _after(self, running: asyncio.Future[None] | None) -> None:
        if running is not None:
            await asyncio.wait({running})
        self._reading, self._next = self._next, None
        await self._refresh()

    def _read_ended(self, read: asyncio.Future[None]) -> None:
        if self._reading is read:
            self._reading = None

    async def _refresh(self) -> None:
        try:
            await self._read()
        except StoreError as err:
            if not self.failing:
                log.warning("the registry of adapters cannot be read", error=str(err))
            self.failing = str(err)
        else:
            self.failing = ""

    async def _read(self) -> None:
        """Raises: StoreError."""
        known = self.table
        found = await self._store.read_adapters(known.revision)
        if found is not None and (mine := restored(known, found)) is not None:
            if await self._store.restore_adapters(mine, over=found.revision):
                what = "the last changes of the registry" if found.revision else "the registry"
                log.warning(f"the store had lost {what} of adapters: written again", num_adapters=len(mine.entries))
            found = await self._store.read_adapters(known.revision)
        if found is not None and (self.table is known or found.revision > self.table.revision):
            self._set(found)  # else a change was written here meanwhile, and the answer is older

    def _set(self, table: AdapterTable) -> None:
        self.table = table
        self._on_change(table)

    def find(self, name: str) -> AdapterEntry | None:
        """In the view."""
        return self.table.entries.get(name)

    async def look_up(self, name: str) -> AdapterEntry | None:
        """As `find`; a name that is unknown here, and could be one, is looked for in the store. Raises: NoWorkerError when that
        cannot be read."""
        if (found := self.find(name)) is None and is_adapter_name(name):
            await self.refresh()
            found = self.find(name)
            if found is None and self.failing:
                text = f"{name} is not known here, and the registry of adapters cannot be read now"
                raise NoWorkerError(text, retry_after_s=RETRY_AFTER_S)
        return found

    async def change(self, name: str, change: Change) -> tuple[AdapterEntry | None, AdapterEntry | None]:
        """Change one name's entry, whoever else writes. Returns: (before, after).

        Raises: what `change` raises; InvalidRequestError when there are too many names; NoWorkerError when the store cannot
            be reached: nothing is changed then, or the change was written and its answer lost.
        """
        try:
            async with self._changing:
                for _ in range(_MAX_TRIES):
                    if (changed := await self._try_to_change(name, change)) is not None:
                        return changed
        except StoreError as err:
            text = f"the registry of adapters cannot be changed: {err}"
            raise NoWorkerError(text, retry_after_s=RETRY_AFTER_S) from err
        raise NoWorkerError("the registry of adapters is being changed by others", retry_after_s=RETRY_AFTER_S)

    async def _try_to_change(self, name: str, change: Change) -> tuple[AdapterEntry | None, AdapterEntry | None] | None:
        """None: another router was faster. Raises: as `change`; StoreError."""
        await self._read()
        table = self.table
        before = table.entries.get(name)
        after = change(before, table)
        if after == before:
            return before, after
        if before is None and len(table.entries) >= MAX_ADAPTERS:
            rule = f"lora_name: there are {len(table.entries)} adapters, the most that are kept"
            raise InvalidRequestError(rule, param="lora_name")
        gone = table.gone_after(name, after)
        revision = await self._store.write_adapter(name, after, revision=table.revision, gone=gone)
        if revision is None:
            return None
        entries = {other: entry for other, entry in table.entries.items() if other != name}
        self._set(AdapterTable(revision, entries if after is None else entries | {name: after}, gone))
        return before, after

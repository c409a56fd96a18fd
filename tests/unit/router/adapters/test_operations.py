"""Operations of a router without others: what is kept of names, and what errors of workers say."""

from __future__ import annotations

import asyncio

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import AdapterError, DiptychError, InvalidRequestError, NoWorkerError
from diptych.common.store.memory import MemoryStore
from diptych.router.adapters.operations import AdapterOperations, LoadedAdapter, LoadRequest
from diptych.router.adapters.registry import AdapterRegistry

FOUND = LoadedAdapter("0f" * 16, 8, 1000)


class Workers:
    """One worker, "local": its answers, and a gate before them."""

    def __init__(self) -> None:
        self.answer: LoadedAdapter | DiptychError = FOUND
        self.go = asyncio.Event()
        self.go.set()
        self.inside = self.most_inside = 0

    async def load_adapter(self, folder: str) -> dict[str, LoadedAdapter | DiptychError]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        await self.go.wait()
        self.inside -= 1
        return {"local": self.answer}

    async def unload_adapter(self, adapter_id: str) -> None:
        return


def operations_of(workers: Workers) -> AdapterOperations:
    registry = AdapterRegistry(MemoryStore(FakeClock()))
    return AdapterOperations(lambda: registry, lambda: {"tiny": workers}, wall=lambda: 0.0)


async def test_a_name_that_is_not_in_use_leaves_no_lock() -> None:
    """Every name that anybody had ever tried kept one."""
    workers = Workers()
    operations = operations_of(workers)
    for number in range(50):
        workers.answer = FOUND if number % 2 else AdapterError("no files", param="adapter_config.json")
        try:
            await operations.load(LoadRequest(f"poems-{number}", "/lora/one"))
        except AdapterError:
            assert number % 2 == 0
        else:
            await operations.unload(f"poems-{number}")
    assert len(operations._locks) == 0


async def test_loads_of_one_name_go_one_after_another() -> None:
    workers = Workers()
    operations = operations_of(workers)
    workers.go.clear()
    loads = [
        asyncio.create_task(operations.load(LoadRequest("poems", "/lora/one", load_inplace=True))) for _ in range(4)
    ]
    for _ in range(50):
        await asyncio.sleep(0)
    assert workers.most_inside == len(operations._locks) == 1
    workers.go.set()
    await asyncio.gather(*loads)
    assert workers.most_inside == 1
    del loads
    assert len(operations._locks) == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoWorkerError("worker local did not load it in time"), "worker local did not load it in time"),
        (InvalidRequestError("no files", param="adapter"), "worker local: no files"),
    ],
)
async def test_an_error_names_its_worker_once(error: DiptychError, text: str) -> None:
    workers = Workers()
    workers.answer = error
    with pytest.raises(type(error)) as raised:
        await operations_of(workers).load(LoadRequest("poems", "/lora/one"))
    assert raised.value.message == text

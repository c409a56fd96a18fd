"""Operations of a router without others: what is kept of names, and what errors of workers say."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import AdapterError, DiptychError, InvalidRequestError, NoWorkerError
from diptych.common.store.memory import MemoryStore
from diptych.router.adapters.base_model import names_of, other_base
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


@pytest.mark.parametrize(
    ("base_model", "is_other"),
    [
        ("", False),
        ("acme/Tiny-1B", False),
        ("tiny-1b", False),
        ("/home/somebody/models/TINY-1B/", False),
        ("served", False),
        ("acme/Tiny-3B", True),
        ("Tiny", True),
        ("line\nbreak", False),
    ],
)
def test_a_base_model_is_compared_by_the_last_part_of_its_name(base_model: str, is_other: bool) -> None:
    for folder in ("/srv/models/Tiny-1B", "/cache/models--acme--Tiny-1B/snapshots/0f1e"):
        assert other_base(base_model, names_of("served", folder)) == (base_model if is_other else "")


async def test_a_version_keeps_the_name_of_another_base_model() -> None:
    workers = Workers()
    operations = operations_of(workers)
    for base_model, kept in (("acme/Tiny", ""), ("acme/large", "acme/large")):
        workers.answer = replace(FOUND, base_model=base_model, adapter_id=f"{len(base_model):032x}")
        entry = await operations.load(LoadRequest("poems", "/lora/one", load_inplace=True))
        assert entry.version(entry.stable).other_base == kept


async def test_a_load_in_place_of_other_files_beside_a_canary_is_refused() -> None:
    """It ended the canary without a word. The same files as the stable version change nothing, as before."""
    workers = Workers()
    operations = operations_of(workers)
    await operations.load(LoadRequest("poems", "/lora/one"))
    workers.answer = replace(FOUND, adapter_id="1e" * 16)
    canary = await operations.load(LoadRequest("poems", "/lora/two", canary_share=0.5))
    workers.answer = replace(FOUND, adapter_id="2d" * 16)
    with pytest.raises(InvalidRequestError, match="roll it back, first") as refused:
        await operations.load(LoadRequest("poems", "/lora/three", load_inplace=True))
    assert refused.value.param == "load_inplace"
    workers.answer = FOUND
    assert await operations.load(LoadRequest("poems", "/lora/one", load_inplace=True)) == canary

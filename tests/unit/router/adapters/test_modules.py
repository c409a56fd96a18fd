"""Adapters of the start that cannot be loaded are tried again, ever less often."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from diptych.common.errors import DiptychError, InvalidRequestError, NoWorkerError
from diptych.common.store.adapters import AdapterEntry
from diptych.router.adapters.modules import MAX_PAUSE_S, MAX_WAIT_S, StartAdapters
from diptych.router.adapters.operations import AdapterOperations, LoadRequest
from diptych_tests.records import adapter_entry


class Refusing(AdapterOperations):
    """Loads end with these errors, the last one again and again."""

    def __init__(self, errors: list[DiptychError]) -> None:
        super().__init__(lambda: None, dict)  # type: ignore[arg-type, return-value]
        self.errors = errors

    def entries(self, tenant: str | None = None) -> list:  # type: ignore[type-arg]
        return []

    async def load(self, request: LoadRequest):  # type: ignore[no-untyped-def]
        raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]


class Enough(Exception):
    pass


async def pauses(errors: list[DiptychError], num: int) -> list[float]:
    seen: list[float] = []

    async def sleep(pause_s: float) -> None:
        seen.append(pause_s)
        if len(seen) == num:
            raise Enough

    with pytest.raises(Enough):
        await StartAdapters(Refusing(errors), {"poems": "/lora/one"}, "tiny", lambda: True, sleep).run()
    return seen


async def test_a_load_that_takes_its_time_delays_no_other() -> None:
    """Each waited half a second for the one before."""
    both, begun = asyncio.Event(), set()

    class Together(Refusing):
        async def load(self, request: LoadRequest):  # type: ignore[no-untyped-def]
            begun.add(request.lora_name)
            if len(begun) == 3:
                both.set()
            async with asyncio.timeout(60):
                await both.wait()

    modules = StartAdapters(Together([]), dict.fromkeys(("a", "b", "c"), "/lora"), "tiny", lambda: True)
    await modules.run()
    assert modules.tried
    assert not modules.missing


async def test_a_folder_that_the_registry_has_no_version_of_is_named() -> None:
    """Another folder for a name that the registry kept was passed over without a word."""

    class Kept(Refusing):
        def entries(self, tenant: str | None = None) -> list[AdapterEntry]:
            return [adapter_entry("poems", "one", "two")]

    warned = []
    for folder in ("/adapters/one", "/adapters/two", "/adapters/new"):
        with capture_logs() as lines:
            modules = StartAdapters(Kept([]), {"poems": folder}, "tiny", lambda: True)
            await modules.run()
        assert not modules.missing
        warned.append([(line["adapter"], line["folder"]) for line in lines if line["log_level"] == "warning"])
    assert warned == [[], [], [("poems", "/adapters/new")]]


async def test_files_that_are_refused_are_tried_again_ever_less_often() -> None:
    """They were tried every 2 s for ever."""
    seen = await pauses([InvalidRequestError("use_dora is not served")], 12)
    assert seen[:4] == [2.0, 4.0, 8.0, 16.0]
    assert seen[-1] == MAX_PAUSE_S


async def test_workers_that_do_not_answer_are_asked_again_soon() -> None:
    assert (await pauses([NoWorkerError("busy")], 8))[-1] == MAX_WAIT_S


async def test_another_reason_begins_with_short_pauses() -> None:
    errors = [InvalidRequestError("a"), InvalidRequestError("a"), NoWorkerError("b"), InvalidRequestError("c")]
    assert await pauses(errors, 5) == [2.0, 4.0, 2.0, 2.0, 4.0]

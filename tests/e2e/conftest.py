from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.client import AsyncClient

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "smollm2.json"
FIRST_PLAIN_ID, LAST_PLAIN_ID = 1000, 40_000
"""Token ids in between stand for ordinary text."""


@dataclass(frozen=True)
class Golden:
    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    ignore_eos: bool


def load_golden() -> list[Golden]:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return [Golden(c["name"], tuple(c["prompt_ids"]), tuple(c["output_ids"]), c["ignore_eos"]) for c in cases]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        goldens = load_golden()
        few = subset(goldens)
        cases = [pytest.param(g, id=g.name, marks=[] if g in few else [pytest.mark.slow]) for g in goldens]
        metafunc.parametrize("golden", cases)


def subset(goldens: list[Golden]) -> list[Golden]:
    """One long prompt, one that runs to EOS, one of a single token, and the first one."""
    long = min((g for g in goldens if len(g.prompt) > 320), key=lambda g: len(g.prompt))
    to_eos = [g for g in goldens if not g.ignore_eos]
    short = min(goldens, key=lambda g: len(g.prompt))
    return [long, short, *to_eos[:1], goldens[0]]


@pytest.fixture(scope="session")
def goldens() -> list[Golden]:
    return load_golden()


@pytest.fixture
async def client(cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.grpc_address, timeout_s=120.0) as connected:
        yield connected


@pytest.fixture
def fresh_prompt() -> Callable[[int], list[int]]:
    """Token ids that no test has sent before, so that no cache has them."""
    rng = random.SystemRandom()
    return lambda length: [rng.randrange(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(length)]

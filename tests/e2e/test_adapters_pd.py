"""Trained adapters over HTTP on two pools, every prompt computed by prefill and decoded by decode, mixed in one batch: ids
are those of peft and transformers. Reloads under load change whole answers only."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from diptych.router.api.auth.keys import add_key
from diptych_tests import golden_adapters, waiting
from diptych_tests.clusters import Cluster
from diptych_tests.golden_adapters import ask, ids_of
from diptych_tests.tool_router import face

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

ANSWER_S = 600.0
LOADS = 21
"""The first one, and 20 that replace it."""
USERS = 4
CHANGING = "changing"


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    admin_key: str

    def http(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        return httpx.AsyncClient(base_url=self.cluster.http_url, headers=headers, timeout=ANSWER_S)


@pytest.fixture(scope="module")
def served(cluster_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`diptych up` with the trained adapters, by their names."""
    root = tmp_path_factory.mktemp("adapters")
    key, _ = add_key(root / "keys.json", "acme", now=0.0, admin=True)
    flags = ["--keys-file", str(root / "keys.json"), "--num-blocks", "512", *golden_adapters.flags()]
    with cluster_module.running_cluster(root, *flags, extra_env={"DIPTYCH_API_KEY": key}) as running:
        yield Served(running, key)


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.http() as client:
        yield client


async def test_all_adapters_in_one_batch_across_the_pools(http: httpx.AsyncClient, served: Served) -> None:
    await golden_adapters.check_mixed(
        http, served.cluster.model, golden_adapters.cases(), golden_adapters.max_new_tokens()
    )
    served.cluster.wait_idle()


ASK = [{"role": "user", "content": "Describe a city that you like, in a few words."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "regex": {"guided_regex": "[A-Za-z ]{10,30}\\.", "temperature": 1.0, "seed": 3, "n": 2},
    "several": {"n": 3, "temperature": 1.0, "seed": 5},
    "beams": {"use_beam_search": True, "beam_width": 3, "n": 2},
}
MODELS = ("", "pirate", "record", "robot")


async def test_grammars_beams_and_several_answers_are_those_of_one_process(http: httpx.AsyncClient) -> None:
    """Prompts computed by prefill, and the same where the process that decodes may compute them; adapters mixed in one batch, and
    no block of one is a hit for the other."""

    async def choices(kind: str, model: str, local: int) -> list[list[int]]:
        body = {"messages": ASK, "max_tokens": 32, "temperature": 0.0, "return_token_ids": True}
        body |= {"local_prefill_max_tokens": local, "cache_salt": f"{kind}-{local}"} | KINDS[kind]
        answer = await http.post(
            "/v1/chat/completions",
            json=body | ({"model": model} if model else {}),
            headers={"x-diptych-explain": "1"},
        )
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert local or not found["diptych"]["local_prefill"], (kind, model)
        for choice in found["choices"]:
            text = choice["message"]["content"]
            if kind == "schema":
                assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), (model, text)
            if kind == "regex":
                assert re.fullmatch(r"[A-Za-z ]{10,30}\.", text), (model, text)
        return [choice["token_ids"] for choice in found["choices"]]

    for kind in KINDS:
        apart, together = [
            await asyncio.gather(*(choices(kind, model, local) for model in MODELS)) for local in (0, 4000)
        ]
        assert apart == together, kind
        assert len({str(answer) for answer in apart}) > 2, f"{kind}: adapters change answers"


async def test_tool_calls_are_those_of_one_process(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": city | {"additionalProperties": False}}}
    ]
    async with face(served.cluster, "hermes", tmp_path, monkeypatch) as here:

        async def call(model: str, local: int) -> tuple[str, str]:
            answer = await here.http.chat.completions.create(
                model=model or here.model,
                messages=ASK,  # type: ignore[arg-type]
                tools=tools,  # type: ignore[arg-type]
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=64,
                extra_body={"local_prefill_max_tokens": local, "cache_salt": f"tools-{local}"},
            )
            (found,) = answer.choices[0].message.tool_calls or []
            assert jsonschema_rs.is_valid(city, json.loads(found.function.arguments))  # type: ignore[union-attr]
            return found.function.name, found.function.arguments  # type: ignore[union-attr]

        apart, together = [await asyncio.gather(*(call(model, local) for model in MODELS)) for local in (0, 4000)]
    assert apart == together
    assert len(set(apart)) > 1, "adapters change calls"


async def test_20_reloads_under_load_mix_no_answer_and_leave_none_stale(
    http: httpx.AsyncClient, served: Served
) -> None:
    """The name goes from one trained adapter to the next. Each answer is wholly of the version that it names, and that is
    none before the last load that had ended when the request was sent."""
    names = golden_adapters.names()
    order = [names[i % len(names)] for i in range(LOADS)]
    new_tokens = golden_adapters.max_new_tokens()
    cases = {name: [case for case in golden_adapters.cases(prompts=6) if case.adapter == name] for name in names}
    begun = ended = 0
    seen: Counter[int] = Counter()

    async def load(number: int) -> None:
        nonlocal begun, ended
        begun = number
        body = {"lora_name": CHANGING, "lora_path": str(golden_adapters.FOLDER / order[number - 1])}
        answer = await http.post("/v1/load_lora_adapter", json=body | {"load_inplace": number > 1})
        assert answer.status_code == 200, answer.text
        ended = number

    async def user(turn: int) -> None:
        while ended < LOADS or seen[LOADS] < USERS:
            turn += 1
            which, oldest = turn % 6, ended
            answer = await ask(http, CHANGING, cases[names[0]][which], new_tokens)
            version = answer["diptych"]["adapter"]["version"]
            assert oldest <= version <= begun
            assert ids_of(answer) == cases[order[version - 1]][which].answer, f"version {version}"
            seen[version] += 1

    await load(1)
    async with asyncio.TaskGroup() as group:
        for number in range(USERS):
            group.create_task(user(number))
        for number in range(2, LOADS + 1):
            await waiting.until(
                lambda: seen[ended] >= 2, "answers of the last version", deadline_s=ANSWER_S, every_s=0.01
            )
            await load(number)
    assert set(seen) == set(range(1, LOADS + 1)), "every version answered"
    gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": CHANGING})
    assert gone.status_code == 200, gone.text
    unknown = await http.post("/v1/completions", json={"model": CHANGING, "prompt": [1, 2, 3], "max_tokens": 1})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    served.cluster.wait_idle()

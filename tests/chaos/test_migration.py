"""A decode worker is killed, stopped or drained in the middle of an answer, or all are killed: the client's stream goes on at
another worker with the tokens of the undisturbed run, or ends with a typed error.

A step gate holds both decode workers in the middle of the answer; the one that has it is lost, the other one is released.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.cli.models.store import resolve_model
from diptych.cli.up.processes import ProcessIdentity
from diptych.client import AsyncClient, Completion, DiptychError
from diptych.common.text.revision import tokenizer_revision
from diptych.router import served_model
from diptych.router.config import RouterConfig
from diptych.router.frontend import Frontend
from diptych.router.server import ApiServers
from diptych_tests import golden_adapters, waiting
from diptych_tests.fake_model_cluster import ask, body_of, fake_model_cluster
from diptych_tests.kill_run import model_folder

pytestmark = pytest.mark.multiproc

ANSWER_S, AGAIN_S = 300.0, 240.0
"""Deadlines of what takes seconds on an idle machine."""
STOPPED_S = 20.0
DECODES = ("decode-0", "decode-1")
STEPS, NUM_TOKENS = 20, 48
"""Steps of the answer before its worker is lost, about one a token; tokens of the whole answer."""
PROMPT = "Once upon a time, in a village by the sea, there lived"
ASK: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 11, "ignore_eos": True, "explain": True,
    "local_prefill_max_tokens": 0,
}  # fmt: skip
LIST_OF_WORDS = f"""
root ::= {' " " '.join(25 * ["word"])} "."
word ::= "red" | "green" | "blue" | "tall" | "small" | "old" | "new"
"""
WORD = "(red|green|blue|tall|small|old|new)"
LIST = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"enum": ["red", "green", "blue", "tall"]}, "minItems": 12, "maxItems": 14},
        "sure": {"type": "boolean"},
    },
    "required": ["words", "sure"],
    "additionalProperties": False,
}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "min_tokens": 40}
CASES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "greedy": {"temperature": 0.0},
    "penalties and min_tokens": PENALTIES | {"ignore_eos": False, "logit_bias": {0: 8.0, 28: -3.0}},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "json_schema": {"json_schema": LIST, "compact_json": True, "ignore_eos": False, "max_tokens": 120},
    "regex": {"regex": f"({WORD} ){{24}}{WORD}\\.", "ignore_eos": False, "max_tokens": 150},
    "ebnf": {"ebnf": LIST_OF_WORDS, "ignore_eos": False, "max_tokens": 150},
    "n": {"n": 3, "logprobs": 1},
    "best_of": {"n": 1, "best_of": 2},
    "beams": {"n": 2, "beam_width": 2, "temperature": 0.0, "seed": None},
    "adapter": {"adapter": "pirate"},
    "adapter and json_schema": {
        "adapter": "pirate", "json_schema": LIST, "compact_json": True, "ignore_eos": False, "max_tokens": 120,
    },
    "adapter and beams": {"adapter": "pirate", "n": 2, "beam_width": 2, "temperature": 0.0, "seed": None},
}  # fmt: skip
WITHHELD = ("best_of", "beams", "adapter and beams")
"""No token of these is sent before their end."""


@dataclass(frozen=True)
class Movable:
    """A cluster with two decode workers, and the gates of their steps."""

    cluster: Any
    gates: Any

    def decode_usable(self) -> int:
        answer = httpx.get(f"{self.cluster.http_url}/status.json", timeout=300.0).json()
        workers = answer["cluster"]["workers"]
        return sum(not worker["why_not"] for worker in workers if worker["id"] in DECODES)

    def serves(self) -> bool:
        children = self.cluster.state.children
        alive = all(ProcessIdentity(child.pid, child.start_time).alive() for child in children)
        try:
            return len(children) == 5 and alive and self.decode_usable() == 2
        except (httpx.TransportError, TypeError):
            return False

    def hold(self) -> None:
        for name in DECODES:
            self.gates.hold(self.cluster, name, after_steps=STEPS)

    async def holder(self, answer: asyncio.Future[Any]) -> str:
        """The worker that holds the answer. The other one is released."""

        def held() -> bool:
            assert not answer.done(), answer
            return any(self.gates.held(name) for name in DECODES)

        await waiting.until(held, "a decode step waits", every_s=0.01)
        name = next(name for name in DECODES if self.gates.held(name))
        (other,) = set(DECODES) - {name}
        self.gates.open(other)
        return name


@pytest.fixture(scope="module")
def started(cluster_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Movable]:
    gates = cluster_module.StepGates(tmp_path_factory.mktemp("gates"))
    name, flags = gates.flags
    pirate = golden_adapters.FOLDER / "pirate"
    lora = ("--enable-lora", "--lora-dir", str(pirate.parent), "--lora-modules", f"pirate={pirate}")
    more = ("--decode-workers", "2", name, f"{flags} --drain-s 1", *lora)
    with cluster_module.running_cluster(tmp_path_factory.mktemp("movable"), *more) as running:
        yield Movable(running, gates)


@pytest.fixture
def movable(started: Movable, cluster_module: Any) -> Iterator[Movable]:
    """Every test begins with all workers, whatever became of the one before, and ends with idle ones."""
    what = f"it serves\n{started.cluster.log()[-3000:]}"
    cluster_module.wait_until(started.serves, deadline_s=AGAIN_S, what=what)
    yield started
    for name in DECODES:
        started.gates.open(name)
    cluster_module.wait_until(started.serves, deadline_s=AGAIN_S, what=what)
    started.cluster.wait_idle()


def outcome(answer: Completion) -> Any:
    """What must be equal; logprobs are compared apart."""
    usage = answer.usage
    return (
        [
            (choice.token_ids, choice.text, choice.finish_reason, choice.stop_string, choice.content, choice.reasoning)
            + tuple((call.name, call.arguments) for call in choice.tool_calls)
            for choice in answer.choices
        ],
        (usage.prompt_tokens, usage.completion_tokens),
        [entry.token_id for entry in answer.prompt_logprobs],
    )


def logprobs_of(answer: Completion) -> list[float]:
    known = [entry for choice in answer.choices for entry in choice.logprobs] + list(answer.prompt_logprobs)
    return [value for entry in known for value in (entry.logprob, *(logprob for _, logprob in entry.top))]


async def disturbed(
    movable: Movable, client: AsyncClient, ask: dict[str, Any], lose: Callable[[str], Any]
) -> tuple[Completion, str]:
    """The answer, and the worker that was lost while it held it."""
    movable.hold()
    answer = asyncio.create_task(client.generate(**ask))
    name = await movable.holder(answer)
    lose(name)
    return await answer, name


def kill(movable: Movable) -> Callable[[str], None]:
    def lose(name: str) -> None:
        movable.cluster.kill(name)
        movable.gates.open(name)

    return lose


def check_moved(answer: Completion, lost: str, *, withheld: bool = False, failure: str = "WORKER_LOST") -> None:
    assert answer.explanation is not None
    (first, second) = answer.explanation.attempts
    (other,) = set(DECODES) - {lost}
    assert (first.decode, first.failure, second.decode, second.failure) == (lost, failure, other, "")
    assert first.num_tokens == 0 if withheld else 0 < first.num_tokens < answer.usage.completion_tokens


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
async def test_killed_in_the_middle_of_an_answer(movable: Movable, case: str) -> None:
    ask = {name: value for name, value in (ASK | CASES[case]).items() if value is not None}
    async with AsyncClient(movable.cluster.grpc_address, timeout_s=ANSWER_S) as client:
        want = await client.generate(**ask)
        assert want.explanation is not None
        assert not want.explanation.attempts
        got, lost = await disturbed(movable, client, ask, kill(movable))
    check_moved(got, lost, withheld=case in WITHHELD)
    assert outcome(got) == outcome(want)
    assert logprobs_of(got) == pytest.approx(logprobs_of(want), abs=1e-5)
    assert got.adapter == want.adapter == CASES[case].get("adapter", "")
    if "json_schema" in case:
        assert set(json.loads(got.text)) == {"words", "sure"}


@pytest.mark.slow
async def test_a_stop_string_across_the_seam(movable: Movable) -> None:
    async with AsyncClient(movable.cluster.grpc_address, timeout_s=ANSWER_S) as client:
        pieces = [delta async for delta in client.stream(**ASK)]
        by_token = {
            delta.offset + i: delta.text if not i else "" for delta in pieces for i in range(len(delta.token_ids))
        }
        stop = "".join(by_token[i] for i in range(STEPS - 4, STEPS + 6))
        assert len(stop) > 8, pieces
        ask = ASK | {"stop": [stop]}
        want = await client.generate(**ask)
        assert want.stop_string == stop
        got, lost = await disturbed(movable, client, ask, kill(movable))
    check_moved(got, lost)
    assert outcome(got) == outcome(want)


async def over_http(url: str, body: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Data lines of a stream, and its chunks."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    return lines, [json.loads(line) for line in lines if line != "[DONE]"]


async def sees_one_stream(movable: Movable, body: dict[str, Any]) -> None:
    """Two choices of NUM_TOKENS each, over plain HTTP."""
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, "n": 2}
    wanted, whole = await over_http(movable.cluster.http_url, body)
    movable.hold()
    streamed = asyncio.create_task(over_http(movable.cluster.http_url, body))
    kill(movable)(await movable.holder(streamed))
    lines, chunks = await streamed
    assert (lines[-1], lines.count("[DONE]")) == ("[DONE]", 1)
    assert wanted[-1] == "[DONE]"
    for index in range(2):
        got, want = (
            [choice for chunk in some for choice in chunk["choices"] if choice["index"] == index]
            for some in (chunks, whole)
        )
        for ids, text, finish in [("token_ids", "text", "finish_reason")]:
            assert [token for c in got for token in c.get(ids, [])] == [token for c in want for token in c.get(ids, [])]
            assert "".join(c[text] for c in got) == "".join(c[text] for c in want)
            assert [c[finish] for c in got if c[finish]] == [c[finish] for c in want if c[finish]] == ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    usages = [[chunk["usage"]["completion_tokens"] for chunk in some if chunk.get("usage")] for some in (chunks, whole)]
    assert usages == [[2 * NUM_TOKENS]] * 2


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed")
async def test_a_plain_http_client_sees_one_stream(tmp_path: Path) -> None:
    async with fake_model_cluster(tmp_path, decode=2) as cluster:
        await sees_one_stream(Movable(cluster, cluster.gates), body_of(ask(11, max_tokens=NUM_TOKENS)))
        await cluster.idle_again()


@pytest.mark.slow
async def test_a_plain_http_client_sees_one_stream_of_the_real_model(movable: Movable) -> None:
    await sees_one_stream(movable, {name: value for name, value in ASK.items() if name != "explain"})


@pytest.mark.slow
async def test_stopped_for_twenty_seconds_and_continued(movable: Movable) -> None:
    """Eight answers. The stopped worker goes on when all have ended elsewhere: its late tokens reach no client, and it holds
    nothing."""
    asks = [ASK | {"seed": seed} for seed in range(8)]
    async with AsyncClient(movable.cluster.grpc_address, timeout_s=ANSWER_S) as client:
        want = [await client.generate(**ask) for ask in asks]
        movable.hold()
        answers = asyncio.gather(*(client.generate(**ask) for ask in asks))
        lost = await movable.holder(answers)
        movable.cluster.kill(lost, signal.SIGSTOP)
        stopped_at = time.monotonic()
        got = await answers
        took_s = time.monotonic() - stopped_at
        gaps = [answer.explanation.longest_gap_s for answer in got if answer.explanation]
        print(
            f"all have ended elsewhere {took_s:.1f} s after the stop; the longest gaps: {[round(gap, 1) for gap in gaps]} s"
        )
        await asyncio.sleep(max(0.0, STOPPED_S - took_s))  # sleep: longer than anything waits for a silent worker
        moved = [answer for answer in got if answer.explanation is not None and answer.explanation.attempts]
        assert moved
        for answer in moved:
            check_moved(answer, lost)
        assert [outcome(answer) for answer in got] == [outcome(answer) for answer in want]
        movable.gates.open(lost)  # its next steps follow at once
        again = asyncio.create_task(client.generate(**ASK | {"seed": 3}))
        movable.cluster.kill(lost, signal.SIGCONT)
        assert outcome(await again) == outcome(want[3])


@pytest.mark.slow
async def test_drained_with_answers_left(movable: Movable) -> None:
    async with AsyncClient(movable.cluster.grpc_address, timeout_s=ANSWER_S) as client:
        want = await client.generate(**ASK)
        got, lost = await disturbed(movable, client, ASK, lambda name: movable.cluster.kill(name, signal.SIGTERM))
        movable.gates.open(lost)
    check_moved(got, lost, failure="WORKER_DRAINED")
    assert outcome(got) == outcome(want)


@pytest.mark.slow
async def test_all_decode_workers_killed(movable: Movable) -> None:
    """While nobody starts them again: a typed error event without [DONE], and for a new request an error with the time after
    which to ask again. A client that does so has its answer once one of them is back."""
    body = {name: value for name, value in ASK.items() if name != "explain"}
    url = movable.cluster.http_url
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as http:
        want = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        movable.hold()
        streamed = asyncio.create_task(over_http(url, body | {"stream": True}))
        await movable.holder(streamed)
        movable.cluster.process.send_signal(signal.SIGSTOP)  # the supervisor
        try:
            for name in DECODES:
                movable.cluster.kill(name)
                movable.gates.open(name)
            lines, chunks = await streamed
            refused = await http.post("/v1/completions", json=body)
        finally:
            movable.cluster.process.send_signal(signal.SIGCONT)
        assert "[DONE]" not in lines
        assert chunks[-1]["error"]["code"] == "worker_lost"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        until = time.monotonic() + AGAIN_S
        while refused.status_code != 200:
            assert refused.status_code == 503, refused.text
            assert time.monotonic() < until
            await asyncio.sleep(int(refused.headers["retry-after"]))  # sleep: as it is told to
            refused = await http.post("/v1/completions", json=body)
        assert refused.json()["choices"][0]["text"] == want


@asynccontextmanager
async def router_with_template(movable: Movable, root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The gRPC address of one more router, in this process, with a chat template for tools and with reasoning. Workers would
    refuse it for the template; here it reports theirs."""
    model = resolve_model("smollm2")
    monkeypatch.setattr(served_model, "tokenizer_revision", lambda _: tokenizer_revision(model))
    config = RouterConfig(
        redis_url=movable.cluster.state.redis_url,
        secret_file=str(movable.cluster.folder.secret),
        model=str(model_folder(root, str(model))),
        served_model_name=movable.cluster.model,
        reasoning_parser="think",
        tool_call_parser="hermes",
    )
    servers, frontend = ApiServers("127.0.0.1", 0, 0), Frontend(config)
    try:
        await frontend.start()
        addresses = await servers.start(frontend, frontend.metrics)
        cluster = frontend._cluster
        assert cluster is not None
        await waiting.until(lambda: frontend.ready()[0] and len(cluster.snapshot().decode) == 2, "the router is ready")
        yield addresses.grpc
    finally:
        await servers.stop(1.0)
        await frontend.close()


CALL = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich, the town by the lake, where the river leaves it"]},
        "days": {"enum": [3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CALL}}
SPLIT: dict[str, dict[str, Any]] = {
    "tool call": {"tools": [TOOL], "tool_choice": "get_weather"},
    "reasoning": {"split": True, "regex": f"<think>({WORD} ){{12}}</think>({WORD} ){{20}}"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLIT)
async def test_killed_in_the_middle_of_a_part(
    movable: Movable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    ask = {name: value for name, value in ASK.items() if name != "prompt"} | SPLIT[case]
    ask |= {"messages": [{"role": "user", "content": "What is the weather?"}], "max_tokens": 200, "ignore_eos": False}
    async with (
        router_with_template(movable, tmp_path / "model", monkeypatch) as address,
        AsyncClient(address, timeout_s=ANSWER_S) as client,
    ):
        want = await client.generate(**ask)
        assert want.tool_calls if case == "tool call" else (want.reasoning and want.content)
        got, lost = await disturbed(movable, client, ask, kill(movable))
    check_moved(got, lost)
    assert outcome(got) == outcome(want)


@pytest.mark.slow
async def test_a_resuming_client_notices_nothing(movable: Movable) -> None:
    async with AsyncClient(movable.cluster.grpc_address, timeout_s=ANSWER_S) as client:
        want = await client.generate(**ASK)
        got, lost = await disturbed(movable, client, ASK | {"resume": True}, kill(movable))
    check_moved(got, lost)
    assert outcome(replace(got, request_id="")) == outcome(replace(want, request_id=""))


@pytest.mark.slow
async def test_policy_fail_is_a_typed_error(movable: Movable) -> None:
    async with AsyncClient(movable.cluster.grpc_address, timeout_s=ANSWER_S) as client:
        with pytest.raises(DiptychError) as failure:
            await disturbed(movable, client, ASK | {"failure_policy": "fail"}, kill(movable))
    assert failure.value.reason == "WORKER_LOST"

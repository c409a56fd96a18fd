"""kill -9 of workers under sixteen streams of the openai client, each at a chosen phase of a request.

A cluster as shipped (`diptych up`: one router, two prefill and three decode workers), whose supervisor starts what was killed
again. Every request is first answered without kills. Then sixteen streams ask without a pause, while the run watches what
anybody can see: the streams, the router's status, the workers' statistics and audits. A phase that begins with a token is
looked for at every message of a stream, one before the first token at the prefill workers, a hundred times a second. A
request that is in one of the phases with the fewest kills so far has its process killed at once; the longer none is found,
the more phases will do. The answer's explanation says afterwards whether the kill hit: which attempt was lost, after how many
tokens, or which prefill worker failed. A kill that came too late counts for no phase. The next kill waits until the streams
that were hit flow again: a request moves three times in a row without a new token, not more.

What is compared: the texts, calls, token ids, finish reasons and usage, byte for byte; log probabilities within 1e-5 (how
many are equal to the bit is counted). Ids of calls are random by design.

With workers of several ranks (`Run.num_ranks`) not the worker is killed but one of its ranks, by SIGKILL and SIGSTOP in turn. The
worker must end by itself, its other ranks with it, and the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil

from diptych.cli.models.store import resolve_model
from diptych.cli.up.processes import ProcessIdentity
from diptych.cli.up.run_folder import ChildState
from diptych.cli.worker_access import WorkerAccess
from diptych.common.secret import load_secret
from diptych.rpc.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from diptych_tests import clusters, waiting

STREAMS = 16
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1", "decode-2")
WORKERS = (*PREFILLS, *DECODES)
PHASES = (
    "queued", "prefill running", "hand-off", "first token", "decoding", "mid-grammar", "mid-tool-call", "n = 3", "logprobs",
)  # fmt: skip
TEMPLATE = Path(__file__).with_name("smollm2_tools.jinja")
_ANSWER_S, _AGAIN_S, _AIM_S = 900.0, 300.0, 240.0
_PATIENCE_S = 1.0
"""A phase with one kill more than the others is looked for, too, after so long without a request in one of these."""
_LOOK_S, _POOL_S, _WORD_S = 0.01, 0.2, 5.0
"""Between two looks at the prefill workers, and at which workers are usable; for a worker's or the router's word."""
LEAST_HITS, MOST_REPLACE_S, MOST_GAP_S = 15, 1.0, 4.0
"""What a whole run shows on a quiet machine: kills of each phase, and seconds."""
_FIRST_TOKENS = 4
"""A kill at the first token has hit when no more than these had been sent."""
_LOGPROB_TOLERANCE = 1e-5

# ---- what is asked ---------------------------------------------------------------------------------------------------

_WORD = "(red|green|blue|tall|small|old|new)"
_LIST = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"enum": ["red", "green", "blue", "tall"]}, "minItems": 12, "maxItems": 14},
        "sure": {"type": "boolean"},
    },
    "required": ["words", "sure"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Zürich, the town by the lake, where the river leaves it", "Bern, upstream on another river"]},
                "note": {"type": "string", "minLength": 30, "maxLength": 60},
                "days": {"enum": [1, 2, 3]},
            },
            "required": ["city", "note", "days"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
_NAMED = {"type": "function", "function": {"name": "get_weather"}}
_IDS = {"return_token_ids": True}
_MORE = {"ignore_eos": True} | _IDS


def _story(number: int) -> str:
    return f"Story number {number}. Once upon a time, in a village by the sea, there lived"


def _long(number: int) -> str:
    """About 500 tokens."""
    lines = (
        f"On day {day} of journey {number} they walked {7 * day + number} miles and saw the sea." for day in range(24)
    )
    return " ".join(lines)


def asks() -> dict[str, list[dict[str, Any]]]:
    """By kind of stream: bodies of requests; `chat` says which route. Kind "long" has a prompt that no worker holds."""
    kinds: dict[str, list[dict[str, Any]]] = {
        "long": [{"prompt": _long(i), "max_tokens": 16, "extra_body": _MORE} for i in range(4)],
        "plain": [
            {"prompt": _story(0), "max_tokens": 100, "extra_body": _MORE},
            {
                "prompt": _story(1), "max_tokens": 100, "presence_penalty": 0.8,
                "extra_body": {"repetition_penalty": 1.2, "min_tokens": 80, "return_token_ids": True},
            },
            {"prompt": _story(2), "max_tokens": 100, "stop": ["and the", ". She"], "extra_body": _IDS},
        ],
        "grammar": [
            {
                "prompt": _story(3), "max_tokens": 150,
                "extra_body": {"guided_regex": f"({_WORD} ){{40}}end", "return_token_ids": True},
            },
            {
                "messages": [{"role": "user", "content": "List words."}], "max_tokens": 150, "extra_body": _IDS,
                "response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": _LIST}},
            },
        ],
        "tool": [
            {
                "messages": [{"role": "user", "content": f"What is the weather on day {i}?"}], "max_tokens": 200,
                "tools": [_TOOL], "tool_choice": _NAMED, "extra_body": _IDS,
            }
            for i in range(3)
        ],
        "several": [{"prompt": _story(4 + i), "max_tokens": 50, "n": 3, "extra_body": _MORE} for i in range(2)],
        "logprobs": [
            {"prompt": _story(6), "max_tokens": 80, "logprobs": 3, "extra_body": _MORE},
            {
                "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 80, "logprobs": True,
                "top_logprobs": 2, "extra_body": _MORE,
            },
        ],
    }  # fmt: skip
    for kind, bodies in kinds.items():
        for number, body in enumerate(bodies):
            body |= {"temperature": 1.0, "seed": 100 * len(kind) + number, "stream_options": {"include_usage": True}}
    return kinds


KIND_OF = {
    "queued": "long", "prefill running": "long", "hand-off": "long", "decoding": "plain", "mid-grammar": "grammar",
    "mid-tool-call": "tool", "n = 3": "several", "logprobs": "logprobs",
}  # fmt: skip
"""The kind of stream in which a phase is looked for; the first token is looked for in all."""
_KINDS_OF_STREAMS = (
    ("long",) * 6 + ("plain",) * 2 + ("grammar",) * 2 + ("tool",) * 2 + ("several",) * 2 + ("logprobs",) * 2
)


# ---- one request -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Flight:
    """One request, as its client sees it. Times are monotonic.

    Args:
        progress: by choice, tokens (messages with text, of answers without ids).
        seen: by choice, what must be equal to the undisturbed answer; numbers: log probabilities.
    """

    label: str
    kind: str
    number: int
    sent_at: float
    progress: Counter[int] = field(default_factory=Counter)
    first_at: float = 0.0
    ended_at: float = 0.0
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: list[float] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    why: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def flying(self) -> bool:
        return not self.ended_at

    def least(self, choices: int) -> int:
        return min(self.progress[index] for index in range(choices))

    @property
    def outcome(self) -> Any:
        return sorted((index, sorted(seen.items())) for index, seen in self.seen.items()), self.usage

    @property
    def arrived_by(self) -> float:
        """The latest time at which the router can have got it: its times are relative to that."""
        return min(self.ended_at - self.why["total_s"], self.first_at - self.why["ttft_s"])

    @property
    def lost(self) -> list[dict[str, Any]]:
        """The attempts whose worker was lost, with the tokens before (`had`) and when the next was submitted (`again_at`)."""
        attempts, had, found = self.why.get("attempts") or [], 0, []
        for one, following in zip(attempts, attempts[1:], strict=False):
            had += one["num_tokens"]
            found.append(one | {"had": had, "again_at": self.arrived_by + following["submitted_s"]})
        return found


def _read(flight: Flight, chunk: Any) -> None:
    more = chunk.model_extra or {}
    if more.get("diptych"):
        flight.why = more["diptych"]
    if chunk.usage is not None:
        flight.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    for choice in chunk.choices:
        seen = flight.seen.setdefault(choice.index, {"text": "", "calls": [], "ids": [], "tokens": [], "end": ""})
        delta = getattr(choice, "delta", None)
        text = (delta.content if delta is not None else choice.text) or ""
        seen["text"] += text
        calls = (delta.tool_calls if delta is not None else None) or ()
        for call in calls:
            if call.function.name:
                seen["calls"].append([call.function.name, ""])
            seen["calls"][call.index][1] += call.function.arguments or ""
        ids = (choice.model_extra or {}).get("token_ids") or []
        seen["ids"] += ids
        _read_logprobs(flight, seen, choice.logprobs)
        if choice.finish_reason:
            seen["end"] = choice.finish_reason
        if text or calls or ids:
            flight.first_at = flight.first_at or time.monotonic()
            flight.progress[choice.index] += max(1, len(ids))


def _read_logprobs(flight: Flight, seen: dict[str, Any], logprobs: Any) -> None:
    if logprobs is None:
        return
    if (content := getattr(logprobs, "content", None)) is not None:
        for entry in content:
            seen["tokens"].append([entry.token, *sorted(one.token for one in entry.top_logprobs)])
            flight.numbers += [entry.logprob, *(one.logprob for one in entry.top_logprobs)]
    elif getattr(logprobs, "tokens", None):
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            seen["tokens"].append([token, *sorted(top)])
            flight.numbers += [logprob, *(top[name] for name in sorted(top))]


async def ask(
    client: openai.AsyncOpenAI,
    model: str,
    flight: Flight,
    body: Mapping[str, Any],
    on_message: Callable[[], object] = lambda: None,
) -> None:
    """Fill the flight. What goes wrong is its `error`."""
    create = client.chat.completions.create if "messages" in body else client.completions.create
    headers = {"x-request-id": flight.label, "x-diptych-explain": "1"}
    more = dict(body.get("extra_body", {}))
    if flight.kind == "long":
        more["cache_salt"] = flight.label  # the same tokens, and nobody holds their KV
    try:
        call: Any = create
        stream = await call(**(body | {"model": model, "stream": True, "extra_headers": headers, "extra_body": more}))
        async for chunk in stream:
            _read(flight, chunk)
            on_message()
    except openai.OpenAIError as error:
        flight.error = repr(error)
    finally:
        flight.ended_at = time.monotonic()


# ---- the cluster -----------------------------------------------------------------------------------------------------


class Watch:
    """What anybody can see of the cluster."""

    def __init__(self, cluster: clusters.Cluster, api_key: str = "") -> None:
        self.cluster = cluster
        self._access = WorkerAccess(secret=load_secret(Path(cluster.state.secret_file)))
        self._channels: dict[str, grpc.Channel] = {}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=cluster.http_url, headers=headers, timeout=60.0)
        self._router_channel = grpc.aio.insecure_channel(cluster.grpc_address)
        self._router = router_pb2_grpc.RouterStub(self._router_channel)
        self.usable: set[str] = set()
        """Workers that live, and that the router uses: as `look` found them last."""

    async def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        await self._http.aclose()
        await self._router_channel.close()

    async def status(self) -> dict[str, Any]:
        with contextlib.suppress(httpx.HTTPError, TypeError):
            answer = await self._http.get("/status.json")
            if answer.status_code in (401, 403):
                raise RuntimeError(f"the cluster's status wants a key: {answer.text}")
            status: dict[str, Any] = answer.json()["cluster"]
            return status
        return {"workers": [], "placements": []}

    async def look(self) -> set[str]:
        """`usable`, now."""
        workers = (await self.status())["workers"]
        alive = {c.name: c.pid for c in self.cluster.state.children if ProcessIdentity(c.pid, c.start_time).alive()}
        self.usable = {one["id"] for one in workers if not one["why_not"] and alive.get(one["id"]) == one["pid"]}
        return self.usable

    async def placements(self) -> dict[str, tuple[str, str]]:
        """(prefill, decode) of the requests that run, by label; only of the latest requests."""
        found = (await self.status())["placements"]
        return {one["label"]: (one["prefill"], one["decode"]) for one in found if one["outcome"] == "running"}

    async def decode_of(self, flight: Flight) -> str:
        """Its decode worker; "": none now."""
        with contextlib.suppress(grpc.RpcError):
            answer = await self._router.Explain(router_pb2.ExplainRequest(request_id=flight.label), timeout=_WORD_S)
            return next((one.decode_worker_id for one in answer.explanation.candidates if one.chosen), "")
        return ""

    async def _ask(self, name: str, call: Callable[[worker_pb2_grpc.WorkerStub], Any]) -> Any:
        """The worker's answer; None: it has none now."""
        child = next((child for child in self.cluster.state.children if child.name == name), None)
        if child is None:  # about to be started again
            return None
        channel = self._channels.get(child.address)
        if channel is None:
            channel = self._channels[child.address] = self._access.open(child.address)
        with contextlib.suppress(grpc.RpcError):
            return await asyncio.to_thread(call, worker_pb2_grpc.WorkerStub(channel))
        return None

    async def stats(self, name: str) -> dict[str, float]:
        answer = await self._ask(name, lambda stub: stub.GetStats(worker_pb2.GetStatsRequest(), timeout=_WORD_S))
        return {} if answer is None else dict(answer.engine)

    async def slabs_in_use(self, name: str) -> int:
        """Of the staging ring: packed, or being read."""
        answer = await self._ask(name, lambda stub: stub.Audit(worker_pb2.AuditRequest(), timeout=_WORD_S))
        return 0 if answer is None else answer.slabs.packed + answer.slabs.in_flight


@dataclass(eq=False)
class Kill:
    """One kill. `target`: the request that it was aimed at; `seen`: of its worker, just before."""

    number: int
    phase: str
    victim: str
    target: Flight
    seen: dict[str, Any]
    beside: Sequence[Flight] = ()
    """The requests that a killed prefill worker had, including the target."""
    at: float = 0.0
    held: Sequence[tuple[Flight, int]] = ()
    """The requests that ran, and their tokens so far."""
    at_unix: float = 0.0
    noticed_s: float | None = None
    """Until the router found the stream of a decode worker broken, by its log."""
    away: Sequence[str] = ()
    """Other workers that were not usable then."""
    ended: bool = False
    """The process is gone."""
    back_s: float | None = None
    """Until the router used the worker's successor; None: the run ended before."""
    rank: int | None = None
    """Which of the worker's ranks was killed; None: the worker itself."""
    signal: str = "SIGKILL"
    gone_s: float | None = None
    """Until the worker's process, and those of all its ranks, had ended."""

    @property
    def flows_again(self) -> bool:
        return all(not flight.flying or flight.progress.total() > had for flight, had in self.held)


def hit(kill: Kill) -> str:
    """Why the kill missed its phase; "": it did not. Known once the target has ended."""
    target = kill.target
    if kill.victim in PREFILLS:
        failed = sum(
            any(f"prefill {kill.victim} failed" in note for note in one.why.get("notes", ())) for one in kill.beside
        )
        needed = 2 if kill.phase == "queued" and kill.seen["num_running"] else 1  # one of them waited
        return "" if failed >= needed else f"the prefill worker had done its part: {failed} requests lost it"
    if target.error or not target.why:
        return "the answer ended without an explanation"
    lost = [one for one in target.lost if one["decode"] == kill.victim and one["again_at"] >= kill.at]
    if not lost:
        return "the request had left the worker"
    most = {"queued": 0, "prefill running": 0, "hand-off": 1, "first token": _FIRST_TOKENS}.get(kill.phase, math.inf)
    least = 0 if kill.phase in ("queued", "prefill running", "hand-off") else 1
    had = lost[0]["had"]
    return "" if least <= had <= most else f"it had {had} tokens"


Found = tuple[str, Flight, dict[str, Any], Sequence[Flight]]
"""(victim, target, seen, beside), see Kill."""
_BEFORE = ("queued", "prefill running", "hand-off")


class Aim:
    """Finds a request in a phase, and the worker that has it.

    Args:
        whole: by kind and number, the tokens of the whole answer.
    """

    def __init__(
        self,
        watch: Watch,
        flights: Sequence[Flight],
        rng: random.Random,
        whole: Mapping[tuple[str, int], int],
    ):
        self._watch, self._flights, self._rng, self._whole = watch, flights, rng, whole
        self._used: set[Flight] = set()
        self._chosen: Counter[tuple[str, bool]] = Counter()
        self._moved = asyncio.Event()
        self._idle: dict[str, bool] = {}
        """Whether the prefill worker computed nothing at the last look."""
        self._depth = 0.0
        """0 to 1, how far into the answer."""

    def on_message(self) -> None:
        """A stream has said something."""
        self._moved.set()

    async def at(self, so_far: Mapping[str, int]) -> tuple[str, Found]:
        """The first of these phases in which a request is seen, those with the fewest kills first. Raises: TimeoutError."""
        began, least = time.monotonic(), min(so_far.values())
        self._depth = self._rng.random()
        order = sorted(so_far, key=lambda phase: (so_far[phase], self._rng.random()))
        while (waited_s := time.monotonic() - began) < _AIM_S:
            self._moved.clear()
            wanted = [phase for phase in order if so_far[phase] <= least + waited_s // _PATIENCE_S]
            for phase in wanted:
                found = await (self._before(phase) if phase in _BEFORE else self._after(phase))
                if found is not None:
                    self._used.add(found[1])
                    return phase, found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if set(wanted) & set(_BEFORE) else _PATIENCE_S):
                    await self._moved.wait()
        raise TimeoutError(f"no request was seen {' or '.join(wanted)} within {_AIM_S:.0f} s")

    def _may_die(self, name: str) -> bool:
        """Only where its role has another usable worker."""
        usable = self._watch.usable
        return name in usable and any(name in side and len(usable & set(side)) > 1 for side in (PREFILLS, DECODES))

    def _flying(self, kind: str | None) -> list[Flight]:
        found = [f for f in self._flights if f.flying and f not in self._used and kind in (None, f.kind)]
        self._rng.shuffle(found)
        return found

    def _is_in(self, phase: str, flight: Flight) -> bool:
        whole, done = self._whole[flight.kind, flight.number], flight.least(3 if flight.kind == "several" else 1)
        if phase == "first token":
            return 1 <= done < _FIRST_TOKENS - 1
        deep = 2 + self._depth * 0.5 * whole <= done < 0.8 * whole
        return deep and (phase != "mid-tool-call" or bool(flight.seen[0]["calls"]))

    async def _after(self, phase: str) -> Found | None:
        """In the stream."""
        for flight in self._flying(KIND_OF.get(phase)):
            if self._is_in(phase, flight):
                decode = await self._watch.decode_of(flight)
                if self._may_die(decode) and flight.flying and self._is_in(phase, flight):
                    return decode, flight, {"tokens": flight.least(3 if flight.kind == "several" else 1)}, ()
        return None

    async def _before(self, phase: str) -> Found | None:
        """Of a prompt that a prefill worker computes: kill that one, or the decode worker that waits for it,
        whichever was chosen less often."""
        most = 1 if phase == "hand-off" else 0
        shown = await asyncio.gather(*(self._seen(phase, prefill) for prefill in PREFILLS))
        for prefill, seen in zip(PREFILLS, shown, strict=True):
            if not seen:
                continue
            placed = await self._watch.placements()
            mine = [
                f for f in self._flights if f.flying and f not in self._used and f.kind == "long"
                and f.progress[0] <= most and placed.get(f.label, ("",))[0] == prefill
            ]  # fmt: skip
            if not mine:
                continue
            target = mine[-1] if phase == "queued" else mine[0]  # they are computed in the order of their arrival
            both = sorted((prefill, placed[target.label][1]), key=lambda name: self._chosen[phase, name in PREFILLS])
            for victim in both:
                if self._may_die(victim):
                    self._chosen[phase, victim in PREFILLS] += 1
                    return victim, target, seen, mine if victim == prefill else ()
        return None

    async def _seen(self, phase: str, prefill: str) -> dict[str, Any]:
        """What shows the phase at the prefill worker; empty: nothing does."""
        if phase == "hand-off":
            slabs = await self._watch.slabs_in_use(prefill)
            return {"slabs in use": slabs} if slabs else {}
        stats = await self._watch.stats(prefill)
        shown = {name: stats.get(name, 0) for name in ("num_waiting", "num_running")}
        if phase == "queued":
            return shown if shown["num_waiting"] else {}
        was_idle, self._idle[prefill] = self._idle.get(prefill, False), not shown["num_running"]
        # One that runs alone has just begun: else it may have ended when the kill comes.
        return shown if shown["num_running"] and (shown["num_waiting"] or was_idle) else {}


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run has found; `record` is its result file."""

    seed: int
    phases: Sequence[str] = PHASES
    num_ranks: int = 1
    """Of each worker; of several one is killed."""
    kills: list[Kill] = field(default_factory=list)
    answers: list[Flight] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    exact_logprobs: int = 0
    logprobs: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    """By request, its answer without a kill."""
    broken: str = "it has not ended"
    """What kept it from its end; "": nothing."""
    seconds: float = 0.0

    def hits(self, *, pending: bool = False) -> Counter[str]:
        """Kills that hit their phase; `pending`: and those whose target has not ended."""
        return Counter(
            kill.phase
            for kill in self.kills
            if (pending if any(one.flying for one in (kill.target, *kill.beside)) else not hit(kill))
        )

    @property
    def moved(self) -> list[Flight]:
        return [answer for answer in self.answers if answer.lost]

    def _kill_of(self, lost: Mapping[str, Any]) -> Kill | None:
        before = [kill for kill in self.kills if kill.victim == lost["decode"] and kill.at <= lost["again_at"]]
        return before[-1] if before else None

    def record(self) -> dict[str, Any]:
        losses = [
            {
                "kill": kill.number,
                "kind": answer.kind,
                "had": one["had"],
                "replace_s": round(one["again_at"] - kill.at, 4),
            }
            for answer in self.moved
            for one in answer.lost
            if (kill := self._kill_of(one)) is not None
        ]
        gaps = []
        for answer in self.moved:
            (first, *others) = answer.lost
            if others or not first["had"]:
                continue  # the stages in the explanation are of the last attempt; before the first token there is no gap
            why = answer.why
            local = why["first_token_s"] - why["reserved_s"]
            recompute_s = local if why["local_prefill"] else why["prefill_compute_s"]
            kill = self._kill_of(first)
            stages = {
                "gap_s": why["longest_gap_s"],
                "recompute_s": max(0.0, recompute_s),
                "queue_s": why["prefill_queue_s"],
            }
            stages |= {name: why[name] for name in ("reserved_s", "first_token_s", "kv_complete_s")}
            gaps.append(
                {"kill": -1 if kill is None else kill.number, "kind": answer.kind}
                | {name: round(seconds, 3) for name, seconds in stages.items()}
                | {"pulls": [(one["holder"], round(one["duration_s"], 3), one["note"]) for one in why["pulls"]]}
            )
        return summed(
            {
                "seeds": [self.seed],
                "phases": list(self.phases),
                "streams": STREAMS,
                "references": [hashlib.sha256(repr(sorted(self.whole.items())).encode()).hexdigest()[:16]]
                if self.whole
                else [],
                "broken": self.broken,
                "seconds": [round(self.seconds, 1)],
                "answers": len(self.answers),
                "moved": len(self.moved),
                "failed": self.failed,
                "wrong": self.wrong,
                "logprobs": {"compared": self.logprobs, "equal to the bit": self.exact_logprobs},
                "resources": [{"before": self.before, "after": self.after}],
                "kills": [
                    {
                        "phase": kill.phase,
                        "victim": kill.victim,
                        "seen": kill.seen,
                        "away": kill.away,
                        "missed": hit(kill),
                        "noticed_s": kill.noticed_s,
                        "back_s": kill.back_s,
                    }
                    | ({} if kill.rank is None else _of_a_rank(kill))
                    for kill in self.kills
                ],
                "losses": losses,
                "gaps": gaps,
            }
        )


def note_when_noticed(kills: Sequence[Kill], log: Path) -> None:
    """`noticed_s` of each, from the router's log."""
    downs: list[tuple[str, float]] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"stream to decode went down"' in line:
            entry = json.loads(line)
            downs.append((entry["worker"], datetime.fromisoformat(entry["timestamp"]).timestamp()))
    for kill in kills:
        after = [at - kill.at_unix for worker, at in downs if worker == kill.victim and at >= kill.at_unix]
        kill.noticed_s = round(min(after), 3) if after else None


def _phase_of(kind: str, had: int) -> str:
    """Of a request of this kind that lost its decode worker after so many tokens, whatever the kill was aimed at."""
    if not had:
        return "before the first token"
    named = next((phase for phase, its in KIND_OF.items() if its == kind and phase not in _BEFORE), "decoding")
    return "first token" if had <= _FIRST_TOKENS else named


def _of_a_rank(kill: Kill) -> dict[str, Any]:
    return {"rank": kill.rank, "signal": kill.signal, "gone_s": kill.gone_s}


def ranks_of(child: ChildState) -> list[psutil.Process]:
    """The processes of a worker's ranks, in their order. Raises: psutil.NoSuchProcess."""
    return [
        process
        for process in sorted(psutil.Process(child.pid).children(), key=lambda one: one.create_time())
        if "diptych.engine.ranks.process" in process.cmdline()
    ]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    cuts = sorted(values)
    at = lambda share: cuts[min(len(cuts) - 1, math.ceil(share * len(cuts)) - 1)]  # noqa: E731
    return {"n": len(cuts), "p50": at(0.5), "p99": at(0.99), "max": cuts[-1]}


def summed(body: dict[str, Any]) -> dict[str, Any]:
    """The record with what its lists amount to."""
    table = {phase: {"hit": 0, "missed": 0, "decode": 0, "prefill": 0} for phase in PHASES}
    for kill in body["kills"]:
        row = table[kill["phase"]]
        row["missed" if kill["missed"] else "hit"] += 1
        if not kill["missed"]:
            row[kill["victim"].partition("-")[0]] += 1
    gaps = body["gaps"]
    replace_s = percentiles([one["replace_s"] for one in body["losses"]])
    gap_less_recompute_s = percentiles([round(max(0.0, one["gap_s"] - one["recompute_s"]), 3) for one in gaps])
    return {
        "holds": {
            "every answer is that without kills": not (body["failed"] or body["wrong"] or body["broken"]),
            f"{LEAST_HITS} kills in each phase": all(table[phase]["hit"] >= LEAST_HITS for phase in body["phases"]),
            f"placed again within {MOST_REPLACE_S:g} s (p99)": replace_s.get("p99", math.inf) <= MOST_REPLACE_S,
            f"no gap above {MOST_GAP_S:g} s and what was computed again": gap_less_recompute_s.get("max", math.inf)
            <= MOST_GAP_S,
        },
        "num_kills": len(body["kills"]),
        "by_phase": table,
        "lost_requests": dict(Counter(_phase_of(one["kind"], one["had"]) for one in body["losses"])),
        "replace_s": replace_s,
        "gap_s": percentiles([one["gap_s"] for one in gaps]),
        "recompute_s": percentiles([one["recompute_s"] for one in gaps]),
        "noticed_s": percentiles([one["noticed_s"] for one in body["kills"] if one.get("noticed_s") is not None]),
        "back_s": percentiles([one["back_s"] for one in body["kills"] if one["back_s"] is not None]),
        "gone_s": percentiles([one["gone_s"] for one in body["kills"] if one.get("gone_s") is not None]),
        "gap_less_recompute_s": gap_less_recompute_s,
        **body,
    }


def model_folder(root: Path, model: str) -> Path:
    """The model's files with the committed template for tools."""
    source = resolve_model(model)
    root.mkdir()
    for file in source.iterdir():
        if file.name != "chat_template.jinja":
            (root / file.name).symlink_to(file)
    (root / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    return root


def resources(cluster: clusters.Cluster) -> dict[str, float]:
    """Of the processes that are never killed, and what the killed ones share with others."""
    found: dict[str, float] = {"shm_files": float(len(list(Path("/dev/shm").iterdir())))}  # noqa: S108
    for child in cluster.state.children:
        if child.name not in WORKERS:
            process = psutil.Process(child.pid)
            found[f"{child.name}_rss_mib"] = round(process.memory_info().rss / 2**20, 1)
            found[f"{child.name}_fds"] = process.num_fds()
    supervisor = psutil.Process(cluster.process.pid)
    return found | {"up_rss_mib": round(supervisor.memory_info().rss / 2**20, 1), "up_fds": supervisor.num_fds()}


async def run(
    done: Run,
    cluster: clusters.Cluster,
    *,
    kills: int,
    most_down: int = 1,
    until: float = math.inf,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
    save: Callable[[], None] = lambda: None,
) -> None:
    """Fill `done`; as far as it came, when cancelled.

    Args:
        most_down: workers that may still be starting when the next one is killed.
        until: no worker is killed later than that, on time.monotonic().
        save: called after each kill.
    """
    began, watch = time.monotonic(), Watch(cluster)
    try:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=_ANSWER_S
        ) as client:
            await _Streams(done, watch, client, say, began).run(kills, most_down, until, save)
        await asyncio.to_thread(cluster.wait_idle)
        done.after = resources(cluster)
    finally:
        await watch.close()
        note_when_noticed(done.kills, cluster.folder.root / "logs" / "router.log")
        done.seconds = time.monotonic() - began


class _Streams:
    """The sixteen, and the kills under them."""

    def __init__(
        self, done: Run, watch: Watch, client: openai.AsyncOpenAI, say: Callable[[str], None], began: float
    ) -> None:
        self._done, self._watch, self._client, self._say, self._began = done, watch, client, say, began
        self._rng, self._bodies, self._labels = random.Random(done.seed), asks(), count()
        self._flights: list[Flight] = []
        self._whole: dict[tuple[str, int], Flight] = {}
        self._stops = False

    async def run(self, kills: int, most_down: int, until: float, save: Callable[[], None]) -> None:
        """Returns: when the streams have ended, and all workers are back."""
        lengths = await self._ask_each()
        self._done.before = resources(self._watch.cluster)
        aim = Aim(self._watch, self._flights, self._rng, lengths)
        watching = asyncio.create_task(self._keep_watch())
        killing = asyncio.create_task(self._kill(aim, kills, most_down, save))
        streams = [asyncio.create_task(self._ask_on(kind, aim.on_message)) for kind in _KINDS_OF_STREAMS]
        tasks = [watching, killing, *streams]
        try:
            left_s = None if until == math.inf else max(0.0, until - time.monotonic())
            ended, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # its error: only the kills end by themselves
            killing.cancel()
            self._stops = True
            await asyncio.gather(*streams)
            await waiting.until(
                lambda: self._watch.usable >= set(WORKERS), "all workers are back", deadline_s=_AGAIN_S, every_s=_POOL_S
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fly(self, kind: str, number: int, on_message: Callable[[], object] = lambda: None) -> Flight:
        flight = Flight(f"kill-{self._done.seed}-{next(self._labels)}", kind, number, time.monotonic())
        self._flights.append(flight)
        await ask(self._client, self._watch.cluster.model, flight, self._bodies[kind][number], on_message)
        self._flights.remove(flight)
        return flight

    async def _ask_each(self) -> dict[tuple[str, int], int]:
        """Without a kill. Returns: the length of each answer."""
        keys = [(kind, number) for kind, several in self._bodies.items() for number in range(len(several))]
        self._whole = dict(zip(keys, await asyncio.gather(*(self._fly(*key) for key in keys)), strict=True))
        assert not (errors := {key: one.error for key, one in self._whole.items() if one.error}), errors
        self._done.whole = {f"{kind} {number}": one.outcome for (kind, number), one in self._whole.items()}
        lengths = {key: one.least(3 if key[0] == "several" else 1) for key, one in self._whole.items()}
        self._say(f"{len(keys)} answers without a kill after {self._took()} s; messages of each: {lengths}")
        return lengths

    def _took(self) -> str:
        return f"{time.monotonic() - self._began:.1f}"

    async def _ask_on(self, kind: str, on_message: Callable[[], object]) -> None:
        while not self._stops:
            self._judge(await self._fly(kind, self._rng.randrange(len(self._bodies[kind])), on_message))

    def _judge(self, flight: Flight) -> None:
        done, want = self._done, self._whole[flight.kind, flight.number]
        done.answers.append(flight)
        if flight.error:
            done.failed.append(f"{flight.label} ({flight.kind} {flight.number}): {flight.error}")
            self._say(f"FAILED {done.failed[-1]}")
        elif flight.outcome != want.outcome or not _close(flight.numbers, want.numbers):
            done.wrong.append(f"{flight.label} ({flight.kind} {flight.number}): {flight.outcome} for {want.outcome}")
            self._say(f"WRONG {done.wrong[-1]}")
        done.logprobs += len(flight.numbers)
        done.exact_logprobs += sum(a == b for a, b in zip(flight.numbers, want.numbers, strict=False))

    async def _keep_watch(self) -> None:
        while True:
            usable = await self._watch.look()
            for victim, kill in {kill.victim: kill for kill in self._done.kills}.items():
                if victim in usable and kill.ended and kill.back_s is None:
                    kill.back_s = round(time.monotonic() - kill.at, 1)
            await asyncio.sleep(_POOL_S)  # sleep: a pause between two looks

    async def _kill(self, aim: Aim, kills: int, most_down: int, save: Callable[[], None]) -> None:
        done, watch = self._done, self._watch
        most = math.ceil(kills / len(done.phases))

        def may_go_on() -> bool:
            there = len(watch.usable) >= len(WORKERS) - most_down
            return there and all(kill.flows_again for kill in done.kills[-2:])

        while len(done.kills) < kills:
            await waiting.until(may_go_on, "workers are back", deadline_s=_AGAIN_S, every_s=0.02)
            hits = done.hits(pending=True)
            so_far = {phase: hits[phase] for phase in done.phases if hits[phase] < most}
            phase, (victim, *found) = await aim.at(so_far or dict.fromkeys(done.phases, 0))
            held = [(flight, flight.progress.total()) for flight in self._flights]
            kill = Kill(len(done.kills), phase, victim, *found, held=held, at=time.monotonic(), at_unix=time.time())
            kill.away = sorted(set(WORKERS) - watch.usable)
            child, processes = self._strike(kill)
            done.kills.append(kill)
            struck = victim if kill.rank is None else f"rank {kill.rank} of {victim}"
            self._say(
                f"[{len(done.kills):3}/{kills}] {self._took():>6} s  {struck} {kill.signal}, {phase} {kill.seen}; "
                f"{len(done.answers)} answers, {len(done.moved)} moved, {len(done.failed)} failed, {len(done.wrong)} wrong; "
                f"hits {dict(done.hits())}"
            )
            dying = [ProcessIdentity(child.pid, child.start_time), *processes]
            await waiting.until(
                lambda dying=dying: not any(one.alive() for one in dying),
                "it has ended, with its ranks",
                deadline_s=_AGAIN_S,
                every_s=0.01,
            )
            kill.gone_s = round(time.monotonic() - kill.at, 3)
            await watch.look()
            kill.ended = True
            save()

    def _strike(self, kill: Kill) -> tuple[ChildState, list[ProcessIdentity]]:
        """Returns: the worker, and its ranks."""
        cluster, number = self._watch.cluster, self._done.num_ranks
        if number == 1:
            return cluster.kill(kill.victim), []
        child = cluster.child(kill.victim)
        processes = ranks_of(child)
        assert len(processes) == number, f"{kill.victim} has {len(processes)} ranks"
        kill.rank = self._rng.randrange(number)
        signum = (signal.SIGKILL, signal.SIGSTOP)[kill.number % 2]
        kill.signal = signum.name
        processes[kill.rank].send_signal(signum)
        return child, [ProcessIdentity(one.pid, one.create_time()) for one in processes]


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= _LOGPROB_TOLERANCE for a, b in zip(one, other, strict=True))


def flags(root: Path, model: str, *, tensor_parallel: int = 1, pipeline: int = 1) -> tuple[str, ...]:
    """Of `diptych up`."""
    folder = model_folder(root / "model", model)
    ranks = (
        "--tensor-parallel-size", str(tensor_parallel), "--pipeline-parallel-size", str(pipeline),
        "--startup-timeout-s", f"{clusters.START_DEADLINE_S:.0f}",  # twenty processes begin at once
    )  # fmt: skip
    return (
        "--model", str(folder), "--served-model-name", "smollm2", "--prefill-workers", "2", "--decode-workers", "3",
        *(ranks if tensor_parallel * pipeline > 1 else ()),
    )  # fmt: skip

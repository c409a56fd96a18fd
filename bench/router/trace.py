"""A seeded, prefix-heavy trace: multi-turn chats under shared system prompts. Times are virtual seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from diptych.common.block_identity import BlockHasher, IdentityHeader
from diptych.common.request import CacheClaim
from diptych.router.placement.adapters import AdapterNeed
from diptych.router.placement.block_table import Keys, as_keys

BLOCK_SIZE = 16
HEADER = IdentityHeader(bytes(32), "model", "tokenizer", "float16", BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Parameters of the trace.

    Args:
        sessions_per_s: Poisson arrivals of new chats, for `duration_s`.
        system_prompts: their number; popularity follows Zipf with exponent 1.
        think_s: mean pause between an answer's expected end and the next question.
    """

    seed: int = 1
    duration_s: float = 300.0
    sessions_per_s: float = 2.5
    system_prompts: int = 24
    system_tokens: tuple[int, int] = (512, 3072)
    turns: tuple[int, int] = (2, 9)
    question_tokens: tuple[int, int] = (32, 768)
    answer_tokens: tuple[int, int] = (32, 384)
    think_s: float = 8.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Args:
        keys: of the prompt's full blocks; `array` the same in the index's form.
        later_keys: of prompt and answer, with which the next turn of the session begins.
        tenant: its tenant.
        within_s: its deadline, from its arrival.
        claim: on its KV in the caches; None: none.
        patience_s: a client still waiting in the router after so long leaves.
        adapter: that answers; None: the base model.
        hint: its answer is not wanted: the prompt comes next (`prefetch`).
    """

    number: int
    session: int
    at: float
    num_tokens: int
    num_answer: int
    keys: tuple[bytes, ...]
    array: Keys
    later_keys: tuple[bytes, ...]
    tenant: str = ""
    within_s: float = 600.0
    patience_s: float = math.inf
    claim: CacheClaim | None = None
    adapter: AdapterNeed | None = None
    hint: bool = False


def with_adapters(trace: Sequence[TraceRequest], needs: Sequence[AdapterNeed | None]) -> list[TraceRequest]:
    """Each session asks for one of these, in turn; its blocks are of that adapter alone."""
    named = []
    for request in trace:
        need = needs[request.session % len(needs)]
        if need is not None:
            keys = tuple(_of_adapter(key, need) for key in request.keys)
            later = tuple(_of_adapter(key, need) for key in request.later_keys)
            request = replace(request, keys=keys, array=as_keys(list(keys)), later_keys=later, adapter=need)
        named.append(request)
    return named


def _of_adapter(key: bytes, need: AdapterNeed) -> bytes:
    return blake2b(key + need.adapter_id.encode(), digest_size=len(key)).digest()


def make_trace(config: TraceConfig) -> list[TraceRequest]:
    """In order of time."""
    rng = random.Random(config.seed)
    systems = [_tokens(rng, config.system_tokens) for _ in range(config.system_prompts)]
    weights = [1.0 / (i + 1) for i in range(len(systems))]
    drafts: list[tuple[float, int, int, int, list[bytes], list[bytes]]] = []
    at, session = 0.0, 0
    while (at := at + rng.expovariate(config.sessions_per_s)) < config.duration_s:
        session += 1
        drafts += _session(rng, config, session, at, rng.choices(systems, weights)[0])
    drafts.sort(key=lambda draft: draft[0])
    return [
        TraceRequest(number, who, when, tokens, answer, tuple(keys), as_keys(keys), tuple(later))
        for number, (when, who, tokens, answer, keys, later) in enumerate(drafts)
    ]


def merged(traces: Mapping[str, Sequence[TraceRequest]]) -> list[TraceRequest]:
    """Several tenants' traces as one."""
    whole: list[TraceRequest] = []
    sessions = 0
    for tenant, trace in traces.items():
        whole += [replace(request, tenant=tenant, session=request.session + sessions) for request in trace]
        sessions += max((request.session for request in trace), default=0)
    whole.sort(key=lambda request: request.at)
    return [replace(request, number=number) for number, request in enumerate(whole)]


def _session(
    rng: random.Random, config: TraceConfig, session: int, at: float, system: Sequence[int]
) -> list[tuple[float, int, int, int, list[bytes], list[bytes]]]:
    found = []
    hasher = BlockHasher(HEADER)
    hasher.update(system)
    for _ in range(rng.randint(*config.turns)):
        hasher.update(_tokens(rng, config.question_tokens))
        num_tokens, keys = hasher.num_tokens, list(hasher.keys)
        answer = _tokens(rng, config.answer_tokens)
        hasher.update(answer)
        found.append((at, session, num_tokens, len(answer), keys, list(hasher.keys)))
        at += 0.02 * len(answer) + rng.expovariate(1.0 / config.think_s)
    return found


def _tokens(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randrange(128_000) for _ in range(rng.randint(*bounds))]

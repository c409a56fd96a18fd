"""Workloads from a seed. Pure: the same spec gives the same items on every machine.

random         independent prompts
shared-prefix  prompts that begin with one of `num_prefixes` system prompts
conversation   turns with think time; every turn carries the real history
agent          loops of tool calls: a task, then tool results after short tool times, with history; with messages every
               turn is an assistant's call and its result in role tool
longdoc        several questions about one long document
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import msgspec

from diptych.common.errors import ConfigError
from diptych.loadtest.workloads.items import WorkItem
from diptych.loadtest.workloads.prompts import Form, Prompt, PromptMaker
from diptych.loadtest.workloads.sizes import Distribution, fixed

GENERATED = ("random", "shared-prefix", "conversation", "agent", "longdoc")


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Lengths in tokens, times in seconds.

    Attributes:
        turns: of a conversation, tool calls of an agent, questions about a document.
        think_time: between a conversation's turns; tool_time: between an agent's.
        tenants: (name, weight), drawn for each session.
        cancel_rate: share of the requests that the client cancels midway.
    """

    kind: str = "random"
    num_requests: int = 100
    input_len: Distribution = field(default_factory=lambda: fixed(256.0))
    output_len: Distribution = field(default_factory=lambda: fixed(64.0))
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 4
    think_time: Distribution = field(default_factory=lambda: fixed(1.0))
    tool_time: Distribution = field(default_factory=lambda: fixed(0.2))
    document_len: Distribution = field(default_factory=lambda: fixed(1024.0))
    tenants: tuple[tuple[str, float], ...] = ()
    cancel_rate: float = 0.0
    form: Form = "ids"
    vocab: tuple[int, int] = (1000, 30000)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigError("num_requests", self.num_requests, "must be 1 or more")
        if self.prefix_len < 0 or self.num_prefixes < 1 or self.turns < 1:
            raise ConfigError(
                "prefix_len", self.prefix_len, "prefix_len >= 0, num_prefixes >= 1 and turns >= 1 must hold"
            )
        if not 0.0 <= self.cancel_rate <= 1.0:
            raise ConfigError("cancel_rate", self.cancel_rate, "must be 0 to 1")
        if not 0 <= self.vocab[0] < self.vocab[1]:
            raise ConfigError("vocab", self.vocab, "must be low,high with 0 <= low < high")


def parse_tenants(text: str) -> tuple[tuple[str, float], ...]:
    """`gold:3,free:1` -> (("gold", 3.0), ("free", 1.0)). Raises: ConfigError."""
    found: list[tuple[str, float]] = []
    for part in filter(None, text.split(",")):
        name, _, weight = part.partition(":")
        try:
            found.append((name, float(weight or 1)))
        except ValueError:
            raise ConfigError("tenants", text, "must be name:weight, separated by commas") from None
        if not name or found[-1][1] <= 0:
            raise ConfigError("tenants", text, "names must not be empty, weights above 0")
    return tuple(found)


def generate(spec: WorkloadSpec) -> list[WorkItem]:
    """Raises: ConfigError for an unknown kind."""
    makers: dict[str, Callable[[WorkloadSpec, Random], Iterator[WorkItem]]] = {
        "random": _random,
        "shared-prefix": _shared_prefix,
        "conversation": _conversation,
        "agent": _agent,
        "longdoc": _longdoc,
    }
    if spec.kind not in makers:
        raise ConfigError("workload", spec.kind, f"must be one of {', '.join(makers)} or a file's format")
    stream = makers[spec.kind](spec, Random(f"{spec.seed}/items"))
    items = [item for item, _ in zip(stream, range(spec.num_requests), strict=False)]
    return dress(items, spec)


def dress(items: list[WorkItem], spec: WorkloadSpec) -> list[WorkItem]:
    """Add numbers, tenants and cancellations, to generated and replayed items."""
    rng = Random(f"{spec.seed}/dress")
    names, weights = [name for name, _ in spec.tenants], [weight for _, weight in spec.tenants]
    tenant_of: dict[str, str] = {}
    dressed: list[WorkItem] = []
    for index, item in enumerate(items):
        tenant, leave = item.tenant, item.cancel_after_tokens
        if names:
            tenant = tenant_of.setdefault(item.session or f"#{index}", rng.choices(names, weights)[0])
        if rng.random() < spec.cancel_rate and item.output_tokens > 1:
            leave = rng.randint(1, item.output_tokens - 1)
        dressed.append(msgspec.structs.replace(item, index=index, tenant=tenant, cancel_after_tokens=leave))
    return dressed


def _maker(spec: WorkloadSpec) -> PromptMaker:
    return PromptMaker(spec.form, spec.vocab)


def _item(prompt: Prompt, num_input: int, num_output: int, **more: object) -> WorkItem:
    return WorkItem(
        index=0,
        input_tokens=num_input,
        output_tokens=num_output,
        token_ids=prompt.token_ids,
        text=prompt.text,
        messages=prompt.messages,
        **more,  # type: ignore[arg-type]
    )


def _random(spec: WorkloadSpec, rng: Random) -> Iterator[WorkItem]:
    if spec.prefix_len:
        yield from _shared_prefix(spec, rng)
        return
    maker = _maker(spec)
    while True:
        num_input = spec.input_len.draw_tokens(rng)
        prompt = maker.join((maker.body(rng, num_input),))
        yield _item(prompt, num_input, spec.output_len.draw_tokens(rng))


def _shared_prefix(spec: WorkloadSpec, rng: Random) -> Iterator[WorkItem]:
    if spec.prefix_len < 1:
        raise ConfigError("prefix_len", spec.prefix_len, "must be 1 or more for the workload shared-prefix")
    maker = _maker(spec)
    prefixes = [maker.body(rng, spec.prefix_len) for _ in range(spec.num_prefixes)]
    while True:
        num_input = spec.input_len.draw_tokens(rng)
        prompt = maker.with_system(rng.choice(prefixes), maker.body(rng, num_input))
        yield _item(prompt, spec.prefix_len + num_input, spec.output_len.draw_tokens(rng), kind="shared-prefix")


def _turns(spec: WorkloadSpec, rng: Random, kind: str, delay: Distribution) -> Iterator[WorkItem]:
    maker = _maker(spec)
    system = maker.body(rng, spec.prefix_len)
    number = 0
    while True:
        for turn in range(spec.turns):
            num_input = spec.input_len.draw_tokens(rng)
            body = maker.body(rng, num_input)
            if turn == 0:
                prompt = maker.with_system(system, body)
            elif kind == "agent":
                prompt = maker.tool_result(rng, f"call_{number}_{turn}", body)
            else:
                prompt = maker.join((body,))
            yield _item(
                prompt,
                num_input + (spec.prefix_len if turn == 0 else 0),
                spec.output_len.draw_tokens(rng),
                kind=kind,
                session=f"{kind}-{number}",
                turn=turn,
                follows=turn > 0,
                delay_s=delay.draw(rng) if turn else 0.0,
            )
        number += 1


def _conversation(spec: WorkloadSpec, rng: Random) -> Iterator[WorkItem]:
    return _turns(spec, rng, "conversation", spec.think_time)


def _agent(spec: WorkloadSpec, rng: Random) -> Iterator[WorkItem]:
    return _turns(spec, rng, "agent", spec.tool_time)


def _longdoc(spec: WorkloadSpec, rng: Random) -> Iterator[WorkItem]:
    maker = _maker(spec)
    while True:
        num_document = spec.document_len.draw_tokens(rng)
        document = maker.body(rng, num_document)
        for _ in range(spec.turns):
            num_input = spec.input_len.draw_tokens(rng)
            prompt = maker.join((document, maker.body(rng, num_input)))
            yield _item(prompt, num_document + num_input, spec.output_len.draw_tokens(rng), kind="longdoc")

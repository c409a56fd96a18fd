"""Builders: small engines on the fake runner, and a prefill and a decode engine joined by copying payload bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.kv_groups import PoolDemand
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeAdapter, FakeRunner
from diptych.engine.messages import (
    Admitted,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FirstCandidates,
    FirstToken,
    GrantSlabs,
    KeepAdapter,
    KvComplete,
    KvMode,
    PrefillComplete,
    PromptLogprobs,
    RangePacked,
    RangeUnpacked,
    SlabGrant,
    TokensOut,
    UnpackRange,
)
from diptych.engine.offline import OfflineEngine

BLOCK = 4
IDENTITY = IdentityHeader(b"k" * 32, "model", "tokenizer", "uint8", BLOCK)


def make_config(**changes: object) -> EngineConfig:
    base = EngineConfig(
        num_blocks=64, block_size=BLOCK, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def make_engine(runner: FakeRunner | None = None, windows: Sequence[int] = (), **changes: object) -> OfflineEngine:
    """`windows`: of each layer of the runner, see FakeRunner."""
    config = make_config(**changes)
    demand = PoolDemand(config.max_num_seqs, config.max_num_batched_tokens)
    runner = runner or FakeRunner(config.num_blocks, BLOCK, windows=windows, demand=demand)
    return OfflineEngine(LocalExecutor(runner), config, IDENTITY, clock=FakeClock())


def make_request(
    attempt: str = "a", prompt: int | Sequence[int] | Prompt = 10, max_tokens: int = 8, seed: int = 0, **fields: object
) -> EngineRequest:
    """`prompt`: as it is, or its tokens, or how many."""
    if not isinstance(prompt, Prompt):
        tokens = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else tuple(prompt)
        prompt = Prompt(tokens, fields.pop("cache_salt", b""))  # type: ignore[arg-type]
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return EngineRequest(attempt, prompt, sampling, **fields)  # type: ignore[arg-type]


def adapter_id(name: str) -> str:
    """Empty for the empty name."""
    return hashlib.sha256(name.encode()).hexdigest()[:32] if name else ""


def make_lora_engine(
    names: Sequence[str], max_loras: int, runner: FakeRunner | None = None, *, parts: int = 1, **changes: object
) -> OfflineEngine:
    """With these adapters kept, see `adapter_id`. `parts`: of which one is installed before a step that others decode in."""
    config = make_config(**changes)
    engine = make_engine(runner or FakeRunner(config.num_blocks, BLOCK, max_loras=max_loras), **changes)
    for name in names:
        size = parts * engine.core.scheduler.throughput.install_budget() if parts > 1 else 1000
        engine.send(KeepAdapter(FakeAdapter(adapter_id(name), num_bytes=size, num_parts=parts)))
    return engine


def run_until_idle(engine: OfflineEngine, max_steps: int = 1000) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(max_steps):
        worked = engine.core.step()
        new = engine.core.take_events()
        events.extend(new)
        if not worked and not new:
            return events
    raise AssertionError("the engine does not come to rest")


def tokens_of(events: Sequence[EngineEvent], attempt: str = "a") -> list[int]:
    return [t for e in events if isinstance(e, TokensOut) and e.attempt == attempt for t in e.token_ids]


def ends_of(events: Sequence[EngineEvent], attempt: str = "a") -> list[EngineEvent]:
    ends = (Finished, Failed, PrefillComplete)
    return [e for e in events if isinstance(e, ends) and e.attempt == attempt]


def make_grants(count: int, slab_bytes: int, first: int = 0) -> tuple[SlabGrant, ...]:
    return tuple(SlabGrant(i, 1, memoryview(bytearray(slab_bytes))) for i in range(first, first + count))


@dataclass
class Outcome:
    token_ids: list[int]
    end: EngineEvent | None = None
    moved_tokens: int = 0
    moved_bytes: int = 0
    cached_tokens: int = 0


class Pair:
    """A prefill and a decode engine; every announced slab is read at once, copied and granted again. `slab_tokens`:
    tokens that one slab holds. `on_payload`: sees (and may damage) the bytes of each range on its way."""

    def __init__(
        self,
        prefill: OfflineEngine,
        decode: OfflineEngine,
        *,
        slabs: int = 2,
        slab_tokens: int = 8,
        on_payload: Callable[[bytearray], None] | None = None,
        drops: Callable[[RangePacked], bool] = lambda packed: False,
        reusable: bool = False,
    ) -> None:
        self.prefill, self.decode, self._reusable = prefill, decode, reusable
        token_bytes = prefill.core.scheduler.limits.kv_bytes_per_token
        grants = make_grants(slabs, slab_tokens * token_bytes)
        self._grants = {g.slab: g for g in grants}
        prefill.send(GrantSlabs(grants))
        self._requests: dict[str, EngineRequest] = {}
        self._on_payload, self._drops = on_payload, drops
        self.ranges: list[RangePacked] = []
        self.seen: list[EngineEvent] = []
        """What a client would be told: decode's events, and the prompt logprobs from wherever they come."""
        self.outcomes: dict[str, Outcome] = {}
        self._prefill_done: set[str] = set()

    def add(self, request: EngineRequest) -> None:
        self._requests[request.attempt] = request
        self.outcomes[request.attempt] = Outcome([])
        self.decode.send(replace(request, mode=KvMode.REMOTE))

    def run(self, requests: Sequence[EngineRequest] = (), max_steps: int = 3000) -> dict[str, Outcome]:
        for request in requests:
            self.add(request)
        for _ in range(max_steps):
            if all(o.end is not None for o in self.outcomes.values()):
                return self.outcomes
            self.turn()
        raise AssertionError(f"no end in sight: {self.outcomes}")

    def turn(self) -> None:
        self.decode.core.step()
        for event in self.decode.core.take_events():
            self.seen.append(event)
            self._on_decode(event)
        self.prefill.core.step()
        for event in self.prefill.core.take_events():
            self._on_prefill(event)

    def _on_decode(self, event: EngineEvent) -> None:
        match event:
            case Admitted(attempt, cached):
                request = self._requests[attempt]
                self.outcomes[attempt].cached_tokens = cached
                more = {"decode_cached_tokens": cached, "peer": "decode", "reusable": self._reusable}
                self.prefill.send(replace(request, mode=KvMode.PREFILL, **more))
            case TokensOut(attempt, offset, token_ids, choice=choice) if choice:
                pass
            case TokensOut(attempt, offset, token_ids):
                outcome = self.outcomes[attempt]
                assert offset == len(outcome.token_ids) + len(self._requests[attempt].output_token_ids)
                outcome.token_ids.extend(token_ids)
            case Finished(attempt) | Failed(attempt):
                assert self.outcomes[attempt].end is None
                self.outcomes[attempt].end = event
            case RangeUnpacked(attempt):
                pass

    def _on_prefill(self, event: EngineEvent) -> None:
        match event:
            case RangePacked(attempt, slab, _, first, count, size, _, first_layer, num_layers, group):
                self.ranges.append(event)
                data = bytearray(self._grants[slab].payload[:size])
                if self._on_payload is not None:
                    self._on_payload(data)
                layers = self.prefill.core.scheduler.limits.num_layers
                self.outcomes[attempt].moved_tokens += count * (num_layers or layers) // layers
                self.outcomes[attempt].moved_bytes += size
                if not self._drops(event):
                    self.decode.send(
                        UnpackRange(
                            attempt, slab, first, count, memoryview(data), first_layer=first_layer,
                            num_layers=num_layers, group=group,
                        )
                    )  # fmt: skip
                self.prefill.send(GrantSlabs((self._grants[slab],)))
            case TokensOut(attempt, _, token_ids, choice=choice, logprobs=logprobs):
                self.decode.send(FirstToken(attempt, token_ids[0], choice, logprobs[0] if logprobs else None))
            case FirstCandidates():
                self.decode.send(event)
            case PromptLogprobs():
                self.seen.append(event)
            case PrefillComplete(attempt):
                self.decode.send(KvComplete(attempt))


class Kit:
    BLOCK = BLOCK
    IDENTITY = IDENTITY
    FakeClock = FakeClock
    Pair = Pair
    local = LocalExecutor
    make_config = staticmethod(make_config)
    make_engine = staticmethod(make_engine)
    make_lora_engine = staticmethod(make_lora_engine)
    adapter_id = staticmethod(adapter_id)
    make_request = staticmethod(make_request)
    make_grants = staticmethod(make_grants)
    run_until_idle = staticmethod(run_until_idle)
    tokens_of = staticmethod(tokens_of)
    ends_of = staticmethod(ends_of)

    @staticmethod
    def undisturbed(
        requests: Sequence[EngineRequest], windows: Sequence[int] = (), adapters: Sequence[str] = ()
    ) -> dict[str, list[int]]:
        """Each request alone, LOCAL, cold, in one chunk."""
        out = {}
        for request in requests:
            demand = PoolDemand(1, 512)
            runner = FakeRunner(64, BLOCK, windows=windows, demand=demand, max_loras=len(adapters))
            engine = make_lora_engine(adapters, len(adapters), runner, num_blocks=64)
            (result,) = engine.generate([replace(request, mode=KvMode.LOCAL)])
            assert result.error is None, result.error
            out[request.attempt] = result.token_ids
        return out


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit

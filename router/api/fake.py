"""A frontend without a cluster that plays a script, for tests of the HTTP and gRPC servers and of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from diptych.common.errors import DiptychError, InvalidRequestError, ModelNotFoundError, NoWorkerError
from diptych.common.observe.metrics import Metrics
from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason
from diptych.common.text.token_bytes import ByteTokens, Tokens
from diptych.router.adapters.operations import AdapterOperations
from diptych.router.adapters.registry import AdapterRegistry
from diptych.router.api.packed_ids import PackedIds, unpack
from diptych.router.preprocess.beam_options import sampling_of
from diptych.router.preprocess.retention import session_text
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    Explanation,
    FinishedEvent,
    GenerateEvent,
    ModelFeatures,
    ModelInfo,
    PromptLogprobsEvent,
    StartedEvent,
    TokenEvent,
    UncheckedRequest,
    UsageInfo,
    ValidatedRequest,
)
from diptych.rpc.v1 import router_pb2, types_pb2

Step = GenerateEvent | BaseException | asyncio.Event | None
"""One step of a script: yield an event, raise an error, wait for an event, or (None) block forever."""

MODEL = "fake-model"
REQUEST_ID = "req-fake"
VOCAB_SIZE = 1000


def _bytes_of(token_id: int) -> bytes:
    """Ids from 100 on are single bytes, so that a token can be half a character."""
    return bytes([token_id - 100]) if 100 <= token_id < 356 else f"<{token_id}>".encode()


class FakeRouterApi:
    """A RouterApi that plays a script.

    Args:
        script: the steps after StartedEvent; every request plays it from the start.
        refuse: raised by `prepare`.
        before_start: steps before StartedEvent.
    """

    def __init__(
        self, script: Sequence[Step], *, refuse: DiptychError | None = None, before_start: Sequence[Step] = ()
    ) -> None:
        self.script = script
        self.refuse = refuse
        self.before_start = before_start
        self.specs: list[UncheckedRequest] = []
        self.closed: list[tuple[str, str]] = []
        """(tenant, session) of each that was closed."""
        self.metrics = Metrics()
        self.model_features = ModelFeatures()
        self.reasons: list[str] = []
        """Why `ready` is false; empty: it is true."""
        self.thinking = False
        self.running = 0
        self.cancelled = 0
        self.prepared = 0
        self.left = asyncio.Event()
        """Set when a client left a request before its end."""

    @property
    def adapters(self) -> AdapterOperations:
        """No router with workers stands behind it."""
        return AdapterOperations(_no_registry, dict)

    def models(self, tenant: str = "") -> list[ModelInfo]:
        return [ModelInfo(MODEL, max_model_len=2048, created=1_700_000_000)]

    def ready(self, *, names_adapters: bool = True) -> tuple[bool, list[str]]:
        return not self.reasons, self.reasons

    def features(self, model: object = "", tenant: str = "") -> ModelFeatures:
        return self.model_features

    def tokens(self, model: object = "", tenant: str = "") -> Tokens:
        return ByteTokens(_bytes_of)

    async def tokenize(self, spec: UncheckedRequest) -> list[int]:
        self.specs.append(spec)
        if self.refuse is not None:
            raise self.refuse
        self._check_model(spec.model)
        return [100 + byte for byte in spec.prompt.encode()] if isinstance(spec.prompt, str) else [1, 2, 3]

    async def detokenize(self, model: object, token_ids: object, tenant: str = "") -> str:
        self._check_model(model)
        assert isinstance(token_ids, list)
        if not all(0 <= token < VOCAB_SIZE for token in token_ids):
            raise InvalidRequestError("tokens must be below the vocabulary size", param="tokens")
        return b"".join(map(_bytes_of, token_ids)).decode("utf-8", "replace")

    def _check_model(self, model: object) -> None:
        if model not in ("", MODEL):
            raise ModelNotFoundError(f"model {model!r} is not served here", param="model")

    async def prepare(self, spec: UncheckedRequest) -> ValidatedRequest:
        self.specs.append(spec)
        if self.refuse is not None:
            raise self.refuse
        self._check_model(spec.model)
        sampling = sampling_of(spec, vocab_size=VOCAB_SIZE, seed=0, max_tokens=16, defaults={})
        ids = spec.token_ids if isinstance(spec.token_ids, list) else [1, 2, 3]
        if spec.prompt == "" or not ids:
            raise InvalidRequestError("the prompt is empty", param="prompt" if spec.token_ids is None else "token_ids")
        self.prepared += 1
        return ValidatedRequest(
            request_id=REQUEST_ID,
            label=str(spec.request_id),
            model=MODEL,
            prompt=Prompt(tuple(ids)),
            sampling=sampling,
            owner=b"",
            explain=spec.explain,
            local_prefill_max_tokens=64,
            failure_policy=0,
            arrived=0.0,
            deadline=1.0,
            tenant=spec.tenant,
            thinking=self.thinking,
            echo=str(spec.prompt) if spec.echo else "",
            idempotency_key=str(spec.idempotency_key),
            resume_after=tuple(spec.resume_after) if isinstance(spec.resume_after, list) else (),
        )

    def prepare_again(
        self, before: ValidatedRequest, prompt: PackedIds, timeout_s: float | None, *, draws_seed: bool
    ) -> ValidatedRequest:
        if self.refuse is not None:
            raise self.refuse
        self.prepared += 1
        return replace(before, prompt=Prompt(unpack(prompt.packed, prompt.count)[0]))

    async def explain(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
        """Knows only the last request."""
        if request_id != REQUEST_ID or not self.specs or self.specs[-1].tenant != tenant:
            raise InvalidRequestError("this router has no recent request of yours with that id", param="request_id")
        return router_pb2.ExplainResponse(explanation=Explanation(request_id=request_id), outcome="finished")

    def what_if(self, request: ValidatedRequest, pool: str) -> router_pb2.WhatIfResponse:
        if pool == "nonsense":
            raise InvalidRequestError("pool must look like 4P4D", param="pool")
        return router_pb2.WhatIfResponse(prompt_tokens=len(request.prompt.token_ids))

    def place(
        self, requests: Sequence[ValidatedRequest], spend: Callable[[str, int], None] = lambda _, __: None
    ) -> list[router_pb2.Placed | DiptychError]:
        return [NoWorkerError("the fake router has no worker") for _ in requests]

    async def close_session(self, session_id: object, tenant: str) -> router_pb2.CloseSessionResponse:
        self.closed.append((tenant, session_text(session_id, "session_id")))
        return router_pb2.CloseSessionResponse(freed_tokens=32, unreached=["decode-1"])

    def tickets_left(self, attempts: Iterable[str]) -> None:
        pass

    async def generate(self, request: ValidatedRequest) -> AsyncIterator[GenerateEvent]:
        self.running += 1
        complete = False
        try:
            for step in self.before_start:
                await _play(step)
            yield StartedEvent(request.request_id, request.model, len(request.prompt.token_ids))
            for step in self.script:
                if isinstance(step, FinishedEvent):
                    complete = True
                    yield finished(step, request.explain)
                elif isinstance(step, TokenEvent) and step.offset < len(request.resume_after):
                    continue  # already sent to the caller
                elif isinstance(step, (TokenEvent, ChoiceFinishedEvent, PromptLogprobsEvent)):
                    yield step
                else:
                    await _play(step)
            complete = True
        finally:
            self.running -= 1
            if not complete:
                self.cancelled += 1
                self.left.set()


def _no_registry() -> AdapterRegistry:
    raise NoWorkerError("the fake router has no registry of adapters")


async def _play(step: Step) -> None:
    if isinstance(step, BaseException):
        raise step
    await (step.wait() if isinstance(step, asyncio.Event) else asyncio.Event().wait())


def finished(event: FinishedEvent, explain: bool) -> FinishedEvent:
    """The event, with an explanation only if the request asked for one."""
    explanation = event.explanation if explain else None
    return FinishedEvent(event.reason, event.usage, event.stop_string, event.stop_token_id, explanation)


def hello_script() -> list[Step]:
    """Three tokens, "Hello there", one of them without complete text; ended by the stop string "!"."""
    explanation = Explanation(
        request_id=REQUEST_ID,
        prefill="p0",
        decode="d0",
        transport="ucx:tcp",
        kv_bytes=4096,
        kv_ranges=2,
        kv_ranges_overlapped=1,
        index_mode="EXACT",
        notes=["as planned"],
        candidates=[types_pb2.PlacementTerms(prefill_worker_id="p0", decode_worker_id="d0", total_ms=1.5, chosen=True)],
        prefill_pid=11,
        decode_pid=12,
        reserved_s=0.25,
    )
    return [
        TokenEvent(0, (10,), "Hello"),
        TokenEvent(1, (11,), ""),
        TokenEvent(2, (12, 13), " there"),
        FinishedEvent(FinishReason.STOP, UsageInfo(3, 4, 2), "!", None, explanation),
    ]

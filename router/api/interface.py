"""The frontend's interface for the gRPC and HTTP servers; tests implement it, too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol, cast

from diptych.common.errors import DiptychError, InternalError
from diptych.common.text.token_bytes import Tokens
from diptych.router.adapters.operations import AdapterOperations
from diptych.router.api.packed_ids import PackedIds
from diptych.router.requests.messages import (
    GenerateEvent,
    ModelFeatures,
    ModelInfo,
    StartedEvent,
    UncheckedRequest,
    ValidatedRequest,
)
from diptych.rpc.v1 import router_pb2


class RouterApi(Protocol):
    """See Frontend."""

    @property
    def adapters(self) -> AdapterOperations: ...

    def models(self, tenant: str = "") -> list[ModelInfo]: ...

    def ready(self, *, names_adapters: bool = True) -> tuple[bool, list[str]]: ...

    def features(self, model: object = "", tenant: str = "") -> ModelFeatures: ...

    def tokens(self, model: object = "", tenant: str = "") -> Tokens: ...

    async def tokenize(self, spec: UncheckedRequest) -> list[int]: ...

    async def detokenize(self, model: object, token_ids: object, tenant: str = "") -> str: ...

    async def prepare(self, spec: UncheckedRequest) -> ValidatedRequest: ...

    def prepare_again(
        self, before: ValidatedRequest, prompt: PackedIds, timeout_s: float | None, *, draws_seed: bool
    ) -> ValidatedRequest: ...

    async def explain(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse: ...

    def what_if(self, request: ValidatedRequest, pool: str) -> router_pb2.WhatIfResponse: ...

    def place(
        self, requests: Sequence[ValidatedRequest], spend: Callable[[str, int], None] = ...
    ) -> list[router_pb2.Placed | DiptychError]: ...

    async def close_session(self, session_id: object, tenant: str) -> router_pb2.CloseSessionResponse: ...

    def tickets_left(self, attempts: Iterable[str]) -> None: ...

    def generate(self, request: ValidatedRequest) -> AsyncIterator[GenerateEvent]: ...


class accepted:
    """The request's start and the events after it; leaving the block cancels the rest. A class: a generator costs each
    request more. Raises: the DiptychError with which the request failed before a decode worker accepted it."""

    __slots__ = ("_events",)

    def __init__(self, router_api: RouterApi, prepared: ValidatedRequest) -> None:
        self._events = cast(AsyncGenerator[GenerateEvent, None], router_api.generate(prepared))

    async def __aenter__(self) -> tuple[StartedEvent, AsyncIterator[GenerateEvent]]:
        try:
            started = await anext(self._events, None)
            if not isinstance(started, StartedEvent):
                raise InternalError("the answer did not begin with StartedEvent")
        except BaseException:
            await self._events.aclose()
            raise
        return started, self._events

    async def __aexit__(self, *_: object) -> None:
        await self._events.aclose()

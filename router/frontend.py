"""What the faces call: check and tokenize a request, then stream its answer. One object per router process."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from diptych.common.clock import Clock, MonotonicClock
from diptych.common.errors import ConfigError, DiptychError, InvalidRequestError, NoWorkerError
from diptych.common.redis_store import RedisStore
from diptych.common.revision import model_revision, tokenizer_revision
from diptych.common.secret import derive_key, load_secret, tenant_salt
from diptych.common.store import Store
from diptych.common.ticket import PURPOSE
from diptych.common.tls import load_cluster_tls
from diptych.common.token_bytes import TokenBytes
from diptych.common.tokenizer import GenerationDefaults, ModelTokenizer, generation_defaults
from diptych.router.admission import Admission
from diptych.router.budgets import SharedQuotas
from diptych.router.cluster import Cluster, Prompt
from diptych.router.compatibility import RouterCheck
from diptych.router.config import RouterConfig
from diptych.router.explain import Story
from diptych.router.idempotency import IdempotencyKeys
from diptych.router.intake import Intake, IntakeLimits
from diptych.router.lookaside import Lookaside
from diptych.router.messages import (
    Explanation,
    FinishedEvent,
    GenerateEvent,
    GenerateSpec,
    ModelFeatures,
    ModelInfo,
    PreparedRequest,
    StartedEvent,
    TokenEvent,
    UsageInfo,
)
from diptych.router.metrics import RequestTimer, RouterMetrics
from diptych.router.relay import Relay
from diptych.router.replication import Replication
from diptych.router.request_span import RequestSpan, traced
from diptych.router.shadow import Shadows
from diptych.router.submission import wish_of
from diptych.router.tools import guess_tool_parser, tool_factory
from diptych.router.tools_reasoning import CLOSE
from diptych.router.turns import Share
from diptych.rpc.v1 import router_pb2

__all__ = [
    "Explanation",
    "FinishedEvent",
    "Frontend",
    "GenerateEvent",
    "GenerateSpec",
    "ModelInfo",
    "PreparedRequest",
    "StartedEvent",
    "TokenEvent",
    "UsageInfo",
]

log = structlog.get_logger(__name__)

_Part = TypeVar("_Part")


class Frontend:
    """Start it once; every method is called on the event loop.

    Args:
        store, clock, rng: the production ones by default.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._clock = clock or MonotonicClock()
        self._rng = rng or random.Random()
        self._created = int(time.time())
        self._model = config.served_model_name or Path(config.model).name
        self._context: int | None = config.max_model_len
        self._cluster: Cluster | None = None
        self._secret: bytes | None = None
        self._intake: Intake | None = None
        self._lookaside: Lookaside | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._rollout = config.rollout
        self._features = ModelFeatures()
        self._keys = IdempotencyKeys(self._clock)
        self._token_bytes: TokenBytes | None = None
        self.metrics = RouterMetrics(
            degraded=lambda: bool(self._cluster and self._cluster.degraded),
            mode_degraded=lambda: bool(self._cluster and self._cluster.mute),
            copies=lambda: float(self._cluster.placer.num_copies) if self._cluster is not None else 0.0,
            waiting_turn=lambda: float(len(self._cluster.turnstile)) if self._cluster is not None else 0.0,
            kv_usage=lambda: self._cluster.kv_usage() if self._cluster is not None else 0.0,
            by_tenant=config.tenant_metrics,
        )
        self._shadow_metrics = RouterMetrics()
        """Shown nowhere: copies are no traffic."""
        self._shadows = Shadows(self._run_shadow, self.metrics) if self._rollout.shadow_share else None

    async def start(self) -> None:
        """Load the tokenizer and begin to watch the cluster. Raises: ConfigError."""
        if self._cluster is not None:
            raise RuntimeError("already started")
        config = self._config
        if not config.model or not config.secret_file:
            name = "secret_file" if config.model else "model"
            raise ConfigError(name, "", "must be set")
        secret = self._secret = load_secret(Path(config.secret_file))
        path = Path(config.model)
        loop = asyncio.get_running_loop()
        tokenizer, check = await loop.run_in_executor(None, _load, path, secret)
        self._context = min(filter(None, (config.max_model_len, _context(path))), default=None)
        self._features = _features(tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._token_bytes = TokenBytes(tokenizer)
        defaults = generation_defaults(path) if config.generation_config == "auto" else GenerationDefaults()
        if defaults != GenerationDefaults():
            log.info("sampling defaults from generation_config.json", defaults=str(defaults))
        if self._store is None:
            self._store = RedisStore(config.redis_url, cluster=config.cluster)
        self._cluster = Cluster(
            self._store,
            check,
            clock=self._clock,
            rng=self._rng,
            poll_s=config.worker_poll_s,
            dead_s=config.worker_dead_s,
            settle_s=config.worker_settle_s,
            policy=config.placement_policy,
            require_prefill=config.require_prefill,
            turn_window_s=config.turn_window_s,
            replication=Replication() if config.hot_prefix_copies else None,
            admission=Admission(config.admission, config.max_ttft_s, config.max_tpot_s),
            tls=load_cluster_tls(config.cluster_ca, config.cluster_cert, config.cluster_key, config.cluster_tls_name),
            rollout=self._rollout,
        )
        limits = IntakeLimits(
            model=self._model,
            max_model_len=self._max_model_len,
            max_prompt_bytes=config.max_prompt_bytes,
            local_prefill_max_tokens=config.local_prefill_max_tokens,
            request_timeout_s=config.request_timeout_s,
        )
        self._intake = Intake(
            tokenizer,
            limits,
            defaults=defaults,
            salt=lru_cache(4096)(partial(tenant_salt, secret)),
            clock=self._clock,
            rng=self._rng,
        )
        if config.lookaside:
            key = derive_key(secret, PURPOSE)
            self._lookaside = Lookaside(self._cluster, key, self.metrics, self._clock)
            self._sweeping = asyncio.create_task(self._lookaside.run(), name="tickets")
        await self._cluster.start()

    async def close(self) -> None:
        """Stop watching and release everything; what still streams ends with WorkerLostError. Idempotent."""
        sweeping, self._sweeping, self._lookaside = self._sweeping, None, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        if self._shadows is not None:
            await self._shadows.close()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.close()
        intake, self._intake = self._intake, None
        if intake is not None:
            intake.close()
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    def models(self) -> list[ModelInfo]:
        return [ModelInfo(self._model, self._max_model_len(), self._created)]

    def ready(self) -> tuple[bool, list[str]]:
        """Whether a request could be served now, and the reasons why not (or what is degraded)."""
        if self._cluster is None:
            return False, ["the router is not running"]
        return self._cluster.ready()

    def features(self) -> ModelFeatures:
        return self._features

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; may be half a character."""
        return self._token_bytes.of(token_id) if self._token_bytes is not None else b""

    async def tokenize(self, spec: GenerateSpec) -> list[int]:
        """Token ids of the spec's prompt or messages. Raises: as `prepare` does for them."""
        return await self._running(self._intake).tokenize(spec)

    async def detokenize(self, model: object, token_ids: object) -> str:
        """Text of token ids, special tokens included. Raises: InvalidRequestError, ModelNotFoundError."""
        return await self._running(self._intake).detokenize(model, token_ids)

    async def prepare(self, spec: GenerateSpec) -> PreparedRequest:
        """Check everything and tokenize (off the event loop).

        Raises: InvalidRequestError (PromptTooLongError) naming the parameter, ModelNotFoundError, OverloadedError.
        """
        began = self._clock.now()
        try:
            prepared = await self._running(self._intake).prepare(spec)
            took_s = self._clock.now() - began
            self.metrics.tokenize.observe(took_s)
            self.metrics.live.stage("tokenize", took_s)
            if self._rollout.on:
                prepared = replace(prepared, group=self._rollout.choose(prepared.request_id))
            return traced(prepared, spec)
        except DiptychError as err:
            self.metrics.refused(err.reason, spec.tenant)
            raise

    async def generate(self, request: PreparedRequest) -> AsyncIterator[GenerateEvent]:
        """StartedEvent, TokenEvent*, FinishedEvent. Leaving the iterator (aclose) cancels the request on decode.

        Raises (while iterating): a DiptychError; before StartedEvent nothing of the answer was produced.
        """
        with self._keys.running(request.tenant, request.idempotency_key) as outcome:
            async with aclosing(self._generate(request)) as events:
                async for event in events:
                    outcome.well |= isinstance(event, FinishedEvent)
                    yield event

    async def _generate(self, request: PreparedRequest) -> AsyncGenerator[GenerateEvent, None]:
        relay = Relay(self._running(self._cluster), request, self.metrics, self._clock)
        if self._shadows is not None and self._rollout.is_shadowed(request.request_id):
            self._shadows.start(request)
        timer = RequestTimer(self.metrics, request, self._clock)
        span = RequestSpan(request, self._clock)
        relay.traceparent = span.traceparent
        try:
            while True:
                event = await relay.next()
                if isinstance(event, TokenEvent):
                    timer.tokens(event)
                    span.token()
                elif isinstance(event, FinishedEvent):
                    timer.finished(event, relay.kv_bytes)
                    span.finished(event)
                yield event
                if isinstance(event, FinishedEvent):
                    return
        except DiptychError as err:
            timer.failed(err)
            span.failed(err)
            log.info("request failed", request_id=request.request_id, reason=err.reason, error=err.message)
            raise
        finally:
            relay.close()
            timer.left()
            span.left()

    async def _run_shadow(self, request: PreparedRequest) -> AsyncIterator[GenerateEvent]:
        """As `generate`, without a trace in metrics."""
        relay = Relay(self._running(self._cluster), request, self._shadow_metrics, self._clock)
        try:
            while not isinstance(event := await relay.next(), FinishedEvent):
                yield event
            yield event
        finally:
            relay.close()

    def place(self, request: PreparedRequest, spend: Callable[[int], None] = lambda _: None) -> router_pb2.Placed:
        """A ticket with which the client takes the request to its decode worker. `spend` gets the answer's tokens.

        Raises: NoWorkerError, also when this router gives out no tickets; RequestDeadlineError.
        """
        if self._lookaside is None:
            raise NoWorkerError("this router gives out no placement tickets")
        try:
            return self._lookaside.grant(request, spend)
        except DiptychError as err:
            self.metrics.errors.labels(err.reason).inc()
            raise

    def explain(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
        """Why a request of the recent past went where it went. Raises: InvalidRequestError when it is not remembered."""
        decision = self._running(self._cluster).decisions.get(request_id)
        if decision is None or self._secret is None or decision.owner != tenant_salt(self._secret, tenant):
            raise InvalidRequestError("this router remembers no request of yours with that id", param="request_id")
        return router_pb2.ExplainResponse(
            explanation=decision.explain(),
            outcome=decision.outcome,
            label=decision.label,
            prompt_tokens=decision.prompt_tokens,
            age_s=self._clock.now() - decision.arrived,
        )

    def budgets(self, per_minute: Callable[[str], int]) -> SharedQuotas:
        """Tenants' quotas that all routers of this cluster share; whoever takes them runs them."""
        cluster = self._running(self._cluster)
        return SharedQuotas(
            per_minute,
            now=self._clock.now,
            store=self._running(self._store),
            num_routers=lambda: cluster.num_routers,
        )

    def use_shares(self, share: Callable[[str], Share]) -> None:
        """What part of the pool each tenant has while requests wait; all have the same without it."""
        self._running(self._cluster).turnstile.share = share

    def status(self, tenant: str) -> dict[str, Any]:
        """Cluster and traffic as this router sees them, for the status page, `diptych top` and `diptych doctor`. Of single
        requests only the tenant's own are told."""
        now = self._clock.now()
        ready, reasons = self.ready()
        owner = b"" if self._secret is None else tenant_salt(self._secret, tenant)
        return {
            "model": self._model,
            "max_model_len": self._max_model_len(),
            "ready": ready,
            "reasons": reasons,
            "cluster": None if self._cluster is None else self._cluster.status(owner),
            "running": self.metrics.value("num_requests_running"),
            "waiting": self.metrics.value("num_requests_waiting"),
            "stages": self.metrics.live.stages(),
            "series": self.metrics.live.points(now),
            "counters": self.metrics.totals(),
        }

    def what_if(self, request: PreparedRequest, pool: str) -> router_pb2.WhatIfResponse:
        """Where the request would go now, or (`pool` like "4P4D") among as many idle workers. Nothing is run.

        Raises: InvalidRequestError naming the pool, NoWorkerError.
        """
        cluster, wish = self._running(self._cluster), wish_of(request)
        if pool:
            story = Story(request.request_id, cluster.what_if(wish, pool))
        else:
            placement = cluster.place(wish, Prompt(request.prompt_token_ids, request.cache_salt))
            story = Story(request.request_id, placement, cluster.index_mode(placement))
        return router_pb2.WhatIfResponse(explanation=story.tell(), prompt_tokens=len(request.prompt_token_ids))

    def _running(self, part: _Part | None) -> _Part:
        if part is None:
            raise NoWorkerError("the router is not running")
        return part

    def _max_model_len(self) -> int:
        """The smallest of the setting, the model's own limit, and the workers'."""
        workers = self._cluster.max_model_len() if self._cluster is not None else None
        return min(filter(None, (self._context, workers)), default=1)


def _load(path: Path, secret: bytes) -> tuple[ModelTokenizer, RouterCheck]:
    if not path.is_dir():
        raise ConfigError("model", str(path), "must be a local folder")
    try:
        revision = model_revision(path)
    except ConfigError:  # a router's host needs no weights; then the workers alone know the revision
        log.warning("no weights in the model folder: the workers' model revision is taken on trust", path=str(path))
        revision = ""
    check = RouterCheck(revision, tokenizer_revision(path), derive_key(secret, "block identity"))
    return ModelTokenizer(path), check


def _features(tokenizer: ModelTokenizer, tool_parser: str, reasoning_parser: str) -> ModelFeatures:
    """Raises: ConfigError for a parser that nobody knows."""
    template = tokenizer.chat_template
    if template is None:
        return ModelFeatures()
    if tool_parser == "auto":
        tool_parser = guess_tool_parser(template.source)
    if tool_parser != "none":
        tool_factory(tool_parser)
    reasoning = reasoning_parser == "think" or (reasoning_parser == "auto" and CLOSE in template.source)
    return ModelFeatures(tool_parser, reasoning, "tools" in template.variables)


def _context(path: Path) -> int | None:
    """The model's own limit, if config.json (which the tokenizer has read) names one."""
    value = json.loads((path / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return value if type(value) is int and value > 1 else None

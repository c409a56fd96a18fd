"""The router's frontend, behind the HTTP and gRPC servers: check and tokenize a request, then stream its answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import structlog

from diptych.common.clock import Clock, MonotonicClock
from diptych.common.compiled import NativeError, find_compiler
from diptych.common.errors import (
    ConfigError,
    DiptychError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
)
from diptych.common.sampling import FinishReason
from diptych.common.secret import load_secret, session_key, tenant_salt
from diptych.common.store.adapters import AdapterEntry
from diptych.common.store.interface import Store
from diptych.common.store.memory import MemoryStore
from diptych.common.store.redis_store import RedisStore
from diptych.common.text.token_bytes import Tokens
from diptych.common.tls import load_redis_tls
from diptych.router.adapters.base_model import names_of
from diptych.router.adapters.modules import StartAdapters
from diptych.router.adapters.operations import AdapterOperations
from diptych.router.adapters.registry import POLL_S, AdapterRegistry
from diptych.router.adapters.resolution import AdapterChoice, checked_choice, named_adapter, unknown_model
from diptych.router.api.packed_ids import PackedIds
from diptych.router.cluster.cluster import RETRY_AFTER_S, Cluster, new_router_id
from diptych.router.config import RouterConfig
from diptych.router.fairness.budgets import SharedQuotas
from diptych.router.fairness.fair_queue import Share
from diptych.router.observe.access_log import Access, current_access, note_end
from diptych.router.observe.adapter_metrics import seen_counters
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.metrics import RequestTimer, RouterMetrics
from diptych.router.observe.request_span import RequestSpan, traced
from diptych.router.placement.native.library import choose_library
from diptych.router.placement.placer import PromptBlocks
from diptych.router.preprocess.retention import session_text
from diptych.router.processes.siblings import Siblings
from diptych.router.requests.idempotency import IdempotencyKeys
from diptych.router.requests.lookaside import RETRIES_AT_ROUTER
from diptych.router.requests.messages import (
    FinishedEvent,
    GenerateEvent,
    ModelFeatures,
    ModelInfo,
    StartedEvent,
    TokenEvent,
    UncheckedRequest,
    ValidatedRequest,
)
from diptych.router.requests.relay import Relay
from diptych.router.requests.shadow import Shadows
from diptych.router.requests.submission import adapter_need, placement_request
from diptych.router.served_model import ServedModel, SharedDependencies, belongs_to, load_folders, make_model
from diptych.rpc.v1 import router_pb2

log = structlog.get_logger(__name__)


class Frontend:
    """One per router process. Start it once; every method is called on the event loop.

    Args:
        store, clock, rng: the production ones by default.
        siblings: the other processes of this router; None: it is one process.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._clock = clock or MonotonicClock()
        self._rng = rng or random.Random()
        self._created = int(time.time())
        self._registry: AdapterRegistry | None = None
        self._at_start: StartAdapters | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.adapters = AdapterOperations(
            self._started_registry,
            lambda: {name: model.cluster for name, model in self._models.items()},
            others_read_s=lambda: 0.0 if isinstance(self._store, MemoryStore) else 2 * POLL_S,
            names=lambda model: names_of(model, config.model_folders.get(model, "")),
        )
        self._models: dict[str, ServedModel] = {}
        self._running: dict[str, Relay] = {}
        """By request id."""
        self._all_were_ready = False
        self._secret: bytes | None = None
        self._rollout = config.rollout
        self._siblings = siblings
        self._keys = siblings or IdempotencyKeys(self._clock)
        self.metrics = RouterMetrics(
            degraded=lambda: any(cluster.degraded for cluster in self._clusters()),
            mode_degraded=lambda: any(cluster.untracked_workers for cluster in self._clusters()),
            copies=lambda: float(sum(cluster.placer.num_copies for cluster in self._clusters())),
            waiting_turn=lambda: float(sum(len(cluster.wait_queue) for cluster in self._clusters())),
            kv_usage=lambda: max((cluster.kv_usage() for cluster in self._clusters()), default=0.0),
            by_tenant=config.tenant_metrics,
        )
        if siblings is not None:
            self.metrics.processes(siblings.count)
        self._lookup = {"backend": "", "wanted": config.placement_backend}
        self._shadow_metrics = RouterMetrics()
        """Not exposed: copies are not traffic."""
        self._shadows = Shadows(self._run_shadow, self.metrics) if self._rollout.shadow_share else None

    def _clusters(self) -> list[Cluster]:
        return [model.cluster for model in self._models.values()]

    @property
    def _cluster(self) -> Cluster | None:
        """The first model's cluster."""
        return next(iter(self._clusters()), None)

    async def start(self) -> None:
        """Load the tokenizers and start watching the workers. Raises: ConfigError."""
        if self._models:
            raise RuntimeError("already started")
        config = self._config
        if not config.model or not config.secret_file:
            name = "secret_file" if config.model else "model"
            raise ConfigError(name, "", "must be set")
        secret = self._secret = load_secret(Path(config.secret_file))
        in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
        folders = await in_thread(load_folders, config, secret)
        library = await in_thread(choose_library, config.placement_backend)
        self._lookup = {"backend": "numpy" if library is None else "native", "wanted": config.placement_backend}
        if self._store is None:
            tls = load_redis_tls(config.redis_ca, config.redis_cert, config.redis_key)
            self._store = RedisStore(config.redis_url, cluster=config.cluster, tls=tls)
        router_id, checks = new_router_id(), [folder.check for folder in folders]
        process = {} if self._siblings is None else {"process": str(self._siblings.number)}
        self.metrics.identify({"role": "router", "worker": router_id, **process})
        for number, folder in enumerate(folders):
            named = router_id if not number else f"{router_id}.{number}"
            self._models[folder.name] = make_model(
                config,
                folder,
                SharedDependencies(self._store, library, secret, self.metrics, self._clock, self._rng),
                router_id=named,
                is_mine=partial(belongs_to, checks, number),
            )
        self._registry = AdapterRegistry(self._store, on_change=self.metrics.adapters.on_change)
        await self._registry.refresh()
        self._tasks.append(asyncio.create_task(self._registry.run(), name="adapter registry"))
        if config.lora_modules:
            first = next(iter(self._models.values()))
            at_start = StartAdapters(
                self.adapters, config.adapter_folders, first.name, lambda: first.cluster.ready()[0]
            )
            self._at_start = at_start
            self._tasks.append(asyncio.create_task(at_start.run(), name="adapters at the start"))
        for model in self._models.values():
            model.cluster.adapter_turns.on_refused = self.metrics.adapters.refused.inc
            await model.start()

    def _started_registry(self) -> AdapterRegistry:
        """Raises: NoWorkerError before the start."""
        if self._registry is None:
            raise NoWorkerError("the router is not running")
        return self._registry

    async def close(self) -> None:
        """Stop watching and release everything; running streams end with WorkerLostError. Idempotent."""
        if self._shadows is not None:
            await self._shadows.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        models, self._models = self._models, {}
        for model in models.values():
            await model.close()
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    def _of(self, name: object) -> ServedModel:
        """Raises: NoWorkerError before the start, InvalidRequestError for a missing name with several models,
        ModelNotFoundError."""
        models = self._models
        if not models:
            raise NoWorkerError("the router is not running")
        if len(models) == 1:  # its preprocessor checks the name
            return next(iter(models.values()))
        if not isinstance(name, str):
            raise InvalidRequestError("model must be text", param="model")
        there = ", ".join(repr(model) for model in models)
        if not name:
            raise InvalidRequestError(f"model must be one of {there}", param="model")
        if name not in models:
            shown = name[:128].encode("ascii", "replace").decode()
            raise ModelNotFoundError(f"the model {shown!r} does not exist; there are {there}", param="model")
        return models[name]

    def _base(self, name: object, tenant: str) -> object:
        """The base model's name, of an adapter's that the tenant may use."""
        if self._registry is None or not isinstance(name, str) or name in self._models:
            return name
        entry = self._registry.find(name) if self.adapters.may_use(tenant, name) else None
        return name if entry is None else entry.model

    def models(self, tenant: str = "") -> list[ModelInfo]:
        """The models, then the adapters that the tenant may use."""
        lengths = {model.name: model.max_model_len() for model in self._models.values()}
        entries = [] if self._registry is None else self.adapters.entries(tenant)
        return [ModelInfo(name, length, self._created) for name, length in lengths.items()] + [
            ModelInfo(
                entry.name,
                lengths[entry.model],
                entry.version(entry.stable).created,
                parent=entry.model,
                root=entry.version(entry.stable).folder,
            )
            for entry in entries
        ]

    async def _choice(self, spec: UncheckedRequest) -> AdapterChoice | None:
        """The adapter that the request names; None: the base model answers, or the check of its name fails. Raises:
        ModelNotFoundError, InvalidRequestError."""
        name, param = named_adapter(spec.model, spec.adapter, self._models)
        if not name and spec.adapter_version:
            raise InvalidRequestError("adapter_version is given without an adapter", param="adapter_version")
        if not name or self._registry is None:
            return None
        entry = await self._registry.look_up(name) if self.adapters.may_use(spec.tenant, name) else None
        version = spec.adapter_version
        choice = checked_choice(entry, name, param, model=spec.model, version=version, models=self._models)
        if choice is None:
            raise unknown_model(name, self._models, [one.name for one in self.adapters.entries(spec.tenant)])
        return choice

    def _choice_again(self, before: ValidatedRequest) -> AdapterChoice | None:
        """As `_choice`, for another request of the same names."""
        if before.adapter is None or self._registry is None:
            return None
        name, version = before.adapter.name, before.adapter.version.number if before.adapter.pinned else None
        entry = self._registry.find(name) if self.adapters.may_use(before.tenant, name) else None
        return checked_choice(entry, name, "adapter", model=before.model, version=version, models=self._models)

    def ready(self, *, names_adapters: bool = True) -> tuple[bool, list[str]]:
        """Whether requests could be served now, and the reasons why not (or for being degraded): at the start for all
        models, later for any. `names_adapters`: False: of adapters that are not loaded only the number is shown: not every
        reader may know their names, and workers' errors contain paths."""
        if not self._models:
            return False, ["the router is not running"]
        reported = {model.name: model.cluster.ready() for model in self._models.values()}
        at_start = self._at_start
        all_are = all(ready for ready, _ in reported.values()) and (at_start is None or at_start.tried)
        self._all_were_ready = self._all_were_ready or all_are
        missing = [] if at_start is None else at_start.reasons(names=names_adapters)
        ready = self._all_were_ready and any(ready for ready, _ in reported.values())
        if len(reported) == 1:
            return ready, next(iter(reported.values()))[1] + missing
        return ready, [f"{name}: {reason}" for name, (_, reasons) in reported.items() for reason in reasons] + missing

    def features(self, model: object = "", tenant: str = "") -> ModelFeatures:
        """Features of the model; of the first for a name that the tenant does not know (which `prepare` rejects)."""
        model = self._base(model, tenant)
        found = self._models.get(model) if isinstance(model, str) else None
        found = found or next(iter(self._models.values()), None)
        return ModelFeatures() if found is None else found.folder.features

    def tokens(self, model: object = "", tenant: str = "") -> Tokens:
        """The model's tokens as bytes. Raises: ModelNotFoundError."""
        return self._of(self._base(model, tenant)).folder.token_bytes

    async def tokenize(self, spec: UncheckedRequest) -> list[int]:
        """Token ids of the spec's prompt or messages. Raises: as `prepare` for these."""
        if (choice := await self._choice(spec)) is not None:
            spec = replace(spec, model=choice.entry.model)
        return await self._of(spec.model).intake.tokenize(spec)

    async def detokenize(self, model: object, token_ids: object, tenant: str = "") -> str:
        """Text of token ids, special tokens included. Raises: InvalidRequestError, ModelNotFoundError."""
        if (choice := await self._choice(UncheckedRequest(model=model, tenant=tenant))) is not None:
            model = choice.entry.model
        return await self._of(model).intake.detokenize(model, token_ids)

    async def prepare(self, spec: UncheckedRequest) -> ValidatedRequest:
        """Check everything and tokenize (off the event loop). Raises: InvalidRequestError (PromptTooLongError) naming
        the parameter, ModelNotFoundError, OverloadedError."""
        began = self._clock.now()
        try:
            choice = await self._choice(spec)
            if choice is not None:
                spec = replace(spec, model=choice.entry.model)
            prepared = await self._of(spec.model).intake.prepare(spec, choice)
            prepared = traced(self._counted(prepared, began), spec)
        except DiptychError as err:
            self._refused(err, spec.tenant)
            raise
        if (access := current_access.get()) is not None:
            access.prepared(prepared)
        return prepared

    def prepare_again(
        self, before: ValidatedRequest, prompt: PackedIds, timeout_s: float | None, *, draws_seed: bool
    ) -> ValidatedRequest:
        """See RequestPreprocessor.prepare_again. Raises: as prepare."""
        began = self._clock.now()
        try:
            intake, choice = self._of(before.model).intake, self._choice_again(before)
            again = intake.prepare_again(before, prompt, timeout_s, draws_seed=draws_seed, adapter=choice)
            return self._counted(again, began)
        except DiptychError as err:
            self._refused(err, before.tenant)
            raise

    def _refused(self, error: DiptychError, tenant: str, request: ValidatedRequest | None = None) -> None:
        """Count a rejected request. Ticket requests have no access log line of a server, so it is written here."""
        self.metrics.refused(error.reason, tenant)
        if current_access.get() is None:
            access = Access("lookaside", "ticket", tenant=tenant)
            if request is not None:
                access.prepared(request)
            access.failed(error)
            access.write()

    def _counted(self, prepared: ValidatedRequest, began: float) -> ValidatedRequest:
        took_s = self._clock.now() - began
        self.metrics.tokenize.observe(took_s)
        self.metrics.live.stage("tokenize", took_s)
        if self._rollout.on:
            prepared = replace(prepared, group=self._rollout.choose(prepared.request_id))
        return prepared

    def generate(self, request: ValidatedRequest) -> AsyncIterator[GenerateEvent]:
        """Yield StartedEvent, TokenEvent*, FinishedEvent. Closing the iterator cancels the request on decode.

        Raises (while iterating): a DiptychError; before StartedEvent no token was generated.
        """
        # A request that goes on with an id is the one that has its key.
        once = request.idempotency_key and (request.resume is None or request.found_by_key)
        return self._generate_once(request) if once else self._generate(request)

    async def _generate_once(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        """As `generate`, under the request's idempotency key."""
        async with AsyncExitStack() as stack:
            try:
                outcome = await stack.enter_async_context(self._keys.hold(request.tenant, request.idempotency_key))
            except DiptychError as err:
                self.metrics.refused(err.reason, request.tenant)
                raise
            async with aclosing(self._generate(request)) as events:
                async for event in events:
                    outcome.well |= isinstance(event, FinishedEvent)
                    yield event

    async def _generate(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        model, attempts = self._of(request.model), self._config.migration_attempts
        num_prompt = len(request.prompt.token_ids)
        if request.prefetch and not model.cluster.is_idle_for(request.tenant, num_prompt, adapter_need(request)):
            busy = OverloadedError("requests wait for a worker: the hint was dropped", retry_after_s=RETRY_AFTER_S)
            self._refused(busy, request.tenant)
            raise busy
        relay = Relay(model.cluster, request, self.metrics, self._clock, migration_attempts=attempts, refs=model.refs)
        if self._shadows is not None and request.resume is None and self._rollout.is_shadowed(request.request_id):
            self._shadows.start(request)
        timer = RequestTimer(self.metrics, request, self._clock)
        span = RequestSpan(request, self._clock)
        relay.traceparent = span.traceparent
        relay.trace.retention = request.retention
        self._running[request.request_id] = relay
        ended: FinishedEvent | None = None
        try:
            while True:
                event = await relay.next()
                if isinstance(event, TokenEvent):
                    timer.tokens(event, relay.num_new(event))
                    span.token()
                    if request.prefetch:
                        continue
                elif isinstance(event, StartedEvent):
                    if (access := current_access.get()) is not None:
                        access.started = True
                elif isinstance(event, FinishedEvent):
                    ended = event
                    timer.finished(event, relay.kv_bytes)
                    span.finished(event)
                if request.prefetch and isinstance(event, FinishedEvent):
                    event = _without_tokens(event)
                yield event
                if isinstance(event, FinishedEvent):
                    return
        except DiptychError as err:
            timer.failed(err)
            span.failed(err)
            if (access := current_access.get()) is not None:
                access.failed(err)
            raise
        finally:
            note_end(relay.trace, ended)
            if self._running.get(request.request_id) is relay:
                del self._running[request.request_id]
            relay.close()
            timer.left()
            span.left()
            relay.trace.settle()

    async def _run_shadow(self, request: ValidatedRequest) -> AsyncIterator[GenerateEvent]:
        """As `generate`, without effect on metrics."""
        relay = Relay(self._of(request.model).cluster, request, self._shadow_metrics, self._clock)
        try:
            while not isinstance(event := await relay.next(), FinishedEvent):
                yield event
            yield event
        finally:
            relay.close()

    def place(
        self, requests: Sequence[ValidatedRequest], spend: Callable[[str, int], None] = lambda _, __: None
    ) -> list[router_pb2.Placed | DiptychError]:
        """For each request a ticket with which the client goes to its decode worker, or the reason for none (see
        Lookaside.grant). `spend` gets (tenant, tokens) of the answers."""
        outcomes: list[router_pb2.Placed | DiptychError] = []
        for name, group in groupby(requests, key=attrgetter("model")):
            of_model = list(group)
            lookaside = self._of(name).lookaside
            if lookaside is None:
                outcomes += [NoWorkerError("this router issues no placement tickets") for _ in of_model]
            else:
                outcomes += lookaside.grant(of_model, spend)
        for request, outcome in zip(requests, outcomes, strict=True):
            # counted as the request that follows
            if isinstance(outcome, DiptychError) and outcome.reason not in RETRIES_AT_ROUTER:
                self._refused(outcome, request.tenant, request)
        return outcomes

    def tickets_left(self, attempts: Iterable[str]) -> None:
        """The client's stream that got these tickets has ended."""
        for model in self._models.values():
            if model.lookaside is not None:
                model.lookaside.left(attempts)

    async def close_session(self, session_id: object, tenant: str) -> router_pb2.CloseSessionResponse:
        """End the claims of a session of the tenant at all workers of all models. Raises: InvalidRequestError."""
        name = session_text(session_id, "session_id")
        if self._secret is None:
            raise NoWorkerError("the router is not running")
        session = session_key(tenant_salt(self._secret, tenant), name)
        released = await asyncio.gather(*(cluster.release_session(session) for cluster in self._clusters()))
        return router_pb2.CloseSessionResponse(
            freed_tokens=sum(tokens for tokens, _ in released),
            unreached=sorted(worker for _, unreached in released for worker in unreached),
        )

    async def explain(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
        """The explanation of a recent request, of any process of this router. Raises: InvalidRequestError for an unknown
        one."""
        if self._siblings is None:
            return self.explain_own(request_id, tenant)
        found = await self._siblings.explain(request_id, tenant)
        with suppress(InvalidRequestError):
            found.append(self.explain_own(request_id, tenant))
        if not found:
            raise _unknown_request()
        return min(found, key=attrgetter("age_s"))  # of a label that several requests have: the latest

    def explain_own(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
        """As `explain`, of this process's requests."""
        found = (cluster.decisions.get(request_id) for cluster in self._clusters())
        decision = next(filter(None, found), None)
        if decision is None or self._secret is None or decision.owner != tenant_salt(self._secret, tenant):
            raise _unknown_request()
        return router_pb2.ExplainResponse(
            explanation=decision.explain(),
            outcome=decision.outcome,
            label=decision.label,
            prompt_tokens=decision.prompt_tokens,
            age_s=self._clock.now() - decision.arrived,
        )

    async def move_request(self, request_id: str, to: str) -> router_pb2.MoveResponse:
        """Move a running request of any tenant to another decode worker; it ends when that one has accepted it. Of any process
        of this router.

        Args:
            request_id: or the caller's label.
            to: the worker; "": the router chooses.
        Raises: InvalidRequestError naming what is wrong, NoWorkerError, RequestDeadlineError.
        """
        moved = await self.move_own(request_id, to)
        if moved is None and self._siblings is not None:
            moved = await self._siblings.move(request_id, to)
        if moved is None:
            raise InvalidRequestError("this router has no recent request with that id", param="request_id")
        return moved

    async def move_own(self, request_id: str, to: str) -> router_pb2.MoveResponse | None:
        """As `move_request`, of this process's requests; None: it has none of that id."""
        decision = next(filter(None, (cluster.decisions.get(request_id) for cluster in self._clusters())), None)
        if decision is None:
            return None
        if decision.outcome != "running":
            raise InvalidRequestError(f"{decision.request_id} has ended: {decision.outcome}", param="request_id")
        relay = self._running.get(decision.request_id)
        if relay is None:
            rule = "its client streams from the decode worker itself, and moves by itself"
            raise InvalidRequestError(f"{decision.request_id} cannot move: {rule}", param="request_id")
        return await relay.move(to)

    def budgets(self, per_minute: Callable[[str], int], unit: str = "tokens") -> SharedQuotas:
        """Quotas shared by all routers of this cluster; the caller runs them."""
        cluster = self._of(next(iter(self._models), "")).cluster
        assert self._store is not None  # it exists as long as the models
        return SharedQuotas(
            per_minute,
            now=self._clock.now,
            store=self._store,
            num_routers=lambda: cluster.num_routers,
            unit=unit,
        )

    def use_shares(self, share: Callable[[str], Share]) -> None:
        """Set the tenants' shares of the pool while requests wait; by default all are equal."""
        for model in self._models.values():
            model.cluster.wait_queue.use_shares(share)
            model.intake.retention.rank = lambda tenant: share(tenant).rank

    def use_adapter_limits(self, may_use: Callable[[str, str], bool]) -> None:
        """Set which adapters a tenant may use, by (tenant, name); by default all."""
        self.adapters.may_use = may_use

    def use_cache_limits(self, most_ttl_s: Callable[[str], float]) -> None:
        """Set the longest time of the tenants' claims on cached KV; 0.0: that of the settings."""
        for model in self._models.values():
            model.intake.retention.most_ttl_s = lambda tenant: most_ttl_s(tenant) or self._config.max_cache_ttl_s

    def status(self, tenant: str) -> dict[str, Any]:
        """Cluster and traffic in this router's view, for the status page, `diptych top` and `diptych doctor`. Of single
        requests it contains only the tenant's."""
        now = self._clock.now()
        ready, reasons = self.ready(names_adapters=False)
        owner = b"" if self._secret is None else tenant_salt(self._secret, tenant)
        each = [
            {
                "model": model.name,
                "max_model_len": model.max_model_len(),
                "cluster": model.cluster.status(owner),
            }
            for model in self._models.values()
        ] or [{"model": next(iter(self._config.model_folders)), "max_model_len": 1, "cluster": None}]
        return {
            **each[0],
            "more_models": each[1:],
            "ready": ready,
            "reasons": reasons,
            "one_process": isinstance(self._store, MemoryStore),  # who registers there runs here
            "lookup": self._lookup | {"compiler": _compiler()},
            "running": self.metrics.value("num_requests_running"),
            "waiting": self.metrics.value("num_requests_waiting"),
            "adapters": [] if self._registry is None else [_shown(entry) for entry in self.adapters.entries(tenant)],
            "adapters_waiting": sum(len(cluster.adapter_turns) for cluster in self._clusters()),
            "stages": self.metrics.live.stages(),
            "series": self.metrics.live.points(now),
            "counters": seen_counters(self.metrics.totals(), lambda name: self.adapters.may_use(tenant, name)),
        }

    def exposition(self) -> bytes:
        """The body of /metrics, of this process."""
        return self.metrics.expose()

    def what_if(self, request: ValidatedRequest, pool: str) -> router_pb2.WhatIfResponse:
        """Where the request would be placed now, or (`pool` like "4P4D") on as many idle workers. Nothing is run.
        Raises: InvalidRequestError naming the pool, NoWorkerError."""
        cluster, query = self._of(request.model).cluster, placement_request(request)
        if pool:
            trace = RequestTrace(request.request_id, cluster.what_if(query, pool), adapter=request.adapter)
        else:
            placement = cluster.place(query, PromptBlocks(request.prompt))
            trace = RequestTrace(request.request_id, placement, cluster.index_mode(placement), adapter=request.adapter)
        return router_pb2.WhatIfResponse(explanation=trace.explanation(), prompt_tokens=len(request.prompt.token_ids))


def _shown(entry: AdapterEntry) -> dict[str, Any]:
    """Of an adapter, for the status."""
    return {
        "name": entry.name,
        "model": entry.model,
        "version": entry.stable,
        "canary": entry.canary,
        "canary_share": entry.canary_share,
    }


def _without_tokens(event: FinishedEvent) -> FinishedEvent:
    """The end of a hint, whose one token was not sent."""
    usage = replace(event.usage, completion_tokens=0)
    return replace(event, reason=FinishReason.LENGTH, usage=usage, stop_string="", stop_token_id=None)


def _unknown_request() -> InvalidRequestError:
    return InvalidRequestError("this router has no recent request of yours with that id", param="request_id")


def _compiler() -> str:
    """The C compiler of this host, or ""."""
    try:
        return find_compiler()
    except NativeError:
        return ""

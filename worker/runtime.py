"""One worker: engine, transfer, registration, health, and its role's services.

load model (executor) -> engine starts, warm-up -> transfer self-test -> gRPC server, NOT_SERVING
    -> lease in the store, SERVING
SIGTERM / SIGINT: NOT_SERVING -> lease "draining" -> running requests finish, up to drain_s -> the rest fails typed
    -> for hand_over_s those who continue it take KV from here -> lease removed -> server, transfer and engine closed
set_role: another worker of the pool is ready, or forced -> NOT_SERVING -> lease "draining"
    -> running requests finish, up to drain_s -> the rest fails typed -> hand_over_s -> the other role's services
    -> lease with the other role, SERVING
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import structlog

from diptych.common.addresses import host_port, is_wildcard
from diptych.common.clock import Clock, MonotonicClock
from diptych.common.compat import CONVERTS, as_strings
from diptych.common.errors import (
    ConfigError,
    DiptychError,
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    StaleReferenceError,
    WorkerDrainedError,
)
from diptych.common.ids import new_incarnation
from diptych.common.observe.logging import bind_process
from diptych.common.observe.tracing import tracing
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.common.secret import call_key, call_token, load_secret
from diptych.common.store.interface import Store, StoreError
from diptych.common.store.registration import WorkerRegistration
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.common.tiers import TIERS, TierState, tier_states
from diptych.common.tls import load_cluster_tls
from diptych.engine.api import EngineClient
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.grammar.compiler import GrammarCompiler
from diptych.engine.messages import EngineEvent, EngineRequest, KvMode
from diptych.engine.runner import ModelRunner
from diptych.engine.sched.lifecycle.swap_cost import Rates, describe
from diptych.kvtransfer.api import Transfer
from diptych.rpc import convert
from diptych.rpc.call_token import TokenInterceptor
from diptych.rpc.channels import bind, cluster_server_credentials, new_server
from diptych.rpc.handlers import ExchangeableHandlers
from diptych.rpc.health import Health
from diptych.rpc.stubs import add_worker
from diptych.rpc.v1 import worker_pb2
from diptych.worker import wire
from diptych.worker.adapters import AdapterLibrary, Adapters, NoAdapters
from diptych.worker.cache_events import CacheEventFeed
from diptych.worker.config import WorkerConfig
from diptych.worker.defaults import DeviceFacts, settled
from diptych.worker.disk_tier import num_disk_blocks, open_disk
from diptych.worker.gpu import GpuMonitor, watch_gpu
from diptych.worker.host_facts import read_host_facts
from diptych.worker.incoming import Limits
from diptych.worker.liveness import why_not_live
from diptych.worker.metrics import MetricsServer, WorkerMetrics
from diptych.worker.model import Computes, LoadedModel, available_bytes
from diptych.worker.refs import WorkerRef
from diptych.worker.role import Role, ServiceFactories
from diptych.worker.role_spec import FULL_NAMES, PACKAGE, ROLES, SOURCE
from diptych.worker.service import WorkerServicer
from diptych.worker.stats import adapter_to_proto, engine_numbers, gpu_to_proto, host_to_proto, settings_of

log = structlog.get_logger(__name__)


def _version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:  # a checkout that is not installed
        return "source"


_LIVENESS_POLL_S = 0.5
_WORKER = f"{PACKAGE}.Worker"
_ENDED_S = 10.0
"""After the drain, until the requests that were given up have ended."""
_HAND_OVER_S = 2.0

MakeServices = Callable[["WorkerRuntime"], ServiceFactories]
TransferFactory = Callable[["WorkerRuntime"], Awaitable[Transfer]]


def warm_up_tokens(config: WorkerConfig, runner: Computes) -> int:
    """Length of the warm-up's prompt. On a GPU it is a whole step, 0.1 s: it allocates what such a step needs, and the first
    measured rate is one that placement can use. On a CPU it would be seconds."""
    wanted = 2 * config.block_size if config.device == "cpu" else config.max_num_batched_tokens
    able = runner.capabilities
    return max(1, min(wanted, able.num_blocks * config.block_size // 2, able.max_model_len - 2))


class WorkerRuntime:
    """The runtime.

    Args:
        make_transfer, make_services: called once, in this order, when the engine runs.
        store: None: no registration.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: LoadedModel,
        *,
        make_transfer: TransferFactory,
        make_services: MakeServices,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config = model.config or settled(config, DeviceFacts(), None)[0]
        self.model = model
        self.clock = clock or MonotonicClock()
        self._began = self.clock.now()
        self.worker_id = config.effective_worker_id
        self.incarnation = new_incarnation()
        self.compat = model.compat
        self._make_transfer = make_transfer
        self._make_services = make_services
        self._store = store
        self._cache_events = CacheEventFeed(self.incarnation)
        self._registration: WorkerRegistration | None = None
        self._draining = self._closed = False
        self._leaves_at = 0.0
        """While it drains: its KV is served until then."""
        self._live = True
        self._monitor: asyncio.Task[None] | None = None
        self.cluster_tls = load_cluster_tls(
            config.cluster_ca, config.cluster_cert, config.cluster_key, config.cluster_tls_name
        )
        if not config.secret_file:
            raise ConfigError(
                "secret_file", "", "is needed: block identities and calls are checked by the cluster secret"
            )
        self._call_key = call_key(load_secret(Path(config.secret_file)))
        self._callers = TokenInterceptor()
        self._server = new_server(() if self.cluster_tls is not None else (self._callers,))
        self.address = ""
        self.ended = asyncio.Event()
        """Set when the worker cannot continue: its engine failed, or a younger incarnation took its name."""
        runner = model.runner
        self._disk = open_disk(config, model.compat, model.identity, self.worker_id, self.clock)
        self._engine_config = config.options(
            EngineConfig,
            num_blocks=runner.capabilities.num_blocks,
            num_disk_blocks=num_disk_blocks(config, model.compat),
            max_step_time_s=config.max_step_time_s or None,
            mixed_step_time_s=config.mixed_step_time_s or None,
            slab_quota_per_peer=max(4, config.num_slabs // 2),
        )
        self.engine = EngineClient(
            model.executor or LocalExecutor(cast(ModelRunner, runner)),
            self._engine_config,
            model.identity,
            model.detokenizer_factory,
            self._on_events,
            clock=self.clock,
            disk=self._disk,
        )
        self.metrics = WorkerMetrics(config.role, stats=self.engine.stats, clock=self.clock)
        self.metrics.identify({"role": config.role, "worker": self.worker_id})
        self.metrics.describe_cache(
            block_size=config.block_size,
            num_blocks=runner.capabilities.num_blocks,
            num_gpu_blocks=runner.capabilities.num_blocks,
            num_cpu_blocks=config.num_host_blocks,
            cache_dtype="+".join(model.compat.kv.dtypes),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        compat = model.compat
        self.metrics.describe_model(
            method=compat.method,
            dtype=compat.compute_dtype,
            kernels=compat.backend,
            tensor_parallel=config.tensor_parallel_size,
            pipeline=config.pipeline_parallel_size,
            nodes=config.nnodes,
        )
        self.metrics.block_bytes, self.metrics.block_size = model.compat.kv.block_bytes, config.block_size
        self.library: AdapterLibrary | None = None
        """None: this worker serves no adapters."""
        if config.enable_lora:
            self.library = self.metrics.library = AdapterLibrary(
                self.worker_id,
                config.lora_dir,
                max_adapters=config.max_cpu_loras,
                max_rank=config.max_lora_rank,
                timeout_s=config.lora_load_timeout_s,
                read=self.engine.read_adapter,
                send=self.engine.send,
                on_loaded=self.metrics.adapter_loaded,
                free_bytes=available_bytes,
            )
        self.gpu: GpuMonitor | None = None
        self._metrics_server: MetricsServer | None = None
        self._transfer: Transfer | None = None
        self._role: Role | None = None
        self._factories: ServiceFactories = {}
        self._handlers = ExchangeableHandlers(
            tuple(FULL_NAMES.values()),
            lambda service: StaleReferenceError(
                f"{self.worker_id} is a {self.role.name} worker: it offers no {service}"
            ),
        )
        self._text_is_loaded = False
        self._change: asyncio.Task[None] | None = None
        self._change_to = ""
        self._changing = False
        self.health = Health((*(FULL_NAMES[service] for service in ROLES[config.role].services), _WORKER))

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.worker_id, self.incarnation, self.address)

    @property
    def adapters(self) -> Adapters:
        """For services."""
        return self.library or NoAdapters()

    def call_token(self, address: str) -> str:
        """The token of calls to the worker of this cluster at `address`."""
        return call_token(self._call_key, address)

    @property
    def limits(self) -> Limits:
        """What a request must fit into."""
        able = self.model.runner.capabilities
        return Limits(
            self.worker_id,
            self.incarnation,
            able.vocab_size,
            able.max_model_len,
            able.block_size,
            len(self.compat.parts),
        )

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "call start() first"
        return self._transfer

    @property
    def role(self) -> Role:
        assert self._role is not None, "call start() first"
        return self._role

    # ---- start ----

    async def start(self) -> None:
        """Start, and return when the worker serves. Raises: ConfigError for an invalid setting."""
        self.engine.start()
        if self.model.grammars is not None and self.config.grammar_warm_up:
            self.model.grammars.warm_up()  # beside ours
        try:
            await self._warm_up()
            self._transfer = await self._make_transfer(self)
            self.gpu = self.metrics.gpu = watch_gpu(self.config.device, self.model.gpu_uuid)
            self.metrics.begin(self._transfer, asyncio.get_running_loop())
            self._factories = self._make_services(self)
            self._role = Role(self.config.role, self._factories)
            await self._listen()
            self.model.runner.expect_compiled()
        except BaseException:
            await self.close()
            raise
        await self._register()
        # Registered first: what was found in files is announced as events.
        await self.engine.open_disk()
        self._monitor = asyncio.create_task(self._watch(), name="liveness")
        await self.health.set(True)

    async def _warm_up(self) -> None:
        """One prefill chunk, one decode step and copies to the host tier, so that the first request does not pay for
        lazy initialization, and the first preemption has measured costs."""
        runner = self.model.runner
        num_tokens = warm_up_tokens(self.config, runner)
        request = EngineRequest(
            attempt="warm-up",
            prompt=Prompt(tuple(i % runner.capabilities.vocab_size for i in range(num_tokens))),
            sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            mode=KvMode.LOCAL,
        )
        try:
            async for _ in self.engine.generate(request):
                pass
        except OverloadedError as error:
            # Nobody else asks: the pool was sized by what was free, and others have taken that since.
            share = self.config.gpu_memory_utilization
            rule = f"a first step failed: {error}; give this worker less, or end what else uses the GPU"
            raise ConfigError("gpu_memory_utilization", share, rule) from error
        await self.engine.reset_cache()
        await self.engine.measure_copies()
        log.info("warmed up")
        log.info(describe(self.preemption_rates(), mode=self.config.preemption_mode))

    async def _listen(self) -> None:
        await self.health.install(self._server)
        add_worker(WorkerServicer(self), self._server)
        self._server.add_generic_rpc_handlers((self._handlers,))
        self._handlers.install(self.role.add_to)
        port = bind(self._server, self.config.host, self.config.port, cluster_server_credentials(self.cluster_tls))
        host = self.config.advertised_host
        if is_wildcard(host):
            raise ConfigError("advertise_host", host, "peers cannot reach a wildcard address: name one of this host")
        self.address = host_port(host, port)
        self._callers.expect(self.call_token(self.address), self.address)
        await self._server.start()
        await self.role.open()
        if self.config.metrics_port is not None:
            self._metrics_server = MetricsServer(self.metrics, self.config.metrics_host, self.config.metrics_port)
            log.info("metrics served", host=self.config.metrics_host, port=self._metrics_server.port)

    @property
    def metrics_port(self) -> int:
        """0: metrics are not served."""
        return self._metrics_server.port if self._metrics_server is not None else 0

    async def _close_metrics(self) -> None:
        if self._metrics_server is not None:
            await self._quietly("metrics", asyncio.to_thread(self._metrics_server.close))
        if self.gpu is not None:
            await self._quietly("GPU monitor", asyncio.to_thread(self.gpu.close))

    async def _register(self) -> None:
        if self._store is None:
            return
        self._registration = WorkerRegistration(
            self._store,
            self.record,
            ttl_s=self.config.lease_s,
            heartbeat_s=self.config.heartbeat_s,
            clock=self.clock,
            on_fenced=self._fenced,
        )
        self._registration.offer(self._cache_events.beginning())
        await self._registration.start()

    def _fenced(self) -> None:
        log.error("another process took this worker's name")
        self.ended.set()

    # ---- for other processes ----

    def why_stuck(self) -> str:
        """Why the engine makes no progress; empty: it does."""
        return why_not_live(self.engine.stats(), self.clock.now(), stall_bound_s=self.config.stall_bound_s)

    def info(self) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=wire.role_to_proto(self.role.name),
            pid=os.getpid(),
            compat=convert.compat_to_proto(self.compat),
            kv_address=wire.kv_address_to_proto(self.transfer.address),
            num_blocks=self.model.runner.capabilities.num_blocks,
            max_model_len=self.model.runner.capabilities.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            transport_path=self.transfer.path,
            transport_bytes_per_s=self.transfer.bytes_per_s,
            version=_version(),
            services=self.role.full_names,
            request_fields=wire.REQUEST_FIELDS,
            max_loras=self._lora_sizes[0],
            max_lora_rank=self._lora_sizes[1],
        )

    def worker_stats(self) -> worker_pb2.GetStatsResponse:
        """The worker's numbers and host facts."""
        host = self.config.metrics_host
        return worker_pb2.GetStatsResponse(
            engine=engine_numbers(self.engine.stats()),
            host=host_to_proto(read_host_facts()),
            transport_path=self.transfer.path,
            transport_bytes_per_s=self.transfer.bytes_per_s,
            link_bytes_per_s=self.role.link_rates(),
            metrics_address=host_port(host, self.metrics_port) if self.metrics_port else "",
            settings=settings_of(
                self.config,
                self.model.kernels,
                self.model.refused,
                self.model.compat.method,
                rank_link=self.model.rank_link,
                rank_gpus=self.model.rank_gpus,
            ),
            uptime_s=self.clock.now() - self._began,
            preemption=wire.preemption_to_proto(self.preemption_rates(), self.tiers()),
            gpu=gpu_to_proto(self.gpu.numbers()) if self.gpu is not None else None,
            adapters=map(adapter_to_proto, self.library.resident() if self.library is not None else ()),
        )

    def preemption_rates(self) -> Rates:
        """Measured costs of recomputing and swapping; 0.0: not measured yet, or no host tier."""
        stats = self.engine.stats()
        return Rates(
            stats.prefill_tokens_per_s, stats.copy_bytes_per_s, self.model.runner.capabilities.kv_bytes_per_token
        )

    def tiers(self) -> tuple[TierState, ...]:
        """Sizes and rates of the tiers that this worker has, nearest first."""
        kv, able = self.model.compat.kv, self.model.runner.capabilities
        sizes = {name: blocks * kv.block_bytes for name, blocks in self._engine_config.tier_blocks.items()}
        if able.group_blocks:
            sizes[TIERS[0].name] = sum(
                count * group.block_bytes(kv.shard) for count, group in zip(able.group_blocks, kv.groups, strict=True)
            )
        return tier_states(sizes, self.engine.stats().tier_bytes_per_s, self.config.tier_eviction)

    async def audit(self, *, full: bool) -> worker_pb2.AuditResponse:
        engine, transfer = await asyncio.gather(self.engine.audit(full), self.transfer.audit(full))
        attempts = {**engine.attempts, **self.role.states()}
        return worker_pb2.AuditResponse(
            blocks=wire.block_counts_to_proto(engine.blocks),
            more_blocks=map(wire.block_counts_to_proto, engine.more_blocks),
            slabs=wire.slab_counts_to_proto(transfer.slabs),
            attempts=attempts,
            violations=[*engine.violations, *transfer.violations],
            kv_bytes_sent=transfer.bytes_sent,
            kv_bytes_received=transfer.bytes_received,
            steps=self.engine.stats().steps,
        )

    def record(self) -> WorkerRecord:
        """The worker's current record for the store."""
        stats, charge = self.engine.stats(), self.compat.kv.charge
        return WorkerRecord(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role.name,
            address=self.address,
            pid=os.getpid(),
            model=self.compat.model,
            compat=as_strings(self.compat) | ({CONVERTS: "yes"} if self.config.allow_kv_conversion else {}),
            kv_bytes_per_token=charge.bytes_per_token,
            kv_windows=charge.windows,
            request_fields=wire.REQUEST_FIELDS,
            max_loras=self._lora_sizes[0],
            max_lora_rank=self._lora_sizes[1],
            tensor_parallel=self.config.tensor_parallel_size,
            pipeline=self.config.pipeline_parallel_size,
            nodes=self.config.nnodes,
            num_blocks=self.model.runner.capabilities.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.model.runner.capabilities.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            event_epoch=self._cache_events.epoch,
            tiers=self.tiers(),
            state=(state := self._state),
            leaves_in_s=max(0.0, self._leaves_at - self.clock.now()) if state == "draining" else 0.0,
            load=WorkerLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting + stats.num_waiting_remote,
                waiting_prompt_tokens=stats.waiting_prompt_tokens,
                kv_usage=stats.kv_usage,
                prefill_tokens_per_s=stats.prefill_tokens_per_s,
                decode_step_s=stats.decode_step_s,
                prompt_step_s=stats.prompt_step_s,
                poll_interval_s=stats.poll_interval_s,
                link_bytes_per_s=self.role.link_rates(),
                pull_overhead_s=self.role.pull_overheads(),
                gpu=self.gpu.load() if self.gpu is not None else None,
                adapters={one.id: one.num_requests for one in self.library.resident()}
                if self.library is not None
                else {},
            ),
        )

    @property
    def _lora_sizes(self) -> tuple[int, int]:
        """Adapters of one step, and their largest rank; zeros: it serves none."""
        able = self.model.runner.capabilities
        return (able.max_loras, able.max_lora_rank) if self.library is not None else (0, 0)

    @property
    def _state(self) -> str:
        """See WorkerRecord.state."""
        if self._draining or self._changing:
            return "draining"
        return "ready" if self._live else "stalled"

    # ---- the engine's events ----

    def _on_events(self, events: list[EngineEvent]) -> None:
        for event in events:
            kv_event = self._cache_events.convert(event)
            if kv_event is not None and self._registration is not None:
                self._registration.offer(kv_event)
        self.metrics.step()
        if self._role is not None:
            self._role.on_step(events)

    async def _watch(self) -> None:
        """Set SERVING only while the engine makes progress."""
        while True:
            await self.engine.ends(_LIVENESS_POLL_S)
            why = self.why_stuck()
            live = not why
            if live != self._live:
                log.warning("engine makes no progress" if why else "engine makes progress again", why=why)
                self._live = live
                if self._registration is not None:
                    self._registration.beat_now()
            if not self._draining and not self._changing:
                await self.health.set(live)
            if not self.engine.stats().alive:
                self.ended.set()
                return

    # ---- change of role ----

    async def load_text(self) -> GrammarCompiler | None:
        """For a service that answers with text: the engine has a detokenizer afterwards. Returns: the caller's compiler, if
        this model and these settings allow grammars."""
        load, first = self.model.load_text, not self._text_is_loaded
        self._text_is_loaded = True
        if load is None or (first and self.model.detokenizer_factory is not None):
            return self.model.grammars if first else None
        factory, grammars = await asyncio.to_thread(load)
        await self.engine.set_detokenizer(factory)
        return grammars

    async def set_role(self, name: str, *, force: bool = False) -> str:
        """Drain, and serve the role `name` from then on, with the same engine, KV and incarnation. What does not end within
        drain_s fails with WorkerDrainedError, and is continued elsewhere by its caller's failure policy. Cancelling the call does
        not undo it.

        Args: force: also where no other worker of its pool is ready.
        Returns: the role before.
        Raises: InvalidRequestError: there is no such role, the settings do not allow it, or the pool would be empty.
            NoWorkerError: the worker is stopping, is changing to another role, or cannot see the pool. InternalError: the
            role before goes on.
        """
        before = self.role.name
        try:
            self.config.check_role(name)
        except ConfigError as error:
            raise InvalidRequestError(f"{self.worker_id} cannot be a {name} worker: {error}", param="role") from None
        if self._change is None or self._change.done():
            if name == before:
                return before
            if self._draining:
                raise NoWorkerError(f"{self.worker_id} is stopping")
            self._change_to = name
            self._change = asyncio.create_task(self._change_role(name, force=force), name=f"become {name}")
        elif name != self._change_to:
            raise NoWorkerError(f"{self.worker_id} is becoming a {self._change_to} worker", retry_after_s=1.0)
        await asyncio.shield(self._change)
        return before

    async def _check_pool(self, name: str) -> None:
        """Raises: InvalidRequestError: no other worker of its pool is ready. NoWorkerError: the store does not say."""
        if self._store is None:
            return
        mine = self.record()
        pool = f"pool of {mine.role} workers of {mine.model}"
        try:
            if self._changing and self._registration is not None:
                await self._registration.beat()  # the lease says so: two workers that change at once see each other
            others = [record for record in await self._store.list_workers() if record.worker_id != mine.worker_id]
        except StoreError as error:
            raise NoWorkerError(
                f"whether the {pool} has another worker is unknown (force ignores it): {error}"
            ) from None
        if not any((one.role, one.model, one.state) == (mine.role, mine.model, "ready") for one in others):
            raise InvalidRequestError(
                f"{mine.worker_id} cannot be a {name} worker: it is the last one that is ready in the {pool}; "
                "--force leaves that empty",
                param="role",
            )

    async def _change_role(self, name: str, *, force: bool) -> None:
        before = self.role
        if not force:
            await self._check_pool(name)
        log.info("changing the role", to=name)
        self._changing = True
        try:
            if not force:
                await self._check_pool(name)
            await self.health.set(False)
            await self._empty(before, WorkerDrainedError(f"{self.worker_id} becomes a {name} worker"))
            role = Role(name, self._factories, before)
            if ROLES[name].publishes:
                # A prefill worker says what its KV was computed from, and of KV that came from a peer it does not know that.
                await self.engine.reset_cache()
            if self._disk is not None and not self.compat.same_bits:
                await self.engine.reset_cache(files=True)  # they are of the other role's steps
            try:
                await role.open()
            except ConfigError as error:
                raise InternalError(f"{self.worker_id} cannot be a {name} worker: {error}") from error
            self._role = role
            self._handlers.install(role.add_to)
            self.metrics.set_role(name)
            self.metrics.identify({"role": name, "worker": self.worker_id})
            bind_process(role=name)
            tracing.set_role(name)
            await self.health.offer((*role.full_names, _WORKER))
            await self._quietly("role", before.close(but=role))
        finally:
            if not self._draining:
                self.role.accept()
                self._changing = False
                await self.health.set(self._live)
            if self._registration is not None:
                self._registration.beat_now()
        log.info("changed the role", before=before.name)

    async def _empty(self, role: Role, error: DiptychError) -> None:
        """No request is left, and no stream of a router. Raises: InternalError when the requests do not end."""
        await self._drain(role, error)
        role.fail_all(error)
        try:
            async with asyncio.timeout(_ENDED_S):
                await role.drained()
        except TimeoutError:
            raise InternalError(f"{self.worker_id}: requests that were given up do not end") from None

    # ---- end ----

    async def drain(self) -> None:
        """Set NOT_SERVING and let running requests finish, up to drain_s. Others may take its KV meanwhile. Idempotent."""
        self._draining = True
        await self.health.leave()
        await self._drain(self.role)

    async def _drain(self, role: Role, error: DiptychError | None = None) -> None:
        """Args: error: of requests that do not end in time; None: WorkerDrainedError."""
        role.stop_accepting(but=SOURCE)
        self._leave_in(self.config.drain_s + self.hand_over_s)
        try:
            async with asyncio.timeout(self.config.drain_s):
                await role.drained(but=SOURCE)
            log.info("drained")
        except TimeoutError:
            log.warning("drain time is over: cancelling the rest", drain_s=self.config.drain_s)
            role.fail_all(error, but=SOURCE)
            self._leave_in(self.hand_over_s)
            await asyncio.sleep(self.hand_over_s)
        role.stop_accepting()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.hand_over_s):
                await role.drained()  # reads that are under way

    @property
    def hand_over_s(self) -> float:
        """A worker that has given requests up serves reads of its KV for so long: they go on elsewhere."""
        return min(_HAND_OVER_S, self.config.drain_s)

    def _leave_in(self, seconds: float) -> None:
        self._leaves_at = self.clock.now() + seconds
        if self._registration is not None:
            self._registration.beat_now()

    async def close(self, error: DiptychError | None = None) -> None:
        """Fail the rest with a typed error and close everything that there is, each part with a deadline. Idempotent."""
        if self._closed:
            return
        self._draining = self._closed = True
        await self._quietly("health", self.health.leave())
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)
        if self._role is not None:
            self._role.stop_accepting()
            self._role.fail_all(error)
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
        if self._registration is not None:
            await self._quietly("registration", self._registration.close())
        if self._store is not None:
            await self._quietly("store", self._store.close())
        if self.library is not None:
            await self._quietly("adapters", self.library.close())
        await self._quietly("server", self._server.stop(1.0))
        await self._close_metrics()
        if self._role is not None:
            await self._quietly("role", self._role.close())
        await self._quietly("engine", self.engine.close())
        if self._transfer is not None:
            await self._quietly("transfer", self._transfer.close())

    @staticmethod
    async def _quietly(part: str, closing: Awaitable[object]) -> None:
        """A part that does not close must not keep the others open."""
        try:
            async with asyncio.timeout(6.0):
                await closing
        except (DiptychError, TimeoutError, OSError) as failure:
            log.warning("did not close cleanly", part=part, error=repr(failure))

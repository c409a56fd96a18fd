"""One model of a router: its tokenizer, workers, blocks and tickets. Models share only the process and the store.

A worker belongs to the model with the same revision, tokenizer and block identity. A worker that matches none belongs
to the first model; it is never used, and readiness reports why.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import structlog

from diptych.common.checkpoint.hashing import expected_fingerprint
from diptych.common.clock import Clock
from diptych.common.errors import ConfigError
from diptych.common.secret import call_key, derive_key, tenant_salt
from diptych.common.store.interface import Store
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.text.revision import tokenizer_revision
from diptych.common.text.token_bytes import TokenBytes
from diptych.common.text.tokenizer import GenerationDefaults, ModelTokenizer, generation_defaults
from diptych.common.ticket import PURPOSE
from diptych.common.tls import load_cluster_tls
from diptych.router.api.packed_ids import unpack
from diptych.router.cluster.cluster import Cluster
from diptych.router.cluster.compatibility import RouterCheck
from diptych.router.config import RouterConfig
from diptych.router.fairness.admission import Admission
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.placement.native.library import Library
from diptych.router.preprocess.preprocessor import PreprocessLimits, RequestPreprocessor
from diptych.router.preprocess.retention import RetentionLimits
from diptych.router.preprocess.text_bound import TextBound, read_text_bound
from diptych.router.requests import resume
from diptych.router.requests.lookaside import Lookaside
from diptych.router.requests.messages import ModelFeatures
from diptych.router.requests.resume import Refs
from diptych.router.tools.reasoning import CLOSE
from diptych.router.tools.registry import guess_tool_parser, tool_factory

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Data of a model's folder, read once.

    Args:
        name: the name clients use.
        context: the model's limit of prompt plus answer; None: it has none.
        defaults: of sampling.
        text_bound: None: unknown.
    """

    name: str
    tokenizer: ModelTokenizer
    token_bytes: TokenBytes
    check: RouterCheck
    context: int | None
    features: ModelFeatures
    defaults: GenerationDefaults
    text_bound: TextBound | None = None


@dataclass(slots=True)
class ServedModel:
    """Started by its creator; `close` releases all of it."""

    folder: ModelFolder
    cluster: Cluster
    intake: RequestPreprocessor
    lookaside: Lookaside | None
    max_model_len: Callable[[], int]
    refs: Refs
    sweeping: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    async def start(self) -> None:
        if self.lookaside is not None:
            self.sweeping = asyncio.create_task(self.lookaside.run(), name=f"tickets {self.name}")
        await self.cluster.start()

    async def close(self) -> None:
        if self.sweeping is not None:
            self.sweeping.cancel()
            await asyncio.gather(self.sweeping, return_exceptions=True)
        await self.cluster.close()
        self.intake.close()


def load_folders(config: RouterConfig, secret: bytes) -> list[ModelFolder]:
    """Every model of the settings, in order. Raises: ConfigError."""
    named = config.model_folders
    folders = [_load(name, Path(path), config, secret) for name, path in named.items()]
    for i, one in enumerate(folders):
        for other in folders[:i]:
            _check_apart(one, other)
    return folders


def _load(name: str, path: Path, config: RouterConfig, secret: bytes) -> ModelFolder:
    if not path.is_dir():
        raise ConfigError("model", str(path), "must be a local folder")
    revision = expected_fingerprint(path)
    if not revision:  # then only the workers know it
        log.warning("no weights and no manifest in the model folder: any model revision is accepted", path=str(path))
    check = RouterCheck(revision, tokenizer_revision(path), derive_key(secret, "block identity"))
    tokenizer = ModelTokenizer(path)
    defaults = generation_defaults(path) if config.generation_config == "auto" else GenerationDefaults()
    if defaults != GenerationDefaults():
        log.info("sampling defaults from generation_config.json", model=name, defaults=str(defaults))
    features = _features(tokenizer, config.tool_call_parser, config.reasoning_parser)
    context = min(filter(None, (config.max_model_len, _context(path))), default=None)
    bound = read_text_bound(path)
    return ModelFolder(name, tokenizer, TokenBytes(tokenizer), check, context, features, defaults, bound)


def _check_apart(one: ModelFolder, other: ModelFolder) -> None:
    """Raises: ConfigError when a worker could belong to either."""
    same_tokenizer = one.check.tokenizer_revision == other.check.tokenizer_revision
    revisions = {one.check.model_revision, other.check.model_revision}
    if same_tokenizer and (len(revisions) == 1 or "" in revisions):
        raise ConfigError(
            "more_models",
            one.name,
            f"its workers look like those of {other.name}: both have one tokenizer, and the folders do not show that "
            "the weights differ (put the weights into both, or the manifests that `diptych model FOLDER --manifest` writes)",
        )


def belongs_to(checks: Sequence[RouterCheck], index: int, record: WorkerRecord) -> bool:
    """Whether the worker belongs to the model of this check; at most one of the checks passes."""
    fits = next((i for i, check in enumerate(checks) if not check.why_not(record)), 0)
    return fits == index


@dataclass(frozen=True, slots=True)
class SharedDependencies:
    """Dependencies shared by the models of a router."""

    store: Store
    library: Library | None
    secret: bytes
    metrics: RouterMetrics
    clock: Clock
    rng: random.Random


def make_model(
    config: RouterConfig,
    folder: ModelFolder,
    around: SharedDependencies,
    *,
    router_id: str,
    is_mine: Callable[[WorkerRecord], bool],
) -> ServedModel:
    """See Cluster for `router_id` and `is_mine`. Raises: ConfigError."""
    cluster = Cluster(
        around.store,
        folder.check,
        clock=around.clock,
        rng=around.rng,
        poll_s=config.worker_poll_s,
        dead_s=config.worker_dead_s,
        settle_s=config.worker_settle_s,
        policy=config.placement_policy,
        require_prefill=config.require_prefill,
        turn_window_s=config.turn_window_s,
        hot_prefix_copies=config.hot_prefix_copies,
        kv_pulls=config.kv_pulls,
        library=around.library,
        admission=Admission(config.admission, config.max_ttft_s, config.max_tpot_s),
        tls=load_cluster_tls(config.cluster_ca, config.cluster_cert, config.cluster_key, config.cluster_tls_name),
        call_key=call_key(around.secret),
        rollout=config.rollout,
        router_id=router_id,
        is_mine=is_mine,
    )

    def max_model_len() -> int:
        """The smallest of the setting, the model's limit, and the workers'."""
        return min(filter(None, (folder.context, cluster.max_model_len())), default=1)

    limits = PreprocessLimits(
        model=folder.name,
        max_model_len=max_model_len,
        max_prompt_bytes=config.max_prompt_bytes,
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        request_timeout_s=config.request_timeout_s,
        text_bound=folder.text_bound,
        pool_tokens=cluster.pool_tokens,
    )
    refs = Refs(derive_key(around.secret, resume.PURPOSE))
    intake = RequestPreprocessor(
        folder.tokenizer,
        limits,
        defaults=folder.defaults,
        salt=lru_cache(4096)(partial(tenant_salt, around.secret)),
        clock=around.clock,
        rng=around.rng,
        unpack=unpack if around.library is None else around.library.unpack,
        refs=refs,
        find=cluster.find,
        retention=RetentionLimits(config.cache_ttl_s, lambda tenant: config.max_cache_ttl_s),
    )
    lookaside = None
    if config.lookaside:
        lookaside = Lookaside(cluster, derive_key(around.secret, PURPOSE), around.metrics, around.clock)
    return ServedModel(folder, cluster, intake, lookaside, max_model_len, refs)


def _features(tokenizer: ModelTokenizer, tool_parser: str, reasoning_parser: str) -> ModelFeatures:
    """Raises: ConfigError for an unknown parser."""
    template, with_tools = tokenizer.chat_template, tokenizer.tool_template
    if template is None or with_tools is None:
        return ModelFeatures()
    if tool_parser == "auto":
        tool_parser = guess_tool_parser(with_tools.source)
    if tool_parser != "none":
        tool_factory(tool_parser)
    reasoning = reasoning_parser == "think" or (reasoning_parser == "auto" and CLOSE in template.source)
    takes_tools = "tools" in with_tools.variables
    return ModelFeatures(tool_parser, reasoning, takes_tools, takes_effort="reasoning_effort" in template.variables)


def _context(path: Path) -> int | None:
    """The model's limit, if config.json names one."""
    value = json.loads((path / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return value if type(value) is int and value > 1 else None

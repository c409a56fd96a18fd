"""Loading of a model folder: runner, facts for the handshake, block identity, detokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from diptych.common.block_identity import IdentityHeader
from diptych.common.checkpoint.hashing import CheckpointHash
from diptych.common.compat import Compat, identified
from diptych.common.errors import ConfigError, InternalError
from diptych.common.kv_format import COMPUTE_DTYPES, KvFormat, dtype_bytes, kv_elements
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import shape, split
from diptych.common.sampling import SamplingParams
from diptych.common.secret import derive_key, load_secret
from diptych.common.text.detokenizer import RequestDetokenizer
from diptych.common.text.revision import tokenizer_revision
from diptych.common.text.token_bytes import TokenBytes
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.capacity import capacity_line
from diptych.engine.executor import Executor, ExecutorLost
from diptych.engine.grammar.backends import Loaders
from diptych.engine.grammar.compiler import ChildProcess, GrammarCompiler, GrammarLimits
from diptych.engine.grammar.program import AfterText, Program
from diptych.engine.grammar.vocabulary import vocabulary_of
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.runner import RunnerCapabilities
from diptych.engine.sched.requests.output import DetokenizerFactory
from diptych.kvtransfer.wrappers import ciphers
from diptych.worker.config import AUTO, WorkerConfig, lora_folders, model_folder
from diptych.worker.defaults import DeviceFacts, ModelFacts, settled, slab_quotas
from diptych.worker.nodes import NodeStart, gathered_nodes
from diptych.worker.ranks import gpus_of_ranks, meeting_point, rank_specs, threads_of_a_rank
from diptych.worker.role_spec import DECODE, ROLES
from diptych.worker.visible_gpus import Gpu, find_gpus, find_links, worst_link

if TYPE_CHECKING:
    from diptych.engine.exec.models.description import ModelDescription

log = structlog.get_logger(__name__)
OnGrammars = Callable[[GrammarCompiler], None]

_KV_SHARE = 0.1
_KV_MOST_BYTES = 1 << 30
_GIB = 1 << 30
_CALL_S = 600.0
"""For one call of the ranks, and for one operation between them. A rank that makes no progress is noticed long before."""
_START_S = 1800.0
"""For loading the weights."""


LoadText = Callable[[], tuple[DetokenizerFactory, GrammarCompiler | None]]


class Computes(Protocol):
    """What a worker asks of its runner, or of the executor over its ranks."""

    @property
    def capabilities(self) -> RunnerCapabilities: ...

    def expect_compiled(self) -> None:
        """See ModelRunner."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model.

    Args:
        detokenizer_factory, grammars: None on a worker that begins as prefill, where decode handles text.
        runner: what computes, in this process; or the executor, over the worker's ranks.
        executor: over the worker's ranks; None: `runner` is the only one.
        load_text: the two, made anew, for a worker that becomes a decode worker; takes seconds. None: the model has no text.
        config: the settings with the device's defaults filled in; None: of a CPU.
        kernels: the back ends: native, torch or triton, with their blocks where there are several.
        refused: which faster back end refuses which blocks, and why; empty: none.
        gpu_uuid: of the GPU that computes, the first rank's where there are several, which work in step; empty: a CPU does.
        rank_gpus: UUID of each rank's GPU, where there are several ranks on GPUs.
        rank_link: the worst connection between two of these GPUs, in words; empty: unknown, or there are no two.
    """

    runner: Computes
    compat: Compat
    identity: IdentityHeader
    detokenizer_factory: DetokenizerFactory | None
    grammars: GrammarCompiler | None = None
    load_text: LoadText | None = None
    executor: Executor | None = None
    config: WorkerConfig | None = None
    kernels: str = ""
    refused: str = ""
    gpu_uuid: str = ""
    rank_gpus: tuple[str, ...] = ()
    rank_link: str = ""


def choose_num_blocks(
    config: WorkerConfig,
    kv: KvFormat,
    demand: PoolDemand,
    *,
    max_model_len: int,
    available_bytes: int,
    lora_bytes: int = 0,
    parts: Sequence[KvFormat] = (),
) -> int:
    """KV blocks of the first group's pool: the configured number, else as many as fit into memory together with the window
    groups' (`demand`), at least one whole context.

    Args:
        lora_bytes: of the slots for adapters, which are in the same memory.
        parts: the ranks' formats, where there are several: together they may have more heads than `kv`.
    Raises: ConfigError when kv_memory_bytes is less than one block, or the configured memory is not available.
    """
    pools = parts or (kv,)
    block_bytes = sum(pool.block_bytes for pool in pools)
    if config.device == "cpu":
        for name, wanted in (
            ("num_blocks", demand.pool_bytes(kv, config.num_blocks, pools)),
            ("max_loras", lora_bytes),
            ("num_host_blocks", config.num_host_blocks * block_bytes),
            ("kv_memory_bytes", config.kv_memory_bytes),
            ("num_slabs", config.num_slabs * config.slab_bytes if ROLES[config.role].publishes else 0),
        ):
            if wanted > available_bytes:
                there = f"takes {wanted / _GIB:,.1f} GiB, and {available_bytes / _GIB:,.1f} GiB are free"
                raise ConfigError(name, getattr(config, name), there)
    if config.num_blocks:
        return config.num_blocks
    if config.kv_memory_bytes:
        if config.kv_memory_bytes < block_bytes:
            raise ConfigError("kv_memory_bytes", config.kv_memory_bytes, f"one block takes {block_bytes} bytes")
        return demand.most_blocks(kv, config.kv_memory_bytes, pools)
    size_bytes = min(int((available_bytes - lora_bytes) * _KV_SHARE), _KV_MOST_BYTES)
    share = demand.most_blocks(kv, size_bytes, pools)
    return max(share, -(-max_model_len // config.block_size) + 1)


def load_model(config: WorkerConfig, on_grammars: OnGrammars = lambda _: None) -> LoadedModel:
    """Takes seconds; run it in an executor. Args: on_grammars: see `make_grammars`. Raises: ConfigError naming the setting or
    the file."""
    folder = model_folder(config.model)
    lora_folders(config.lora_dir)
    with (
        CheckpointHash(folder, verify=config.verify_weights) as hashing,
        futures.ThreadPoolExecutor(1, "load-text") as beside,
    ):
        return _load(config, folder, hashing, beside, on_grammars)


def _load(
    config: WorkerConfig,
    folder: Path,
    hashing: CheckpointHash,
    beside: futures.Executor,
    on_grammars: OnGrammars,
) -> LoadedModel:
    # Imported here: torch takes seconds, and a fake runner does not need it.
    from diptych.engine.exec.attention import attention_version
    from diptych.engine.exec.cuda.sizing import PoolBudget
    from diptych.engine.exec.kv_pool import kv_format_of
    from diptych.engine.exec.lora import LoraSizes, slot_bytes
    from diptych.engine.exec.model_runner import TorchModelRunner
    from diptych.engine.exec.models.registry import describe
    from diptych.engine.exec.parallel.division import method_of_ranks
    from diptych.engine.exec.sampler import SAMPLER_VERSION

    began = time.monotonic()
    tokenizer_content = tokenizer_revision(folder)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", str(folder / "config.json"), f"not JSON: {error}") from None
    parsed = describe(raw)
    facts = ModelFacts(
        checkpoint_dtype(raw) if config.device != "cpu" and config.dtype == AUTO else "float32",
        kv_format_of(parsed, block_size=config.block_size, window_groups=True),
    )
    parts = _parts_of(config, parsed, facts.kv)
    gpus = _rank_gpus(config) if parts else ()
    device = _facts_of(gpus) if gpus else _device_facts(config.device)
    config, lines = settled(config, device, facts)
    for line in lines:
        log.info("by default", setting=line)
    elements = kv_elements(config.kv_cache_dtype, config.dtype)
    kv, parts = facts.kv.with_dtype(*elements), tuple(part.with_dtype(*elements) for part in parts)
    max_model_len = config.max_model_len or parsed.max_position
    demand = PoolDemand(config.max_num_seqs, config.max_num_batched_tokens)
    max_loras = config.max_loras if config.enable_lora else 0
    num_blocks = choose_num_blocks(
        config,
        kv,
        demand,
        max_model_len=max_model_len,
        available_bytes=available_bytes(),
        lora_bytes=slot_bytes(parsed, LoraSizes(max_loras, config.max_lora_rank), dtype_bytes(config.dtype)),
        parts=parts,
    )
    log.info("loading the model", folder=str(folder), dtype=config.dtype, num_blocks=num_blocks)
    # Python code for a second, while the weights are read and a GPU computes.
    text = beside.submit(_load_text, config, folder, on_grammars) if DECODE in ROLES[config.role].services else None
    shared: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "max_model_len": max_model_len,
        "num_host_blocks": config.num_host_blocks,
        "backend": None if config.backend == AUTO else config.backend,
        "batch_invariant": config.batch_invariant,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_loras": max_loras,
        "max_lora_rank": config.max_lora_rank,
    }
    by_memory = config.device == "cuda" and not config.num_blocks and not config.kv_memory_bytes
    ranks = _start_ranks(config, folder, shared, gpus, kv, parts, by_memory=by_memory) if parts else None
    runner: Computes
    if ranks is None:
        budget = None
        if by_memory:
            budget = PoolBudget(config.gpu_memory_utilization, config.max_num_batched_tokens, _ring_on_gpu(config))
        runner = TorchModelRunner.load(folder, num_threads=config.threads, budget=budget, demand=demand, **shared)
    else:
        runner = ranks
    try:
        waited = time.monotonic()
        fingerprint = hashing.manifest().fingerprint
        log.info(
            "weights identified",
            fingerprint=fingerprint,
            hashed_bytes=hashing.hashed_bytes,
            waited_s=round(time.monotonic() - waited, 2),
            own_manifest=hashing.has_own_manifest,
        )
        if ranks is not None:
            ranks.check_models(fingerprint, _START_S)
        able = runner.capabilities
        if able.rank_sizes != tuple((part.num_layers, part.bytes_per_token) for part in parts):
            raise InternalError(f"the ranks hold KV as {able.rank_sizes}, and peers would be told {shape(parts)}")
        if not parts and able.kv != kv:
            raise InternalError(f"the pool holds KV as {able.kv}, and peers would be told {kv}")
        compat = Compat(
            model=config.model_name,
            model_revision=fingerprint,
            tokenizer_revision=tokenizer_content,
            kv=kv,
            compute_dtype=config.dtype,
            attention_version=attention_version(config.device, batch_invariant=config.batch_invariant),
            sampler_version=SAMPLER_VERSION,
            method=method_of_ranks(parsed, config.tensor_parallel_size),
            backend=able.kernels,
            batch_invariant=config.batch_invariant,
            kv_parts=parts,
            kv_encryption="" if config.kv_encryption == ciphers.OFF else config.kv_encryption,
        )
        identity, compat = identified(compat, identity_key(config))
        factory: DetokenizerFactory | None = None
        grammars: GrammarCompiler | None = None
        if text is not None:
            factory, grammars = text.result()
    except BaseException:
        if ranks is not None:
            ranks.close(asked=False)
        raise
    log.info("model loaded", seconds=round(time.monotonic() - began, 2))
    group_blocks = able.group_blocks or demand.group_blocks(kv, able.num_blocks)
    log.info(capacity_line(kv, group_blocks), dtype=config.dtype, kv_dtype="+".join(kv.dtypes), kernels=able.kernels)
    log.info(able.weights)
    return LoadedModel(
        runner,
        compat,
        identity,
        factory,
        grammars,
        partial(_load_text, config, folder),
        executor=ranks,
        config=config,
        kernels=able.kernels,
        refused=able.refused,
        gpu_uuid=gpus[0].uuid if gpus else device.uuid,
        rank_gpus=tuple(gpu.uuid for gpu in gpus),
        rank_link=_link_of(gpus),
    )


def _parts_of(config: WorkerConfig, model: ModelDescription, kv: KvFormat) -> tuple[KvFormat, ...]:
    """The ranks' formats; none where there is one rank. Raises: ConfigError when the model cannot be divided in this way."""
    degrees = config.degrees
    if degrees.num_ranks == 1:
        return ()
    from diptych.engine.exec.parallel.division import sizes_of

    sizes_of(model).check(degrees)
    return split(kv, tensor_parallel=degrees.tensor_parallel, pipeline=degrees.pipeline)


def _rank_gpus(config: WorkerConfig) -> tuple[Gpu, ...]:
    """Of each rank of this host; none on a CPU. Raises: ConfigError when there are too few."""
    if config.device == "cpu":
        return ()
    gpus = gpus_of_ranks(find_gpus(os.environ), config.devices, config.degrees.num_ranks // config.nnodes)
    log.info("GPUs of the ranks", **{f"rank_{rank}": f"{gpu.visible} ({gpu.name})" for rank, gpu in enumerate(gpus)})
    return gpus


def _facts_of(gpus: Sequence[Gpu]) -> DeviceFacts:
    """Of the smallest one. This process has no context on any of them."""
    least = min(gpus, key=lambda gpu: gpu.total_bytes)
    return DeviceFacts("cuda", least.name, least.total_bytes)


def _link_of(gpus: Sequence[Gpu]) -> str:
    try:
        return worst_link(gpus, find_links(gpus)) if gpus else ""
    except ConfigError:
        return ""  # NVML, which found them, does not answer any more


def _start_ranks(
    config: WorkerConfig,
    folder: Path,
    shared: Mapping[str, Any],
    gpus: Sequence[Gpu],
    kv: KvFormat,
    parts: Sequence[KvFormat],
    *,
    by_memory: bool,
) -> RanksExecutor:
    """Returns when all of them have loaded their parts. Raises: InternalError when one does not come up: its log says why."""
    degrees = config.degrees
    arguments: dict[str, Any] = {
        **shared,
        "model": str(folder.absolute()),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "deadline_s": _CALL_S,
    }
    several_groups = not kv.has_one_full_group
    if several_groups:
        arguments |= {"window_groups": True, "max_num_seqs": config.max_num_seqs}
    threads = threads_of_a_rank(config.threads, degrees.num_ranks // config.nnodes)
    utilization = config.gpu_memory_utilization if by_memory else 0.0
    log.info("starting the ranks", degrees=str(degrees), threads_of_each=threads, hosts=config.nnodes)
    here = range(degrees.num_ranks // config.nnodes)
    more: dict[str, str] = {}
    nodes = None
    with ExitStack() as stack:
        try:
            if config.nnodes == 1:
                arguments["rendezvous"] = stack.enter_context(meeting_point())
            else:
                nodes, where, more = gathered_nodes(config, NodeStart(arguments, threads, utilization))
                arguments |= where
            return RanksExecutor(
                rank_specs(degrees, arguments, threads, gpus, utilization, here=here, more=more),
                sampler=degrees.sampler,
                deadline_s=_CALL_S,
                start_deadline_s=_START_S,
                silence_s=config.rank_silence_s,
                nodes=nodes,
                kv=kv if several_groups else None,
                parts=parts,
            )
        except ExecutorLost as error:
            raise InternalError(f"the ranks did not start: {error}") from None


def warmed_up_on(loop: asyncio.AbstractEventLoop) -> OnGrammars:
    """For `load_model`: the process that compiles grammars comes up beside the weights, and not after them."""

    def on_grammars(grammars: GrammarCompiler) -> None:
        loop.call_soon_threadsafe(grammars.warm_up)

    return on_grammars


def _load_text(
    config: WorkerConfig, folder: Path, on_grammars: OnGrammars = lambda _: None
) -> tuple[DetokenizerFactory, GrammarCompiler | None]:
    tokenizer = ModelTokenizer(folder, chat=False)

    def factory(sampling: SamplingParams, prompt: Sequence[int]) -> RequestDetokenizer:
        return RequestDetokenizer(tokenizer, sampling.stop, prompt=prompt)

    # The first one builds the tokenizer's byte table, which takes 0.1 s.
    factory(SamplingParams(max_tokens=1), ())
    return factory, make_grammars(config, tokenizer, on_grammars) if config.grammar_backend != "none" else None


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """dtype of the weights in config.json. Raises: ConfigError when it is not supported."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if own not in COMPUTE_DTYPES:
        raise ConfigError("dtype", AUTO, f"the checkpoint has {own}: name one of {', '.join(COMPUTE_DTYPES)}")
    return own


def _device_facts(device: str) -> DeviceFacts:
    """Raises: ConfigError when the device cannot be used."""
    if device == "cpu":
        return DeviceFacts()
    import torch

    if device != "cuda":
        raise ConfigError("device", device, "must be cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError("device", device, "no CUDA device is usable here")
    properties = torch.cuda.get_device_properties(0)
    return DeviceFacts("cuda", properties.name, properties.total_memory, str(properties.uuid))


def make_grammars(
    config: WorkerConfig, tokenizer: ModelTokenizer, on_grammars: OnGrammars = lambda _: None
) -> GrammarCompiler | None:
    """None for a model without end-of-text token: a constrained answer could not end.

    Args:
        on_grammars: called in this thread with what may be warmed up, before this process imports the libraries itself.
    """
    if not tokenizer.eos_token_ids:
        return None
    limits = GrammarLimits(time_cap_s=config.grammar_time_cap_s)
    token_bytes = TokenBytes(tokenizer)

    def after_text(program: Program, text: str) -> AfterText:
        return AfterText(program, text, token_bytes.of, tokenizer.vocab_size, tokenizer.eos_token_ids)

    loaders = Loaders(lambda: vocabulary_of(tokenizer))
    compiler = GrammarCompiler(
        lambda: ChildProcess(config.grammar_backend, config.model, limits), loaders.load, after_text, limits
    )
    if config.grammar_warm_up:
        on_grammars(compiler)
        # Here and not beside the first requests: while a thread imports for seconds, each launch of a step is late.
        try:
            loaders.warm_up(config.grammar_backend)
        except ImportError as error:
            log.warning("grammars cannot be compiled", error=str(error))
    return compiler


def identity_key(config: WorkerConfig) -> bytes:
    """Key of the block identities; the router derives the same from the same secret. Raises: ConfigError."""
    if not config.secret_file:
        raise ConfigError("secret_file", "", "is needed: block identities are derived from the cluster secret")
    return derive_key(load_secret(Path(config.secret_file)), "block identity")


def _ring_on_gpu(config: WorkerConfig) -> int:
    """Bytes of the staging ring that may be in GPU memory, once the transport is known."""
    from diptych.kvtransfer.fabric.registry import candidates

    quotas = slab_quotas(config)
    slabs = (spec.gpu_slabs(quotas) for spec in candidates(config.transport, config.kv_device))
    return max(slabs, default=0) * config.slab_bytes


def available_bytes() -> int:
    """Available memory without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 30

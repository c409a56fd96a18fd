"""The torch model runner: weights, KV pool, one step at a time. See engine/runner.py for the interface."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from diptych.common.adapters.peft import MAX_RANK, AdapterFacts
from diptych.common.errors import AdapterError, ConfigError, InternalError
from diptych.common.kv_format import COMPUTE_DTYPES, SAME_DTYPE, dtype_bytes
from diptych.common.kv_groups import PoolDemand
from diptych.engine.exec.backends.base import Layout
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.cuda.late_kernels import warn_of_late_kernels
from diptych.engine.exec.cuda.sizing import PoolBudget, out_of_memory, profile
from diptych.engine.exec.decoder import Decoder
from diptych.engine.exec.kv_pool import KvPool, check_pool, kv_format_of
from diptych.engine.exec.loading import PlacedModel, load_weights, names_elsewhere
from diptych.engine.exec.lora import NO_LORAS, HostAdapter, LoraSizes
from diptych.engine.exec.models.fields import eos_token_ids
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.parallel.communicator import Communicator
from diptych.engine.exec.parallel.place import WHOLE_PLACE, RankPlace
from diptych.engine.exec.parallel.stage import SampledStep, Stage
from diptych.engine.exec.sampling import draw_step, want_prompt_rows
from diptych.engine.exec.weights import ModelWeights
from diptych.engine.messages import BlockCopy, LoadedAdapter, Payload, ScheduledSeq, StepResult
from diptych.engine.provenance import Provenance, note_launched, note_step
from diptych.engine.runner import CopyHandle, OutOfDeviceMemory, RunnerCapabilities, StepInFlight
from diptych.kernels.dispatch import TRITON

if TYPE_CHECKING:
    from diptych.engine.exec.cuda.backend import CudaBackend
    from diptych.engine.exec.cuda.batch import CudaBatch
    from diptych.engine.exec.cuda.draw import DeviceStep

_T = TypeVar("_T")
log = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in COMPUTE_DTYPES}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("model", str(path.parent), f"no {path.name} in the folder") from None
    except ValueError as error:
        raise ConfigError("model", str(path), f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("model", str(path), "must hold a JSON object")
    return value


def _lora_sizes(max_loras: int, max_lora_rank: int) -> LoraSizes:
    if max_loras < 0:
        raise ConfigError("max_loras", max_loras, "must be 0 or more")
    if not 1 <= max_lora_rank <= MAX_RANK:
        raise ConfigError("max_lora_rank", max_lora_rank, f"must be 1 to {MAX_RANK}")
    return LoraSizes(max_loras, max_lora_rank)


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ConfigError("device", name, "must be cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "no CUDA device is usable here")
    return torch.device(name)


def _fused_backend(
    weights: ModelWeights,
    pool: KvPool,
    max_model_len: int,
    graph_sizes: Sequence[int] | None,
    chunk_graphs: Sequence[tuple[int, int]] | None,
    batch_invariant: bool,
) -> CudaBackend:
    # Here and not above: nothing on the CPU's path imports Triton.
    from diptych.engine.exec.cuda.backend import CudaBackend

    with torch.inference_mode():
        graphs: dict[str, Any] = {"graph_sizes": graph_sizes, "chunk_graphs": chunk_graphs}
        chosen = {name: value for name, value in graphs.items() if value is not None}
        return CudaBackend(weights, pool, max_model_len=max_model_len, batch_invariant=batch_invariant, **chosen)


def _trial_graphs(
    sizes: Sequence[int] | None, shapes: Sequence[tuple[int, int]] | None, row_bytes: int, *, slots: bool = False
) -> tuple[list[int], list[tuple[int, int]], int]:
    """Graphs that a trial captures: the largest of each kind, into whose memory the others fit. Args: row_bytes: of a row's
    logits. slots: for adapters: there are more graphs then. Returns: also the bytes of what the others put out, which each
    keeps for itself."""
    from diptych.engine.exec.cuda.chunk_graphs import CHUNK_GRAPHS, MAX_CHUNKS
    from diptych.engine.exec.cuda.graphs import GRAPH_SIZES, kinds_of, output_bytes

    sizes = GRAPH_SIZES if sizes is None else sizes
    ascending = sorted(CHUNK_GRAPHS if shapes is None else shapes, key=sum)
    others = [*sizes[:-1], *(rows + MAX_CHUNKS for rows, _ in ascending[:-1])]
    return list(sizes[-1:]), ascending[-1:], output_bytes(others, row_bytes) * len(kinds_of(slots))


def _prepare_kernels() -> None:
    """Import them, and have Triton hash its own files for the key of its cache, which it keeps: 0.4 s without Python code."""
    from triton.runtime import cache

    from diptych.engine.exec.cuda import backend  # noqa: F401

    cache.triton_key()


def _with_memory(step: Callable[[], _T]) -> _T:
    """Raises: OutOfDeviceMemory in place of torch's error."""
    try:
        return step()
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
    # Outside the handler: the error holds the frames, and they the tensors that filled the memory.
    torch.cuda.empty_cache()
    raise OutOfDeviceMemory(reason)


class _Launched:
    """Implements engine.runner.StepInFlight."""

    def __init__(self, step: DeviceStep, on_failure: Callable[[], None]) -> None:
        """on_failure: the step goes on, on the device, though nobody waits for it any more."""
        self._step, self._on_failure = step, on_failure
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    @torch.inference_mode()
    def draw(self, ended: Container[int] = ()) -> None:
        try:
            _with_memory(lambda: self._step.draw(ended))
        except Exception as error:
            self._error = error
            self._on_failure()

    def done(self) -> bool:
        return self.failed or self._step.done()

    def result(self) -> StepResult:
        if self._error is not None:
            raise self._error
        return self._step.result()


class TorchModelRunner:
    """Implements engine.runner.ModelRunner."""

    def __init__(
        self,
        model: PlacedModel,
        *,
        eos_token_ids: tuple[int, ...],
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        graph_sizes: Sequence[int] | None = None,
        chunk_graphs: Sequence[tuple[int, int]] | None = None,
        demand: PoolDemand | None = None,
        kv_cache_dtype: str = SAME_DTYPE,
    ) -> None:
        """Args: num_blocks, demand, kv_cache_dtype: see load."""
        weights, plan = model.weights, model.plan
        like, description = weights.embedding, weights.description
        self.description = description
        """Of a rank: its part."""
        self.backend = plan.summary()
        """Names of the back ends, with their blocks where there are several."""
        self.refusals = [line for _, line in plan.reasons()]
        """Which faster back end refuses which blocks, and why."""
        self.weight_sizes = weights.sizes()
        self._lora = weights.lora
        self.loras = NO_LORAS if weights.lora is None else weights.lora.sizes
        """Slots for adapters."""
        kv = kv_format_of(
            plan.model,
            block_size=block_size,
            dtype=str(like.dtype).removeprefix("torch."),
            window_groups=demand is not None,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.kv_dtype = "+".join(kv.dtypes)
        part = plan.place.part(kv)
        self._groups = tuple(kv.groups.index(kv.group(group.name)) for group in part.groups)
        """Of the model's KV groups those that are in this rank's pool."""
        blocks = (num_blocks,) if demand is None else demand.group_blocks(kv, num_blocks)
        self.pool = KvPool(
            [blocks[group] for group in self._groups], part, device=like.device, num_host_blocks=num_host_blocks
        )
        self.num_host_blocks = num_host_blocks
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.kv_bytes_per_token = self.pool.bytes_per_token
        self.vocab_size = description.vocab_size
        self.eos_token_ids = eos_token_ids
        self.num_layers = description.num_layers
        self._provenance: Provenance | None = None
        self.on_launched: Callable[[], None] = lambda: None
        names = plan.names
        fused = names == (TRITON,) and plan.place.pipeline == 1
        self._runs_ahead = like.device.type == "cuda" and fused
        self._reports_layers = TRITON not in names
        self.on_layers: Callable[[int], None] = lambda num_layers: None
        self._fused: CudaBackend | None = None
        if fused:
            self._fused = _fused_backend(
                weights, self.pool, max_model_len, graph_sizes, chunk_graphs, plan.embedding_owner.batch_invariant
            )
        else:
            self._decoder = Decoder(model, self.pool, max_model_len=max_model_len)
        self._stage: Stage | None = None
        if weights.communicator is not None and not fused:
            self._stage = Stage(self._decoder, weights, self._groups)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        num_blocks: int = 0,
        block_size: int = 16,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        num_host_blocks: int = 0,
        backend: str | None = None,
        graph_sizes: Sequence[int] | None = None,
        chunk_graphs: Sequence[tuple[int, int]] | None = None,
        budget: PoolBudget | None = None,
        demand: PoolDemand | None = None,
        batch_invariant: bool = False,
        kv_cache_dtype: str = SAME_DTYPE,
        max_loras: int = 0,
        max_lora_rank: int = 16,
        place: RankPlace = WHOLE_PLACE,
        communicator: Communicator | None = None,
    ) -> TorchModelRunner:
        """Load a local Hugging Face folder.

        Args:
            device: "cpu" or "cuda". dtype: "float32", "bfloat16" or "float16", of weights and computation.
            num_blocks: of the pool, where it keeps every token; counts only without a budget.
            budget: device "cuda" only: as many blocks as it leaves room for, by a trial (engine.exec.cuda.sizing).
            max_model_len: None: what the model was trained for.
            num_threads: torch's threads in this process; None leaves them.
            num_host_blocks: slots of the host tier, each of one block.
            backend: "native" (compiled C), "torch" or "triton" (kernels, CUDA graphs for decode); None: the device's own,
                which on a CPU is native where it can be had, with a warning where it cannot.
            graph_sizes, chunk_graphs: triton only: padded batch sizes of the decode graphs, ascending; shapes of those of steps
                with chunks. None: the default ones.
            demand: layers with a window keep that window only, in KV groups whose pools are sized by it; None: every token.
            batch_invariant: a sequence's tokens do not depend on the rest of its steps: see plan_for.
            kv_cache_dtype: of KV_CACHE_DTYPES: "auto" is `dtype`; the others are quantized, with scales.
            max_loras: adapters on the device at one time; 0: none are served. max_lora_rank: of any of them.
            place: which part of the model this rank computes. communicator: to the other ranks, where there are some; all of
                them load at the same time, with the same arguments.
        Raises: ConfigError naming the field; RunnerLost.
        """
        folder = Path(path)
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
        if budget is not None and device != "cuda":
            raise ConfigError("device", device, "only a GPU's pool is sized by its memory")
        for field, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1 and not (field == "num_blocks" and budget is not None):
                raise ConfigError(field, value, "must be at least 1")
        loras = _lora_sizes(max_loras, max_lora_rank)
        if num_host_blocks < 0:
            raise ConfigError("num_host_blocks", num_host_blocks, "must be 0 or more")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        raw = _read_json(folder / "config.json")
        description = describe(raw)
        generation = folder / "generation_config.json"
        eos = eos_token_ids(raw, _read_json(generation) if generation.exists() else None)
        length = description.max_position if max_model_len is None else max_model_len
        if not 1 <= length <= description.max_position:
            raise ConfigError("max_model_len", length, f"must be between 1 and the model's {description.max_position}")
        kv = kv_format_of(
            description,
            block_size=block_size,
            dtype=dtype,
            window_groups=demand is not None,
            kv_cache_dtype=kv_cache_dtype,
        )
        check_pool(kv, num_host_blocks)
        own = place.part(kv)
        plan = plan_for(
            description,
            own,
            device_type=device,
            dtype=DTYPES[dtype],
            wanted=backend,
            batch_invariant=batch_invariant,
            loras=loras,
            place=place,
        )
        preparing = None
        if device == "cuda" and plan.names == (TRITON,):
            preparing = threading.Thread(target=_prepare_kernels, name="prepare-kernels", daemon=True)
            preparing.start()
        began = time.monotonic()
        try:
            with Checkpoint(folder, dtype=DTYPES[dtype], device=_device(device)) as source:
                source.leave(names_elsewhere(description, place))
                model = load_weights(source, plan, loras, communicator)
        except torch.OutOfMemoryError as error:
            raise out_of_memory("model", str(folder), f"the weights in {dtype}", error) from None
        log.info("weights loaded in %.2f s", time.monotonic() - began)
        if preparing is not None:
            preparing.join()

        def make(
            blocks: int,
            host_blocks: int = 0,
            sizes: Sequence[int] | None = graph_sizes,
            shapes: Sequence[tuple[int, int]] | None = chunk_graphs,
        ) -> TorchModelRunner:
            return cls(
                model,
                eos_token_ids=eos,
                num_blocks=blocks,
                block_size=block_size,
                max_model_len=length,
                num_host_blocks=host_blocks,
                graph_sizes=sizes,
                chunk_graphs=shapes,
                demand=demand,
                kv_cache_dtype=kv_cache_dtype,
            )

        if budget is not None:
            trial_sizes, trial_shapes = graph_sizes, chunk_graphs
            if plan.names == (TRITON,):
                row_bytes = description.vocab_size * dtype_bytes(dtype)
                trial_sizes, trial_shapes, outputs = _trial_graphs(
                    graph_sizes, chunk_graphs, row_bytes, slots=loras.slots > 0
                )
                budget = replace(budget, reserve_bytes=budget.reserve_bytes + outputs)
            num_blocks = profile(lambda n: make(n, sizes=trial_sizes, shapes=trial_shapes), budget, kv, demand, own)
        if communicator is not None:
            num_blocks = communicator.agree_min(num_blocks)
        try:
            return make(num_blocks, num_host_blocks)
        except torch.OutOfMemoryError as error:
            raise out_of_memory("num_blocks", num_blocks, f"{num_blocks:,} KV blocks", error) from None

    @property
    def capabilities(self) -> RunnerCapabilities:
        """See ModelRunner."""
        return RunnerCapabilities(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_layers=self.num_layers,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            num_host_blocks=self.num_host_blocks,
            runs_ahead=self._runs_ahead,
            reports_layers=self._reports_layers and (self._stage is None or not self._stage.pipelined),
            verifies_drafts=True,
            kv=self.pool.kv,
            group_blocks=self.pool.num_blocks,
            max_loras=self.loras.slots,
            max_lora_rank=self.loras.max_rank if self.loras.slots else 0,
            kernels=self.backend,
            refused="; ".join(self.refusals),
            weights=self.weight_sizes.line(),
        )

    def _check_adapters(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Raises: InternalError: the engine knows how many slots there are."""
        for seq in seqs:
            if seq.adapter >= self.loras.slots:
                raise InternalError(f"{seq.attempt}: there is no slot {seq.adapter}, only {self.loras.slots}")

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> HostAdapter:
        """See ModelRunner.read_adapter."""
        if self._lora is None:
            raise AdapterError("this engine keeps no adapters", param="adapter")
        return self._lora.read(folder, facts)

    @torch.inference_mode()
    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None:
        """See ModelRunner.install_adapter."""
        if self._lora is None or not isinstance(adapter, HostAdapter):
            raise InternalError(f"{adapter.id} was not read by this runner")
        self._lora.install(slot, adapter, parts)

    @torch.inference_mode()
    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        """See ModelRunner.execute. Raises: StepAborted; InternalError when a sequence breaks the scheduler's promises."""
        result = StepResult(token_ids=[()] * len(seqs))
        if not seqs:
            return result
        self._check_adapters(seqs)
        if self._fused is not None:
            return self._execute_fused(self._fused, seqs, should_abort, result)
        if self._stage is not None:
            return self._execute_stage(self._stage, seqs, should_abort, result)
        batch = self._decoder.lay_out(seqs)
        prompt_rows = want_prompt_rows(seqs, batch)
        logits = self._decoder.forward(batch, should_abort, self.on_layers)
        self._note(seqs, batch, result)
        if logits is None:
            return result
        draw_step(seqs, batch.sample_seqs, prompt_rows, logits, self.eos_token_ids, result)
        return result

    def _execute_stage(
        self,
        stage: Stage,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool] | None,
        result: StepResult,
    ) -> StepResult:
        step = stage.run(seqs, should_abort, self.on_layers)
        if step is not None:
            self._note(seqs, step, result)
            if step.logits is not None:
                draw_step(seqs, step.sample_seqs, step.prompt_rows, step.logits, self.eos_token_ids, result)
        return result

    @torch.inference_mode()
    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepInFlight:
        """See ModelRunner.launch. Raises: OutOfDeviceMemory; InternalError when a sequence breaks a promise."""
        fused = self._fused
        if fused is None:
            raise InternalError(f"the {self.backend} backend takes no steps ahead")
        self._check_adapters(seqs)
        batch = fused.build(seqs)
        if self._provenance is not None:
            note_launched(self._provenance, seqs, batch.order, batch.token_ids, batch.positions)
        step = _with_memory(lambda: fused.launch(seqs, batch, sources, self.eos_token_ids))
        return _Launched(step, fused.wrote)

    def _execute_fused(
        self,
        fused: CudaBackend,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool] | None,
        result: StepResult,
    ) -> StepResult:
        def step() -> StepResult:
            batch = fused.build(seqs)
            prompt_rows = want_prompt_rows(seqs, batch)
            logits = fused.execute(seqs, batch, should_abort)
            self.on_launched()
            self._note(seqs, batch, result)
            if logits is not None:
                fused.draw(seqs, batch.sample_seqs, prompt_rows, logits, self.eos_token_ids, result)
            return result

        return _with_memory(step)

    def _note(self, seqs: Sequence[ScheduledSeq], batch: Layout | CudaBatch | SampledStep, result: StepResult) -> None:
        """See engine.provenance."""
        if self._provenance is None:
            if not any(seq.vouch for seq in seqs):
                return
            self._provenance = Provenance(self.block_size)
        token_ids, positions = batch.token_ids, batch.positions
        rows = token_ids if isinstance(token_ids, list) else token_ids.tolist()
        at = positions if isinstance(positions, list) else positions.tolist()
        note_step(self._provenance, seqs, batch.order, rows, at, result)

    def expect_compiled(self) -> None:
        """See ModelRunner.expect_compiled."""
        if self._fused is not None:
            warn_of_late_kernels()

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See ModelRunner.copy_blocks. Groups are the model's."""
        if self._stage is None:
            self.pool.copy_blocks(copies)
        else:
            groups = {group: own for own, group in enumerate(self._groups)}
            self.pool.copy_blocks([replace(one, group=groups[one.group]) for one in copies if one.group in groups])
        if self._provenance is not None:
            self._provenance.copied(copies)

    @torch.inference_mode()
    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: Payload, layers: range | None = None, group: int = 0
    ) -> int:
        """See ModelRunner.pack. Raises: InternalError when blocks or bytes do not fit the tokens."""
        try:
            return self.pool.pack(block_ids, num_tokens, out, layers, group)
        except ValueError as error:
            raise InternalError(f"pack: {error}") from error

    @torch.inference_mode()
    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: Payload, layers: range | None = None, group: int = 0
    ) -> CopyHandle | None:
        """See ModelRunner.unpack. Raises: InternalError when blocks or bytes do not fit the tokens."""
        if not self._groups[group]:
            self.note_overwritten(block_ids)
        try:
            return self.pool.unpack(block_ids, num_tokens, src, layers, group)
        except ValueError as error:
            raise InternalError(f"unpack: {error}") from error

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        """See ModelRunner.note_pulled."""
        self._provenance = self._provenance or Provenance(self.block_size)
        self._provenance.pulled(block_table, token_ids, first_new, first_block)

    def note_overwritten(self, block_ids: Sequence[int]) -> None:
        """See ModelRunner.note_overwritten."""
        if self._provenance is not None:
            self._provenance.forget(block_ids)

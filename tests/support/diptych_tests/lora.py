"""LoRA adapters of random numbers, in folders as peft writes them, and an engine that serves adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from diptych.common.adapters.peft import load_adapter, read_adapter
from diptych.common.block_identity import IdentityHeader
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import KeepAdapter
from diptych.engine.offline import OfflineEngine

Shape = tuple[int, int]


def linear_shapes(model: Path, targets: Iterable[str] = ()) -> dict[str, Shape]:
    """Name -> (outputs, inputs) of the linear layers of a model's blocks whose names end with one of `targets`; none: all."""
    description = describe(json.loads((model / "config.json").read_text()))
    ends = tuple(targets)
    return {
        part.name: (part.outputs, layer.inputs)
        for block in description.blocks
        for layer in block.linears
        for part in layer.parts
        if not ends or part.name.endswith(ends)
    }


def write_adapter(
    folder: Path,
    shapes: Mapping[str, Shape],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
    ranks: Callable[[str], int] | None = None,
    dtype: type = np.float32,
    **config: object,
) -> Path:
    """Args: ranks: name -> rank, for a rank_pattern. size: standard deviation of the numbers. config: further fields."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors, pattern = {}, {}
    for name, (outputs, inputs) in shapes.items():
        r = rank if ranks is None else ranks(name)
        if r != rank:
            pattern[name] = r
        for side, shape in (("A", (r, inputs)), ("B", (outputs, r))):
            values = rng.standard_normal(shape, dtype=np.float32) * size
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.astype(dtype)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(shapes), "bias": "none"}
    if pattern:
        fields["rank_pattern"] = pattern
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge_adapter(model: Path, adapter: Path, out: Path) -> Path:
    """A model in float32 whose weights have the adapter added: what any kernel for adapters is compared with."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text((model / "config.json").read_text())
    tensors, loaded = load_file(model / "model.safetensors"), load_adapter(adapter)
    for module in loaded.facts.modules:
        a, b = (np.frombuffer(raw.data, np.float32).reshape(raw.shape) for raw in loaded.tensors[module.name])
        added = module.scale * (b.astype(np.float64) @ a.astype(np.float64))
        name = f"{module.name}.weight"
        tensors[name] = (tensors[name] + added).astype(np.float32)
    save_file(tensors, out / "model.safetensors")
    return out


def adapter_engine(
    model: Path, backend: str, max_loras: int = 0, max_lora_rank: int = 16
) -> tuple[OfflineEngine, TorchModelRunner]:
    """An engine of 600 blocks of 16 tokens on one thread, in float32."""
    blocks, size = 600, 16
    runner = TorchModelRunner.load(
        model, num_blocks=blocks, block_size=size, num_threads=1, backend=backend, max_loras=max_loras,
        max_lora_rank=max_lora_rank,
    )  # fmt: skip
    config = EngineConfig(num_blocks=blocks, block_size=size, max_step_time_s=None, mixed_step_time_s=None)
    identity = IdentityHeader(bytes(32), "adapters", "adapters", runner.kv_dtype, size)
    return OfflineEngine(LocalExecutor(runner), config, identity), runner


def keep_adapter(engine: OfflineEngine, runner: TorchModelRunner, folder: Path) -> str:
    """Give an engine the adapter of a folder. Returns: its id."""
    facts = read_adapter(folder)
    engine.send(KeepAdapter(runner.read_adapter(folder, facts)))
    return facts.id

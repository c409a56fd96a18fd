"""The whole of `diptych quantize`, without the command line."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from diptych.common.checkpoint.hashing import model_fingerprint
from diptych.common.errors import ConfigError
from diptych.common.model_files import read_json_object
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.registry import describe
from diptych.engine.quantize.blocks import CalibrationRun, PlainCheckpoint
from diptych.engine.quantize.folder import WeightWriter, check_new, copy_beside, new_folder, stored_tensors, write_json
from diptych.engine.quantize.gptq import Int4Rule
from diptych.engine.quantize.methods import Tensors, quantize_groups, quantize_rows, smooth
from diptych.engine.quantize.perplexity import PIECE, perplexity
from diptych.engine.quantize.rounding import fp8_rows, int8_rows
from diptych.engine.quantize.settings import MANIFEST_FILE, QuantizeSettings
from diptych.engine.quantize.text import HELD_OUT, Text, read_text

MANIFEST_VERSION = 1
CALIBRATION_PIECE = 512
"""Tokens of a prompt of calibration text."""
MOST_PIECES = 128
"""Prompts of a calibration: 65,536 tokens, as the papers take 128 of 2,048."""
_PACKAGES = ("diptych", "torch", "safetensors", "tokenizers")
Update = Callable[[str, int, int], None]
"""stage, units that are done, all units of the stage."""


@dataclass(frozen=True, slots=True)
class Job:
    """
    Args:
        source: a folder with a plain model. out: a folder that does not exist.
        held_out: a text file; None: the text that comes with this package.
        device: "cpu" or "cuda": computes calibration and perplexity.
    """

    source: Path
    out: Path
    settings: QuantizeSettings
    held_out: Path | None = None
    device: str = "cpu"


def quantize(job: Job, update: Update, *, before: float | None = None) -> dict[str, Any]:
    """Write the quantized model. Returns: the manifest, as it lies in the folder.

    Args: before: perplexity of the source on the same text, where it was measured already.
    Raises: ConfigError naming the field: of the settings, a text, the model or the folder. Nothing is left behind then.
    """
    began = time.monotonic()
    check_new(job.out)
    config = _plain_config(job.source)
    description = describe(config)
    linears = [linear for block in description.blocks for linear in block.linears]
    is_int4 = job.settings.method == "int4"
    group_size = job.settings.group_size_for(linears) if is_int4 else None
    tokenizer = ModelTokenizer(job.source)
    calibration = None
    if job.settings.calibration is not None:
        piece = min(CALIBRATION_PIECE, description.max_position)
        calibration = read_text(job.settings.calibration, "calibration", tokenizer, piece=piece, most=MOST_PIECES)
    held_out = read_text(
        job.held_out or HELD_OUT, "held_out", tokenizer, piece=min(PIECE, description.max_position - 1)
    )
    dtype = "float32" if job.device == "cpu" else "bfloat16"

    def measure(folder: Path, when: str) -> float:
        stage = f"perplexity {when}"
        update(stage, 0, len(held_out.pieces))
        return perplexity(
            folder,
            held_out,
            device=job.device,
            dtype=dtype,
            tick=lambda done: update(stage, done, len(held_out.pieces)),
        )

    with new_folder(job.out) as folder:
        if before is None:
            before = measure(job.source, "before")
        writer = WeightWriter(folder)
        replaced, most_smoothed = _quantized(job, description, group_size, calibration, writer, update)
        _write_others(job.source, description, replaced, writer)
        writer.finish()
        copy_beside(job.source, folder)
        write_json(folder / "config.json", {**config, "quantization_config": job.settings.config(group_size)})
        after = measure(folder, "after")
        chosen = {name: value for name, value in asdict(job.settings).items() if value is not None}
        manifest: dict[str, Any] = {
            "version": MANIFEST_VERSION,
            **chosen,
            "calibrated": calibration is not None,
            **({} if group_size is None else {"group_size": group_size}),
            **({} if most_smoothed is None else {"largest_smoothing_factor": most_smoothed}),
            "source": {"name": job.source.name, "revision": model_fingerprint(job.source)},
            "calibration": None if calibration is None else calibration.described(),
            "perplexity": {
                "text": held_out.described(), "dtype": dtype, "before": before, "after": after, "ratio": after / before,
            },
            "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES},
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        write_json(folder / MANIFEST_FILE, manifest)
    return manifest


def _plain_config(folder: Path) -> dict[str, Any]:
    config = read_json_object(folder / "config.json")
    if config.get("quantization_config"):
        raise ConfigError("model", str(folder), "is quantized already: its config.json has a quantization_config")
    return config


def _quantized(
    job: Job,
    description: ModelDescription,
    group_size: int | None,
    calibration: Text | None,
    writer: WeightWriter,
    update: Update,
) -> tuple[Tensors, float | None]:
    """Write the linear layers. Returns: what replaces other tensors of the checkpoint, and the largest smoothing factor,
    where there was a smoothing."""
    method, settings = job.settings.method, job.settings
    stage, total = f"{method}: layers", description.num_layers
    replaced: Tensors = {}
    most_smoothed: float | None = None
    rule = Int4Rule(
        group_size or 0,
        settings.symmetric is not False,
        settings.act_order is not False,
        _stored_dtype(job.source, description),
    )
    with (
        Checkpoint(job.source, dtype=torch.float32, device=torch.device(job.device)) as source,
        torch.inference_mode(),
    ):
        plain = PlainCheckpoint(source, description)
        run = None if calibration is None else CalibrationRun(description, plain.embedding, calibration.prompts())
        update(stage, 0, total)
        for index, block in enumerate(plain.blocks()):
            declared = description.blocks[index]
            inputs = None if run is None else run.observe(index, block)
            if method == "int4":
                try:
                    tensors, meant = quantize_groups(declared, block, rule, inputs)
                except ValueError as error:
                    raise ConfigError("calibration", str(settings.calibration), f"layer {index}: {error}") from None
                if run is not None and index + 1 < total:
                    run.advance(index, meant)
            else:
                if run is not None and inputs is not None:
                    run.accept()
                    block, moved, most = smooth(declared, block, inputs)
                    replaced |= moved
                    most_smoothed = max(most, most_smoothed or 1.0)
                tensors = quantize_rows(declared, block, int8_rows if method == "int8" else fp8_rows)
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            update(stage, index + 1, total)
    return replaced, most_smoothed


def _stored_dtype(folder: Path, description: ModelDescription) -> torch.dtype:
    """Of the checkpoint's first linear weight: scales of int4 are stored in it."""
    name = f"{description.blocks[0].linears[0].parts[0].name}.weight"
    return next((tensor.dtype for found, tensor in stored_tensors(folder) if found == name), torch.float32)


def _write_others(source: Path, description: ModelDescription, replaced: Tensors, writer: WeightWriter) -> None:
    """What is no weight of a linear layer of a block, as it is stored, unless it is replaced."""
    linears = [linear for block in description.blocks for linear in block.linears]
    quantized = {f"{part.name}.weight" for linear in linears for part in linear.parts}
    for name, tensor in stored_tensors(source):
        if name in quantized:
            continue
        value = replaced.get(name)
        if value is not None:
            same = value.cpu().to(tensor.dtype)
            tensor = same if torch.equal(same.float(), value.cpu()) else value.cpu()  # not exact: it stays float32
        writer.add(name, tensor)

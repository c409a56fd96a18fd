"""What quantized weights and quantized KV cost in perplexity, through the engine as it serves; run by `make quality`.

    python -P -m diptych.bench.engine.quality [--model smollm2] [--only int8 ...] [--out FOLDER]
    python -P -m diptych.bench.engine.quality --merge FILE FILE ... --out FILE

Every method of the registry has its rows, and so have every dtype and every quantized KV cache, for each of MODELS. A row's
ratio is its perplexity over that of the plain model in float32; one above the row's gate ends the run with exit code 1.
docs/quality.md says where the gates come from.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.bench.engine import gemma3
from diptych.bench.result import surroundings, write
from diptych.cli.models.store import DEFAULT_MODEL, resolve_model
from diptych.cli.progress import progress_on
from diptych.cli.temporary import temporary_folder
from diptych.common.checkpoint.hashing import model_fingerprint
from diptych.common.errors import ConfigError
from diptych.common.kv_format import COMPUTE_DTYPES, QUANTIZED_KV
from diptych.common.paths import cache_dir
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.quantize.perplexity import PIECE, perplexity
from diptych.engine.quantize.run import Job, Update, quantize
from diptych.engine.quantize.settings import QuantizeSettings
from diptych.engine.quantize.text import HELD_OUT, Text, read_text

CALIBRATION = Path(__file__).parent / "texts" / "calibration.txt"
BASE = "float32"


@dataclass(frozen=True, slots=True)
class Row:
    """
    Args:
        settings: how the weights are quantized; None: they are not.
        dtype: of what is not quantized, of activations, and of KV where `load` says nothing else.
        packed: the model's GGUF file with its blocks as they lie there.
        load: more arguments of TorchModelRunner.load.
    """

    name: str
    settings: QuantizeSettings | None = None
    packed: bool = False
    dtype: str = BASE
    load: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """One that is measured.

    Args:
        name: in its record. spec: what resolve_model takes, fetched where it is not there.
        gates: row -> the largest ratio: on the held-out text, the ratio measured, and a third of its loss more, at least 0.005
            and at most 0.05.
        left_out: row -> why it is measured only where it is named.
    """

    name: str
    spec: Callable[[], str]
    gates: Mapping[str, float]
    left_out: Mapping[str, str] = field(default_factory=dict)


MODELS: Mapping[str, Model] = {
    "smollm2": Model(
        DEFAULT_MODEL,
        lambda: DEFAULT_MODEL,
        {
            "float32": 1.0,
            "float16": 1.005,
            "bfloat16": 1.005,
            "KV in fp8_e4m3": 1.012,
            "KV in fp8_e5m2": 1.048,
            "KV in int8": 1.005,
            "gguf": 1.005,
            "int8": 1.124,
            "int8, smoothed": 1.091,
            "fp8": 1.061,
            "int4, nearest": 1.536,
            "int4, GPTQ": 1.491,
        },
    ),
    "gemma3-270m": Model(
        gemma3.FILE.removesuffix(".gguf"),
        lambda: str(gemma3.gguf_file(cache_dir())),
        {
            "float32": 1.0,
            "bfloat16": 1.008,
            "KV in fp8_e4m3": 1.017,
            "KV in fp8_e5m2": 1.11,
            "KV in int8": 1.023,
        },
        {"float16": "its activations are larger than float16's numbers"}
        | dict.fromkeys(
            (
                "gguf",
                "int8",
                "int8, smoothed",
                "fp8",
                "int4, nearest",
                "int4, GPTQ",
            ),
            "not measured yet",
        ),
    ),
}

RECIPES: Mapping[str, Mapping[str, QuantizeSettings]] = {
    "int8": {
        "int8": QuantizeSettings("int8"),
        "int8, smoothed": QuantizeSettings("int8", calibration=CALIBRATION),
    },
    "fp8": {"fp8": QuantizeSettings("fp8")},
    "int4": {
        "int4, nearest": QuantizeSettings("int4"),
        "int4, GPTQ": QuantizeSettings("int4", calibration=CALIBRATION),
    },
}
"""Method of the registry -> its rows."""
GGUF = "gguf"
"""The method whose weights are those of the file that the plain model was converted from: only rounding differs."""


def rows() -> list[Row]:
    """Raises: KeyError for a method of the registry without a recipe."""
    found = [Row(dtype, dtype=dtype) for dtype in COMPUTE_DTYPES]
    found += [Row(f"KV in {name}", load={"kv_cache_dtype": name}) for name in QUANTIZED_KV]
    for method in METHODS:
        if method == GGUF:
            found.append(Row(GGUF, packed=True))
        elif method != PLAIN:
            found += [Row(name, settings) for name, settings in RECIPES[method].items()]
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """One row's result. Args: seconds: of quantizing and measuring."""

    name: str
    perplexity: float
    ratio: float
    gate: float | None
    seconds: float

    @property
    def passed(self) -> bool:
        """A row without a gate has not."""
        return self.gate is not None and self.ratio <= self.gate

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.name, "perplexity": self.perplexity, "ratio": self.ratio, "gate": self.gate, "passed": self.passed,
            "seconds": round(self.seconds, 1),
        }  # fmt: skip


def measure(
    model: Model, wanted: Sequence[Row], source: Path, text: Text, update: Update, work: Path
) -> Iterator[Measured]:
    """The base, then each row. Args: work: an empty folder for the quantized models."""
    base = 0.0
    for i, row in enumerate([one for one in rows() if one.name == BASE] + [one for one in wanted if one.name != BASE]):
        began = time.monotonic()
        value = _perplexity(model, row, source, text, base, update, work / f"row-{i}")
        base = base or value
        yield _judged(model.gates, row.name, value, value / base, time.monotonic() - began)


def _perplexity(model: Model, row: Row, source: Path, text: Text, base: float, update: Update, folder: Path) -> float:
    """Args: folder: to be made, where the row's weights are quantized here."""
    if row.settings is None:
        held = resolve_model(model.spec(), packed=True) if row.packed else source
        return perplexity(
            held, text, dtype=row.dtype, tick=lambda done: update(row.name, done, len(text.pieces)), **row.load
        )
    job = Job(source, folder, row.settings)
    manifest = quantize(job, lambda stage, *counts: update(f"{row.name}: {stage}", *counts), before=base)
    return float(manifest["perplexity"]["after"])


def merged(parts: Sequence[Path]) -> dict[str, Any]:
    """One record of several runs, judged by the gates as they are now. Raises: ConfigError where the runs are not of the same
    model and text."""
    records = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    for part, record in zip(parts, records, strict=True):
        for key in ("model", "text"):
            if record[key] != records[0][key]:
                raise ConfigError("merge", str(part), f"has another {key} than {parts[0]}")
    gates = {model.name: model.gates for model in MODELS.values()}[records[0]["model"]["name"]]
    runs = [run for record in records for run in record["runs"]]
    for run in runs:
        run["rows"] = [
            _judged(gates, row["row"], row["perplexity"], row["ratio"], row["seconds"]).as_dict() for row in run["rows"]
        ]
    return {**records[0], "runs": runs}


def _judged(gates: Mapping[str, float], name: str, perplexity: float, ratio: float, seconds: float) -> Measured:
    return Measured(name, perplexity, ratio, gates.get(name), seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=sorted(MODELS), default=[], help="default: each")
    parser.add_argument("--only", nargs="*", metavar="ROW", help=f"of: {'; '.join(row.name for row in rows())}")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-out"), help="a folder, for a record of each model; with --merge a file"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="write one record of these, and measure nothing"
    )
    given = parser.parse_args(arguments)
    if given.merge:
        record = merged(given.merge)
        write(given.out, record)
        return _verdict([row["row"] for run in record["runs"] for row in run["rows"] if not row["passed"]])
    known = {row.name: row for row in rows()}
    if unknown := [name for name in given.only or () if name not in known]:
        parser.error(f"--only: no row {unknown[0]!r}; there are {'; '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the folder with models is deleted
    failed: list[str] = []
    for key in given.model or MODELS:
        left_out = {} if given.only else MODELS[key].left_out
        wanted = [known[name] for name in given.only or known if name not in left_out]
        found = _measured(MODELS[key], wanted, given.out / f"quality-{key}.json")
        for name, why in left_out.items():
            print(f"{key}: {name} is left out: {why}")
        failed += [f"{key}: {one.name}" for one in found if not one.passed]
    return _verdict(failed)


def _measured(model: Model, wanted: Sequence[Row], out: Path) -> list[Measured]:
    """Args: out: the record, with what is found so far: the run may be ended."""
    began = surroundings()
    found: list[Measured] = []
    with progress_on() as progress, temporary_folder("diptych-quality-") as work:
        source = resolve_model(model.spec(), progress)
        text = read_text(HELD_OUT, "held_out", ModelTokenizer(source), piece=PIECE)
        facts = {"name": model.name, "revision": model_fingerprint(source)}
        progress.note(f"{model.name}, {text.num_tokens:,} tokens")
        for one in measure(model, wanted, source, text, progress.update, Path(work)):
            found.append(one)
            progress.note(line(one))
            run = {"surroundings": began, "rows": [row.as_dict() for row in found]}
            write(out, {"model": facts, "text": text.described(), "runs": [run]})
    return found


def _verdict(failed: Sequence[str]) -> int:
    """Returns: the exit code."""
    if failed:
        print(f"above their gates: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def line(one: Measured) -> str:
    """For a terminal."""
    gate = "no gate" if one.gate is None else f"gate {one.gate:.3f}"
    verdict = "" if one.passed else "  FAILED"
    return f"{one.name:<26}{one.perplexity:9.3f}{one.ratio:9.4f}   {gate}{verdict}"


if __name__ == "__main__":
    sys.exit(main())

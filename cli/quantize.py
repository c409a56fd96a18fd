"""`diptych quantize`: a quantized copy of a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from diptych.engine.quantize.settings import QuantizeSettings


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def quantize(
        model: Annotated[str, typer.Argument(help="A plain model: a name that `diptych model` accepts.")],
        method: Annotated[
            str,
            typer.Option(
                help="int8 (W8A8), fp8 (W8A8, E4M3) or int4 (weights only, in groups). Of linear layers; embedding and head "
                "stay as they are."
            ),
        ],
        out: Annotated[Path, typer.Option(help="The folder to write; must not exist.")],
        calibration: Annotated[
            Path | None,
            typer.Option(
                help="Text in UTF-8, like what the model will be used for; 65,536 tokens of it count at most. int4 is then made "
                "by GPTQ, and int8 with smoothing of large activations."
            ),
        ] = None,
        group_size: Annotated[
            int | None,
            typer.Option(
                help="int4: inputs that share a scale, 128, 64 or 32. Default: 128 where it divides every layer, else the next.",
                show_default=False,
            ),
        ] = None,
        symmetric: Annotated[
            bool | None,
            typer.Option(
                "--symmetric/--asymmetric",
                help="int4: a zero of its own for each group, or none. Default: symmetric.",
                show_default=False,
            ),
        ] = None,
        act_order: Annotated[
            bool | None,
            typer.Option(
                "--act-order/--no-act-order",
                help="int4 with a calibration: round the inputs with the largest activations first. Default: yes. The stored "
                "layout and its speed stay the same.",
                show_default=False,
            ),
        ] = None,
        held_out: Annotated[
            Path | None,
            typer.Option(
                help="Text of which perplexity is measured. Default: the Declaration of Independence, 1,700 tokens.",
                show_default=False,
            ),
        ] = None,
        device: Annotated[str, typer.Option(help="cpu or cuda: computes calibration and perplexity.")] = "cpu",
    ) -> None:
        """Write a quantized copy of a model.

        In the compressed-tensors format, with its perplexity before and after."""
        from diptych.engine.quantize.settings import QuantizeSettings

        settings = QuantizeSettings(method, group_size, symmetric, act_order, calibration)
        raise typer.Exit(run_quantize(model, settings, out, held_out=held_out, device=device))


def run_quantize(model: str, settings: QuantizeSettings, out: Path, **more: Any) -> int:
    """Args: more: held_out and device of engine.quantize.run.Job. Returns: the exit code. Raises: ConfigError."""
    from diptych.cli.models.store import resolve_model
    from diptych.cli.progress import progress_on
    from diptych.engine.quantize.run import Job, quantize
    from diptych.engine.quantize.settings import MANIFEST_FILE

    with progress_on() as progress:
        job = Job(resolve_model(model, progress), out, settings, **more)
        found = quantize(job, progress.update)["perplexity"]
    print(
        f"{out}: perplexity {found['before']:.3f} before, {found['after']:.3f} after (ratio {found['ratio']:.4f}) on "
        f"{found['text']['num_tokens']:,} tokens of {found['text']['file']}; more in {MANIFEST_FILE}"
    )
    if hint := hint_of(settings, found["ratio"]):
        print(hint)
    return 0


LARGE_LOSS = 1.1
"""Of perplexity, by a factor: more than int8 costs the smallest models that were measured (docs/quality.md)."""


def hint_of(settings: QuantizeSettings, ratio: float) -> str:
    """What to try where perplexity rose by more than LARGE_LOSS; "" where it did not."""
    if ratio <= LARGE_LOSS:
        return ""
    calibrate = settings.calibration is None and settings.method != "fp8"
    ways = ["--calibration FILE, of text like the model's use"] if calibrate else []
    if settings.method == "int4":
        ways += ["--asymmetric"] if settings.symmetric is not False else []
        ways += ["a smaller --group-size", "--method int8"]
    return f"warning: perplexity rose by {100 * (ratio - 1):.0f}%" + (f"; try {', or '.join(ways)}" if ways else "")

"""`python -P -m diptych.bench gpu-checkouts NAME=CHECKOUT[,FLAG...]... --out FILE`: several checkouts in turn on the GPUs of
one machine.

In every round each checkout starts `diptych serve` or `diptych up` with default flags (or those that follow its folder), in
alternating order, and gets the same load over HTTP. The first start of each, which fills the caches of Triton and Python,
is not counted.

    start      seconds until readiness, and the log's times of its phases, since the first line
    serve      `serve` on one GPU: users in a closed loop, 512 tokens in, 128 out
    hand-off   `up` on two GPUs, idle: the interval between first and second token, less one step
    closed     `up`: users in a closed loop
    poisson    `up`: 2,000 tokens in, 128 out

`start` counts the starts that the other blocks need, too; alone it starts `serve`, and with --up also `up`.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from diptych.bench.gpu.over_http import Bench, Row, say
from diptych.bench.gpu.over_http import main_parser as http_parser
from diptych.bench.gpu.random_model import BIG, TINY, write_model

BLOCKS = ("start", "serve", "hand-off", "closed", "poisson")
PHASES = ("loading the model", "weights loaded", "gpu memory", "model loaded", "warmed up", "ready", "kv transfer")


def phases(text: str) -> Row:
    """Seconds of the log's lines that begin a phase, since its first line of that process. Args: text: of Server.text."""
    found: Row = {}
    for log in text.split("== ")[1:]:
        name, first = log.partition("\n")[0], None
        for line in log.splitlines()[1:]:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                at = datetime.fromisoformat(entry["timestamp"])
                first = first or at
                if entry["event"].startswith(PHASES):
                    found[f"{name}: {entry['event'][:40]}"] = round((at - first).total_seconds(), 2)
    return found


class Checkouts(Bench):
    """`args`: of over_http, with `checkouts`, `rounds` and `up`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.sources = {name: rest.split(",") for name, _, rest in (pair.partition("=") for pair in args.checkouts)}

    @contextlib.contextmanager
    def of(self, checkout: str, name: str, command: str, model: Path) -> Iterator[Row]:
        """A server of the checkout. Yields: its row of the result."""
        folder, *flags = self.sources[checkout]
        source = Path(folder).resolve() / "src"
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.env = {"PYTHONPATH": os.pathsep.join([str(source), *others[1:]])}
        row = self.result.setdefault(name, {})
        with self.up(name, model, flags) if command == "up" else self.serve(name, model, flags):
            entry = self.result["servers"][name]
            row |= {"start_s": entry["start_s"], "phases": phases(self.log_text())}
            yield row
        self.write()
        say(f"{name}: {json.dumps(row)}")

    async def one_server(self, checkout: str, name: str, command: str, model: Path, blocks: Sequence[str]) -> None:
        scale = 0.05 if self.args.tiny else 1.0
        sized = lambda length: max(8, int(scale * length))  # noqa: E731
        with self.of(checkout, name, command, model) as row:
            await self.warm([sized(64), sized(512), *([sized(2000)] if command == "up" else [])])
            if command == "up" and "hand-off" in blocks:
                row["hand_off"] = await self.hand_off([sized(512), sized(2048), sized(8192)])
            if "closed" in blocks if command == "up" else "serve" in blocks:
                for users in self.args.users:
                    row[f"closed_{users}"] = await self.closed(users, self.args.each, sized(512))
            for rate in self.args.rates if command == "up" and "poisson" in blocks else ():
                row[f"poisson_{rate:g}"] = await self.poisson(rate, self.args.seconds, sized(2000))

    async def run(self) -> None:
        args, blocks = self.args, self.args.blocks.split(",")
        model = write_model(Path(args.work) / "big", TINY if args.tiny else BIG, args.device)
        say("model written")
        commands = ["serve"] if "serve" in blocks or not set(blocks) - {"start"} else []
        commands += ["up"] if set(blocks) & {"hand-off", "closed", "poisson"} or args.up else []
        for checkout in self.sources:  # not counted: caches are filled
            for command in commands:
                with self.of(checkout, f"{command}-{checkout}-first", command, model):
                    pass
        for number in range(args.rounds):
            order = list(self.sources)
            for checkout in order if number % 2 == 0 else order[::-1]:
                for command in commands:
                    self.rng.seed(args.seed + number)
                    await self.one_server(checkout, f"{command}-{checkout}-{number}", command, model, blocks)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = http_parser(__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=CHECKOUT[,FLAG...]")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--up", action="store_true", help="start `up` as well")
    parser.set_defaults(blocks=",".join(BLOCKS), users=[8, 32, 64], rates=[8.0, 16.0])
    args = parser.parse_args(arguments)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    bench = Checkouts(args)
    asyncio.run(bench.run())
    bench.write()


if __name__ == "__main__":
    main()

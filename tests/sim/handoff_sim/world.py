"""One schedule: a few requests, a few workers, and all faults of a seed. `run(seed)` returns the failures.

Requests, faults and their times are drawn from the seed alone, so a seed is a reproducer. A cancel or a fault occurs at
a time or after the n-th callback of the loop: between any two actions of the code.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import structlog
from handoff_sim import reference
from handoff_sim.client import Client
from handoff_sim.engine import BLOCK, LAYERS, RANKS, WINDOWS, Context, Degrees, Sizes, ranks_of
from handoff_sim.files import Files, has_files
from handoff_sim.laws import Law
from handoff_sim.links import Links
from handoff_sim.loop import Deadlock, VirtualLoop
from handoff_sim.nodes import DecodeNode, PrefillNode, WorkerNode
from handoff_sim.offers import has_offers
from handoff_sim.sources import Sources, has_pulls
from handoff_sim.trouble import Trouble
from handoff_sim.way_back import WayBack
from handoff_sim.wire import Faults, Wires

from diptych.engine.messages import RangePacked, UnpackRange

PROFILES = (
    "calm", "calm", "lossy", "damaged", "killed", "vanished", "stopped", "partitioned", "everything", "everything",
)  # fmt: skip
_HORIZON_S = 60.0
_COLLECT_EVERY = 10


def _window_groups(seed: int) -> dict[str, Any]:
    """Every fourth schedule has them. The others are what they were without: seeds that once found a fault stay reproducers."""
    if seed % 8 not in (3, 5):
        return {}
    rng = Random(f"windows {seed}")
    # A prefill worker of the version before `reusable` has one rank, and is asked for no others.
    return {"windows": rng.choice(WINDOWS), "reusable": rng.random() < 0.6 or has_ranks(seed)}


def has_ranks(seed: int) -> bool:
    """The other schedules are what they were without. Some have window groups, too."""
    return seed % 17 == 7 and not has_files(seed)


def _ranks(seed: int) -> dict[str, Any]:
    """Degrees of prefill and of decode, in both directions, some of them equal."""
    rng = Random(f"ranks {seed}")
    return {"ranks": (rng.choice(RANKS), rng.choice(RANKS))} if has_ranks(seed) else {}


class World:
    """Args: with_files: the schedule has files of KV, and pulls, whichever its seed."""

    def __init__(self, seed: int, *, with_files: bool = False) -> None:
        self.seed = seed
        self.has_pulls = with_files or has_pulls(seed)
        windows = _window_groups(seed)
        has_disks = with_files or has_files(seed)
        self.rng = rng = Random(seed)
        self.loop = VirtualLoop()
        self.profile = rng.choice(PROFILES)
        self.problems: list[str] = []
        self.headline = ""
        """The first law that was broken, and where."""
        wild = self.profile == "everything"
        self.links = Links(self.loop, rng, rng.choice((0.002, 0.02, 0.3 if self.profile != "calm" else 0.05)))
        faults = Faults(
            lose=rng.choice((0.02, 0.15)) if wild or self.profile == "lossy" else 0.0,
            stick=rng.choice((0.0, 0.2)) if wild or self.profile == "lossy" else 0.0,
            twice=rng.choice((0.0, 0.2)),
            damage=rng.choice((0.05, 0.3)) if wild or self.profile == "damaged" else 0.0,
            forge=rng.choice((0.0, 0.5)),
        )
        self.sizes = Sizes(
            num_slabs=rng.randint(2, 4),
            num_blocks=rng.choice((12, 16, 24, 40)),
            chunk=rng.choice((4, 8, 16)),
            lease_s=3.0 if self.profile == "calm" else rng.choice((0.1, 0.3, 1.0, 3.0)),
            read_base_s=rng.choice((0.05, 0.3, 1.0)),
            silence_s=rng.choice((0.3, 1.0)),
            quota=rng.randint(1, 3),
            cap=rng.randint(1, 2),
            grant_quota=rng.randint(1, 3),
            overlap=rng.choice(("on", "on", "off")),
            slab_blocks=2 if self.has_pulls else 0,
            offers=has_offers(seed),
            **windows,
            **({} if with_files else _ranks(seed)),
        )
        self.client = Client(self)
        self.trouble = Trouble(self)
        self.files = Files(self) if has_disks else None
        self.wires = Wires(self.links, rng, faults, self.report)
        self.context = Context(
            self.loop,
            rng,
            self.links,
            self.wires,
            self.sizes,
            self.report,
            self.check_unpack,
            self._check_packed,
            self.files,
        )
        self.prefill: dict[str, PrefillNode] = {}
        self.lives = self.num_pulled = 0

    # ---- reports ----

    def report(self, law: Law, problem: str) -> None:
        if not self.problems:
            self.headline = f"seed {self.seed} breaks law {law.number}, {law.text!r}: {problem}"
        if len(self.problems) < 20:
            at = f"{self.loop.time() - 1000.0:.6f} s, callback {self.loop.num_callbacks}"
            self.problems.append(f"{at}, law {law.number}: {problem}")

    def reported(self) -> str:
        """The law that was broken first, in the first line; and the schedule in words."""
        asks = "; ".join(
            f"{a.name}: {a.length} tokens, {a.max_tokens} out, ended {a.ended} with {a.error!r}, notes {a.notes}"
            for a in self.client.asks
        )
        schedule = f"{self.profile}, {self.sizes}, {self.wires.faults}"
        return f"{self.headline}\n  ({schedule})\n  {asks}\n  " + ", ".join(self.trouble.trail)

    def counts(self) -> dict[str, int]:
        """What has happened in it."""
        files = self.files
        return {
            "seeds": 1, "callbacks": self.loop.num_callbacks, "with_files": files is not None, "ranges_pulled": self.num_pulled,
            **({} if files is None else files.counts()),
        }  # fmt: skip

    def check_unpack(self, command: UnpackRange, degrees: Degrees | None = None) -> None:
        """`degrees`: of the worker."""
        self.num_pulled += command.attempt.startswith("pull/")
        name = command.attempt.removeprefix("pull/").partition("/")[0].partition("\0")[0]
        ask = next(a for a in self.client.asks if a.name == name)
        ids, windows = reference.prompt(ask.family, ask.length), self.sizes.windows
        first, num = command.first_token, command.num_tokens
        if first + num > ask.length:
            answer = reference.tokens(ask.family, ask.length, ask.seed, windows, ranks=degrees is not None)
            ids = (*ids, *answer)
        layers = None  # of a window group ranges have all
        if degrees is not None:
            every = ranks_of(degrees, windows)[command.part].groups[command.group].num_layers
            layers = range(command.first_layer, command.first_layer + (command.num_layers or every))
            right = reference.kv_of_rank(ids, first, num, layers, degrees, command.part, windows, command.group)
        else:
            if not windows:
                layers = range(command.first_layer, command.first_layer + (command.num_layers or LAYERS))
            right = reference.kv(ids, first, num, layers, windows, command.group)
        if bytes(command.payload) != right:
            self.report(
                Law.VERIFIED,
                f"{ask.name}: wrong KV is unpacked at token {first}, group {command.group}, rank {command.part}, {layers}",
            )

    def _check_packed(self, packed: RangePacked) -> None:
        """Of a window group only what the next token sees is sent, and what the token behind the prompt's longest hit sees."""
        if packed.attempt.startswith("source/"):
            return
        ask = next(a for a in self.client.asks if a.name == packed.attempt.partition("/")[0])
        window = self.sizes.facts().compat.parts[packed.part].groups[packed.group].window
        seen_by = (ask.length - 1) // BLOCK * BLOCK if self.sizes.reusable else ask.length
        if window and packed.first_token < (seen_by + 1 - window) // BLOCK * BLOCK:
            self.report(
                Law.WINDOWS,
                f"{ask.name}: token {packed.first_token} of KV group {packed.group} is sent and seen by none",
            )

    # ---- the run ----

    def run(self) -> list[str]:
        loop = self.loop
        asyncio.set_event_loop(None)
        loop.step_in = self.trouble.step_in
        try:
            loop.run_until_complete(self._main())
        except Deadlock:
            self.report(
                Law.ENDS_ONCE,
                f"deadlock: nothing will ever happen any more; {[a.name for a in self.client.asks if not a.ended]} wait",
            )
        except TimeoutError:
            self.report(Law.ENDS_ONCE, "the schedule does not come to an end")
        finally:
            for task in loop.tasks:
                task.cancel()
            try:
                loop.run_until_complete(asyncio.sleep(0.5))
                loop.run_until_complete(loop.shutdown_asyncgens())
            except Deadlock:
                pass
            loop.close()
        for error in loop.errors:
            self.report(Law.NO_OWN_ERROR, f"unhandled: {error}")
        return self.problems

    async def _main(self) -> None:
        async with asyncio.timeout(_HORIZON_S):
            for i in range(self.rng.randint(1, 2)):
                self.start_prefill(f"p{i}")
            self.decode = DecodeNode(self.context, "d0", "d-life-0", self._find)
            self.sources = Sources(self)
            self.way_back = WayBack(self)
            self.session = self.decode.intake.open_session()
            reader = asyncio.create_task(self.client.read(self.session))
            for number, ask in enumerate(self.client.asks):
                turns = self.sources if self.files is None else self.files
                after_s = self.rng.random() ** 2 * 0.1 + turns.later_s(number)
                self.loop.call_later(after_s, self.client.submit, ask)
                if self.rng.random() < 0.35:
                    self.trouble.at(lambda a=ask: self.client.cancel(a), 0.4)
            faulty = self.trouble.plan()
            if self.files is not None:
                self.files.plan()
                faulty = True
            await self._until_all_ended()
            if self.profile == "calm" and not faulty:
                await self._settle(1.0)
            else:
                ended_at = self.loop.time()
                await asyncio.sleep(1.5)
                self.trouble.heal()
                # One lease and its quarantine; and until a death is noticed (1.5 s), and what is delayed.
                await self._settle(2 * self.sizes.lease_s + 2.5, ended_at)
            self._check_end()
            reader.cancel()
            await self._close()

    async def _settle(self, within_s: float, since: float = 0.0) -> None:
        """Until everything is free, and a moment longer; what is not by then shows in the checks.

        Args: within_s: after `since` (0.0: now) or the end of the last trouble, whichever is later.
        """
        since = since or self.loop.time()
        quiet = 0
        # Twice: a worker may have started again just now.
        while quiet < 2 and self.loop.time() < max(since, self.trouble.last_at) + within_s:
            await asyncio.sleep(
                0.1
            )  # before the look: what a fault of this moment leaves behind is not the end's fault
            if self.trouble.under_way() or (self.files is not None and self.files.at_work()):
                since = self.loop.time()
            quiet = 0 if self._left_over() else quiet + 1

    async def _until_all_ended(self) -> None:
        limit = self.loop.time() + 32.0
        while any(not a.ended and not a.lost for a in self.client.asks):
            await asyncio.sleep(0.05)
            if self.loop.time() > limit:
                waiting = [a.name for a in self.client.asks if not a.ended]
                self.report(Law.ENDS_ONCE, f"{waiting} never end; states {self.decode.intake.states()}")
                return

    async def _close(self) -> None:
        for node in self.nodes:
            node.transfer.stop()
        self.decode.intake.fail_all()
        for node in self.nodes:
            node.handoffs.fail_all()
        await asyncio.sleep(0)

    def start_prefill(self, worker_id: str) -> None:
        self.lives += 1
        node = self.prefill[worker_id] = PrefillNode(self.context, worker_id, f"life-{self.lives}", self._find)
        node.readers = lambda: [one for one in self.nodes if one is not node]

    @property
    def nodes(self) -> list[WorkerNode]:
        return [*self.prefill.values(), self.decode]

    def _find(self, address: str) -> WorkerNode | None:
        worker_id = address.partition(":")[0]
        node = self.decode if worker_id == self.decode.ref.worker_id else self.prefill.get(worker_id)
        return node if node is not None and not node.node.dead else None

    # ---- the end ----

    def _left_over(self) -> list[str]:
        nodes = [node for node in self.nodes if not node.node.dead]
        coming = [f"{self.trouble.restarts} workers are starting again"] if self.trouble.restarts else []
        if self.way_back.num_open:
            coming.append(f"{self.way_back.num_open} reads of prefill are open")
        return [*coming, *(left for node in nodes for left in node.left_over())]

    def _check_end(self) -> None:
        for left in self._left_over():
            self.report(Law.ALL_FREE, left)
        for node in self.nodes:
            for broken in [] if node.node.dead else node.check_end():
                self.report(*broken)
        for ask in self.client.asks:
            if ask.ended != 1 and not ask.lost:
                self.report(Law.ENDS_ONCE, f"{ask.name}: ended {ask.ended} times")


def run_all(seeds: Iterable[int], *, with_files: bool = False) -> Iterator[tuple[int, list[str], World]]:
    """One after the other, without logs. A schedule leaves reference cycles, all garbage at its end: collect them then,
    and exempt earlier objects."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("diptych").setLevel(logging.CRITICAL)
    gc.disable()
    gc.collect()
    gc.freeze()
    for n, seed in enumerate(seeds, 1):
        problems, world = run(seed, with_files=with_files)
        yield seed, problems, world
        del world
        if n % _COLLECT_EVERY == 0:
            gc.collect()


def run(seed: int, *, with_files: bool = False) -> tuple[list[str], World]:
    """The failures of one schedule; expected: none."""
    world = World(seed, with_files=with_files)
    return world.run(), world

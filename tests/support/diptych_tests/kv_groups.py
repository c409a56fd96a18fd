"""Drives a runner whose pool has several KV groups, as a scheduler does: blocks behind a window are freed after each step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.common.kv_groups import expected_ranges
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.messages import ScheduledSeq, StepResult

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@dataclass
class GroupSequence:
    """tables[g][i]: block first_blocks[g] + i of the sequence in group g. num_freed: leading entries of a table whose blocks
    are free already: a scheduler that goes ahead drops them a step late."""

    name: str
    tables: list[list[int]]
    first_blocks: list[int]
    num_freed: list[int]
    tokens: list[int]
    num_prompt: int
    computed: int = 0

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.num_prompt :]


@dataclass(frozen=True)
class Part:
    """Bytes of tokens [first, end) of a group; layers: within the group, None: all."""

    group: int
    first: int
    end: int
    layers: range | None
    data: bytes


@dataclass
class GroupDriver:
    """Blocks are dealt out at random. What is freed is filled with NaN at once, so that any later read of it is seen.

    late: share of the freed blocks that stay in the tables for a step.
    """

    runner: TorchModelRunner
    seed: int = 7
    late: float = 0.4
    reused: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.kv, self.pools = self.runner.pool.kv, self.runner.pool.groups
        self.free = [list(range(pool.num_blocks)) for pool in self.pools]
        self._used: list[set[int]] = [set() for _ in self.pools]
        for pool in self.pools:
            pool.tensor.fill_(float("nan"))

    def take(self, group: int) -> int:
        free = self.free[group]
        block = free.pop(self.rng.randrange(len(free)))
        self.reused += block in self._used[group]
        self._used[group].add(block)
        return block

    def drop(self, group: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pools[group].tensor[block] = float("nan")
        self.free[group] += blocks

    def begin(self, name: str, prompt: Sequence[int]) -> GroupSequence:
        count = len(self.pools)
        tables: list[list[int]] = [[] for _ in range(count)]
        return GroupSequence(name, tables, [0] * count, [0] * count, list(prompt), len(prompt))

    def end(self, seq: GroupSequence) -> None:
        for group, table in enumerate(seq.tables):
            self.drop(group, table[seq.num_freed[group] :])

    def row(self, seq: GroupSequence, count: int, *, sample: bool, guesses: Sequence[int] = ()) -> ScheduledSeq:
        """The sequence's next `count` known tokens, and guesses behind them."""
        end = seq.computed + count + len(guesses)
        for group, (kv, table) in enumerate(zip(self.kv.groups, seq.tables, strict=True)):
            while (seq.first_blocks[group] + len(table)) * kv.block_size < end:
                table.append(self.take(group))
        return ScheduledSeq(
            seq.name,
            [*seq.tokens[seq.computed : seq.computed + count], *guesses],
            seq.computed,
            tuple(seq.tables),
            sample,
            GREEDY,
            max(0, len(seq.tokens) - seq.num_prompt),
            first_blocks=tuple(seq.first_blocks),
            num_drafts=len(guesses),
        )

    def slide(self, seq: GroupSequence, computed: int) -> None:
        """`computed` tokens are computed: free what lies behind the windows, in the table now or a step later."""
        seq.computed = computed
        for group, kv in enumerate(self.kv.groups):
            table, gone = seq.tables[group], seq.num_freed[group]
            behind = kv.first_block(computed) - seq.first_blocks[group]
            self.drop(group, table[gone:behind])
            kept = gone if self.rng.random() < self.late else behind
            del table[:kept]
            seq.first_blocks[group] += kept
            seq.num_freed[group] = behind - kept

    def execute(self, rows: Sequence[tuple[GroupSequence, ScheduledSeq]]) -> StepResult:
        """One step; drawn tokens are appended."""
        result = self.runner.execute([row for _, row in rows])
        assert not result.bad_rows
        for (seq, row), drawn in zip(rows, result.token_ids, strict=True):
            seq.tokens += drawn
            self.slide(seq, row.start + len(row.token_ids) - (row.num_drafts and row.num_drafts + 1 - len(drawn)))
        return result

    def prefill(self, seq: GroupSequence, chunk: int) -> None:
        while seq.computed < seq.num_prompt:
            count = min(chunk, seq.num_prompt - seq.computed)
            self.execute([(seq, self.row(seq, count, sample=seq.computed + count == seq.num_prompt))])

    def decode(self, seqs: Sequence[GroupSequence], count: int) -> None:
        """All sequences together, until each has `count` outputs; the order changes from step to step."""
        while going := [seq for seq in seqs if len(seq.outputs) < count]:
            self.rng.shuffle(going)
            self.execute([(seq, self.row(seq, 1, sample=True)) for seq in going])

    def generate(self, prompts: Sequence[Sequence[int]], count: int, *, chunk: int) -> list[list[int]]:
        """Prefills in chunks, beside the sequences that decode already."""
        running: list[GroupSequence] = []
        for number, prompt in enumerate(prompts):
            seq = self.begin(f"s{number}", prompt)
            while seq.computed < seq.num_prompt:
                some = min(chunk, seq.num_prompt - seq.computed)
                rows = [(seq, self.row(seq, some, sample=seq.computed + some == seq.num_prompt))]
                rows += [(other, self.row(other, 1, sample=True)) for other in running if len(other.outputs) < count]
                self.execute(rows)
            running.append(seq)
        self.decode(running, count)
        for seq in running:
            self.end(seq)
        return [seq.outputs for seq in running]

    # ---- a hand-off ----

    def packed(self, seq: GroupSequence) -> list[Part]:
        """What a hand-off of the computed prompt moves; of a group with several layers in two parts."""
        out = []
        for part in expected_ranges(self.kv, 0, seq.computed):
            kv = self.kv.groups[part.group]
            first = part.first // kv.block_size - seq.first_blocks[part.group]
            middle = kv.num_layers // 2
            for layers in [range(middle), range(middle, kv.num_layers)] if middle else [None]:
                size = part.num_tokens * kv.layer_bytes_per_token(self.kv.shard) * (len(layers) if layers else 1)
                data = bytearray(size)
                table = seq.tables[part.group][first:]
                self.runner.pack(table, part.num_tokens, memoryview(data), layers, part.group)
                out.append(Part(part.group, part.first, part.end, layers, bytes(data)))
        return out

    def unpacked(self, name: str, tokens: Sequence[int], num_prompt: int, parts: Sequence[Part]) -> GroupSequence:
        """A sequence whose KV came from elsewhere; other blocks than those that came are not held at all."""
        seq = self.begin(name, tokens[:num_prompt])
        seq.tokens = list(tokens)
        for part in parts:
            size, table = self.kv.groups[part.group].block_size, seq.tables[part.group]
            if not table:
                seq.first_blocks[part.group] = part.first // size
                table += [self.take(part.group) for _ in range(part.first // size, -(-part.end // size))]
            self.runner.unpack(table, part.end - part.first, memoryview(part.data), part.layers, part.group)
            seq.computed = part.end
        return seq

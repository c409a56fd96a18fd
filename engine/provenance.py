"""Which tokens the KV in each block was computed from, recorded from the rows of the steps that computed it.

A prefill worker sends a digest of it with the KV. A token that was dropped, changed or moved between the call and the
model's rows, or a cached block of another prompt, yields another digest than decode computes. Requests are not read
here: only the tokens, positions and blocks of computed rows count."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.text.prompt_digest import block_digest
from diptych.engine.step_messages import UNKNOWN_TOKEN, BlockCopy, ComputedFrom, ScheduledSeq, StepResult


class Provenance:
    """Of the blocks of the first KV group and of the host tier's slots; what was not recorded is unknown. One thread only.

    Block tables are of that group; index i is the sequence's block first_block + i.

    A runner starts recording with the first sequence that has `vouch`; an engine without such sequences records
    nothing."""

    def __init__(self, block_size: int) -> None:
        self.block_size = self._block_size = block_size
        self._blocks: dict[int, tuple[bytes, list[int]]] = {}
        """By block: the digest of the block before it, and the tokens computed into its leading slots."""
        self._host: dict[int, tuple[bytes, list[int]]] = {}

    def computed(self, block_table: Sequence[int], start: int, token_ids: Sequence[int], first_block: int = 0) -> None:
        """Rows of one sequence were computed, at positions start, start + 1, ..."""
        size, done = self._block_size, 0
        while done < len(token_ids):
            at = start + done
            index, offset = at // size - first_block, at % size
            some = token_ids[done : done + size - offset]
            done += len(some)
            block = block_table[index]
            if offset:
                before, kept = self._blocks.get(block, (None, []))
            else:
                before, kept = (b"" if at == 0 else self._before(block_table, index)), []
            if before is None or len(kept) < offset:
                self._blocks.pop(block, None)
            else:
                self._blocks[block] = (before, [*kept[:offset], *some])

    def pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        """The sequence's blocks from index `first_new` on came from another worker, under the keys of these tokens. What is
        recorded of the block before them stays as it is: rows showed it."""
        size = self._block_size
        before = b""
        for index in range(len(token_ids) // size):
            tokens = list(token_ids[index * size : (index + 1) * size])
            if index >= max(first_new, first_block):
                self._blocks[block_table[index - first_block]] = (before, tokens)
            elif index >= first_block:
                known = self._blocks.get(block_table[index - first_block])
                if known is None or len(known[1]) < size:
                    return  # unknown, and so is all that follows
                before = block_digest(*known)
                continue
            before = block_digest(before, tokens)

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if copy.group:
                continue
            tiers = {"device": self._blocks, "host": self._host}
            source, target = (tiers[tier] for tier in copy.kind.tiers)
            known = source.get(copy.src)
            if known is None:
                target.pop(copy.dst, None)
            else:
                target[copy.dst] = known

    def forget(self, blocks: Sequence[int]) -> None:
        """Their content is no longer what was recorded."""
        for block in blocks:
            self._blocks.pop(block, None)

    def of(self, block_table: Sequence[int], num_tokens: int, first_block: int = 0) -> ComputedFrom | None:
        """What the KV of a sequence's first `num_tokens` tokens was computed from, by its last block; None: not
        known."""
        index = (num_tokens - 1) // self._block_size
        known = self._blocks.get(block_table[index - first_block])
        if known is None or len(known[1]) != num_tokens - index * self._block_size:
            return None
        return ComputedFrom(num_tokens, block_digest(*known), self._block_size)

    def _before(self, block_table: Sequence[int], index: int) -> bytes | None:
        if index == 0:
            return None  # it is behind the window
        known = self._blocks.get(block_table[index - 1])
        return None if known is None or len(known[1]) < self._block_size else block_digest(*known)


def note_step(
    provenance: Provenance,
    seqs: Sequence[ScheduledSeq],
    order: Sequence[int],
    token_ids: Sequence[int],
    positions: Sequence[int],
    result: StepResult,
) -> None:
    """A step was computed; fills result.computed_from. order: sequence index of each group of rows, in row order;
    token_ids,
    positions: [num_rows], what the model was given."""
    first = 0
    for i in order:
        seq = seqs[i]
        end = first + len(seq.token_ids)
        table, first_block = seq.block_tables[0], seq.first_blocks[0]
        provenance.computed(table, positions[first], token_ids[first:end], first_block)
        if seq.vouch:
            known = provenance.of(table, positions[end - 1] + 1, first_block)
            if known is not None:
                result.computed_from[i] = known
        first = end


def note_launched(
    provenance: Provenance,
    seqs: Sequence[ScheduledSeq],
    order: Sequence[int],
    token_ids: Sequence[int],
    positions: Sequence[int],
) -> None:
    """A step was launched, as note_step. What a token is computed into that is still being drawn is not known."""
    first = 0
    for i in order:
        seq = seqs[i]
        end = first + len(seq.token_ids)
        table, first_block = seq.block_tables[0], seq.first_blocks[0]
        if UNKNOWN_TOKEN in token_ids[first:end]:
            provenance.forget([table[positions[first] // provenance.block_size - first_block]])
        else:
            provenance.computed(table, positions[first], token_ids[first:end], first_block)
        first = end

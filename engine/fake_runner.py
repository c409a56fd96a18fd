"""A deterministic ModelRunner without torch, for tests and simulations.

Its KV is real bytes in the real layout, and every token it draws is a hash over the KV bytes of all positions so far: a
wrong block table, a lost or flipped byte or a slot written twice changes the tokens, as it would (sometimes) in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from diptych.common.sampling import SamplingParams
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.engine.runner import StepAborted


class FakeRunner:
    """See ModelRunner.

    Args:
        before_execute: called with the step's sequences before anything is computed; may raise, advance a clock or block.
        bad_attempts: attempts whose rows come out bad, as NaN logits would.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        *,
        num_layers: int = 2,
        head_dim: int = 4,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        eos_token_ids: tuple[int, ...] = (2,),
        before_execute: Callable[[Sequence[ScheduledSeq]], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.kv_bytes_per_token = num_layers * 2 * head_dim
        self.before_execute = before_execute
        self.bad_attempts: set[str] = set()
        self.pool = np.zeros((num_blocks, num_layers, 2, block_size, 1, head_dim), dtype=np.uint8)
        self.computed_tokens = 0
        self.executed_steps = 0

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        if self.before_execute is not None:
            self.before_execute(seqs)
        if should_abort is not None and should_abort():
            raise StepAborted
        for seq in seqs:
            self._write(seq)
        self.executed_steps += 1
        result = StepResult([None] * len(seqs))
        for i, seq in enumerate(seqs):
            if seq.attempt in self.bad_attempts:
                result.bad_rows[i] = "NaN"
            elif seq.sample:
                result.token_ids[i] = self._draw(seq)
        return result

    def pack(self, block_ids: Sequence[int], num_tokens: int, out: memoryview) -> int:
        full, tail = divmod(num_tokens, self.block_size)
        parts = [self.pool[block_ids[i]].tobytes() for i in range(full)]
        if tail:
            parts.append(self.pool[block_ids[full], :, :, :tail].tobytes())
        data = b"".join(parts)
        out[: len(data)] = data
        return xxhash.xxh3_64_intdigest(data)

    def unpack(self, block_ids: Sequence[int], num_tokens: int, src: memoryview) -> None:
        full, tail = divmod(num_tokens, self.block_size)
        shape = self.pool.shape[1:]
        size = int(np.prod(shape))
        data = np.frombuffer(src, dtype=np.uint8)
        for i in range(full):
            self.pool[block_ids[i]] = data[i * size : (i + 1) * size].reshape(shape)
        if tail:
            rest = data[full * size : num_tokens * self.kv_bytes_per_token]
            self.pool[block_ids[full], :, :, :tail] = rest.reshape(shape[0], 2, tail, 1, shape[4])

    def _slot(self, seq: ScheduledSeq, position: int) -> npt.NDArray[np.uint8]:
        block, offset = divmod(position, self.block_size)
        return self.pool[seq.block_table[block], :, :, offset]

    def _write(self, seq: ScheduledSeq) -> None:
        position = seq.start
        before = self._slot(seq, position - 1).tobytes() if position else b""
        for token in seq.token_ids:
            digest = xxhash.xxh3_128_digest(before + token.to_bytes(4, "little") + position.to_bytes(4, "little"))
            digest = (digest * (self.kv_bytes_per_token // len(digest) + 1))[: self.kv_bytes_per_token]
            slot = self._slot(seq, position)
            slot[...] = np.frombuffer(digest, dtype=np.uint8).reshape(slot.shape)
            before = digest
            position += 1
        self.computed_tokens += len(seq.token_ids)

    def _draw(self, seq: ScheduledSeq) -> int:
        num_tokens = seq.start + len(seq.token_ids)
        used = -(-num_tokens // self.block_size)
        kv = self.pool[seq.block_table[:used]].transpose(0, 3, 1, 2, 4, 5).reshape(used * self.block_size, -1)
        seen = xxhash.xxh3_64_intdigest(kv[:num_tokens].tobytes())
        return int(xxhash.xxh3_64_intdigest(_counter(seq.sampling, seq.output_index) + seen.to_bytes(8, "little"))) % (
            self.vocab_size
        )


def _counter(sampling: SamplingParams, output_index: int) -> bytes:
    """A draw depends on (seed, token index) alone, as the real sampler's does; greedy depends on neither."""
    if sampling.greedy:
        return b""
    return sampling.seed.to_bytes(8, "little") + output_index.to_bytes(4, "little")

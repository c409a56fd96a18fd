"""A deterministic ModelRunner without torch, for tests and simulations.

Its KV is real bytes in the real layout, and every token it draws is a hash over the KV bytes of all positions that its
layers see: a wrong block table, a lost or flipped byte or a slot written twice changes the tokens, as it would
(sometimes) in a model. Where logits matter (constraints, logprobs) they are hashes too, one a token id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from diptych.common.adapters.peft import AdapterFacts
from diptych.common.errors import AdapterError, InternalError
from diptych.common.kv_format import full_format, windowed_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.sampling import SamplingParams
from diptych.engine import constraints
from diptych.engine.messages import BlockCopy, Candidate, LoadedAdapter, ScheduledSeq, StepResult, TokenLogprobs
from diptych.engine.provenance import Provenance, note_step
from diptych.engine.runner import RunnerCapabilities, StepAborted, StepInFlight


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    """Implements LoadedAdapter."""

    id: str
    rank: int = 8
    num_bytes: int = 1000
    num_parts: int = 1


class FakeRunner:
    """See ModelRunner.

    Args:
        before_execute: called with the step's sequences before anything is computed; may raise, advance a clock or
        block.
        between_layers: called between two layers, in front of `on_layers`, with how many are computed; may block.
        windows: of each layer, 0: it sees every token; empty: all layers do.
        demand: bounds the pools of window groups.
        groups: of a rank of a pipeline stage: which of the model's KV groups its own are; empty: it has all of them.
        max_loras, max_lora_rank: see RunnerCapabilities; KV depends on the id of its row's adapter.
        before_install: called with slot and adapter before it is installed; may raise.
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
        num_host_blocks: int = 0,
        before_execute: Callable[[Sequence[ScheduledSeq]], None] | None = None,
        between_layers: Callable[[int], None] = lambda num_layers: None,
        windows: Sequence[int] = (),
        demand: PoolDemand | None = None,
        groups: Sequence[int] = (),
        max_loras: int = 0,
        max_lora_rank: int = 16,
        before_install: Callable[[int, LoadedAdapter], None] = lambda slot, adapter: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        if windows:
            num_layers = len(windows)
            self.kv = windowed_format(windows, 1, head_dim, block_size=block_size, dtype="int8")
        else:
            self.kv = full_format(num_layers, 1, head_dim, block_size=block_size, dtype="int8")
        self._groups = tuple(groups) or tuple(range(len(self.kv.groups)))
        self.group_blocks = (demand or PoolDemand()).group_blocks(self.kv, num_blocks)
        self._places = {
            layer: (index, at) for index, group in enumerate(self.kv.groups) for at, layer in enumerate(group.layers)
        }
        self.kv_bytes_per_token = self.kv.bytes_per_token
        self.num_layers = num_layers
        self.steps_ahead = False
        self.on_launched: Callable[[], None] = lambda: None
        self.on_layers: Callable[[int], None] = lambda num_layers: None
        self.before_execute = before_execute
        self.between_layers = between_layers
        self.max_loras, self.max_lora_rank = max_loras, max_lora_rank
        self.before_install = before_install
        self.slots: list[LoadedAdapter | None] = [None] * max_loras
        self._installed = [0] * max_loras
        """Parts of the adapter that is copied into each slot."""
        self.installs = 0
        self.bad_attempts: set[str] = set()
        self.pools = [
            np.zeros((count, group.num_layers, 2, block_size, 1, head_dim), dtype=np.uint8)
            for group, count in zip(self.kv.groups, self.group_blocks, strict=True)
        ]
        self.pool = self.pools[0]
        self.num_host_blocks = num_host_blocks
        self.host = np.zeros((num_host_blocks, *self.pool.shape[1:]), dtype=np.uint8)
        self._each = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._provenance: Provenance | None = None
        self.computed_tokens = 0
        self.executed_steps = 0

    @property
    def capabilities(self) -> RunnerCapabilities:
        return RunnerCapabilities(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_layers=self.num_layers,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            num_host_blocks=self.num_host_blocks,
            runs_ahead=self.steps_ahead,
            reports_layers=True,
            verifies_drafts=True,
            kv=self.kv,
            group_blocks=self.group_blocks,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank if self.max_loras else 0,
        )

    def expect_compiled(self) -> None:
        """It has no kernels."""

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepInFlight:
        raise InternalError("the fake runner has no device; see FakeDeviceRunner")

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        if self.before_execute is not None:
            self.before_execute(seqs)
        if should_abort is not None and should_abort():
            raise StepAborted
        self._write(seqs, should_abort)
        self.executed_steps += 1
        result = StepResult([()] * len(seqs))
        self._note(seqs, result)
        for i, seq in enumerate(seqs):
            if seq.attempt in self.bad_attempts:
                result.bad_rows[i] = "NaN"
                continue
            if seq.prompt_targets:
                self._prompt_logprobs(i, seq, result)
            if seq.sample and seq.num_candidates:
                self._find_candidates(i, seq, result)
            elif seq.sample:
                self._sample(i, seq, result)
        return result

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if copy.group not in self._groups:
                continue
            tiers = {"device": self.pools[self._groups.index(copy.group)], "host": self.host}
            source, target = (tiers[tier] for tier in copy.kind.tiers)
            target[copy.dst] = source[copy.src]
        if self._provenance is not None:
            self._provenance.copied(copies)

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: memoryview, layers: range | None = None, group: int = 0
    ) -> int:
        full, tail = divmod(num_tokens, self.block_size)
        pool = self._part(layers, group)
        parts = [pool[block_ids[i]].tobytes() for i in range(full)]
        if tail:
            parts.append(pool[block_ids[full], :, :, :tail].tobytes())
        data = b"".join(parts)
        out[: len(data)] = data
        return xxhash.xxh3_64_intdigest(data)

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: memoryview, layers: range | None = None, group: int = 0
    ) -> None:
        full, tail = divmod(num_tokens, self.block_size)
        pool = self._part(layers, group)
        shape = pool.shape[1:]
        size = int(np.prod(shape))
        data = np.frombuffer(src, dtype=np.uint8)
        if not self._groups[group]:
            self.note_overwritten(block_ids)
        for i in range(full):
            pool[block_ids[i]] = data[i * size : (i + 1) * size].reshape(shape)
        if tail:
            rest = data[full * size : num_tokens * (size // self.block_size)]
            pool[block_ids[full], :, :, :tail] = rest.reshape(shape[0], 2, tail, 1, shape[4])

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> FakeAdapter:
        """See ModelRunner.read_adapter. Nothing is read."""
        if not self.max_loras:
            raise AdapterError("this runner keeps no adapters", param="adapter")
        if facts.rank > self.max_lora_rank:
            raise AdapterError(f"rank {facts.rank} is above the maximum of {self.max_lora_rank}", param="r")
        return FakeAdapter(facts.id, facts.rank, facts.num_bytes)

    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None:
        """See ModelRunner.install_adapter."""
        self.before_install(slot, adapter)
        parts = range(adapter.num_parts) if parts is None else parts
        self._installed[slot] = (self._installed[slot] if parts.start else 0) + len(parts)
        whole = self._installed[slot] == parts.stop == adapter.num_parts
        self.slots[slot] = adapter if whole else None
        self.installs += whole

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        self._provenance = self._provenance or Provenance(self.block_size)
        self._provenance.pulled(block_table, token_ids, first_new, first_block)

    def note_overwritten(self, block_ids: Sequence[int]) -> None:
        if self._provenance is not None:
            self._provenance.forget(block_ids)

    def _part(self, layers: range | None, group: int) -> npt.NDArray[np.uint8]:
        """A view of the group's pool, of these layers only."""
        pool = self.pools[group]
        return pool if layers is None else pool[:, layers.start : layers.stop]

    def _slot(self, seq: ScheduledSeq, position: int, group: int = 0) -> npt.NDArray[np.uint8]:
        block, offset = divmod(position, self.block_size)
        number = self._groups[group]
        index = block - seq.first_blocks[number]
        assert index >= 0, f"{seq.attempt}: block {block} of group {number} is behind the window"
        return self.pools[group][seq.block_tables[number][index], :, :, offset]

    def _write(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None) -> None:
        """Layer by layer, as a model does."""
        groups = range(len(self.pools))
        slots = [
            ([self._slot(seq, position, group) for group in groups], kv)
            for seq in seqs
            for position, kv in enumerate(self._kv(seq), seq.start)
        ]
        for layer in range(self.num_layers):
            if layer:
                self.between_layers(layer)
                self.on_layers(layer)
                if should_abort is not None and should_abort():
                    raise StepAborted
            group, at = self._places[layer]
            for by_group, kv in slots:
                by_group[group][at] = kv[layer]
        self.computed_tokens += sum(len(seq.token_ids) for seq in seqs)

    def _note(self, seqs: Sequence[ScheduledSeq], result: StepResult) -> None:
        if self._provenance is None:
            if not any(seq.vouch for seq in seqs):
                return
            self._provenance = Provenance(self.block_size)
        token_ids = [token for seq in seqs for token in seq.token_ids]
        positions = [seq.start + row for seq in seqs for row in range(len(seq.token_ids))]
        note_step(self._provenance, seqs, range(len(seqs)), token_ids, positions, result)

    def _kv(self, seq: ScheduledSeq) -> list[npt.NDArray[np.uint8]]:
        """Of each of its tokens: a hash of the token and of the first group's KV before it."""
        position, out = seq.start, []
        layers = list(self.kv.groups[0].layers)
        before = self._slot(seq, position - 1).tobytes() if position else b""
        salt = b""
        if seq.adapter >= 0:
            adapter = self.slots[seq.adapter]
            assert adapter is not None, f"{seq.attempt}: slot {seq.adapter} is empty"
            salt = adapter.id.encode()
        for token in seq.token_ids:
            digest = xxhash.xxh3_128_digest(
                salt + before + token.to_bytes(4, "little") + position.to_bytes(4, "little")
            )
            digest = (digest * (self.kv_bytes_per_token // len(digest) + 1))[: self.kv_bytes_per_token]
            out.append(np.frombuffer(digest, dtype=np.uint8).reshape(self.num_layers, 2, 1, -1))
            before = digest if len(layers) == self.num_layers else out[-1][layers].tobytes()
            position += 1
        return out

    def _seen(self, seq: ScheduledSeq, num_tokens: int) -> int:
        """A hash over the KV bytes that the last of the sequence's first `num_tokens` tokens sees."""
        size, parts = self.block_size, []
        used = -(-num_tokens // size)
        for index, group, pool in zip(self._groups, self.kv.groups, self.pools, strict=True):
            first = group.first_needed(num_tokens - 1)
            begin, in_front = first // size, seq.first_blocks[index]
            assert begin >= in_front, f"{seq.attempt}: block {begin} of {group.name} was freed, and is still seen"
            blocks = seq.block_tables[index][begin - in_front : used - in_front]
            kv = pool[blocks].transpose(0, 3, 1, 2, 4, 5).reshape(len(blocks) * size, -1)
            parts.append(kv[first - begin * size : num_tokens - begin * size].tobytes())
        return int(xxhash.xxh3_64_intdigest(b"".join(parts)))

    def _sample(self, i: int, seq: ScheduledSeq, result: StepResult) -> None:
        """Draw at the row's last position; with drafts at each position whose guesses before it were right."""
        first = len(seq.token_ids) - 1 - seq.num_drafts
        accepted: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for place in range(seq.num_drafts + 1):
            if place and seq.token_ids[first + place] != accepted[-1]:
                break
            seen = self._seen(seq, seq.start + first + place + 1)
            scores, refusal = self._constrained(seq, seen, accepted)
            if refusal:
                if not place:
                    result.refused_rows[i] = refusal
                break
            token = self._draw(seq, seen, scores, seq.output_index + place, seq.choice)
            accepted.append(token)
            if seq.top_logprobs is not None:
                logprobs += self._logprobs(seen, [token], seq.top_logprobs)
            if seq.num_draws > 1:
                result.more_draws[i] = self._more_draws(seq, seen, scores)
        result.token_ids[i] = tuple(accepted)
        if logprobs:
            result.logprobs[i] = tuple(logprobs)

    def _constrained(
        self, seq: ScheduledSeq, seen: int, accepted: Sequence[int]
    ) -> tuple[npt.NDArray[np.float32] | None, str]:
        """Scores under the constraints after the accepted tokens (None: there are none), and why no token is left."""
        if seq.history is None:
            return None, ""
        seq.memo = constraint = constraints.constraint_of(seq.memo, seq.sampling, self.eos_token_ids, seq.grammar)
        constraint.advance([*seq.history, *accepted], seq.num_prompt)
        scores = self._logits(seen)
        if constraints.apply(scores, constraint):
            return scores, ""
        return None, constraint.trouble or "no token is left"

    def _draw(
        self, seq: ScheduledSeq, seen: int, scores: npt.NDArray[np.float32] | None, output_index: int, choice: int
    ) -> int:
        counter = _counter(seq.sampling, output_index, choice)
        if scores is None:
            return int(xxhash.xxh3_64_intdigest(counter + seen.to_bytes(8, "little")) % self.vocab_size)
        noise = self._logits(xxhash.xxh3_64_intdigest(counter)) if counter else 0.0
        return int(np.argmax(scores + noise))

    def _more_draws(
        self, seq: ScheduledSeq, seen: int, scores: npt.NDArray[np.float32] | None
    ) -> list[tuple[int, TokenLogprobs | None]]:
        drawn: list[tuple[int, TokenLogprobs | None]] = []
        for choice in range(seq.choice + 1, seq.choice + seq.num_draws):
            token = self._draw(seq, seen, scores, seq.output_index, choice)
            known = None if seq.top_logprobs is None else self._logprobs(seen, [token], seq.top_logprobs)[0]
            drawn.append((token, known))
        return drawn

    def _find_candidates(self, i: int, seq: ScheduledSeq, result: StepResult) -> None:
        seen = self._seen(seq, seq.start + len(seq.token_ids))
        logits = self._logits(seen).astype(np.float64)
        scores = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        if seq.history is not None:
            seq.memo = constraint = constraints.constraint_of(seq.memo, seq.sampling, self.eos_token_ids, seq.grammar)
            constraint.advance(seq.history, seq.num_prompt)
            constraints.apply(scores, constraint)
        best = [int(t) for t in _highest(scores, seq.num_candidates) if scores[t] > -np.inf]
        known: list[TokenLogprobs] | list[None] = [None] * len(best)
        if seq.top_logprobs is not None:
            known = self._logprobs(seen, best, seq.top_logprobs)
        result.candidates[i] = [Candidate(t, float(scores[t]), entry) for t, entry in zip(best, known, strict=True)]

    def _prompt_logprobs(self, i: int, seq: ScheduledSeq, result: StepResult) -> None:
        top = seq.sampling.prompt_logprobs or 0
        result.prompt_logprobs[i] = [
            self._logprobs(self._seen(seq, seq.start + row + 1), [target], top)[0]
            for row, target in enumerate(seq.prompt_targets)
        ]

    def _logits(self, seen: int) -> npt.NDArray[np.float32]:
        """One in [0, 8) for each token id."""
        x = self._each ^ np.uint64(seen)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 21)

    def _logprobs(self, seen: int, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        logits = self._logits(seen).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        likeliest = tuple((int(t), float(logprobs[t])) for t in _highest(logprobs, top))
        return [
            TokenLogprobs(token, float(logprobs[token]), 1 + int((logprobs > logprobs[token]).sum()), likeliest)
            for token in tokens
        ]


def _highest(scores: npt.NDArray[np.float32] | npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Token ids of the highest scores, from the highest on; among equal ones the lowest id first."""
    among = np.arange(len(scores) if count else 0)
    if 0 < count < len(scores):
        among = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return among[np.argsort(-scores[among], kind="stable")[:count]]


def _counter(sampling: SamplingParams, output_index: int, choice: int = 0) -> bytes:
    """A draw depends on (seed, choice, token index) alone, as the real sampler's does; greedy depends on none of
    them."""
    if sampling.greedy:
        return b""
    return sampling.seed.to_bytes(8, "little") + output_index.to_bytes(4, "little") + choice.to_bytes(4, "little")

"""Which computed range of which PREFILL request goes into which granted slab.

The transfer thread lends slabs (GrantSlabs). A slab comes back the same way once it was read and acknowledged; a grant
of a slab that was packed for a peer gives that peer its quota back. A decode worker that stopped reading therefore
holds at most its quota, and the ranges of other peers are sent. The slab that came back last is packed first: it is
still in a CPU cache.

The last range of a prompt may be sent in groups of layers (`layer_job`) while the step that computes it runs, also by each of
several ranks that have all layers. What is left of its layers is packed after the step.

Each KV group of each rank has ranges of its own (`common.kv_parts.GroupPart`). Of ranks that the peer does not ask for nothing
is packed. Of several groups a range holds all layers that the rank has. A window group is packed once the prompt is computed:
only what the next token sees of it is sent (`common.kv_groups.expected_ranges`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat
from diptych.common.kv_groups import expected_ranges
from diptych.common.kv_parts import GroupPart
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.engine.overlap import Overlap
from diptych.engine.sched.requests.request import Request, State


@dataclass(frozen=True, slots=True)
class PackJob:
    """Copy the KV of tokens [first_token, first_token + num_tokens) from `block_ids` into the grant's payload.
    `layers`: of these only; None: of all. `of`: the KV group and the rank, within which the layers are counted."""

    request: Request
    grant: SlabGrant
    block_ids: list[int]
    first_token: int
    num_tokens: int
    of: GroupPart
    layers: range | None = None


@dataclass(slots=True)
class _Progress:
    """By group and rank: tokens before `until` are packed, or need not be. Of those from there to the end, the first
    `layers` layers are."""

    until: list[int]
    layers: list[int]


class Packing:
    """Owns the granted slabs, and what is packed of each request."""

    def __init__(
        self,
        block_size: int,
        group_parts: Sequence[GroupPart],
        quota_per_peer: int,
        num_layers: int = 1,
        kv: KvFormat | None = None,
    ) -> None:
        """Args: num_layers: of the model. kv: its format; None: one group, which keeps every token."""
        self._kv = kv if kv is not None and not kv.has_one_full_group else None
        self._units = tuple(group_parts)
        """Each is packed by itself. Below, a unit is an index in this list."""
        self._several_ranks = len({one.part for one in group_parts}) > 1
        self._block_size = block_size
        self._num_layers = num_layers
        self._quota = quota_per_peer
        self._grants: list[SlabGrant] = []
        self._held_by: dict[int, str] = {}
        self._per_peer: dict[str, int] = {}
        self._pending: dict[str, Request] = {}
        self._progress: dict[str, _Progress] = {}
        self.overlap = Overlap()

    @property
    def slabs_held(self) -> int:
        return len(self._grants)

    def grant(self, grants: tuple[SlabGrant, ...], overlap: Overlap | None = None) -> None:
        """Raises: ConfigError for a slab that cannot hold one block."""
        if overlap is not None:
            self.overlap = overlap
        for grant in grants:
            least = self._block_size * max(unit.bytes_per_token for unit in self._units)
            if len(grant.payload) < least:
                raise ConfigError("slab_bytes", len(grant.payload), f"a slab must hold a block of {least} bytes")
            peer = self._held_by.pop(grant.slab, None)
            if peer is not None:
                left = self._per_peer[peer] - 1
                if left:
                    self._per_peer[peer] = left
                else:
                    del self._per_peer[peer]
            self._grants.append(grant)

    def offer(self, request: Request) -> None:
        """Ranges of the request are packed, now and after later steps, until `drop`."""
        self._pending[request.attempt] = request

    def drop(self, request: Request) -> None:
        self._pending.pop(request.attempt, None)
        self._progress.pop(request.attempt, None)

    @property
    def sends_layers(self) -> bool:
        """Ranges of some layers can be made (`layer_job`)."""
        return self._kv is None and all(unit.num_layers == self._num_layers for unit in self._units)

    def least_packed(self, request: Request) -> int:
        """Tokens before this are packed in every unit, or need not be."""
        progress = self._progress.get(request.attempt)
        return min(self._start(request) if progress is None else progress.until)

    def packed_until(self, request: Request, unit: int = 0) -> int:
        """Tokens of the unit before this are packed, were with decode from the start, or are not sent."""
        progress = self._progress.get(request.attempt)
        return self._start(request)[unit] if progress is None else progress.until[unit]

    def is_packed(self, request: Request) -> bool:
        """Nothing is left to pack."""
        return not request.want_kv or self.least_packed(request) >= request.kv_target

    def next_job(self) -> PackJob | None:
        """The oldest request with a computed range and a peer below its quota; None: nothing can be packed now."""
        return self._job(self._pending.values())

    @property
    def any_late(self) -> bool:
        """A prompt is computed, and not all of it is packed."""
        return any(request.state is State.PACKING for request in self._pending.values())

    def late_job(self) -> PackJob | None:
        """As `next_job`, of prompts whose computing is over."""
        return self._job(request for request in self._pending.values() if request.state is State.PACKING)

    def _job(self, requests: Iterable[Request]) -> PackJob | None:
        if not self._grants:
            return None
        for request in requests:
            if not self._may_hold_more(request):
                continue
            for unit in self._in_turn(request):
                if self._packed_layers(request, unit):
                    if request.num_computed >= request.kv_target:
                        return self._layers(request, self._units[unit].num_layers, self._grants.pop(), unit)
                    continue
                of = self._units[unit]
                start, end = self.packed_until(request, unit), self._packable_end(request, unit)
                if end <= start:
                    continue
                grant = self._grants.pop()
                size = self._block_size
                fit = len(grant.payload) // of.bytes_per_token // size * size
                count = min(end - start, fit)
                return PackJob(request, grant, self._blocks(request, start, count, of.group), start, count, of)
        return None

    def _in_turn(self, request: Request) -> Sequence[int]:
        """The units; of several ranks first the one of which least is packed. Then the ranks' ranges of the same tokens follow
        each other, and a peer of other ranks that needs them together keeps few of them waiting."""
        units = range(len(self._units))
        if not self._several_ranks:
            return units
        return sorted(units, key=lambda i: (self.packed_until(request, i), self._units[i].group, self._units[i].part))

    def layer_job(self, request: Request, num_computed: int) -> PackJob | None:
        """The step that runs computes the last tokens of `request` and is done with `num_computed` layers: those that
        are not packed yet. None: there are none, no slab is free for them, or they do not fit."""
        if not self._grants or not self._may_hold_more(request):
            return None
        for unit in self._in_turn(request):
            wanted = self.packed_until(request, unit) < request.kv_target
            if wanted and num_computed > self._packed_layers(request, unit):
                if self._layers_that_fit(request, self._grants[-1], unit) < 1:
                    return None
                return self._layers(request, num_computed, self._grants.pop(), unit)
        return None

    def packed(self, job: PackJob, checksum: int) -> RangePacked:
        """The slab is full: it counts against the peer until it is granted again. Returns: the event that announces
        it."""
        request, peer, grant = job.request, job.request.peer, job.grant
        self._held_by[grant.slab] = peer
        self._per_peer[peer] = self._per_peer.get(peer, 0) + 1
        of = job.of
        unit, every = self._units.index(of), of.num_layers
        size_bytes = job.num_tokens * of.bytes_per_token
        first_layer = num_layers = 0
        progress = self._progress.get(request.attempt)
        if progress is None:
            progress = self._progress[request.attempt] = _Progress(self._start(request), [0] * len(self._units))
        progress.layers[unit] = 0
        if self._kv is not None or self._several_ranks:
            num_layers = every
        if job.layers is not None:
            first_layer, num_layers = job.layers.start, len(job.layers)
            size_bytes = size_bytes * num_layers // every
        if job.layers is not None and job.layers.stop < every:
            progress.until[unit], progress.layers[unit] = job.first_token, job.layers.stop
        else:
            progress.until[unit] = job.first_token + job.num_tokens
        return RangePacked(
            request.attempt, grant.slab, grant.generation, job.first_token, job.num_tokens, size_bytes, checksum,
            first_layer, num_layers, of.own, of.part,
        )  # fmt: skip

    def give_back(self, job: PackJob) -> None:
        """Nothing was packed: the slab can be used for another range."""
        self._grants.append(job.grant)

    def _start(self, request: Request) -> list[int]:
        """By unit, the first token to be sent."""
        held, end, ranks = request.source.decode_cached_tokens, request.kv_target, request.source.ranks
        start = [held]
        if self._kv is not None:
            start = [end] * len(self._kv.groups)
            for part in expected_ranges(self._kv, held, end, reusable=request.source.reusable):
                start[part.group] = part.first
        return [start[unit.group] if not ranks or unit.part in ranks else end for unit in self._units]

    def _may_hold_more(self, request: Request) -> bool:
        return self._per_peer.get(request.peer, 0) < self._quota

    def _packed_layers(self, request: Request, unit: int) -> int:
        progress = self._progress.get(request.attempt)
        return 0 if progress is None else progress.layers[unit]

    def _layers_that_fit(self, request: Request, grant: SlabGrant, unit: int) -> int:
        count = request.kv_target - self.packed_until(request, unit)
        of = self._units[unit]
        return len(grant.payload) * of.num_layers // (count * of.bytes_per_token)

    def _layers(self, request: Request, until: int, grant: SlabGrant, unit: int) -> PackJob:
        """All tokens that are left, of the layers from the first that is not packed to `until`, or as many as fit."""
        start, first = self.packed_until(request, unit), self._packed_layers(request, unit)
        count = request.kv_target - start
        layers = range(first, min(until, first + max(1, self._layers_that_fit(request, grant, unit))))
        return PackJob(request, grant, self._blocks(request, start, count), start, count, self._units[unit], layers)

    def _blocks(self, request: Request, start: int, count: int, group: int = 0) -> list[int]:
        size, first = self._block_size, request.seq.first_blocks[group]
        return request.tables[group][start // size - first : -(-(start + count) // size) - first]

    def _packable_end(self, request: Request, unit: int) -> int:
        if request.num_computed >= request.kv_target:
            return request.kv_target
        packed_until = self.packed_until(request, unit)
        if self._kv is not None and self._kv.groups[self._units[unit].group].window:
            return packed_until
        end = request.num_computed // self._block_size * self._block_size
        early_bytes = (end - packed_until) * self._units[unit].bytes_per_token
        least = self.overlap.least_early_bytes(request.source.link_bytes_per_s)
        return end if early_bytes >= least else packed_until

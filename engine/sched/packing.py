"""Which computed range of which PREFILL request goes into which granted slab.

The transfer thread lends slabs (GrantSlabs). A slab comes back the same way once it was read and acknowledged; a grant
of a slab that was packed for a peer gives that peer its quota back. A decode worker that stopped reading therefore
holds at most its quota, and the ranges of other peers are sent. The slab that came back last is packed first: it is
still in a CPU cache.

The last range of a prompt may be sent in groups of layers (`layer_job`) while the step that computes it runs. What is
left of its layers is packed after the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.engine.overlap import Overlap
from diptych.engine.sched.request import Request, State


@dataclass(frozen=True, slots=True)
class PackJob:
    """Copy the KV of tokens [first_token, first_token + num_tokens) from `block_ids` into the grant's payload.
    `layers`: of these only; None: of all. `group`: index of the KV group; the layers are counted within it."""

    request: Request
    grant: SlabGrant
    block_ids: list[int]
    first_token: int
    num_tokens: int
    layers: range | None = None
    group: int = 0


@dataclass(slots=True)
class _Progress:
    """Tokens before `until` are packed; of those from there to the end, the first `layers` layers are."""

    until: int
    layers: int = 0


class Packing:
    """Owns the granted slabs, and what is packed of each request."""

    def __init__(self, block_size: int, kv_bytes_per_token: int, quota_per_peer: int, num_layers: int = 1) -> None:
        self._block_size = block_size
        self._token_bytes = kv_bytes_per_token
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
            if len(grant.payload) < self._block_size * self._token_bytes:
                raise ConfigError(
                    "slab_bytes",
                    len(grant.payload),
                    f"a slab must hold a block of {self._block_size * self._token_bytes} bytes",
                )
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

    def packed_until(self, request: Request) -> int:
        """Tokens before this are packed, or were with decode from the start."""
        progress = self._progress.get(request.attempt)
        return request.source.decode_cached_tokens if progress is None else progress.until

    def is_packed(self, request: Request) -> bool:
        """Nothing is left to pack."""
        return not request.want_kv or self.packed_until(request) >= request.kv_target

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
            if self._packed_layers(request):
                if request.num_computed >= request.kv_target and self._may_hold_more(request):
                    return self._layers(request, self._num_layers, self._grants.pop())
                continue
            start, end = self.packed_until(request), self._packable_end(request)
            if end <= start or not self._may_hold_more(request):
                continue
            grant = self._grants.pop()
            size = self._block_size
            fit = len(grant.payload) // self._token_bytes // size * size
            count = min(end - start, fit)
            return PackJob(request, grant, self._blocks(request, start, count), start, count)
        return None

    def layer_job(self, request: Request, num_computed: int) -> PackJob | None:
        """The step that runs computes the last tokens of `request` and is done with `num_computed` layers: those that
        are not packed yet. None: there are none, no slab is free for them, or they do not fit."""
        if num_computed <= self._packed_layers(request) or not self._grants or not self._may_hold_more(request):
            return None
        if self._layers_that_fit(request, self._grants[-1]) < 1:
            return None
        return self._layers(request, num_computed, self._grants.pop())

    def packed(self, job: PackJob, checksum: int) -> RangePacked:
        """The slab is full: it counts against the peer until it is granted again. Returns: the event that announces
        it."""
        request, peer, grant = job.request, job.request.peer, job.grant
        self._held_by[grant.slab] = peer
        self._per_peer[peer] = self._per_peer.get(peer, 0) + 1
        size_bytes = job.num_tokens * self._token_bytes
        first_layer = num_layers = 0
        if job.layers is not None:
            first_layer, num_layers = job.layers.start, len(job.layers)
            size_bytes = size_bytes * num_layers // self._num_layers
        if job.layers is not None and job.layers.stop < self._num_layers:
            self._progress[request.attempt] = _Progress(job.first_token, job.layers.stop)
        else:
            self._progress[request.attempt] = _Progress(job.first_token + job.num_tokens)
        return RangePacked(
            request.attempt, grant.slab, grant.generation, job.first_token, job.num_tokens, size_bytes, checksum,
            first_layer, num_layers,
        )  # fmt: skip

    def give_back(self, job: PackJob) -> None:
        """Nothing was packed: the slab can be used for another range."""
        self._grants.append(job.grant)

    def _may_hold_more(self, request: Request) -> bool:
        return self._per_peer.get(request.peer, 0) < self._quota

    def _packed_layers(self, request: Request) -> int:
        progress = self._progress.get(request.attempt)
        return 0 if progress is None else progress.layers

    def _layers_that_fit(self, request: Request, grant: SlabGrant) -> int:
        count = request.kv_target - self.packed_until(request)
        return len(grant.payload) * self._num_layers // (count * self._token_bytes)

    def _layers(self, request: Request, until: int, grant: SlabGrant) -> PackJob:
        """All tokens that are left, of the layers from the first that is not packed to `until`, or as many as fit."""
        start, first = self.packed_until(request), self._packed_layers(request)
        count = request.kv_target - start
        layers = range(first, min(until, first + max(1, self._layers_that_fit(request, grant))))
        return PackJob(request, grant, self._blocks(request, start, count), start, count, layers)

    def _blocks(self, request: Request, start: int, count: int) -> list[int]:
        size = self._block_size
        return request.block_ids[start // size : -(-(start + count) // size)]

    def _packable_end(self, request: Request) -> int:
        if request.num_computed >= request.kv_target:
            return request.kv_target
        end = request.num_computed // self._block_size * self._block_size
        packed_until = self.packed_until(request)
        early_bytes = (end - packed_until) * self._token_bytes
        least = self.overlap.least_early_bytes(request.source.link_bytes_per_s)
        return end if early_bytes >= least else packed_until

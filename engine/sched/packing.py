"""Which computed range of which PREFILL request goes into which granted slab.

Slabs are lent by the transfer thread (GrantSlabs) and come back the same way once they were read and acknowledged: a grant
of a slab that was packed for a peer gives that peer its quota back. So a decode worker that stopped reading holds at most
its quota, and everybody else's ranges go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.engine.messages import SlabGrant
from diptych.engine.sched.request import Request


@dataclass(frozen=True, slots=True)
class PackJob:
    """Copy the KV of tokens [first_token, first_token + num_tokens) from `block_ids` into the grant's payload."""

    request: Request
    grant: SlabGrant
    block_ids: list[int]
    first_token: int
    num_tokens: int


class Packing:
    def __init__(self, block_size: int, kv_bytes_per_token: int, quota_per_peer: int) -> None:
        self._block_size = block_size
        self._token_bytes = kv_bytes_per_token
        self._quota = quota_per_peer
        self._grants: deque[SlabGrant] = deque()
        self._held_by: dict[int, str] = {}
        self._per_peer: dict[str, int] = {}
        self._pending: dict[str, Request] = {}
        self._least_early_bytes = 0

    @property
    def slabs_held(self) -> int:
        return len(self._grants)

    def grant(self, grants: tuple[SlabGrant, ...], least_early_bytes: int = 0) -> None:
        """Raises: ConfigError for a slab that cannot hold one block."""
        self._least_early_bytes = least_early_bytes
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
        """The request wants its ranges packed, now and after later steps, until `drop`."""
        self._pending[request.attempt] = request

    def drop(self, request: Request) -> None:
        self._pending.pop(request.attempt, None)

    def next_job(self) -> PackJob | None:
        """The oldest request with a computed range and a peer below its quota; None: nothing can be packed now."""
        if not self._grants:
            return None
        for request in self._pending.values():
            end = self._packable_end(request)
            if end <= request.packed_until or self._per_peer.get(request.peer, 0) >= self._quota:
                continue
            grant = self._grants.popleft()
            start, size = request.packed_until, self._block_size
            fit = len(grant.payload) // self._token_bytes // size * size
            count = min(end - start, fit)
            blocks = request.block_ids[start // size : -(-(start + count) // size)]
            return PackJob(request, grant, blocks, start, count)
        return None

    def packed(self, job: PackJob) -> None:
        """The slab is full: it counts against the peer until it is granted again."""
        peer = job.request.peer
        self._held_by[job.grant.slab] = peer
        self._per_peer[peer] = self._per_peer.get(peer, 0) + 1
        job.request.packed_until = job.first_token + job.num_tokens

    def give_back(self, job: PackJob) -> None:
        """Nothing was packed: the slab can be used for another range."""
        self._grants.appendleft(job.grant)

    def _packable_end(self, request: Request) -> int:
        if request.num_computed >= request.kv_target:
            return request.kv_target
        end = request.num_computed // self._block_size * self._block_size
        early_bytes = (end - request.packed_until) * self._token_bytes
        return end if early_bytes >= self._least_early_bytes else request.packed_until

"""REMOTE requests while their KV arrives: which ranges may be unpacked where, and when the KV is complete.

A range is planned (`plan`), copied by the runner, and counted (`unpacked`). A copy that runs beside the steps is
registered with `copy_begins` and `copy_ends`; `remove` waits for those that still write into the request's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.common.kv_parts import GroupPart
from diptych.engine.messages import UnpackRange
from diptych.engine.runner import CopyHandle
from diptych.engine.sched.cache.kv_cache_manager import KvCacheManager
from diptych.engine.sched.requests.admission import ModelLimits
from diptych.engine.sched.requests.request import Request


@dataclass(frozen=True, slots=True)
class UnpackJob:
    """Copy `num_tokens` tokens' KV from the command's payload into `block_ids`. `layers`: of these only; None: of
    all. `into`: the KV group and the rank."""

    request: Request
    first_block: int
    block_ids: list[int]
    num_tokens: int
    into: GroupPart
    layers: range | None = None


@dataclass(slots=True)
class _Arriving:
    """What has arrived of one request's KV.

    Args:
        covered: (group, index) of the blocks whose KV is there.
        layers_in: by rank, of blocks that come layer by layer, a bit for each of its layers of the group that is there.
        parts_in: of blocks that come rank by rank, a bit for each rank whose layers are all there.
        copies: what still writes into its blocks.
        complete: everything up to kv_target is there.
    """

    request: Request
    covered: set[tuple[int, int]] = field(default_factory=set)
    layers_in: dict[tuple[int, int, int], int] = field(default_factory=dict)
    parts_in: dict[tuple[int, int], int] = field(default_factory=dict)
    copies: list[CopyHandle] = field(default_factory=list)
    complete: bool = False


class RemoteRequests:
    """Owns the requests in WAITING_FOR_REMOTE_KV."""

    def __init__(self, kv: KvCacheManager, limits: ModelLimits) -> None:
        self._kv = kv
        self._group_parts = {(one.part, one.own): one for one in limits.group_parts}
        self._holders = [0] * kv.num_groups
        """By KV group, a bit for each rank that has layers of it."""
        for one in self._group_parts.values():
            self._holders[one.group] |= 1 << one.part
        self._arriving: dict[str, _Arriving] = {}
        self._requests: dict[str, Request] = {}
        self._pulls: set[str] = set()

    @property
    def requests(self) -> Mapping[str, Request]:
        """By attempt."""
        return self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Without pulls, which never run."""
        return len(self._requests) - len(self._pulls)

    def get(self, attempt: str) -> Request | None:
        return self._requests.get(attempt)

    def admit(self, request: Request, *, pull: bool = False) -> None:
        """Its blocks are counted; its KV may arrive. `pull`: it ends when its KV has arrived."""
        self._arriving[request.attempt] = _Arriving(request)
        self._requests[request.attempt] = request
        if pull:
            self._pulls.add(request.attempt)

    def pull(self, attempt: str) -> Request | None:
        """The pull of this name, if there is one."""
        return self._requests[attempt] if attempt in self._pulls else None

    def remove(self, request: Request) -> bool:
        """It joins the running batch, or has ended. Waits for what still writes into its blocks.

        Returns: whether its KV was complete; False also for one that is not here.
        """
        arriving = self._arriving.pop(request.attempt, None)
        if arriving is None:
            return False
        del self._requests[request.attempt]
        self._pulls.discard(request.attempt)
        for copy in arriving.copies:
            copy.wait()
        return arriving.complete

    # ---- ranges ----

    def plan(self, command: UnpackRange) -> UnpackJob | None:
        """Where the range goes; None when it must not be written: the attempt is gone or runs already, the range is not
        block-aligned, overlaps the pinned prefix, reaches past the end or the layers, lies behind the window or in no
        group, or the payload is too short."""
        arriving = self._arriving.get(command.attempt)
        into = self._group_parts.get((command.part, command.group))
        if arriving is None or arriving.complete or into is None:
            return None
        request, size = arriving.request, self._kv.block_size
        first, end = command.first_token, command.first_token + command.num_tokens
        whole = end % size == 0 or end == request.kv_target
        if command.num_tokens < 1 or first % size or not whole:
            return None
        begin = request.seq.first_blocks[into.group]
        if first < max(request.num_computed, begin * size) or end > request.kv_target:
            return None
        all_layers = into.num_layers
        num_layers = command.num_layers or all_layers
        if command.first_layer < 0 or command.first_layer + num_layers > all_layers:
            return None
        if len(command.payload) < command.num_tokens * into.bytes_per_token * num_layers // all_layers:
            return None
        request.converted = request.converted or command.converted
        some = num_layers < all_layers
        layers = range(command.first_layer, command.first_layer + num_layers) if some else None
        self._kv.bind(request)
        first_block = first // size
        blocks = request.tables[into.group][first_block - begin : -(-end // size) - begin]
        return UnpackJob(request, first_block, blocks, command.num_tokens, into, layers)

    def copy_begins(self, job: UnpackJob, copy: CopyHandle) -> None:
        self._arriving[job.request.attempt].copies.append(copy)

    def copy_ends(self, job: UnpackJob, copy: CopyHandle) -> bool:
        """Returns: False when the request does not wait for it any more."""
        arriving = self._arriving.get(job.request.attempt)
        if arriving is None or copy not in arriving.copies:
            return False
        arriving.copies.remove(copy)
        return True

    def unpacked(self, job: UnpackJob) -> None:
        """Every byte of the range is there, and was verified."""
        arriving = self._arriving[job.request.attempt]
        group, part = job.into.group, job.into.part
        every = (1 << job.into.num_layers) - 1
        these = every if job.layers is None else (1 << job.layers.stop) - (1 << job.layers.start)
        all_parts = self._holders[group]
        for index in range(job.first_block, job.first_block + len(job.block_ids)):
            block = group, index
            if these != every:
                layers = arriving.layers_in.get((part, *block), 0) | these
                arriving.layers_in[part, *block] = layers
                if layers != every:
                    continue
            parts = arriving.parts_in.get(block, 0) | 1 << part
            if parts == all_parts:
                arriving.covered.add(block)
            else:
                arriving.parts_in[block] = parts

    def missing(self, request: Request) -> str:
        """The blocks whose KV has not arrived, in words; empty: everything that the next token sees is there."""
        size, covered = self._kv.block_size, self._arriving[request.attempt].covered
        end = -(-request.kv_target // size)
        parts = []
        for group, begin in enumerate(self._kv.needed_from(request)):
            gaps = [i for i in range(max(begin, request.num_computed // size), end) if (group, i) not in covered]
            if gaps:
                named = f" of KV group {group}" if self._kv.num_groups > 1 else ""
                parts.append(f"{len(gaps)} blocks{named} from block {gaps[0]} on")
        return ", ".join(parts)

    def arrived_until(self, request: Request) -> int:
        """Tokens before this are here, in every group; with several groups all of them or none that were not here before."""
        if not self.missing(request):
            return request.kv_target
        if self._kv.num_groups > 1 or self._kv.slides:
            return request.num_computed
        covered, block = self._arriving[request.attempt].covered, request.num_computed // self._kv.block_size
        while (0, block) in covered:
            block += 1
        return block * self._kv.block_size

    def set_complete(self, request: Request) -> None:
        arriving = self._arriving[request.attempt]
        arriving.complete = True
        self._kv.bind(request)
        self._kv.trim_front(request, arriving.covered)

    def is_complete(self, request: Request) -> bool:
        return self._arriving[request.attempt].complete

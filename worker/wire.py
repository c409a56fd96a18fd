"""Proto <-> types of kvtransfer and worker, with the checks of untrusted input."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diptych.common.addresses import host_port
from diptych.common.errors import IncompatibleWorkersError, InvalidRequestError, TransferError
from diptych.common.request import ADAPTER, ADAPTER_FOLDER, CHOICE, IDEMPOTENCY, RESUME
from diptych.common.sampling import LATER_FIELDS
from diptych.common.tiers import TierState
from diptych.engine.messages import BlockCounts
from diptych.engine.sched.lifecycle.swap_cost import Rates, break_even_tokens
from diptych.kvtransfer.api import KvAddress, SlabCounts
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.rpc.fields import same_fields
from diptych.rpc.v1 import prefill_pb2, types_pb2, worker_pb2
from diptych.worker.refs import WorkerRef
from diptych.worker.role_spec import ROLES

REUSABLE = "reusable"
SOURCE = "source"
"""It takes KV from the holder that a request names, and others may take its own."""
SOURCE_TIERS = "source_tiers"
"""Others may take its KV of lower tiers, too."""
RANKS = "ranks"
"""It sends the KV of those of its ranks that a request names."""
MESSAGE_FIELDS = (ADAPTER, ADAPTER_FOLDER, REUSABLE, CHOICE, SOURCE, SOURCE_TIERS, RESUME, RANKS, IDEMPOTENCY)
REQUEST_FIELDS = (*LATER_FIELDS, *MESSAGE_FIELDS)
"""Fields of requests, later than the first version, that this one knows: sampling parameters, and those of the messages."""


def ask_for_ranks(
    request: prefill_pb2.PrefillRequest | prefill_pb2.FetchRequest,
    ranks: Sequence[int],
    known_fields: Collection[str],
    worker_id: str,
) -> None:
    """Of the others no KV is sent. Raises: IncompatibleWorkersError when the worker does not know how."""
    if RANKS not in known_fields:
        raise IncompatibleWorkersError(f"{worker_id} is of a version that sends the KV of all of its ranks")
    request.ranks.extend(ranks)


def role_to_proto(name: str) -> worker_pb2.WorkerRole:
    return ROLES[name].number  # type: ignore[return-value]


def role_from_proto(role: worker_pb2.WorkerRole) -> str:
    """Raises: InvalidRequestError for a role that does not exist."""
    for name, spec in ROLES.items():
        if spec.number == role:
            return name
    raise InvalidRequestError(f"role={int(role)} is not a role", param="role")


def ref_to_proto(ref: WorkerRef) -> types_pb2.WorkerRef:
    return types_pb2.WorkerRef(worker_id=ref.worker_id, incarnation=ref.incarnation, address=ref.address)


def kv_address_to_proto(address: KvAddress) -> worker_pb2.KvAddress:
    return worker_pb2.KvAddress(transport=address.transport, host=address.host, port=address.port, blob=address.blob)


def kv_address_from_proto(message: worker_pb2.KvAddress) -> KvAddress:
    """Raises: IncompatibleWorkersError when the peer names no transport or no usable port."""
    if not message.transport or message.port > 65_535:
        raise IncompatibleWorkersError(
            f"handshake: KV address {message.transport!r} {host_port(message.host, message.port)}"
        )
    return KvAddress(message.transport, message.host, message.port, message.blob)


def tier_tokens_to_proto(tiers: Sequence[tuple[str, int]]) -> list[types_pb2.TierTokens]:
    return [types_pb2.TierTokens(tier=name, tokens=tokens) for name, tokens in tiers]


def handle_to_proto(handle: SlabHandle) -> prefill_pb2.SlabHandle:
    return prefill_pb2.SlabHandle(**same_fields(SlabHandle, handle))


def handle_from_proto(message: prefill_pb2.SlabHandle) -> SlabHandle:
    """Raises: TransferError when a required field is missing."""
    sizes = message.num_tokens >= 1 and message.size_bytes >= 1
    if not (message.worker_id and message.attempt and sizes and message.mac):
        raise TransferError("a slab handle has no worker, attempt, range, size or MAC")
    return SlabHandle(**same_fields(SlabHandle, message))


def block_counts_to_proto(counts: BlockCounts) -> worker_pb2.BlockCounts:
    return worker_pb2.BlockCounts(**same_fields(BlockCounts, counts))


def slab_counts_to_proto(counts: SlabCounts) -> worker_pb2.SlabCounts:
    return worker_pb2.SlabCounts(**same_fields(SlabCounts, counts))


def preemption_to_proto(rates: Rates, tiers: Sequence[TierState]) -> worker_pb2.PreemptionCost:
    """Unset break-even: a rate is not known, or there is no tier to swap to."""
    known = (
        any(tier.num_bytes for tier in tiers[1:]) and rates.prefill_tokens_per_s > 0.0 and rates.copy_bytes_per_s > 0.0
    )
    return worker_pb2.PreemptionCost(
        **same_fields(Rates, rates),
        tiers=[
            worker_pb2.KvTier(
                name=tier.name, num_bytes=tier.num_bytes, bytes_per_s=tier.bytes_per_s, eviction=tier.eviction
            )
            for tier in tiers
        ],
        swap_from_tokens=break_even_tokens(rates) if known else None,
    )

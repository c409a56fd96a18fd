"""What both pools check first in a request that comes from the wire."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import InvalidRequestError, StaleReferenceError
from diptych.rpc.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Limits:
    """What this worker can serve. `num_ranks`: whose KV has slabs of its own."""

    worker_id: str
    incarnation: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_ranks: int = 1


def check_addressed(attempt: str, target: types_pb2.WorkerRef, limits: Limits, *, max_attempt_id: int) -> None:
    """Raises: InvalidRequestError for an attempt's id of no or too many characters; StaleReferenceError when another
    life of this worker, or another worker, was meant."""
    if not 0 < len(attempt) <= max_attempt_id:
        raise InvalidRequestError(f"attempt must have 1 to {max_attempt_id} characters", param="attempt")
    if (target.worker_id, target.incarnation) != (limits.worker_id, limits.incarnation):
        raise StaleReferenceError(
            f"this is {limits.worker_id}/{limits.incarnation}, "
            f"the request is for {target.worker_id}/{target.incarnation}"
        )

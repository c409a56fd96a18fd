"""The explanation of an answer: decode's facts and the router's placement in one object. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.router.index import IndexMode
from diptych.router.policy import Placement, Terms
from diptych.rpc.v1 import types_pb2

_MAX_CANDIDATES = 32


def explanation(
    facts: types_pb2.Explanation, placement: Placement, mode: IndexMode, notes: Sequence[str], request_id: str
) -> types_pb2.Explanation:
    """`facts`: decode's part. `notes`: what did not go the planned way at the router, put before decode's own notes."""
    whole = types_pb2.Explanation()
    whole.CopyFrom(facts)
    whole.request_id = request_id
    whole.index_mode = mode.value
    del whole.notes[:]
    whole.notes.extend([*placement.notes, *notes, *facts.notes])
    shown = placement.best(_MAX_CANDIDATES)
    if placement.chosen not in shown:
        shown[-1:] = [placement.chosen]
    whole.candidates.extend(_terms(terms, terms == placement.chosen) for terms in shown)
    return whole


def _terms(terms: Terms, chosen: bool) -> types_pb2.PlacementTerms:
    prefill = terms.prefill
    return types_pb2.PlacementTerms(
        prefill_worker_id=prefill.worker_id if prefill is not None else "",
        decode_worker_id=terms.decode.worker_id,
        queue_ms=terms.queue_ms,
        prefill_ms=terms.prefill_ms,
        transfer_ms=terms.transfer_ms,
        decode_load_ms=terms.decode_load_ms,
        stall_ms=terms.stall_ms,
        total_ms=terms.total_ms,
        prefill_hit_tokens=prefill.hit_tokens if prefill is not None else 0,
        decode_hit_tokens=terms.decode.hit_tokens,
        chosen=chosen,
    )

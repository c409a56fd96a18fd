"""What decode tells about one request: usage and the explanation, filled in while the request lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.decode.remote_prefill_facts import LegFacts
from diptych.engine.messages import ChoiceFinished, Finished
from diptych.rpc import convert
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2


@dataclass(slots=True)
class Facts:
    """Times are seconds since Submit on decode's own clock; 0.0: it did not happen."""

    request_id: str
    decode: str
    decode_pid: int
    prompt_tokens: int
    prefill: str = ""
    local: bool = False
    cached_decode: int = 0
    leg: LegFacts = field(default_factory=LegFacts)
    notes: list[str] = field(default_factory=list)
    prefill_faults: list[tuple[str, str]] = field(default_factory=list)
    """(worker id, reason) of each leg that failed."""
    reserved_s: float = 0.0
    first_token_s: float = 0.0
    kv_complete_s: float = 0.0

    def computed_here(self, cached: int) -> None:
        self.local = True
        self.prefill = self.decode
        self.cached_decode = cached
        self.leg = LegFacts()

    def fetched_again(self, worker_id: str, leg: LegFacts) -> None:
        """After a preemption: what it moved counts, where the prompt came from does not change."""
        self.leg.kv_bytes += leg.kv_bytes
        self.leg.kv_ranges += leg.kv_ranges
        self.notes.append(f"preempted: {worker_id} computed the KV again")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody computed for this request: what decode had, and of the rest what prefill had."""
        return self.cached_decode if self.local else max(self.cached_decode, self.leg.cached_tokens)

    def faults(self) -> list[decode_pb2.PrefillFault]:
        return [decode_pb2.PrefillFault(worker_id=name, reason=reason) for name, reason in self.prefill_faults]

    def explanation(self, transport_path: str) -> types_pb2.Explanation:
        return types_pb2.Explanation(
            prefill=self.prefill,
            decode=self.decode,
            transport=(self.leg.path or transport_path) if self.leg.kv_bytes else "none",
            kv_bytes=self.leg.kv_bytes,
            cached_tokens_prefill=self.leg.cached_tokens,
            cached_tokens_decode=self.cached_decode,
            kv_ranges=self.leg.kv_ranges,
            kv_ranges_overlapped=self.leg.kv_ranges_overlapped,
            local_prefill=self.local,
            notes=[*self.notes, *([self.leg.converted] if self.leg.converted and self.leg.kv_bytes else [])],
            request_id=self.request_id,
            prefill_pid=self.decode_pid if self.local else self.leg.prefill_pid,
            decode_pid=self.decode_pid,
            reserved_s=self.reserved_s,
            first_token_s=self.first_token_s,
            kv_complete_s=self.kv_complete_s,
            prefill_queue_s=self.leg.queue_s,
            prefill_compute_s=self.leg.compute_s,
        )


def choice_finished(event: ChoiceFinished) -> types_pb2.ChoiceFinished:
    return types_pb2.ChoiceFinished(
        choice=event.choice,
        finish_reason=convert.finish_reason_to_proto(event.reason),
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
        completion_tokens=event.num_output_tokens,
    )


def end_of(finished: Finished, facts: Facts, transport_path: str) -> decode_pb2.End:
    """The good end of a request."""
    message = router_pb2.Finished(
        finish_reason=convert.finish_reason_to_proto(finished.reason),
        stop_string=finished.stop_string,
        usage=types_pb2.Usage(
            prompt_tokens=facts.prompt_tokens,
            completion_tokens=finished.num_output_tokens,
            cached_tokens=facts.cached_tokens,
        ),
        explanation=facts.explanation(transport_path),
    )
    if finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    return decode_pb2.End(finished=message, prefill_faults=facts.faults())

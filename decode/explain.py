"""Decode's facts about one request: usage and the explanation, filled in while the request runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.common.request import CacheClaim
from diptych.decode.remote_prefill_facts import RemotePrefillFacts
from diptych.engine.messages import ChoiceFinished, Finished
from diptych.rpc import convert
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2
from diptych.worker.reads.block_pulls import PullFacts, pull_to_proto


@dataclass(slots=True)
class Facts:
    """Times are seconds since Submit on decode's clock; 0.0: it did not happen."""

    request_id: str
    decode: str
    decode_pid: int
    prompt_tokens: int
    backend: str = ""
    """See Compat.backend. That of prefill is the same: a pair with two of them is refused."""
    prefill: str = ""
    local: bool = False
    cached_decode: int = 0
    kept_decode: int = 0
    """Of what it had cached, what a claim has kept."""
    claim: CacheClaim | None = None
    """The request's."""
    remote: RemotePrefillFacts = field(default_factory=RemotePrefillFacts)
    pulled: PullFacts | None = None
    """What this worker took from another one first."""
    tiers: list[types_pb2.TierTokens] = field(default_factory=list)
    """Of the tokens cached here, those from lower tiers."""
    notes: list[str] = field(default_factory=list)
    prefill_faults: list[tuple[str, str]] = field(default_factory=list)
    """(worker id, reason) of each failed remote prefill."""
    reserved_s: float = 0.0
    first_token_s: float = 0.0
    kv_complete_s: float = 0.0

    def computed_here(self, cached: int) -> None:
        self.local = True
        self.prefill = self.decode
        self.cached_decode = cached
        self.remote = RemotePrefillFacts()

    def fetched_again(self, worker_id: str, remote: RemotePrefillFacts) -> None:
        """After a preemption: the transferred KV counts, but the origin of the prompt's KV does not change."""
        self.remote.kv_bytes += remote.kv_bytes
        self.remote.kv_ranges += remote.kv_ranges
        self.notes.append(f"preempted: {worker_id} computed the KV again")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens not computed for this request: those cached on decode, and of the rest those cached on prefill."""
        return self.cached_decode if self.local else max(self.cached_decode, self.remote.cached_tokens)

    def faults(self) -> list[decode_pb2.PrefillFault]:
        return [decode_pb2.PrefillFault(worker_id=name, reason=reason) for name, reason in self.prefill_faults]

    @property
    def pulls(self) -> list[types_pb2.KvPull]:
        own = None if self.pulled is None else pull_to_proto(self.pulled)
        return [pull for pull in (self.remote.pulled, own) if pull is not None]

    def _notes_on_kv(self) -> list[str]:
        remote = self.remote
        notes = [note for note in (remote.regrouped, remote.converted) if note and remote.kv_bytes]
        notes += [
            f"KV of {pull.num_tokens} tokens came from decode worker {pull.holder}: without --batch-invariant its last bits may "
            "differ from what prefill computes"
            for pull in self.pulls
            if pull.other_bits and pull.num_tokens
        ]
        return notes

    def _claim_report(self) -> types_pb2.CacheClaimReport | None:
        claim, kept = self.claim, (self.remote.kept_tokens, self.kept_decode)
        if claim is None and not any(kept):
            return None
        report = types_pb2.CacheClaimReport(kept_tokens_prefill=kept[0], kept_tokens_decode=kept[1])
        if claim is not None:
            report.ttl_s, report.priority = claim.ttl_s, claim.priority
        return report

    def explanation(self, transport_path: str) -> types_pb2.Explanation:
        return types_pb2.Explanation(
            prefill=self.prefill,
            decode=self.decode,
            transport=(self.remote.path or transport_path) if self.remote.kv_bytes else "none",
            kv_bytes=self.remote.kv_bytes,
            cached_tokens_prefill=self.remote.cached_tokens,
            cached_tokens_decode=self.cached_decode,
            kv_ranges=self.remote.kv_ranges,
            kv_ranges_overlapped=self.remote.kv_ranges_overlapped,
            local_prefill=self.local,
            notes=[*self.notes, *self._notes_on_kv()],
            pulls=self.pulls,
            cached_tiers_prefill=self.remote.tiers,
            cached_tiers_decode=self.tiers,
            claim=self._claim_report(),
            request_id=self.request_id,
            prefill_pid=self.decode_pid if self.local else self.remote.prefill_pid,
            decode_pid=self.decode_pid,
            reserved_s=self.reserved_s,
            first_token_s=self.first_token_s,
            kv_complete_s=self.kv_complete_s,
            prefill_queue_s=self.remote.queue_s,
            prefill_compute_s=self.remote.compute_s,
            backend=self.backend,
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
    """The End message of a finished request."""
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

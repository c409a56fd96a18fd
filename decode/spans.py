"""A request's spans on decode: the attempt, its calls to prefill, and the KV transfers. See common/observe/tracing.py."""

from __future__ import annotations

from diptych.common.errors import DiptychError
from diptych.common.observe.tracing import TRACEPARENT, Span, tracing
from diptych.decode.explain import Facts
from diptych.decode.remote_prefill_facts import RemotePrefillFacts
from diptych.decode.submission import Submission


class AttemptSpan:
    """From Submit to End."""

    def __init__(self, submission: Submission) -> None:
        self._span = tracing.start(
            "decode",
            kind="server",
            parent=submission.traceparent,
            attributes={
                "diptych.request_id": submission.request_id,
                "diptych.attempt": submission.attempt,
                "diptych.worker": submission.placement.decode.worker_id,
                "gen_ai.usage.input_tokens": len(submission.prompt.token_ids),
            },
        )

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def event(self, name: str) -> None:
        self._span.event(name)

    def finished(self, facts: Facts, output_tokens: int) -> None:
        self._span.set(
            diptych__local_prefill=facts.local,
            diptych__cached_tokens=facts.cached_tokens,
            gen_ai__usage__output_tokens=output_tokens,
        )
        self._span.end()

    def failed(self, error: DiptychError) -> None:
        self._span.fail(error.reason, error.message)
        self._span.end()


class RemotePrefillSpan:
    """One call to prefill, and within it the KV transfer from the first announced range to the last verified one."""

    def __init__(self, parent: str, worker_id: str, attempt: str) -> None:
        self._call = tracing.start(
            "prefill call",
            kind="client",
            parent=parent,
            attributes={"diptych.worker": worker_id, "diptych.attempt": attempt, "rpc.system.name": "grpc"},
        )
        self._transfer: Span | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Metadata for the call."""
        return ((TRACEPARENT, self._call.traceparent),) if self._call.traceparent else None

    def announced(self) -> None:
        """A range may be read."""
        if self._transfer is None:
            self._transfer = tracing.start("kv transfer", parent=self._call.traceparent)

    def complete(self, facts: RemotePrefillFacts) -> None:
        """All KV is received and verified."""
        if self._transfer is not None:
            self._transfer.set(diptych__kv_bytes=facts.kv_bytes, diptych__kv_ranges=facts.kv_ranges)
            self._transfer.end()

    def end(self, facts: RemotePrefillFacts, error: DiptychError | None = None) -> None:
        """The call ended. Idempotent."""
        for span in filter(None, (self._transfer, self._call)):
            if error is not None:
                span.fail(error.reason, error.message)
        self._call.set(diptych__cached_tokens=facts.cached_tokens, diptych__compute_s=facts.compute_s)
        if self._transfer is not None:
            self._transfer.end()
        self._call.end()

"""`diptych explain` and `diptych what-if`: the reasons of a past placement, and the placement of a hypothetical
request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from diptych.cli.router_access import TLS_CA, TLS_SERVER_NAME, RouterAccess, router_access

_ADDRESS = typer.Option(help="host:port of the router's gRPC server; default: the cluster here.")
_TIMEOUT_S = 10.0


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command()
    def explain(
        request_id: Annotated[
            str, typer.Argument(help="Request id from an answer, a header or the log; or its label.")
        ],
        address: Annotated[str, _ADDRESS] = "",
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
    ) -> None:
        """Show why a recent request was placed where it was."""
        from diptych.rpc.v1 import router_pb2

        question = router_pb2.ExplainRequest(request_id=request_id)
        access = router_access(address, tls_ca, tls_server_name)
        answer = _call(access, "Explain", question, router_pb2.ExplainResponse.FromString)
        print(f"{answer.outcome}, {answer.prompt_tokens} prompt tokens, {answer.age_s:.1f} s ago")
        print("\n".join(lines_of(answer.explanation)))

    @app.command("what-if")
    def what_if(
        prompt: Annotated[str, typer.Option(help="Text of the prompt.")],
        pool: Annotated[
            str, typer.Option(help='Hypothetical idle workers, such as "4P4D"; default: the real ones.')
        ] = "",
        max_tokens: Annotated[
            int,
            typer.Option(
                min=1,
                max=2**31 - 1,
                help="Length of the answer in tokens. 1: prefill's token is all of it, so no KV is transferred. More: the "
                "placement is the same for every length that fits the context beside the prompt.",
            ),
        ] = 16,
        address: Annotated[str, _ADDRESS] = "",
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
    ) -> None:
        """Show where a request would be placed. Nothing is run."""
        from diptych.rpc.v1 import router_pb2, types_pb2

        if pool:
            from diptych.router.placement.what_if import parse_pool

            parse_pool(pool)  # fail before connecting
        request = router_pb2.GenerateRequest(prompt=prompt, sampling=types_pb2.SamplingParams(max_tokens=max_tokens))
        question = router_pb2.WhatIfRequest(request=request, pool=pool)
        access = router_access(address, tls_ca, tls_server_name)
        answer = _call(access, "WhatIf", question, router_pb2.WhatIfResponse.FromString)
        print(f"{answer.prompt_tokens} prompt tokens")
        print("\n".join(lines_of(answer.explanation)))


def _claim_line(claim: Any) -> str:
    asked = f" of {claim.requested_ttl_s:g} s requested" if claim.requested_ttl_s > claim.ttl_s else ""
    session = f", session {claim.session_id}" if claim.session_id else ""
    made = f"for {claim.ttl_s:g} s{asked}, priority {claim.priority}{session}" if claim.ttl_s else "none"
    kept = f"{claim.kept_tokens_prefill} cached tokens on prefill and {claim.kept_tokens_decode} on decode"
    return f"claim:    {made}; claims had kept {kept}"


def _first_token_parts(why: Any) -> str:
    """What the time to the first token was spent on; empty: not known, or it is that of several attempts."""
    if not why.first_token_s or why.attempts:
        return ""
    if why.local_prefill:
        parts = {"waiting for KV blocks": why.reserved_s, "computing": why.first_token_s - why.reserved_s}
    else:
        parts = {"prefill's queue": why.prefill_queue_s, "computing": why.prefill_compute_s}
        parts["between prefill and decode"] = why.first_token_s - sum(parts.values())
    parts["router"] = why.ttft_s - why.first_token_s
    return ", ".join(f"{what} {max(0.0, seconds):.3f} s" for what, seconds in parts.items())


def lines_of(why: Any) -> list[str]:
    """A types.proto Explanation as text: prediction, outcome, and the cost of every candidate."""
    lines = [f"policy {why.policy or 'unknown'}, index {why.index_mode or 'unknown'}"]
    lines.append(
        f"expected: first token after {why.predicted_ttft_s:.3f} s, {why.predicted_cached_tokens} tokens cached"
    )
    if why.decode:
        lines.append(
            f"seen:     first token after {why.ttft_s:.3f} s, {why.cached_tokens} tokens cached;"
            f" prefill {why.prefill}, decode {why.decode}, {why.kv_bytes} bytes over {why.transport}"
        )
        if parts := _first_token_parts(why):
            lines.append(f"          of that: {parts}")
        if why.total_s:
            lines.append(
                f"          the rest in {max(0.0, why.total_s - why.ttft_s):.3f} s"
                + (f", the longest gap between tokens {why.longest_gap_s:.3f} s" if why.longest_gap_s else "")
            )
        lines.append(f"computed: by {why.backend or 'an unknown back end'}")
    for number, attempt in enumerate(why.attempts, 1):
        end = f"{attempt.failure} after {attempt.num_tokens} tokens" if attempt.failure else "the rest"
        workers = f"prefill {attempt.prefill or '(local)'}, decode {attempt.decode}"
        lines.append(f"attempt {number}: {workers}, submitted after {attempt.submitted_s:.3f} s: {end}")
    for pull in why.pulls:
        why_less = f" ({pull.note})" if pull.note else ""
        lower = "".join(f", {part.tokens} of its tier {part.tier}" for part in pull.source_tiers)
        lines.append(
            f"pulled:   KV of {pull.num_tokens} tokens behind {pull.first_token}, {pull.kv_bytes} bytes in "
            f"{pull.duration_s:.3f} s, from {pull.holder}{lower} to {pull.reader}{why_less}"
        )
    for worker, tiers in ((why.prefill, why.cached_tiers_prefill), (why.decode, why.cached_tiers_decode)):
        lines += [f"restored: KV of {part.tokens} tokens from the tier {part.tier} of {worker}" for part in tiers]
    if why.HasField("claim"):
        lines.append(_claim_line(why.claim))
    if why.HasField("adapter"):
        lines.append(f"adapter:  {why.adapter.name}, version {why.adapter.version} ({why.adapter.id})")
    lines += [f"note: {note}" for note in why.notes]
    lines.append(
        f"  {'prefill':<14}{'decode':<14}{'total':>9}{'queue':>9}{'compute':>9}{'move':>9}{'load':>9}{'stall':>9}  ms"
        f"{'hit P':>9}{'hit D':>7}"
    )
    for terms in why.candidates:
        charges = (
            *(terms.total_ms, terms.queue_ms, terms.prefill_ms),
            *(terms.transfer_ms, terms.decode_load_ms, terms.stall_ms),
        )
        lines.append(
            f"{'>' if terms.chosen else ' '} {terms.prefill_worker_id or '(local)':<14}{terms.decode_worker_id:<14}"
            + "".join(f"{charge:>9.1f}" for charge in charges)
            + f"    {terms.prefill_hit_tokens:>9}{terms.decode_hit_tokens:>7}"
        )
        if terms.adapter_ms:
            lines.append(f"    loads the adapter, or waits for a slot: {terms.adapter_ms:.1f} ms")
        if terms.HasField("pull"):
            pull = terms.pull
            lines.append(
                f"    takes KV of tokens {pull.first_token} to {pull.num_tokens} from {pull.holder}: {pull.pull_ms:.1f} ms, "
                f"computing {pull.compute_ms:.1f}; pays from {pull.pays_from_tokens:.0f} tokens on over this link"
            )
    return lines


def _call(access: RouterAccess, method: str, question: Any, parse: Callable[[bytes], Any]) -> Any:
    """Make one unary call. Raises: DiptychError, ConfigError."""
    import grpc

    from diptych.client import wire

    if (tls := access.tls()) is None:
        channel = grpc.insecure_channel(access.address, options=wire.options())
    else:
        channel = grpc.secure_channel(access.address, tls.credentials(), options=wire.tls_options(tls))
    with channel:
        call = channel.unary_unary(
            f"/diptych.rpc.v1.Router/{method}",
            request_serializer=type(question).SerializeToString,
            response_deserializer=parse,
        )
        try:
            return call(question, timeout=_TIMEOUT_S, metadata=wire.metadata(None))
        except grpc.RpcError as error:
            raise wire.typed(error, access.address) from None

"""Invariants of the metrics of an idle cluster. Pure: texts of /metrics in, violations out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "diptych_"
Labels = tuple[tuple[str, str], ...]


class Figures:
    """One or several processes' series, added up, or what they have grown by."""

    def __init__(self, values: Mapping[tuple[str, Labels], float]) -> None:
        self._values = Counter(dict(values))

    @classmethod
    def parse(cls, *texts: str) -> Figures:
        values: Counter[tuple[str, Labels]] = Counter()
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = {k: v for k, v in sample.labels.items() if k not in ("role", "worker")}
                    values[sample.name.removeprefix(PREFIX), tuple(sorted(labels.items()))] += sample.value
        return cls(values)

    def since(self, before: Figures) -> Figures:
        return Figures({key: value - before._values[key] for key, value in self._values.items()})

    def total(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(value for (found, at), value in self._values.items() if found == name and wanted <= set(at))

    def histograms(self) -> dict[str, dict[Labels, list[tuple[float, float]]]]:
        """Name -> labels -> (upper bound, cumulative count)."""
        found: dict[str, dict[Labels, list[tuple[float, float]]]] = {}
        for (name, labels), value in self._values.items():
            if name.endswith("_bucket"):
                rest = tuple(pair for pair in labels if pair[0] != "le")
                bounds = found.setdefault(name.removesuffix("_bucket"), {}).setdefault(rest, [])
                bounds.append((float(dict(labels)["le"]), value))
        return found

    def value(self, name: str, labels: Labels) -> float:
        return self._values[name, labels]


def check_router(router: Figures, *, more_choices: int | None = 0) -> list[str]:
    """Laws of a router that has no request left. `more_choices`: choices that were begun besides the first of each
    request; None: not known."""
    out = _Findings()
    total = router.total
    answered, failed = total("request_success_total"), total("request_errors_total")
    out.same("requests = answered + failed", total("requests_total"), answered + failed)
    for name in ("num_requests_running", "num_requests_waiting"):
        out.same(f"{name} = 0", total(name), 0)
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        out.same(f"{name} counts the answered", total(f"{name}_count"), answered)
    for kind in ("prompt", "generation"):
        whole = total(f"request_{kind}_tokens_sum") + total("unfinished_tokens_total", of=kind)
        out.same(f"{kind} tokens = those of answered + unfinished", total(f"{kind}_tokens_total"), whole)
    out.at_most("cached <= prompt tokens", total("prompt_tokens_cached_total"), total("prompt_tokens_total"))
    begun = total("time_to_first_token_seconds_count")
    gaps = total("generation_tokens_total") - begun
    if more_choices is not None:
        gaps -= more_choices
        out.same("inter-token samples = tokens - choices", total("inter_token_latency_seconds_count"), gaps)
    out.at_most("inter-token samples", total("inter_token_latency_seconds_count"), gaps)
    out.at_most("answered with tokens <= with a first token", answered, begun)
    out.same("each first token was predicted", total("predicted_ttft_error_seconds_count"), begun)
    out.same("regret beside error", total("placement_regret_seconds_count"), begun)
    queued = total("request_queue_time_seconds_count")
    out.same("stages: decode beside queue", total("request_decode_time_seconds_count"), queued)
    out.same("stages: inference beside queue", total("request_inference_time_seconds_count"), queued)
    out.at_most("stages are of answered requests", queued, answered)
    let_in = total("admission_total", verdict="admitted") + total("admission_total", verdict="would_refuse")
    out.same("placements = let in + placed again", total("placements_total"), let_in + total("replacements_total"))
    out.same("placed again = other decode", total("fallbacks_total", to="other_decode"), total("replacements_total"))
    ended = sum(total("placement_tickets_total", outcome=name) for name in ("finished", "failed", "lapsed"))
    out.same("tickets = their ends", total("placement_tickets_total", outcome="granted"), ended)
    return out.found + check_histograms(router)


def check_workers(router: Figures, decode: Figures, prefill: Figures, *, exact: bool) -> list[str]:
    """Invariants of a router and its workers, all idle. `exact`: every request was answered by its first worker, so
    that nothing was sampled or read in vain."""
    out = _Findings()
    hold = out.same if exact else out.at_most
    hold("tokens: router, decode", router.total("generation_tokens_total"), decode.total("generation_tokens_total"))
    hold("prompt tokens: router, decode", router.total("prompt_tokens_total"), decode.total("prompt_tokens_total"))
    received = decode.total("kv_transfer_bytes_total") - decode.total("kv_pulled_bytes_total")  # of prompts
    hold("KV: router, decode", router.total("kv_transfer_bytes_total"), received)
    # Prefill may also have sent what other workers pulled.
    sent, pulled = prefill.total("kv_transfer_bytes_total"), decode.total("kv_pulled_bytes_total")
    pulled += prefill.total("kv_pulled_bytes_total")
    (out.at_most if pulled else hold)("KV: decode, prefill", received, sent)
    for role, figures in (("decode", decode), ("prefill", prefill)):
        total = figures.total
        out.same(f"{role}: queries = prompt tokens", total("prefix_cache_queries_total"), total("prompt_tokens_total"))
        hits = total("prompt_tokens_by_source_total", source="local_cache_hit")
        out.same(f"{role}: hits = their source", total("prefix_cache_hits_total"), hits)
        out.at_most(f"{role}: steps", total("iteration_tokens_total_count"), total("engine_steps_total"))
        out.same(f"{role}: none running", total("num_requests_running"), 0)
        out.same(f"{role}: none waiting", total("num_requests_waiting"), 0)
        out.found += check_histograms(figures)
    return out.found


def check_histograms(figures: Figures) -> list[str]:
    out = _Findings()
    for name, series in figures.histograms().items():
        for labels, bounds in series.items():
            counts = [count for _, count in sorted(bounds)]
            out.same(f"{name}: +Inf = count", counts[-1], figures.value(f"{name}_count", labels))
            if counts != sorted(counts):
                out.found.append(f"{name}{labels}: buckets fall: {counts}")
    return out.found


class _Findings:
    def __init__(self) -> None:
        self.found: list[str] = []

    def same(self, law: str, one: float, other: float) -> None:
        if one != other:
            self.found.append(f"{law}: {one:g} and {other:g}")

    def at_most(self, law: str, one: float, other: float) -> None:
        if one > other:
            self.found.append(f"{law}: {one:g} is more than {other:g}")

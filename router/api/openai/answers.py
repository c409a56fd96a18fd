"""Common parts of OpenAI responses. Pure: returns JSON-ready dictionaries or SSE bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych.router.requests.messages import ChoiceFinishedEvent, Explanation, FinishedEvent, UsageInfo
from diptych.rpc.v1 import types_pb2

DONE = b"data: [DONE]\n\n"
PING = b": ping\n"
"""A comment line, and no blank one: after an event with an id the openai client would take that for the end of an empty event."""

_TIERS = ("cached_tiers_prefill", "cached_tiers_decode")
_BY_HAND = ("notes", "candidates", "attempts", "pulls", "claim", "adapter", *_TIERS)
_EXPLAINED = [f.name for f in Explanation.DESCRIPTOR.fields if f.name not in _BY_HAND]
_ATTEMPT = [f.name for f in types_pb2.RequestAttempt.DESCRIPTOR.fields]
_TERMS = [f.name for f in types_pb2.PlacementTerms.DESCRIPTOR.fields if f.name != "pull"]
_PULL_TERMS = [f.name for f in types_pb2.PullTerms.DESCRIPTOR.fields]
_CLAIM = [f.name for f in types_pb2.CacheClaimReport.DESCRIPTOR.fields]
_ADAPTER = [f.name for f in types_pb2.AdapterReport.DESCRIPTOR.fields]
_PULL = [f.name for f in types_pb2.KvPull.DESCRIPTOR.fields]


def sse(payload: object) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def usage_object(usage: UsageInfo, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    """The `diptych` object: all fields of the message; the candidates' costs are in `placement`. `attempts` is empty
    unless the request was placed again."""
    facts: dict[str, Any] = {name: getattr(explanation, name) for name in _EXPLAINED}
    facts["notes"] = list(explanation.notes)
    facts["placement"] = [_terms_object(terms) for terms in explanation.candidates]
    facts["attempts"] = [{name: getattr(one, name) for name in _ATTEMPT} for one in explanation.attempts]
    facts["pulls"] = [
        {name: getattr(one, name) for name in _PULL}
        | {"source_tiers": {part.tier: part.tokens for part in one.source_tiers}}
        for one in explanation.pulls
    ]
    for name in _TIERS:
        facts[name] = {part.tier: part.tokens for part in getattr(explanation, name)}
    claim = explanation.claim
    facts["claim"] = {name: getattr(claim, name) for name in _CLAIM} if explanation.HasField("claim") else None
    adapter = explanation.adapter
    facts["adapter"] = {name: getattr(adapter, name) for name in _ADAPTER} if explanation.HasField("adapter") else None
    return facts


def _terms_object(terms: types_pb2.PlacementTerms) -> dict[str, Any]:
    shown = {name: getattr(terms, name) for name in _TERMS}
    for pool in ("prefill", "decode"):
        tiers = shown[f"{pool}_tiers"] = {part.tier: part.tokens for part in shown[f"{pool}_tiers"]}
        shown[f"{pool}_host_tokens"] = tiers.get("host", 0)  # the former name of this one
    shown["pull"] = {name: getattr(terms.pull, name) for name in _PULL_TERMS} if terms.HasField("pull") else None
    return shown


def stop_reason(finished: FinishedEvent | ChoiceFinishedEvent) -> str | int | None:
    """The request's stop string or stop token that ended the answer, if any."""
    return finished.stop_string or finished.stop_token_id

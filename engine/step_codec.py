"""Step messages as bytes, for ranks in processes of their own: JSON, whose floats are exact in Python.

A sequence's memo and grammar stay in their process; an executor over processes declares that it takes no grammars.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from diptych.common.sampling import EarlyStopping, SamplingParams, TokenLogprobs
from diptych.engine.step_messages import (
    BlockCopy,
    Candidate,
    ComputedFrom,
    CopyKind,
    ScheduledSeq,
    StepResult,
)

_SEQ_FIELDS = tuple(field.name for field in fields(ScheduledSeq) if field.name not in ("sampling", "grammar", "memo"))
_SAMPLING_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def encode_seqs(seqs: Sequence[ScheduledSeq]) -> bytes:
    return _dump([[_sampling(seq.sampling), *(_plain(getattr(seq, name)) for name in _SEQ_FIELDS)] for seq in seqs])


def decode_seqs(data: bytes) -> list[ScheduledSeq]:
    return [_seq(sampling, dict(zip(_SEQ_FIELDS, values, strict=True))) for sampling, *values in json.loads(data)]


def encode_result(result: StepResult) -> bytes:
    return _dump(
        {
            "token_ids": result.token_ids,
            "bad_rows": list(result.bad_rows.items()),
            "refused_rows": list(result.refused_rows.items()),
            "logprobs": [[i, [_entry(one) for one in row]] for i, row in result.logprobs.items()],
            "more_draws": [[i, [[t, _entry(one)] for t, one in row]] for i, row in result.more_draws.items()],
            "candidates": [
                [i, [[c.token_id, c.score, _entry(c.logprobs)] for c in row]] for i, row in result.candidates.items()
            ],
            "prompt_logprobs": [[i, [_entry(one) for one in row]] for i, row in result.prompt_logprobs.items()],
            "computed_from": [
                [i, one.num_tokens, one.digest.hex(), one.block_size] for i, one in result.computed_from.items()
            ],
        }
    )


def decode_result(data: bytes) -> StepResult:
    values = json.loads(data)
    return StepResult(
        token_ids=[tuple(row) for row in values["token_ids"]],
        bad_rows=dict(values["bad_rows"]),
        refused_rows=dict(values["refused_rows"]),
        logprobs={i: tuple(_known(one) for one in row) for i, row in values["logprobs"]},
        more_draws={i: [(t, _logprobs(one)) for t, one in row] for i, row in values["more_draws"]},
        candidates={
            i: [Candidate(t, score, _logprobs(one)) for t, score, one in row] for i, row in values["candidates"]
        },
        prompt_logprobs={i: [_known(one) for one in row] for i, row in values["prompt_logprobs"]},
        computed_from={
            i: ComputedFrom(count, bytes.fromhex(digest), size) for i, count, digest, size in values["computed_from"]
        },
    )


def encode_copies(copies: Sequence[BlockCopy]) -> bytes:
    return _dump([[copy.kind.value, copy.src, copy.dst, copy.group] for copy in copies])


def decode_copies(data: bytes) -> list[BlockCopy]:
    return [BlockCopy(CopyKind(kind), *place) for kind, *place in json.loads(data)]


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _seq(sampling: dict[str, Any], values: dict[str, Any]) -> ScheduledSeq:
    for name in ("block_tables", "first_blocks"):
        values[name] = tuple(values[name])
    return ScheduledSeq(sampling=_params(sampling), **values)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    values = {name: getattr(params, name) for name in _SAMPLING_DEFAULTS if name != "grammar"}
    changed = {name: value for name, value in values.items() if value != _SAMPLING_DEFAULTS[name]}
    if "early_stopping" in changed:
        changed["early_stopping"] = params.early_stopping.value
    return changed


def _params(values: dict[str, Any]) -> SamplingParams:
    if "early_stopping" in values:
        values["early_stopping"] = EarlyStopping(values["early_stopping"])
    return SamplingParams(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _entry(one: TokenLogprobs | None) -> list[Any] | None:
    return None if one is None else [one.token_id, one.logprob, one.rank, one.top]


def _known(values: list[Any]) -> TokenLogprobs:
    token_id, logprob, rank, top = values
    return TokenLogprobs(token_id, logprob, rank, _tuples(top))


def _logprobs(values: list[Any] | None) -> TokenLogprobs | None:
    return None if values is None else _known(values)

"""Proto <-> common types, with strict checks: what comes from a wire is not trusted, not even inside the cluster.

(KvAddress and SlabHandle belong to kvtransfer, which this room may not import: see worker/wire.py.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from diptych.common.compat import Compat
from diptych.common.errors import IncompatibleWorkersError, InternalError, InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.common.sampling import EarlyStopping, FinishReason, SamplingParams, check_sampling
from diptych.rpc.v1 import types_pb2, worker_pb2

KV_DTYPES = ("float32", "float16", "bfloat16")

_ALWAYS_SET = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
    "best_of",
)

_FINISH_TO_PROTO = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}
_EARLY_TO_PROTO = {
    EarlyStopping.OFF: types_pb2.EARLY_STOPPING_UNSPECIFIED,
    EarlyStopping.ON: types_pb2.EARLY_STOPPING_ON,
    EarlyStopping.NEVER: types_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_FROM_PROTO = {value: key for key, value in _EARLY_TO_PROTO.items()}
_GRAMMAR_TO_PROTO = {
    GrammarKind.JSON_SCHEMA: types_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: types_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.CHOICE: types_pb2.GRAMMAR_KIND_CHOICE,
    GrammarKind.EBNF: types_pb2.GRAMMAR_KIND_EBNF,
    GrammarKind.TAGS: types_pb2.GRAMMAR_KIND_TAGS,
}
_GRAMMAR_FROM_PROTO = {value: key for key, value in _GRAMMAR_TO_PROTO.items()}


class LogprobsOfToken(Protocol):
    """What both the engine's and the router's own structs look like."""

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...

    @property
    def rank(self) -> int: ...

    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


_Logprobs = TypeVar("_Logprobs")


def logprobs_to_proto(entry: LogprobsOfToken) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def logprobs_from_proto(
    message: types_pb2.TokenLogprobs, make: Callable[[int, float, int, tuple[tuple[int, float], ...]], _Logprobs]
) -> _Logprobs:
    """Args: make: (token_id, logprob, rank, top) -> the receiver's own struct. Raises: InternalError."""
    if len(message.top_token_ids) != len(message.top_logprobs) or math.isnan(message.logprob):
        raise InternalError("logprobs came that make no sense")
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return make(message.token_id, message.logprob, message.rank, top)


def grammar_to_proto(grammar: Grammar) -> types_pb2.Grammar:
    kind = _GRAMMAR_TO_PROTO[grammar.kind]
    return types_pb2.Grammar(kind=kind, source=grammar.source, free_until=grammar.free_until, compact=grammar.compact)


def grammar_from_proto(message: types_pb2.Grammar) -> Grammar:
    """Raises: InvalidRequestError for an unknown kind; what is in it is checked by check_sampling."""
    kind = _GRAMMAR_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidRequestError(f"grammar.kind {message.kind} is unknown", param="grammar")
    return Grammar(kind, message.source, message.free_until, message.compact)


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Every optional field is set."""
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_word_ids=[types_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        min_tokens=sampling.min_tokens,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        n=sampling.n,
        best_of=sampling.best_of,
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        early_stopping=_EARLY_TO_PROTO[sampling.early_stopping],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
    )


def sampling_from_proto(message: types_pb2.SamplingParams, *, vocab_size: int) -> SamplingParams:
    """Inside the cluster: defaults were filled in at the router.

    Raises: InvalidRequestError naming the field that is unset or out of range.
    """
    for field in _ALWAYS_SET:
        if not message.HasField(field):
            raise InvalidRequestError(f"{field} is not set", param=field)
    return check_sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        max_tokens=message.max_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_word_ids),
        min_tokens=message.min_tokens,
        include_stop_str_in_output=message.include_stop_str_in_output,
        n=message.n,
        best_of=message.best_of,
        beam_width=message.beam_width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=early_stopping_from_proto(message.early_stopping),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        vocab_size=vocab_size,
    )


def early_stopping_from_proto(value: int) -> EarlyStopping:
    """Raises: InvalidRequestError for an unknown value."""
    try:
        return _EARLY_FROM_PROTO[value]  # type: ignore[index]
    except KeyError:
        raise InvalidRequestError(f"early_stopping {value} is unknown", param="early_stopping") from None


def finish_reason_to_proto(reason: FinishReason) -> types_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: int) -> FinishReason:
    """Raises: InvalidRequestError for an unknown value."""
    try:
        return _FINISH_FROM_PROTO[value]  # type: ignore[index]
    except KeyError:
        raise InvalidRequestError(f"finish_reason {value} is unknown", param="finish_reason") from None


def compat_to_proto(compat: Compat) -> worker_pb2.Compat:
    return worker_pb2.Compat(
        model=compat.model,
        model_revision=compat.model_revision,
        tokenizer_revision=compat.tokenizer_revision,
        num_layers=compat.num_layers,
        num_kv_heads=compat.num_kv_heads,
        head_dim=compat.head_dim,
        block_size=compat.block_size,
        kv_dtype=compat.kv_dtype,
        kv_layout=compat.kv_layout,
        tensor_parallel_size=compat.tensor_parallel_size,
        attention_version=compat.attention_version,
        sampler_version=compat.sampler_version,
        protocol_version=compat.protocol_version,
        block_identity_golden=compat.block_identity_golden,
    )


def compat_from_proto(message: worker_pb2.Compat) -> Compat:
    """Raises: IncompatibleWorkersError when the peer's facts make no sense (empty, zero, unknown KV dtype)."""
    for field in ("num_layers", "num_kv_heads", "head_dim", "block_size", "tensor_parallel_size", "protocol_version"):
        if getattr(message, field) < 1:
            raise IncompatibleWorkersError(f"handshake: {field} is not set")
    for field in ("model_revision", "tokenizer_revision", "kv_layout", "attention_version", "sampler_version"):
        if not getattr(message, field):
            raise IncompatibleWorkersError(f"handshake: {field} is empty")
    if message.kv_dtype not in KV_DTYPES:
        raise IncompatibleWorkersError(f"handshake: kv_dtype {message.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    return Compat(
        model=message.model,
        model_revision=message.model_revision,
        tokenizer_revision=message.tokenizer_revision,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        kv_dtype=message.kv_dtype,
        kv_layout=message.kv_layout,
        tensor_parallel_size=message.tensor_parallel_size,
        attention_version=message.attention_version,
        sampler_version=message.sampler_version,
        protocol_version=message.protocol_version,
        block_identity_golden=message.block_identity_golden,
    )


def check_remaining(remaining_s: float) -> float:
    """Seconds until a deadline. Raises: InvalidRequestError unless finite and above 0."""
    if not math.isfinite(remaining_s) or remaining_s <= 0:
        raise InvalidRequestError(f"remaining_s must be finite and above 0, got {remaining_s:g}", param="remaining_s")
    return remaining_s


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> tuple[int, ...]:
    """Raises: InvalidRequestError when an id is outside the vocabulary."""
    ids = tuple(token_ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequestError(f"{param} must be below the vocabulary size {vocab_size}", param=param)
    return ids

"""Proto <-> common types, with strict checks: received messages are untrusted, also inside the cluster.

(KvAddress and SlabHandle belong to kvtransfer, which this package may not import: see worker/wire.py.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from diptych.common.compat import PROTOCOL_VERSION, Compat
from diptych.common.errors import ConfigError, IncompatibleWorkersError, InternalError, InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.common.kv_format import KvFormat, KvGroup, KvKind, Shard
from diptych.common.kv_parts import check_parts
from diptych.common.request import (
    ADAPTER,
    ADAPTER_FOLDER,
    MAX_CACHE_PRIORITY,
    MAX_CACHE_TTL_S,
    SESSION_BYTES,
    CacheClaim,
    Prompt,
)
from diptych.common.sampling import (
    DEFAULTS,
    LATER_FIELDS,
    SAMPLING,
    EarlyStopping,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    check_sampling,
    sampling_values,
)
from diptych.rpc.v1 import decode_pb2, prefill_pb2, types_pb2, worker_pb2

_PROTO_NAMES = tuple("bad_word_ids" if name == "bad_words" else name for name in SAMPLING)
_REQUIRED = frozenset(name for name, row in SAMPLING.items() if row.required)

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


def logprobs_to_proto(entry: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def logprobs_from_proto(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    """Raises: InternalError."""
    if len(message.top_token_ids) != len(message.top_logprobs) or math.isnan(message.logprob):
        raise InternalError("received invalid logprobs")
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def grammar_to_proto(grammar: Grammar) -> types_pb2.Grammar:
    kind = _GRAMMAR_TO_PROTO[grammar.kind]
    return types_pb2.Grammar(kind=kind, source=grammar.source, free_until=grammar.free_until, compact=grammar.compact)


def grammar_from_proto(message: types_pb2.Grammar) -> Grammar:
    """Raises: InvalidRequestError for an unknown kind; its content is checked by check_sampling."""
    kind = _GRAMMAR_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidRequestError(f"grammar.kind {message.kind} is unknown", param="grammar")
    return Grammar(kind, message.source, message.free_until, message.compact)


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Every optional field of the first version is set; a later one where it is not the default, since workers reject fields
    that they do not know."""
    values: dict[str, Any] = dict(zip(_PROTO_NAMES, sampling_values(sampling), strict=True))
    for name in LATER_FIELDS:
        if values[name] == DEFAULTS[name]:
            del values[name]
    values["logit_bias"] = dict(sampling.logit_bias) if sampling.logit_bias else None
    if sampling.bad_words:
        values["bad_word_ids"] = [types_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words]
    values["early_stopping"] = _EARLY_TO_PROTO[sampling.early_stopping]
    if sampling.grammar is not None:
        values["grammar"] = grammar_to_proto(sampling.grammar)
    return types_pb2.SamplingParams(**values)


def early_stopping_from_proto(value: int) -> EarlyStopping:
    """Raises: InvalidRequestError for an unknown value."""
    try:
        return _EARLY_FROM_PROTO[value]  # type: ignore[index]
    except KeyError:
        raise InvalidRequestError(f"early_stopping {value} is unknown", param="early_stopping") from None


_READ: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "stop_token_ids": ("stop_token_ids", tuple),
    "stop": ("stop", tuple),
    "allowed_token_ids": ("allowed_token_ids", tuple),
    "logit_bias": ("logit_bias", dict),
    "bad_word_ids": ("bad_words", lambda words: tuple(tuple(word.token_ids) for word in words)),
    "early_stopping": ("early_stopping", early_stopping_from_proto),
    "grammar": ("grammar", grammar_from_proto),
}
"""Proto field that is not a scalar -> parameter, and its conversion."""


def later_fields_of(request: prefill_pb2.PrefillRequest) -> frozenset[str]:
    """What it sets that a worker of the first version would ignore: parameters of LATER_FIELDS, and an adapter."""
    known = {field.name for field, _ in request.sampling.ListFields() if field.name in LATER_FIELDS}
    return frozenset({*known, ADAPTER, ADAPTER_FOLDER} if request.adapter else known)


def unknown_fields(message: types_pb2.SamplingParams) -> str:
    """The numbers of its fields, and of its grammar's, that this version does not know; "": none."""
    found = [UnknownFieldSet(part) for part in (message, message.grammar)]
    return ", ".join(str(part[i].field_number) for part in found for i in range(len(part)))


def sampling_from_proto(message: types_pb2.SamplingParams, *, vocab_size: int) -> SamplingParams:
    """Inside the cluster all defaults are filled in. Raises: InvalidRequestError naming the field that is unset or out
    of range; IncompatibleWorkersError for a field that this version does not know, and would ignore."""
    if unknown := unknown_fields(message):
        raise IncompatibleWorkersError(f"sampling parameters of a later version: field {unknown} is unknown here")
    values: dict[str, object] = {}
    for field, value in message.ListFields():
        name = field.name
        if name in _READ:
            name, read = _READ[name]
            values[name] = read(value)
        elif name in SAMPLING and name != "bad_words":  # texts, used by the router only
            values[name] = value
    if not values.keys() >= _REQUIRED:
        name = next(name for name in SAMPLING if name in _REQUIRED and name not in values)
        raise InvalidRequestError(f"{name} is not set", param=name)
    return check_sampling(vocab_size=vocab_size, **values)


def prompt_fields(prompt: Prompt, *, adapter_folder: str = "", with_ids: bool = True) -> dict[str, Any]:
    """The fields of a prompt in Submit and PrefillRequest.

    Args:
        adapter_folder: of the prompt's adapter, for workers that lack it.
    Raises: InternalError for values without a field in the message.
    """
    if prompt.media:
        raise InternalError("a prompt with media cannot be sent")
    ids = prompt.token_ids if with_ids else ()
    fields = {"prompt_token_ids": ids, "cache_salt": prompt.cache_salt, "adapter": prompt.adapter}
    return {**fields, "adapter_folder": adapter_folder} if prompt.adapter else fields


def prompt_from_proto(message: decode_pb2.Submit | prefill_pb2.PrefillRequest, *, vocab_size: int) -> Prompt:
    """Raises: InvalidRequestError when it is empty or an id is outside the vocabulary."""
    if not message.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    ids = check_token_ids(message.prompt_token_ids, vocab_size=vocab_size, param="prompt")
    return Prompt(ids, message.cache_salt, message.adapter)


def adapter_folder_from_proto(message: decode_pb2.Submit | prefill_pb2.PrefillRequest) -> str:
    """Where the prompt's adapter is loaded from by a worker that lacks it; empty: nowhere. Raises: InvalidRequestError."""
    if message.adapter_folder and not message.adapter:
        raise InvalidRequestError("adapter_folder is set, and adapter is not", param="adapter_folder")
    return check_folder(message.adapter_folder, "adapter_folder")


def check_folder(folder: str, param: str) -> str:
    """Raises: InvalidRequestError unless it is empty or can be an absolute path."""
    if folder and (len(folder) > MAX_FOLDER or not folder.startswith("/") or "\0" in folder):
        raise InvalidRequestError(
            f"{param} must be an absolute path of at most {MAX_FOLDER} characters, got {folder[:80]!r}", param=param
        )
    return folder


def claim_to_proto(claim: CacheClaim | None) -> types_pb2.CacheClaim | None:
    if claim is None:
        return None
    return types_pb2.CacheClaim(ttl_s=claim.ttl_s, priority=claim.priority, session=claim.session, rank=claim.rank)


def claim_from_proto(message: decode_pb2.Submit | prefill_pb2.PrefillRequest) -> CacheClaim | None:
    """That of the request, or None. Raises: InvalidRequestError."""
    if not message.HasField("claim"):
        return None
    claim = message.claim
    if not 0.0 < claim.ttl_s <= MAX_CACHE_TTL_S:
        raise InvalidRequestError(f"claim.ttl_s={claim.ttl_s} is no time", param="claim.ttl_s")
    if claim.priority > MAX_CACHE_PRIORITY:
        raise InvalidRequestError(f"claim.priority={claim.priority} is no priority", param="claim.priority")
    check_session(claim.session, "claim.session", may_be_empty=True)
    return CacheClaim(claim.ttl_s, claim.priority, claim.session, claim.rank)


def check_session(session: bytes, param: str, *, may_be_empty: bool = False) -> bytes:
    """Raises: InvalidRequestError."""
    if len(session) != SESSION_BYTES and (session or not may_be_empty):
        raise InvalidRequestError(f"{param} has {len(session)} bytes, not {SESSION_BYTES}", param=param)
    return session


def finish_reason_to_proto(reason: FinishReason) -> types_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: int) -> FinishReason:
    """Raises: InvalidRequestError for an unknown value."""
    try:
        return _FINISH_FROM_PROTO[value]  # type: ignore[index]
    except KeyError:
        raise InvalidRequestError(f"finish_reason {value} is unknown", param="finish_reason") from None


MAX_FOLDER = 4096

_KINDS = {
    KvKind.FULL: worker_pb2.KV_KIND_FULL,
    KvKind.WINDOW: worker_pb2.KV_KIND_WINDOW,
    KvKind.LATENT: worker_pb2.KV_KIND_LATENT,
    KvKind.RECURRENT: worker_pb2.KV_KIND_RECURRENT,
}
_KINDS_FROM_PROTO = {number: kind for kind, number in _KINDS.items()}
_MAX_KV_LAYERS = 4096


def kv_format_to_proto(kv: KvFormat) -> worker_pb2.KvFormat:
    groups = [
        worker_pb2.KvGroup(
            kind=_KINDS[group.kind], layers=group.layers, heads=group.heads, dims=group.dims, dtype=group.dtype,
            block_size=group.block_size, window=group.window, scale_dtype=group.scale_dtype,
            part_dtypes=group.part_dtypes,
        )
        for group in kv.groups
    ]  # fmt: skip
    return worker_pb2.KvFormat(groups=groups, shard_rank=kv.shard.rank, shard_degree=kv.shard.degree, order=kv.order)


def kv_format_from_proto(message: worker_pb2.KvFormat) -> KvFormat:
    """Raises: IncompatibleWorkersError for a size of 0, an unknown dtype or kind, or a layer in two groups."""
    if sum(len(group.layers) for group in message.groups) > _MAX_KV_LAYERS:
        raise IncompatibleWorkersError(f"handshake: KV of more than {_MAX_KV_LAYERS} layers")
    try:
        groups = tuple(
            KvGroup(
                kind=_KINDS_FROM_PROTO[group.kind], layers=tuple(group.layers), heads=group.heads,
                dims=tuple(group.dims), dtype=group.dtype, block_size=group.block_size, window=group.window,
                scale_dtype=group.scale_dtype, part_dtypes=tuple(group.part_dtypes),
            )
            for group in message.groups
        )  # fmt: skip
        return KvFormat(groups, Shard(message.shard_rank, message.shard_degree), message.order)
    except KeyError as error:
        raise IncompatibleWorkersError(f"handshake: KV group of unknown kind {error.args[0]}") from None
    except ConfigError as error:
        raise IncompatibleWorkersError(f"handshake: {error}") from None


_PLAIN_FACTS = tuple(field.name for field in fields(Compat) if field.name not in ("kv", "kv_parts"))
_MAX_PARTS = 4096


def compat_to_proto(compat: Compat) -> worker_pb2.Compat:
    plain = {name: getattr(compat, name) for name in _PLAIN_FACTS}
    parts = map(kv_format_to_proto, compat.kv_parts)
    return worker_pb2.Compat(kv=kv_format_to_proto(compat.kv), kv_parts=parts, **plain)


def compat_from_proto(message: worker_pb2.Compat) -> Compat:
    """Raises: IncompatibleWorkersError for invalid values of the peer (empty, zero, unknown dtype)."""
    if message.protocol_version < 1:
        raise IncompatibleWorkersError("handshake: protocol_version is not set")
    if not message.HasField("kv"):
        raise IncompatibleWorkersError(
            f"handshake: no KV format (protocol version {message.protocol_version}, ours is {PROTOCOL_VERSION})"
        )
    for name in ("model_revision", "tokenizer_revision", "attention_version", "sampler_version", "method"):
        if not getattr(message, name):
            raise IncompatibleWorkersError(f"handshake: {name} is empty")
    if len(message.kv_parts) > _MAX_PARTS:
        raise IncompatibleWorkersError(f"handshake: KV of more than {_MAX_PARTS} ranks")
    kv, parts = kv_format_from_proto(message.kv), tuple(map(kv_format_from_proto, message.kv_parts))
    if parts:
        try:
            check_parts(kv, parts)
        except ConfigError as error:
            raise IncompatibleWorkersError(f"handshake: {error}") from None
    return Compat(kv=kv, kv_parts=parts, **{name: getattr(message, name) for name in _PLAIN_FACTS})


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

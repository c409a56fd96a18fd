"""Facts compared in the handshake: two workers must agree on them before KV is transferred."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from diptych.common.block_identity import IdentityHeader, golden_key, identity_of
from diptych.common.kv_format import KvFormat
from diptych.common.kv_parts import numerics, shape

PROTOCOL_VERSION = 4
"""2: FirstTokens carries a digest of the computed prompt, and is rejected without it. 3: the KV format is a message of
groups; block identities cover values only."""


@dataclass(frozen=True, slots=True)
class Compat:
    """See proto Compat.

    Args:
        method: of the weights: `plain`, or the quantization method; with the degree of the ranks where that changes values.
        compute_dtype: of weights and activations.
        attention_version, sampler_version: change whenever results may change.
        backend: the kernels that compute the layers.
        batch_invariant: the worker promises tokens that do not depend on what else runs; a pair keeps it only if both do.
        kv_encryption: the cipher of KV on its way between workers; empty: none.
        kv_parts: the ranks' formats, whose whole is `kv` (common/kv_parts.py); empty: one rank.
    """

    model: str
    model_revision: str
    tokenizer_revision: str
    kv: KvFormat
    compute_dtype: str
    attention_version: str
    sampler_version: str
    block_identity_golden: bytes = b""
    method: str = "plain"
    backend: str = ""
    protocol_version: int = PROTOCOL_VERSION
    batch_invariant: bool = False
    kv_parts: tuple[KvFormat, ...] = ()
    kv_encryption: str = ""

    @property
    def parts(self) -> tuple[KvFormat, ...]:
        """By rank; `kv` where there is one."""
        return self.kv_parts or (self.kv,)

    @property
    def same_bits(self) -> bool:
        """KV of a token has the same bits whatever else its step computes, in prefill and decode alike."""
        return self.batch_invariant or self.backend in _INDEPENDENT_ROWS


_INDEPENDENT_ROWS = frozenset({"native", "fake"})
"""Back ends whose rows do not depend on each other, whatever the settings."""


CONVERTIBLE = frozenset(
    {"block_size", "kv_dtype", "kv_scale_dtype", "kv_layout", "compute_dtype", "block_identity_golden"}
)
"""Facts that may differ where decode converts KV (`allow_kv_conversion`). The golden identity follows from the dtypes."""

CONVERTS = "kv_conversion"
"""In the store, beside the facts of a worker that accepts KV of other layouts."""

KV_RULE = "kv_rule"
"""In the store: `KvFormat.value_rule`, for the router's block identities. It follows from other facts."""


KV_PARTS = "kv_parts"
"""Which rank has what. It may differ: the layout of KV, and not its values."""

NUMERICS = "numerics"
"""In which order the ranks' sums are added up: a fact where batch invariance is promised, of more than one rank."""
_ONE_RANK = numerics(())

_UNSAID = frozenset({"batch_invariant", "kv_encryption"})
"""Not among the facts where they are off."""


def facts(compat: Compat) -> dict[str, str]:
    """Every fact by name, including those of the KV format; bytes as hexadecimal digits. A promise that is not made is left
    out."""
    out = {}
    for field in fields(Compat):
        value = getattr(compat, field.name)
        if field.name == KV_PARTS:
            if value:
                out[field.name] = shape(value)
        elif field.name in _UNSAID and not value:  # as by a worker that does not know the fact
            continue
        elif isinstance(value, KvFormat):
            out.update(value.facts())
        else:
            out[field.name] = value.hex() if isinstance(value, bytes) else str(value)
    if compat.batch_invariant and (order := numerics(compat.kv_parts)) != _ONE_RANK:
        out[NUMERICS] = order
    return out


def unset(name: str) -> str:
    """What a fact that is left out means, for people."""
    return _ONE_RANK if name == NUMERICS else "unset"


def differences(mine: Compat, theirs: Compat, *, converting: bool = False) -> list[str]:
    """Facts that differ, each as "name: mine X, theirs Y". An empty list: KV may be transferred, if the ranks' parts fit
    (planner.check_parts_fit). `converting`: ignore what decode can convert."""
    a, b = facts(mine), facts(theirs)
    passed_over = {KV_PARTS, *(CONVERTIBLE if converting else ())}
    return [
        f"{name}: mine {a.get(name, unset(name))}, theirs {b.get(name, unset(name))}"
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name) and name not in passed_over
    ]


def as_strings(compat: Compat) -> dict[str, str]:
    """The form in the store."""
    return {**facts(compat), KV_RULE: compat.kv.value_rule}


def identified(compat: Compat, key: bytes) -> tuple[IdentityHeader, Compat]:
    """The header under which a worker with these facts names its blocks, and the facts with its golden identity. `key`:
    32 bytes, derived from the cluster secret."""
    header = identity_of(key, as_strings(compat), block_size=compat.kv.block_size)
    assert header is not None, "as_strings() has every fact"
    return header, replace(compat, block_identity_golden=golden_key(header))

"""Compatibility of workers with each other and with the router, from the `compat` maps of the leases. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.common.block_identity import GOLDEN, IDENTITY_FACTS, IdentityHeader, golden_key, identity_of
from diptych.common.compat import CONVERTIBLE, CONVERTS, KV_PARTS, KV_RULE, unset
from diptych.common.store.worker_record import WorkerRecord


def pair_differences(prefill: Mapping[str, str], decode: Mapping[str, str]) -> list[str]:
    """Fields that differ, each as "field: prefill X, decode Y"; an empty list: KV may be transferred, after a
    conversion where decode supports it. The golden key is a hash of others: it is left out where one of these differs."""
    passed_over = {CONVERTS, KV_PARTS, KV_RULE, *(CONVERTIBLE if decode.get(CONVERTS) else ())}
    names = [
        name
        for name in sorted(prefill.keys() | decode.keys())
        if prefill.get(name) != decode.get(name) and name not in passed_over
    ]
    if any(name in IDENTITY_FACTS or name in CONVERTIBLE for name in names if name != GOLDEN):
        names = [name for name in names if name != GOLDEN]
    return [
        f"{name}: prefill {prefill.get(name, unset(name))}, decode {decode.get(name, unset(name))}" for name in names
    ]


@dataclass(slots=True)
class RouterCheck:
    """What a worker must share with this router. Results are cached per incarnation.

    Args:
        model_revision, tokenizer_revision: of the router's model folder; model_revision "" (a folder without weights)
            accepts any.
        identity_key: derived from the cluster secret.
    """

    model_revision: str
    tokenizer_revision: str
    identity_key: bytes
    _headers: dict[tuple[str, ...], tuple[IdentityHeader | None, str]] = field(default_factory=dict)

    def header(self, record: WorkerRecord) -> IdentityHeader | None:
        return self._checked(record)[0]

    def why_not(self, record: WorkerRecord) -> str:
        """Why this router must not use the worker, or ""."""
        return self._checked(record)[1]

    def _checked(self, record: WorkerRecord) -> tuple[IdentityHeader | None, str]:
        facts = (record.worker_id, record.incarnation, record.model, str(record.block_size))
        if facts not in self._headers:
            if len(self._headers) > 4096:
                self._headers.clear()
            self._headers[facts] = self._check(record)
        return self._headers[facts]

    def _check(self, record: WorkerRecord) -> tuple[IdentityHeader | None, str]:
        for name, mine in (("model_revision", self.model_revision), ("tokenizer_revision", self.tokenizer_revision)):
            theirs = record.compat.get(name, "unset")
            if mine and theirs != mine:
                return None, f"{name}: worker {theirs}, router {mine}"
        header = identity_of(
            self.identity_key, record.compat, block_size=record.block_size, tokenizer_revision=self.tokenizer_revision
        )
        if header is None:
            missing = ", ".join(name for name in IDENTITY_FACTS if name not in record.compat)
            return None, f"its lease does not name {missing} (another version)"
        block_size = record.compat.get("block_size", str(record.block_size))  # absent where groups have their own
        if block_size != str(record.block_size):
            return None, f"block_size: lease {record.block_size}, compat {block_size}"
        golden = golden_key(header).hex()
        theirs = record.compat.get(GOLDEN, "unset")
        if theirs != golden:
            return None, f"block identity: worker {theirs}, router {golden} (another cluster secret or version)"
        return header, ""

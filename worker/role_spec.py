"""What a worker's role is, as a value: which part of the transfer's arena it uses. The role itself is in role.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Args:
    publishes: packs KV into slabs that others read.
    reads: reads slabs that others published.
    """

    name: str
    publishes: bool = False
    reads: bool = False


ROLES: Mapping[str, RoleSpec] = {
    spec.name: spec for spec in (RoleSpec("prefill", publishes=True), RoleSpec("decode", reads=True))
}

"""What a worker's role is, as a value: the services that a worker of this role offers. The services are in role.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PACKAGE = "diptych.rpc.v1"
PREFILL, DECODE, SOURCE = "prefill", "decode", "source"
FULL_NAMES: Mapping[str, str] = {name: f"{PACKAGE}.{name.capitalize()}" for name in (PREFILL, DECODE, SOURCE)}
"""The gRPC service of each service."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Args:
    number: in the proto's WorkerRole.
    services: names of the services, in the order in which they are opened.
    publishes: it packs KV into slabs all the time, where others do it now and then. The opposite for reading.
    """

    name: str
    number: int
    services: tuple[str, ...]
    publishes: bool = False


ROLES: Mapping[str, RoleSpec] = {
    spec.name: spec
    for spec in (RoleSpec("prefill", 1, (PREFILL, SOURCE), publishes=True), RoleSpec("decode", 2, (DECODE, SOURCE)))
}

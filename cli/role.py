"""`diptych role WORKER ROLE`: change what a worker does. It ends when a router places on it in its new role."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from diptych.cli.worker_access import WorkerAccess
from diptych.common.errors import ConfigError, DiptychError, NoWorkerError
from diptych.rpc.errors import describe, from_rpc_error, typed_error
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import worker_pb2
from diptych.worker.role_spec import ROLES

POLL_S = 0.5


class Status(Protocol):
    def get(self) -> dict[str, Any]:
        """A router's /status.json. Raises: NoWorkerError when it cannot be reached."""
        ...


def set_role(
    address: str, worker: dict[str, Any], role: str, *, force: bool, access: WorkerAccess, timeout_s: float
) -> str:
    """Ask the worker for the role, and wait until it has it. Returns: the role before. Raises: DiptychError."""
    number: Any = ROLES[role].number
    request = worker_pb2.SetRoleRequest(
        worker_id=worker["id"], incarnation=worker["incarnation"], role=number, force=force
    )
    with access.open(address) as channel:
        try:
            answer = WorkerStub(channel).SetRole(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _named(error, worker["id"], address) from None
    return next(name for name, spec in ROLES.items() if spec.number == answer.previous)


def _named(error: grpc.RpcError, worker_id: str, address: str) -> DiptychError:
    """The error of a call to the worker, in words if none was reached."""
    if typed_error(error) is not None or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return from_rpc_error(error)
    why = describe(error)
    seen = "is not running" if "refused" in why else f"cannot be reached: {why}"
    return NoWorkerError(f"worker {worker_id} at {address} {seen}")


def run_role(
    router: Status,
    worker: str,
    role: str,
    *,
    timeout_s: float,
    force: bool = False,
    access: WorkerAccess = WorkerAccess(),  # noqa: B008 - frozen
    ask: Callable[..., str] = set_role,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Returns: 0; 1 when the router does not place on the worker in its new role in time.

    Raises: ConfigError for an unknown worker or role; DiptychError when the worker or the router refuses, or cannot be reached.
    """
    if role not in ROLES:
        raise ConfigError("role", role, f"must be {' or '.join(ROLES)}")
    until = now() + timeout_s
    known = {one["id"]: one for one in router.get()["cluster"]["workers"]}
    if worker not in known:
        raise ConfigError(
            "worker", worker, f"the router has no such worker; it has: {', '.join(sorted(known)) or 'none'}"
        )
    before = ask(known[worker]["address"], known[worker], role, force=force, access=access, timeout_s=timeout_s)
    if before == role:
        print(f"{worker} is a {role} worker already")
        return 0
    while True:
        why = _why_not(router, worker, role)
        if not why:
            print(f"{worker} was a {before} worker, and is a {role} worker now", flush=True)
            return 0
        if now() >= until:
            print(f"error: {worker} is a {role} worker, but the router does not use it yet: {why}", file=sys.stderr)
            return 1
        sleep(POLL_S)


def _why_not(router: Status, worker: str, role: str) -> str:
    try:
        workers = router.get()["cluster"]["workers"]
    except NoWorkerError as error:
        return error.message
    found = next((one for one in workers if one["id"] == worker), None)
    if found is None:
        return "the router does not see it"
    if found["role"] != role:
        return "the router still sees the old role"
    why: str = found["why_not"]
    return why

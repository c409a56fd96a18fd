"""What the ranks of one worker say to each other while they compute a step.

Every rank makes the same calls in the same order. Each of them has a deadline: with a peer that is gone or stands still it
raises RunnerLost, and this rank can compute nothing any more.
"""

from __future__ import annotations

import logging
import re
import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.exec.methods.base import LoadedLinear, StepRows
from diptych.engine.exec.parallel.inboxes import SLOT_BYTES, Inboxes, can_share
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.runner import RunnerLost

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_dist: Any = torch.distributed  # which does not say that it exports its stores
_SOURCE = re.compile(r"^\[[^]]*\] ")
"""A place in gloo's own sources, which its messages begin with."""
_MOST_SENDS = 8
"""Sends on their way; the next one waits for the oldest."""


class Communicator(Protocol):
    """Of one rank. Its tensor-parallel group are the ranks of its stage; tensors are on the device of the model.

    on_progress: called before and after each operation: this rank is not stuck in between two of them.
    """

    place: RankPlace
    on_progress: Callable[[], None]

    def all_reduce(self, x: Tensor) -> Tensor:
        """x: [rows, n], this rank's addend. Returns: [rows, n], the sum over the tensor-parallel group: ((r0 + r1) + r2) + ...
        in float32, rounded once to x's dtype. The same bits on every rank; a row's do not depend on the other rows. x may be
        overwritten."""
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """x: [rows, n], this rank's columns. Returns: [rows, n * tensor_parallel] on every rank, in the order of the ranks."""
        ...

    def send(self, x: Tensor) -> None:
        """To the same rank of the next stage, which calls `receive`. x: [rows, width]; not written any more. Does not wait for
        the other rank."""
        ...

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """From the same rank of the stage before. Returns: [rows, width], a new tensor."""
        ...

    def agree_min(self, value: int) -> int:
        """The smallest value of all ranks of all stages."""
        ...

    def close(self) -> None:
        """Idempotent. Peers that wait for this rank get RunnerLost."""
        ...


def add_in_order(parts: list[Tensor]) -> Tensor:
    """The sum that `all_reduce` promises. parts: of the ranks, in their order; the first one may be overwritten."""
    total = parts[0] if parts[0].dtype == torch.float32 else parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


class HostCommunicator:
    """Implements Communicator over gloo: between processes of one host, or of several. Where the ranks of a stage are on one
    host, rows of up to SLOT_BYTES go through memory that they share (parallel.inboxes).

    Every rank gathers the addends of all others and adds them up itself: the order of the sum is that of the ranks, and with
    two ranks no other way moves fewer bytes.

    Args:
        rendezvous: where the ranks find each other: "file:///folder/file" that only this user can open, whose ranks then talk
            over the loopback interface; or "tcp://host:port", where rank 0 listens, on this address only. Nobody proves who he
            is there: the network is a private one.
        deadline_s: of each operation, and of the wait for the other ranks here.
        host: this machine's own address, for "tcp://"; empty: the one that its name has.
        stage_on_one_host: also for "tcp://": the ranks of each stage are processes of one user on one machine.
    Raises: ConfigError for a rendezvous of another form; RunnerLost when the other ranks do not come.
    """

    def __init__(
        self, place: RankPlace, *, rendezvous: str, deadline_s: float, host: str = "", stage_on_one_host: bool = False
    ) -> None:
        self.place = place
        self.on_progress: Callable[[], None] = lambda: None
        self._deadline = timedelta(seconds=deadline_s)
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self.store, device = self._guarded(lambda: _meet(rendezvous, place, self._deadline, host))
        """Where the ranks met, for groups of other kinds."""
        self._world = self._group(self.store, "world", place.rank, place.num_ranks, device)
        shard = place.shard
        self._peers = self._group(self.store, f"stage{place.stage}", shard.rank, shard.degree, device)
        self._inboxes: Inboxes | None = None
        self.one_host = rendezvous.startswith("file:")
        """All ranks are on this one."""
        self.stage_on_one_host = self.one_host or stage_on_one_host
        if self.stage_on_one_host and shard.degree > 1 and can_share():
            self._inboxes = self._share()

    def _share(self) -> Inboxes | None:
        """Memory for the ranks of this stage; None where one of them cannot map it."""
        shard, name, found = self.place.shard, f"inboxes{self.place.stage}", None
        self.store.set_timeout(self._deadline)
        try:
            where = "" if shard.rank == 0 else self._guarded(lambda: self.store.get(name)).decode()
            found = Inboxes(shard.rank, shard.degree, where=where, deadline_s=self._deadline.total_seconds())
        except OSError as error:
            _log.warning("ranks exchange rows over sockets, which takes longer: %s", error)
        if shard.rank == 0:
            self.store.set(name, "" if found is None else found.address)
        agreed = self._by_gloo(torch.tensor([[found is not None]]))
        return found if all(bool(one) for one in agreed) else None

    def _group(self, store: Any, name: str, rank: int, size: int, device: Any) -> Any:
        options = _dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = self._deadline, [device]
        own = _dist.PrefixStore(name, store)
        return self._guarded(lambda: _dist.ProcessGroupGloo(own, rank, size, options))

    def _guarded(self, step: Callable[[], _T]) -> _T:
        """Raises: RunnerLost in place of torch's errors."""
        self.on_progress()
        try:
            return step()
        except RuntimeError as error:
            reason = _SOURCE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
            raise RunnerLost(f"rank {self.place.rank} waited for its peers in vain: {reason}") from None
        finally:
            self.on_progress()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator."""
        return x if self.place.tensor_parallel == 1 else add_in_order(self._gathered(x)).to(x.device)

    def gather_columns(self, x: Tensor) -> Tensor:
        """See Communicator."""
        return x if self.place.tensor_parallel == 1 else torch.cat(self._gathered(x), dim=1).to(x.device)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """In host memory."""
        own, inboxes = x.cpu().contiguous(), self._inboxes
        if inboxes is None or own.nbytes > SLOT_BYTES:
            return self._by_gloo(own)
        out = torch.empty((self.place.tensor_parallel, *own.shape), dtype=own.dtype)
        into = out.view(len(out), -1).view(torch.uint8)
        self._guarded(lambda: inboxes.exchange(_bytes(own), into))
        return list(out.unbind())

    def _by_gloo(self, own: Tensor) -> list[Tensor]:
        out = torch.empty((self.place.tensor_parallel, *own.shape), dtype=own.dtype)
        parts = list(out.unbind())
        self._guarded(lambda: self._peers.allgather([[_bytes(part) for part in parts]], [_bytes(own)]).wait())
        return parts

    def send(self, x: Tensor) -> None:
        """See Communicator."""
        if len(self._sends) >= _MOST_SENDS:
            self._guarded(lambda: self._sends.popleft()[0].wait())
        sent = _bytes(x.cpu().contiguous())
        target = self.place.rank + self.place.tensor_parallel
        self._sends.append((self._guarded(lambda: self._world.send([sent], target, 0)), sent))

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        x = torch.empty((rows, width), dtype=dtype)
        source = self.place.rank - self.place.tensor_parallel
        self._guarded(lambda: self._world.recv([_bytes(x)], source, 0).wait())
        return x

    def agree_min(self, value: int) -> int:
        """See Communicator."""
        mine = torch.tensor([value], dtype=torch.int64)
        all_of_them = list(torch.empty(self.place.num_ranks, dtype=torch.int64).unsqueeze(1).unbind())
        self._guarded(lambda: self._world.allgather([all_of_them], [mine]).wait())
        return min(int(one) for one in all_of_them)

    def close(self) -> None:
        """See Communicator."""
        if self._inboxes is not None:
            self._inboxes.close()
        self._sends.clear()
        self._world = self._peers = None


def _bytes(x: Tensor) -> Tensor:
    """The same memory, [n] uint8: gloo then needs to know no dtype."""
    return x.view(-1).view(torch.uint8)


def _meet(rendezvous: str, place: RankPlace, deadline: timedelta, host: str) -> tuple[Any, Any]:
    """Returns: the store over which ranks find each other, and the interface on which they talk. Raises: ConfigError;
    RuntimeError."""
    where = urlsplit(rendezvous)
    if where.scheme == "file" and Path(where.path).is_absolute():
        device = _dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        return _dist.FileStore(where.path, place.num_ranks), device
    try:
        known = where.scheme == "tcp" and bool(where.hostname) and bool(where.port)
    except ValueError:
        known = False
    if not known or where.hostname is None or where.port is None:
        raise ConfigError("rendezvous", rendezvous, "must be file:///absolute/path or tcp://host:port")
    listening = _listen(rendezvous, where.hostname, where.port) if place.rank == 0 else None
    store = _dist.TCPStore(
        where.hostname, where.port, place.num_ranks, place.rank == 0, timeout=deadline, master_listen_fd=listening
    )
    device = (
        _dist.ProcessGroupGloo.create_device(hostname=host) if host else _dist.ProcessGroupGloo.create_default_device()
    )
    return store, device


def _listen(rendezvous: str, host: str, port: int) -> int:
    """The descriptor of a socket on this address; torch itself would listen on every interface. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family).detach()
    except OSError as error:
        raise ConfigError("rendezvous", rendezvous, f"cannot listen there: {error.strerror or error}") from None


class ReducedLinear:
    """A layer that is divided by inputs, outermost, over its method and its adapters: the ranks' results are added up."""

    __slots__ = ("_inner", "_communicator")

    def __init__(self, inner: LoadedLinear, communicator: Communicator) -> None:
        """Args: inner: with the bias on rank 0 only, as methods load it."""
        self._inner, self._communicator = inner, communicator

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        return self._communicator.all_reduce(self._inner(x, step))


class GatheredLinear:
    """A layer that is divided by outputs, whose results every rank wants whole: the head."""

    __slots__ = ("inner", "_communicator")

    def __init__(self, inner: LoadedLinear, communicator: Communicator) -> None:
        self.inner, self._communicator = inner, communicator

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        return self._communicator.gather_columns(self.inner(x, step))

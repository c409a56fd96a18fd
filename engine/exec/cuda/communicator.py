"""What the ranks of one host say to each other on their GPUs.

    few bytes       one launch over inboxes that the GPUs write into each other's (kernels/triton_all_reduce.py)
    many bytes      NCCL
    same card       NCCL refuses two ranks on one GPU: all over inboxes, piece by piece

Both can be captured in graphs, and neither syncs. The host's group (gloo) carries handles and numbers, before any step.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.exec.cuda.peer_memory import PeerMemory
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.parallel.communicator import HostCommunicator
from diptych.engine.runner import RunnerLost
from diptych.kernels.triton_all_reduce import (
    PROGRAMS,
    WORD_BYTES,
    Inboxes,
    all_reduce_norm,
    gather_columns,
    one_shot_all_reduce,
)
from diptych.kernels.triton_quantize import QuantizedRows

ROOM = 1 << 20
"""Words that a rank may send at once: 4 MiB of elements."""
ONE_SHOT_BYTES = 4 << 20
"""Messages of more bytes are NCCL's: see docs/measurements/gpu-ranks.md."""
_READ_S = 5e-7
"""One look for words that have not come yet."""
_MOST_READS = 2**31 - 1


def reads_of(deadline_s: float) -> int:
    """See Inboxes.limit."""
    return min(_MOST_READS, int(deadline_s / _READ_S))


class CudaCommunicator:
    """Implements Communicator on this thread's GPU.

    Args:
        host: of the same ranks. Those of a stage that are on one host can map each other's memory; if all of them are, NCCL
            meets on the loopback interface.
        deadline_s: of each wait for another rank.
    Raises: ConfigError where GPUs neither reach each other's memory nor have NCCL; RunnerLost.
    """

    def __init__(self, host: HostCommunicator, *, deadline_s: float) -> None:
        self.place, self._host = host.place, host
        if host.one_host:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self.on_progress: Callable[[], None] = lambda: None
        self._device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize(self._device)  # its context is this thread's from here on
        self._failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._failed_here = self._failed.numpy()
        shard = self.place.shard
        self._rank, self._degree = shard.rank, shard.degree
        self.one_shot_bytes = ONE_SHOT_BYTES
        self._memory, trouble = self._opened(deadline_s)
        self._peers: Any = None
        self._world: Any = None
        if self._has_own_card():
            self._peers = self._group(f"nccl-stage{self.place.stage}", self._rank, self._degree, deadline_s)
            if self.place.pipeline > 1:
                self._world = self._group("nccl-world", self.place.rank, self.place.num_ranks, deadline_s)
        elif trouble is not None:
            raise trouble

    def _opened(self, deadline_s: float) -> tuple[PeerMemory | None, ConfigError | None]:
        """The inboxes of the tensor-parallel group. Returns: None and why where one of the ranks cannot reach another's."""
        self._inboxes: Inboxes | None = None
        if self._degree == 1:
            return None, None
        trouble: ConfigError | None = None
        memory: PeerMemory | None = None
        handle = bytes(64)
        if not self._host.stage_on_one_host:
            return None, ConfigError("device", "cuda", "a stage on several hosts needs NCCL, and a GPU for each rank")
        try:
            memory = PeerMemory(2 * self._degree * ROOM * WORD_BYTES)
            handle = memory.handle()
        except ConfigError as error:
            trouble = error
        handles = self._told(handle)
        addresses: list[int] = []
        if memory is not None and trouble is None and all(any(one) for one in handles):
            try:
                for rank, one in enumerate(handles):
                    addresses.append(memory.address if rank == self._rank else memory.open(one))
            except ConfigError as error:
                trouble = error
        if self._host.agree_min(int(len(addresses) == self._degree)):
            self._inboxes = Inboxes(
                self._rank,
                self._degree,
                tuple(addresses),
                ROOM,
                torch.zeros(PROGRAMS, dtype=torch.int32, device=self._device),
                torch.full((1,), reads_of(deadline_s), dtype=torch.int32, device=self._device),
                self._failed,
            )
            return memory, None
        return memory, trouble or ConfigError(
            "tensor_parallel_size", self._degree, "a rank's GPU reaches no other's memory"
        )

    def _told(self, mine: bytes) -> list[bytes]:
        """What each rank of the tensor-parallel group says; all of the same length."""
        said = self._host.gather_columns(torch.frombuffer(bytearray(mine), dtype=torch.uint8).unsqueeze(0))
        raw = bytes(said.numpy())
        return [raw[i : i + len(mine)] for i in range(0, len(raw), len(mine))]

    def _has_own_card(self) -> bool:
        """Whether each rank has a card of its own, on every rank the same answer."""
        if not dist.is_nccl_available() or self.place.num_ranks == 1:
            return False
        mine = str(torch.cuda.get_device_properties(self._device).uuid).encode()
        cards = self._told(mine)
        return bool(self._host.agree_min(int(len(set(cards)) == len(cards))))

    def _group(self, name: str, rank: int, size: int, deadline_s: float) -> Any:
        made: Any = dist  # parts of it are not typed
        options = made.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline_s)
        group = made.ProcessGroupNCCL(made.PrefixStore(name, self._host.store), rank, size, options)
        with self._guarded():  # connects
            group.allreduce([torch.zeros(1, device=self._device)]).wait()
            torch.cuda.synchronize(self._device)
        return group

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        self.on_progress()
        try:
            yield
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            raise RunnerLost(f"rank {self.place.rank} waited for its peers in vain: {reason}") from None
        finally:
            self.on_progress()

    def check(self) -> None:
        """Where the host has waited for what the GPU computed. Raises: RunnerLost when a wait for another rank ended in vain."""
        if self._failed_here[0]:
            raise RunnerLost(f"rank {self.place.rank} waited for its peers in vain: no words came from one of them")

    def _is_small(self, x: Tensor, columns: int | None = None) -> bool:
        inboxes = self._inboxes
        if inboxes is None or not x.is_contiguous() or not inboxes.holds(x, columns):
            return False
        return self._peers is None or x.nbytes <= self.one_shot_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator."""
        if self._degree == 1:
            return x
        with self._guarded():
            if self._inboxes is not None and self._is_small(x):
                return one_shot_all_reduce(x, self._inboxes)
            if self._peers is None:
                return self._piece_by_piece(x)
            x = x.contiguous()
            if self._degree == 2:  # either order has the same sum
                self._peers.allreduce([x]).wait()
                return x
            return self._in_order(x)

    def _piece_by_piece(self, x: Tensor) -> Tensor:
        assert self._inboxes is not None
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat, into = x.reshape(-1), out.view(-1)
        step = self._inboxes.most(x)
        for first in range(0, flat.shape[0], step):
            into[first : first + step] = one_shot_all_reduce(flat[first : first + step].contiguous(), self._inboxes)
        return out

    def _in_order(self, x: Tensor) -> Tensor:
        """NCCL adds in an order that depends on the size: each rank adds up a share of the rows here."""
        rows, n = x.shape
        share = -(-rows * n // self._degree)
        flat = torch.nn.functional.pad(x.view(-1), (0, share * self._degree - rows * n)).view(self._degree, share)
        parts = torch.empty_like(flat)
        self._peers.alltoall_base(parts, flat, [], []).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        whole = torch.empty_like(flat)
        self._peers._allgather_base(whole, total.to(x.dtype)).wait()
        return whole.view(-1)[: rows * n].view(rows, n)

    def all_reduce_norm(
        self, x: Tensor, norm: RmsNorm, residual: Tensor, wanted: str | None
    ) -> Tensor | QuantizedRows | None:
        """residual += the sum over the ranks. Args: x: this rank's addend, or [splits, rows, size] fp32 whose sum it is.
        Returns: norm(residual), quantized where a kind is wanted; None: the message is too large, nothing was done."""
        if self._inboxes is None or not x.is_contiguous() or not self._is_small(residual, residual.shape[1]):
            return None
        with self._guarded():
            return all_reduce_norm(x, norm.weight, norm.eps, residual, self._inboxes, offset=norm.offset, kind=wanted)

    def gather_columns(self, x: Tensor) -> Tensor:
        """See Communicator."""
        if self._degree == 1:
            return x
        with self._guarded():
            if self._inboxes is not None and self._is_small(x, x.shape[1]):
                return gather_columns(x, self._inboxes)
            rows, n = x.shape
            x = x.contiguous()
            if self._peers is None:
                return self._gathered_in_pieces(x)
            parts = torch.empty((self._degree, rows, n), dtype=x.dtype, device=x.device)
            self._peers._allgather_base(parts, x).wait()
            return parts.transpose(0, 1).reshape(rows, n * self._degree)

    def _gathered_in_pieces(self, x: Tensor) -> Tensor:
        assert self._inboxes is not None
        rows, n = x.shape
        even = self._inboxes.holds(x[:0], n)
        if not even:
            x = torch.nn.functional.pad(x, (0, 1))
        step = max(1, self._inboxes.most(x) // x.shape[1])
        out = torch.cat([gather_columns(x[i : i + step], self._inboxes) for i in range(0, rows, step)])
        return out if even else out.view(rows, self._degree, n + 1)[:, :, :n].reshape(rows, -1)

    def send(self, x: Tensor) -> None:
        """See Communicator."""
        if self._world is None:
            self._host.send(x)
            return
        with self._guarded():
            self._world.send([x.contiguous()], self.place.rank + self.place.tensor_parallel, 0).wait()

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        if self._world is None:
            return self._host.receive(rows, width, dtype).to(self._device)
        x = torch.empty((rows, width), dtype=dtype, device=self._device)
        with self._guarded():
            self._world.recv([x], self.place.rank - self.place.tensor_parallel, 0).wait()
        return x

    def agree_min(self, value: int) -> int:
        """See Communicator."""
        return self._host.agree_min(value)

    def close(self) -> None:
        """See Communicator. Kernels of other ranks that write here have ended, or their process has."""
        for group in (self._peers, self._world):
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.abort()
        self._peers = self._world = self._inboxes = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._host.close()

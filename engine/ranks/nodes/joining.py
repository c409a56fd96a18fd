"""How a process of another host joins a worker's executor: the messages, and who is admitted. Pure.

    both    CHALLENGE   32 random bytes
    other   HELLO       a MAC, and who it is: a node's process, or a rank that this process has started
    worker  WELCOME     a MAC, and which ranks the node has; or REFUSED with the setting that is wrong

Both MACs are keyed by the cluster secret and are over both challenges, so each side knows that the other one has the secret,
and neither can use what it saw earlier. Where the cluster has certificates, all of it goes over TLS.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.common.secret import derive_key

CHALLENGE_BYTES = 32
MAC_BYTES = 32
MOST_GREETING_BYTES = 1 << 16
"""Of a greeting: from a process that may not have the secret."""
NODE, RANK = "node", "rank"
FROM_WORKER, FROM_OTHER = b"worker", b"other"


class Hello(msgspec.Struct, frozen=True):
    """Args (fields):
    kind: NODE or RANK.
    nnodes, tensor_parallel, pipeline: as this host was told; 0: it was not.
    rank, attempt: of a rank: its number, and that of the start for which its node was admitted.
    """

    kind: str
    version: str
    node_rank: int
    nnodes: int = 0
    tensor_parallel: int = 0
    pipeline: int = 0
    rank: int = -1
    attempt: str = ""


class Welcome(msgspec.Struct, frozen=True):
    """Args (fields): first_rank, num_ranks: those of the node. attempt: a name of this start of the worker."""

    first_rank: int
    num_ranks: int
    attempt: str
    silence_s: float


class Refusal(msgspec.Struct, frozen=True):
    """A ConfigError."""

    field: str
    value: str
    rule: str

    def error(self) -> ConfigError:
        return ConfigError(self.field, self.value, self.rule)


def refusal_of(error: ConfigError) -> Refusal:
    """To be sent."""
    return Refusal(error.field, str(error.value), error.rule)


@dataclass(frozen=True, slots=True)
class Group:
    """The hosts of one worker. Node 0 is the worker's own; each has equally many ranks, in their order.

    Args: silence_s: see Watch.
    """

    version: str
    nnodes: int
    tensor_parallel: int
    pipeline: int
    attempt: str
    silence_s: float

    @property
    def ranks_of_a_node(self) -> int:
        return self.tensor_parallel * self.pipeline // self.nnodes

    def ranks_of(self, node_rank: int) -> range:
        """Args: node_rank: 0 to nnodes - 1."""
        first = node_rank * self.ranks_of_a_node
        return range(first, first + self.ranks_of_a_node)

    def welcome(self, node_rank: int) -> Welcome:
        return Welcome(node_rank * self.ranks_of_a_node, self.ranks_of_a_node, self.attempt, self.silence_s)


def check(hello: Hello, group: Group, nodes: Collection[int], ranks: Collection[int]) -> None:
    """Args: nodes, ranks: that have joined. Raises: ConfigError naming what is wrong on the other host."""
    if hello.version != group.version:
        raise ConfigError("version", hello.version, f"the worker runs Diptych {group.version}: use the same everywhere")
    if not 1 <= hello.node_rank < group.nnodes:
        rule = f"the worker has nodes 0 to {group.nnodes - 1} (--nnodes {group.nnodes}), and is node 0 itself"
        raise ConfigError("node_rank", hello.node_rank, rule)
    for name, told, own in (
        ("nnodes", hello.nnodes, group.nnodes),
        ("tensor_parallel_size", hello.tensor_parallel, group.tensor_parallel),
        ("pipeline_parallel_size", hello.pipeline, group.pipeline),
    ):
        if told and told != own:
            raise ConfigError(name, told, f"the worker was started with {own}")
    if hello.kind == RANK:
        _check_rank(hello, group, nodes, ranks)
    elif hello.kind != NODE:
        raise ConfigError("kind", hello.kind, f"must be {NODE} or {RANK}")
    elif hello.node_rank in nodes:
        raise ConfigError("node_rank", hello.node_rank, "another host has joined with it: give each host its own")


def _check_rank(hello: Hello, group: Group, nodes: Collection[int], ranks: Collection[int]) -> None:
    if hello.attempt != group.attempt or hello.node_rank not in nodes:
        raise ConfigError("attempt", hello.attempt, "is not this start of the worker")
    if hello.rank not in group.ranks_of(hello.node_rank) or hello.rank in ranks:
        raise ConfigError("rank", hello.rank, f"is not expected of node {hello.node_rank}")


def joining_key(secret: bytes) -> bytes:
    """Key of the MACs. Args: secret: the cluster's."""
    return derive_key(secret, "ranks on several hosts")


@dataclass(frozen=True, slots=True)
class Greeting:
    """The two challenges of one connection, and the key."""

    key: bytes
    worker: bytes
    other: bytes

    def sealed(self, side: bytes, body: bytes) -> bytes:
        """Args: side: FROM_WORKER or FROM_OTHER. Returns: the MAC and the body."""
        return self._mac(side, body) + body

    def opened(self, side: bytes, data: bytes) -> bytes | None:
        """The body of what the other side sealed; None: it does not have the secret."""
        mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
        return body if hmac.compare_digest(mac, self._mac(side, body)) else None

    def _mac(self, side: bytes, body: bytes) -> bytes:
        parts = bytes((len(side),)) + side + self.worker + self.other + body
        return blake3(parts, key=self.key).digest(MAC_BYTES)

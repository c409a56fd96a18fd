"""How commands call the workers of a cluster: by its certificate, or by its secret."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

    from diptych.common.tls import ClusterTls


@dataclass(frozen=True, slots=True)
class WorkerAccess:
    """The access.

    Args:
        tls: for a cluster with mTLS.
        secret: of the cluster; empty: unknown, and a worker without mTLS refuses calls.
    """

    tls: ClusterTls | None = None
    secret: bytes = field(default=b"", repr=False)

    def open(self, address: str) -> grpc.Channel:
        """A channel to the worker at host:port."""
        from diptych.common.secret import call_key, call_token
        from diptych.rpc.channels import open_sync_channel

        return open_sync_channel(address, self.tls, call_token(call_key(self.secret), address) if self.secret else "")

"""Settings of the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.common.errors import ConfigError
from diptych.kvtransfer.fabric import registry
from diptych.kvtransfer.slabs.layout import RingSpec, SlabQuotas
from diptych.kvtransfer.wrappers.ciphers import OFF
from diptych.kvtransfer.wrappers.encryption import check_mode
from diptych.kvtransfer.wrappers.faults import FaultSpec


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Raises: ConfigError.

    Args:
        transport: a name of kvtransfer/fabric/registry.py, or "auto": the first that passes its self-test here, named in the log.
            Both workers of a pair must use the same one.
        device: "cpu" or "cuda": where the pool is.
        host: address of ours that the transport binds to and advertises; no other interface listens.
        slab_bytes: whole slab with header and trailer, a multiple of the page size.
        num_slabs: of each part of the arena that is used, unless `quotas` is set.
        quotas: of the arena's two parts; None: by what the worker's role does.
        peer_quota: slabs to read into that one peer may keep busy; 0: three quarters of them.
        quarantine_cap: quarantined slabs beyond which a pair is unusable; 0: half of the slabs of that part.
        require_transport: refuse to start unless the self-test found exactly this path, for example "ucx:tcp" or "nixl:shm", and
            refuse every peer that comes on another one.
        kv_encryption: off, or the cipher of slabs and control messages: aes-gcm or chacha20-poly1305. Both workers of a pair must
            use the same one; not for transports whose slabs are in GPU memory. It takes as much memory as the ring again.
        verify_checksum: False only in tests.
        faults: misbehave on purpose; tests only.
    """

    transport: str = "auto"
    host: str = "127.0.0.1"
    device: str = "cpu"
    slab_bytes: int = 4 << 20
    num_slabs: int = 8
    quotas: SlabQuotas | None = None
    lease_s: float = 30.0
    peer_quota: int = 0
    quarantine_cap: int = 0
    require_transport: str = ""
    kv_encryption: str = OFF
    verify_checksum: bool = True
    faults: FaultSpec | None = field(default=None)

    def __post_init__(self) -> None:
        registry.check(self.transport, self.device)
        check_mode(self.kv_encryption, self.transport)
        if not 0 < self.lease_s < float("inf"):
            raise ConfigError("lease_s", self.lease_s, "must be a positive number of seconds")
        for name in ("peer_quota", "quarantine_cap"):
            if not 0 <= getattr(self, name) <= self.num_slabs:
                raise ConfigError(name, getattr(self, name), f"must be between 0 and num_slabs={self.num_slabs}")
        RingSpec(self.num_slabs, self.slab_bytes)

    def quotas_of(self, *, publishes: bool, reads: bool) -> SlabQuotas:
        return self.quotas or SlabQuotas(self.num_slabs if publishes else 0, self.num_slabs if reads else 0)

    def peer_quota_of(self, num_slabs: int) -> int:
        return self.peer_quota or max(1, num_slabs * 3 // 4)

    def quarantine_cap_of(self, num_slabs: int) -> int:
        return self.quarantine_cap or max(1, num_slabs // 2)

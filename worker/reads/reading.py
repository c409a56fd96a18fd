"""What a worker reads other workers' KV with. One for the worker's life: it outlives a change of role."""

from __future__ import annotations

from diptych.rpc.channels import open_channel
from diptych.worker.peers import PeerDirectory
from diptych.worker.reads.block_pulls import BlockPulls
from diptych.worker.reads.link_rate import LinkRates
from diptych.worker.reads.range_reads import ReadContext
from diptych.worker.reads.slab_unpacker import SlabUnpacker
from diptych.worker.runtime import WorkerRuntime


class Reading:
    """Peers, the unpacker, measured links, and pulls."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        config = runtime.config
        reader = runtime.metrics.metered(runtime.transfer)
        self.peers = PeerDirectory(
            runtime.compat,
            forget=runtime.transfer.forget,
            handshake_timeout_s=config.handshake_timeout_s,
            allow_conversion=config.allow_kv_conversion,
            transport=runtime.transfer.address.transport,
            open_channel=lambda address: open_channel(address, runtime.cluster_tls, runtime.call_token(address)),
        )
        self.unpacker = SlabUnpacker(runtime.engine, reader)
        self.links = LinkRates()
        self.context = ReadContext(
            peers=self.peers,
            reader=reader,
            unpacker=self.unpacker,
            links=self.links,
            clock=runtime.clock,
            kv=runtime.compat.kv,
            kv_parts=runtime.compat.kv_parts,
            same_bits=runtime.compat.same_bits,
            read_base_s=config.read_base_s,
            silence_s=config.leg_silence_s,
            renew_every_s=config.slab_lease_s / 6,
        )
        self.pulls = BlockPulls(runtime.engine, self.context, lambda: runtime.ref, runtime.metrics.pulled)

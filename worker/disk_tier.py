"""The worker's folder of blocks, or the store that it shares, as its settings ask for it."""

from __future__ import annotations

from pathlib import Path

import structlog

from diptych.common.block_identity import IdentityHeader, golden_key
from diptych.common.clock import Clock
from diptych.common.compat import Compat
from diptych.common.errors import ConfigError
from diptych.kvtransfer.disk.block_file import HEAD_BYTES, identity_of
from diptych.kvtransfer.disk.block_folder import BlockFolder
from diptych.kvtransfer.disk.block_store import DiskBlockStore
from diptych.kvtransfer.disk.keeper import BlockKeeper
from diptych.kvtransfer.disk.mooncake import MooncakeKeeper, check, connect
from diptych.kvtransfer.slabs.layout import layout_hash
from diptych.worker.config import WorkerConfig

log = structlog.get_logger(__name__)


def num_disk_blocks(config: WorkerConfig, compat: Compat) -> int:
    """Blocks in files; 0: none. Raises: ConfigError when there is no prefix cache, or not one block fits."""
    setting = "kv_store" if config.kv_store else "disk_kv_dir"
    if not getattr(config, setting):
        return 0
    if not config.enable_prefix_caching:
        raise ConfigError(setting, getattr(config, setting), "needs enable_prefix_caching")
    block_bytes = HEAD_BYTES + sum(_piece_bytes(compat))
    count = config.disk_kv_bytes // block_bytes
    if not count:
        raise ConfigError("disk_kv_bytes", config.disk_kv_bytes, f"one block takes {block_bytes} bytes")
    return count


def check_store(config: WorkerConfig) -> None:
    """Before the model is loaded. Raises: ConfigError when the shared store that the settings name cannot be used."""
    if config.kv_store:
        check(config.kv_store)


def open_disk(
    config: WorkerConfig, compat: Compat, identity: IdentityHeader, worker_id: str, clock: Clock
) -> DiskBlockStore | None:
    """None: the worker keeps no blocks outside of its memory. Blocking, for as long as a folder with many files takes. Raises:
    ConfigError."""
    if not num_disk_blocks(config, compat):
        return None
    # The key of fixed tokens has weights, numerics and the cluster's key in it, the layout hash the rest.
    mine = identity_of(golden_key(identity), layout_hash(compat), "" if compat.same_bits else config.role)
    piece_bytes = _piece_bytes(compat)
    block_bytes = sum(piece_bytes)
    keeper: BlockKeeper
    if config.kv_store:
        where = config.kv_store
        keeper = MooncakeKeeper(connect(where, block_bytes), mine, block_bytes)
    else:
        root = Path(config.disk_kv_dir).expanduser().absolute()
        where, keeper = str(root), BlockFolder(root, worker_id, mine, block_bytes)
    store = DiskBlockStore(keeper, clock, piece_bytes)
    log.info(
        "blocks outside of memory",
        where=where,
        found=len(store.found),
        removed=store.damaged,
        removed_bytes_of_other_models=store.other_bytes,
        bytes_per_s=round(store.bytes_per_s),
    )
    return store


def _piece_bytes(compat: Compat) -> list[int]:
    """Of a block, by rank, and by KV group within it: what ranks hold all the same is there for each of them."""
    return [group.block_bytes(part.shard) for part in compat.parts for group in part.groups]

"""Drives libraries that were compiled with sanitizers, at the edges of every size: sanitized.py NAME=LIBRARY ...

A program, since the sanitizers must be loaded before Python is: test_sanitizers.py starts it and reads what they report. Every
buffer has exactly the size that is promised to C, so one step too far is outside.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from diptych.common.kv_format import Shard
from diptych.engine.exec.lora import LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import StepRows
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.methods.quantized import Int8Weights
from diptych.engine.exec.native.weights import Packer
from diptych.kernels import kv_pack
from diptych.kernels.native.api import Library
from diptych.kernels.native.kv_move import KvMoves
from diptych.router.placement.block_table import BlockTable, as_keys
from diptych.router.placement.native.library import Library as LookupLibrary
from diptych.router.placement.native.library import address
from diptych.router.placement.native.lookup import NativeLookup
from diptych_tests import native_layers


def decoder(path: Path) -> None:
    library = Library(path)
    lanes = library.lanes
    for outputs, inputs, rows in ((1, 1, 1), (library.panel + 1, 33, 2), (75, 7, 5), (3, 40, 13), (33, 9, 160)):
        x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        codes, scales = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs)
        packer = Packer(library, native_layers.Exact())
        for weights in (
            PlainWeights(weight, bias), PlainWeights(weight.bfloat16().float(), bias), Int8Weights(codes, scales, bias),
        ):  # fmt: skip
            linear = packer(weights)
            for threads in (1, 2):
                library.linear(x, linear.weights, outputs, threads)
        for tiles in (False, True):
            library.use_tiles(tiles)
            linear = packer(PlainWeights(weight.bfloat16(), bias))
            for some in (1, rows):
                library.linear(x[:some], linear.weights, outputs, 2)
    for outputs, inputs, group in ((1, 16, 16), (library.panel + 1, 96, 48), (3, 640, 320)):
        for order in (None, torch.randperm(inputs)):
            linear = packer(native_layers.int4_of(torch.randn(outputs, inputs), group, order=order))
            for rows in (1, 3, 4, 100):
                library.linear(torch.randn(rows, inputs), linear.weights, outputs, 2)
    for kind in KINDS:
        for outputs, inputs in ((1, 256), (library.panel + 1, 512)):
            linear = packer(native_layers.gguf_of(kind, outputs, inputs))
            for rows in (1, 3, 13):
                library.linear(torch.randn(rows, inputs), linear.weights, outputs, 2)
    for parts, inputs, rank in (((lanes,), 1, 1), ((5 * lanes, lanes, 2 * lanes), 33, 11), ((lanes, lanes), 16, 8)):
        for dtype in (torch.float32, torch.bfloat16):
            slots = LoraSlots(parts, inputs, LoraSizes(3, rank), torch.empty(0, dtype=dtype))
            for slot in range(3):
                slots.install(slot, native_layers.random_adapter(random.Random(slot), slots, inputs, rank))
            linear = packer(PlainWeights(torch.randn(sum(parts), inputs).to(dtype), None))
            linear = linear.with_lora(native_layers.packed_slots(library, slots))
            for rows in (1, 3, 37):
                linear(torch.randn(rows, inputs), StepRows(torch.arange(rows, dtype=torch.int32).flip(0) % 4 - 1))
    library.norm(torch.randn(3, lanes), torch.randn(lanes), 1e-6)
    for count in (1, lanes - 1, lanes, lanes + 1):
        library.softcap(torch.randn(count), 2.0)
    least = max(library.panel, 2 * lanes)
    several = native_layers.Sizes(hidden=lanes, ffn=library.panel, heads=4, kv_heads=2, head_dim=least)
    half = {"method": "bfloat16", "codes": torch.bfloat16}
    for features, sizes, how in (
        (native_layers.GEMMA2, several, {}),
        (native_layers.GEMMA2, several, half),
        (native_layers.GEMMA2, several, {"loras": 2}),
        (native_layers.GEMMA3, several, {}),
        ((native_layers.QWEN3,), replace(several, hidden=3 * lanes, ffn=3 * library.panel, heads=5, kv_heads=1), {}),
        *(
            ((native_layers.LLAMA,), replace(several, head_dim=dim), {})
            for dim in (16, 64, 128, 256)
            if dim % least == 0
        ),
        (native_layers.GEMMA2, replace(several, heads=12, kv_heads=1, head_dim=256, block_size=16), {}),
    ):
        layers = native_layers.Layers(library, features, sizes, nowhere=1 << 40, **how)
        size = sizes.block_size
        # One row of one token; a block exactly full, one short of it, one more; chunks over a block's edge; several tiles.
        for counts in ((1,), (size,), (size - 1, 1, 1), (size + 1,), (2 * size, 1, 2 * size - 3), (3, 37, 1), (100, 1)):
            sequence, other = (layers.sequence(sum(counts), seed=seed) for seed in (1, 2))
            other.slot = how.get("loras", 0) - 1
            for count in counts:
                layers.run((sequence, count))
                layers.run((other, count), threads=2)
            for one in (sequence, other):
                layers.release(one)
        beside = [layers.sequence(length, seed=length) for length in (1, size, size + 2, 3 * size)]
        for one in beside:
            layers.run((one, len(one.x) - 1)) if len(one.x) > 1 else None
        layers.run(*((one, 1) for one in beside))
    for features in (native_layers.GEMMA2, (native_layers.LLAMA,)):
        rank = native_layers.Layers(library, features, several).rank(Shard(), lambda x: x)
        sequence = rank.sequence(38)
        for count in (1, 37):
            rank.run((sequence, count), threads=2)


def kv_move(path: Path) -> None:
    moves = KvMoves(path)
    for values in (1, 3, 16, 333, 9000):
        pool = torch.randn(5, 2, 2, 4, 1, values)
        for count in (1, 3, 4, 5, 8, 11):
            for layers in (None, range(1, 2)):
                data = kv_pack.pool_bytes(pool)
                rows = data if layers is None else data[:, 2:4]
                out = torch.empty(count * rows.shape[1] * rows.shape[3], dtype=torch.uint8)
                ids = [4, 0, 3][: -(-count // 4)]
                moves.pack(rows, ids, count, memoryview(out.numpy()))
                moves.unpack(rows, ids, count, memoryview(out.numpy()))


def lookup(path: Path) -> None:
    library = LookupLibrary(path)
    for size in (1, 3, 16, 100):
        for blocks in (0, 1, 5, 2000 // size):
            # Arrays of numpy: Python's own have room to grow behind their end.
            tokens, keys, opening = np.zeros(blocks * size, np.uint32), np.empty((blocks, 2), np.uint64), bytes(size)
            library.keys(bytes(32), opening, len(opening), address(tokens), blocks, size, address(keys))
    for packed, count in (
        (b"", 0), (b"\x0a", 0), (b"\x0a\x00", 0), (b"\x0a\x01\x05", 1), (b"\x0a\x02\x85\x01", 1), (b"\x0a\x01\x85", 1),
        (b"\x0a\x02\x01\x01", 1), (b"\x0a\x0b" + 11 * b"\x85", 1), (b"\x0a\x05\xff\xff\xff\xff\x0f", 1),
    ):  # fmt: skip
        library.unpack_into(packed, len(packed), count, address(np.empty(count, np.uint32)))
    rng = np.random.default_rng(0)
    for num_keys, workers in ((1, 1), (15, 2), (16, 64), (33, 65), (400, 130)):
        table = BlockTable(300)
        table.reserve_columns(workers)
        keys = as_keys([rng.bytes(16) for _ in range(num_keys)])
        for column in range(workers):
            table.add(keys[: 1 + column * num_keys // workers], column)
        hits, host = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
        found = NativeLookup(library, range(workers), range(workers), 16)
        for part in (keys, keys[:1], keys[::-1].copy(), as_keys([bytes(16)])):
            for _ in range(4):
                table.hits_into(found, part, 10, address(hits), address(host))


def main() -> None:
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        name, _, library = argument.partition("=")
        print(f"\n== {argument}", file=sys.stderr, flush=True)
        globals()[name.partition("-")[0]](Path(library))


if __name__ == "__main__":
    main()

"""Who holds a slab that is put together anew for other ranks: the step thread, as long as any of them reads from it."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.common.errors import TransferError
from diptych.common.kv_format import full_format
from diptych.common.kv_parts import split
from diptych.engine.messages import RangeUnpacked, UnpackRange
from diptych.kvtransfer.api import ReceivedSlab
from diptych.kvtransfer.slabs.convert import RangeConverter
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.worker.reads.slab_unpacker import SlabUnpacker

KV = full_format(2, 2, 4, block_size=4, dtype="float16")
ONE, TWO, FOUR = (split(KV, tensor_parallel=degree) for degree in (1, 2, 4))
END = 8


class Bench:
    """An engine that answers nothing by itself, and the reader of slabs."""

    def __init__(self) -> None:
        self.sent: list[UnpackRange] = []
        self.finished: list[ReceivedSlab] = []
        self.unpacker = SlabUnpacker(self, self)  # type: ignore[arg-type]

    def send(self, command: Any) -> None:
        self.sent.append(command)

    def finish(self, slab: ReceivedSlab) -> None:
        self.finished.append(slab)

    def answer(self, command: UnpackRange, *, unpacked: bool = True) -> None:
        self.unpacker.on_unpacked(RangeUnpacked(command.attempt, command.job, unpacked))


def slab(part: int, size: int, **changes: Any) -> ReceivedSlab:
    fields = {
        "worker_id": "p0", "incarnation": "life", "attempt": "a", "slab": part, "generation": 1, "first_token": 0,
        "num_tokens": END, "first_layer": 0, "num_layers": 2, "layout_hash": 7, "size_bytes": size, "checksum": 0,
        "expires_ns": 9, "part": part,
    }  # fmt: skip
    return ReceivedSlab(SlabHandle(**fields | changes), part, memoryview(bytes(size)))  # type: ignore[arg-type]


async def test_a_slab_for_several_ranks_is_theirs_until_the_last_has_it() -> None:
    bench, received = Bench(), slab(1, END * TWO[1].bytes_per_token)
    unpacking = bench.unpacker.unpack_converted("a", received, RangeConverter(TWO, FOUR, 0, END), pull=True)
    assert [(c.part, c.payload is received.payload, c.pull) for c in bench.sent] == [(2, True, True), (3, True, True)]
    bench.answer(bench.sent[1])
    assert not bench.finished
    unpacking[0][1].cancel()  # who waits is gone, and the step thread still reads
    bench.answer(bench.sent[0], unpacked=False)
    assert bench.finished == [received]
    assert await unpacking[1][1]
    assert not bench.unpacker.num_open


async def test_a_slab_whose_bytes_were_copied_is_free_at_once() -> None:
    bench, size = Bench(), END * TWO[0].bytes_per_token
    converter, halves = RangeConverter(TWO, ONE, 0, END), [slab(0, size), slab(1, size)]
    assert bench.unpacker.unpack_converted("a", halves[0], converter) == []
    assert (bench.finished, bench.sent) == ([halves[0]], [])
    [(whole, answer)] = bench.unpacker.unpack_converted("a", halves[1], converter)
    assert bench.finished == halves
    assert (whole.num_tokens, len(whole.payload)) == (END, 2 * size)
    bench.answer(bench.sent[0], unpacked=False)
    assert not await answer


async def test_a_slab_that_does_not_fit_is_free_and_nothing_is_unpacked() -> None:
    bench, wrong = Bench(), slab(0, 16)
    with pytest.raises(TransferError, match="8 tokens take"):
        bench.unpacker.unpack_converted("a", wrong, RangeConverter(TWO, ONE, 0, END))
    assert (bench.finished, bench.sent, bench.unpacker.num_open) == ([wrong], [], 0)

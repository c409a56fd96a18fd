"""All-reduce and gather over inboxes: several ranks' launches one after the other, each with the others' words there already."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels.triton_all_reduce import PROGRAMS, Inboxes, all_reduce_norm, gather_columns, one_shot_all_reduce
from diptych.kernels.triton_norm import rms_norm, rms_norm_quantized

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1"),
]
ROOM = 4096


class Ranks:
    """Inboxes of several ranks in this process. A launch waits for words that its peers have not sent yet, so it is made twice:
    first to send, and not to wait."""

    def __init__(self, degree: int) -> None:
        self.memory = [torch.zeros(2 * degree * ROOM, dtype=torch.int64) for _ in range(degree)]
        addresses = tuple(one.data_ptr() for one in self.memory)
        self.inboxes = [
            Inboxes(
                rank,
                degree,
                addresses,
                ROOM,
                torch.zeros(PROGRAMS, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
            )
            for rank in range(degree)
        ]

    def each(self, launch):
        """Returns: what `launch` returns with all words there, of each rank."""
        for one in self.inboxes:
            before = one.epochs.clone()
            launch(one)
            one.epochs.copy_(before)
            one.failed.zero_()
        results = [launch(one) for one in self.inboxes]
        assert not any(int(one.failed) for one in self.inboxes)
        return results


@pytest.mark.parametrize(("degree", "dtype", "rows", "size"), [
    (2, torch.float16, 3, 70), (3, torch.float32, 2, 37), (4, torch.float16, 1, 2050)
])  # fmt: skip
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(degree, dtype, rows, size):
    ranks = Ranks(degree)
    for _ in range(3):  # both halves of the inbox, and the first one again
        parts = [torch.randn(rows, size).to(dtype) for _ in range(degree)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for out in ranks.each(lambda one, parts=parts: one_shot_all_reduce(parts[one.rank], one)):
            assert torch.equal(out, total.to(dtype))


def test_splits_are_added_up_and_rounded_before_they_are_sent():
    ranks = Ranks(2)
    parts = [torch.randn(4, 3, 64) for _ in range(2)]
    addends = [(((p[0] + p[1]) + p[2]) + p[3]).half().float() for p in parts]
    for out in ranks.each(lambda one: one_shot_all_reduce(parts[one.rank], one, dtype=torch.float16)):
        assert torch.equal(out, (addends[0] + addends[1]).half())


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("splits", [1, 2])
def test_norm_of_the_sum_is_that_of_the_kernels_one_by_one(kind, splits):
    ranks, dtype = Ranks(2), torch.float16
    weight, residual = (torch.rand(96) + 0.5).to(dtype), torch.randn(5, 96).to(dtype)
    parts = [torch.randn(splits, 5, 96) if splits > 1 else torch.randn(5, 96).to(dtype) for _ in range(2)]
    sums = ranks.each(lambda one: one_shot_all_reduce(parts[one.rank], one, dtype=dtype if splits > 1 else None))
    expected_residual = residual.clone()
    if kind is None:
        expected = rms_norm(sums[0], weight, 1e-5, expected_residual, offset=1.0)
    else:
        expected = rms_norm_quantized(sums[0], weight, 1e-5, expected_residual, offset=1.0, kind=kind)
    residuals = []

    def launch(one):
        residuals.append(residual.clone())
        return all_reduce_norm(parts[one.rank], weight, 1e-5, residuals[-1], one, offset=1.0, kind=kind)

    for out, after in zip(ranks.each(launch), residuals[2:], strict=True):
        assert torch.equal(after, expected_residual)
        if kind is None:
            assert torch.equal(out, expected)
        else:
            assert torch.equal(out.codes, expected.codes)
            assert torch.equal(out.scales, expected.scales)


def test_more_rows_than_programs():
    ranks = Ranks(2)
    rows = PROGRAMS + 3
    parts = [torch.randn(rows, 8).to(torch.float16) for _ in range(2)]
    weight = torch.ones(8, dtype=torch.float16)
    total = (parts[0].float() + parts[1].float()).half()
    for out in ranks.each(
        lambda one: all_reduce_norm(parts[one.rank], weight, 1e-5, torch.zeros(rows, 8, dtype=torch.float16), one)
    ):
        assert torch.equal(out, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 2050), (torch.float32, 7)])
def test_columns_of_all_ranks(dtype, columns):
    ranks = Ranks(3)
    parts = [torch.randn(2, columns).to(dtype) for _ in range(3)]
    for out in ranks.each(lambda one: gather_columns(parts[one.rank], one)):
        assert torch.equal(out, torch.cat(parts, 1))


def test_a_peer_that_sends_nothing_ends_the_wait():
    ranks = Ranks(2)
    ranks.inboxes[0].limit.fill_(3)
    one_shot_all_reduce(torch.ones(1, 8), ranks.inboxes[0])
    assert int(ranks.inboxes[0].failed) == 1
    assert int(ranks.inboxes[0].limit) == 0, "launches behind this one wait as long again"


def test_what_does_not_fit_is_refused():
    one = Ranks(2).inboxes[0]
    with pytest.raises(ValueError, match="at most 4096 words"):
        one_shot_all_reduce(torch.ones(4097), one)
    with pytest.raises(ValueError, match="at most 4096 words"):
        gather_columns(torch.ones(2, 3, dtype=torch.bfloat16), one)
    with pytest.raises(ValueError, match="does not fit weight"):
        all_reduce_norm(torch.ones(2, 4), torch.ones(5), 1e-5, torch.ones(2, 4), one)

"""The arithmetic of `diptych quantize`: each rule beside a naive one."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.quantize.gptq import Int4Rule, gptq, inverse_factor
from diptych.engine.quantize.methods import packed_groups
from diptych.engine.quantize.rounding import (
    Groups,
    fp8_rows,
    int4_codes,
    int4_grid,
    int4_nearest,
    int4_values,
    int8_rows,
)
from diptych.engine.quantize.smoothing import smoothing_factors

BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])


def correlated(rows, inputs, seed=0):
    """Activations of which some are large, and all have something in common."""
    torch.manual_seed(seed)
    return (torch.randn(rows, inputs) + 2 * torch.randn(rows, 1)) * torch.rand(inputs).mul(3).exp()


def output_error(x, weight, groups):
    return float((x @ (weight - groups.values()).T).square().mean())


def test_int8_has_a_scale_for_each_output():
    weight = torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0], [-254.0, 3.1, 2.9]])
    rows = int8_rows(weight)
    assert rows.codes.tolist() == [[127, -50, 0], [0, 0, 0], [-127, 2, 1]]
    torch.testing.assert_close(rows.scales, torch.tensor([[0.01], [1.0], [2.0]]))
    assert rows.codes.dtype == torch.int8


def test_fp8_has_a_scale_for_each_output():
    weight = torch.tensor([[448.0, -1.0, 17.0], [0.0, 0.0, 0.0], [-896.0, 3.0, 1e-9]])
    rows = fp8_rows(weight)
    assert rows.codes.float().tolist() == [[448.0, -1.0, 16.0], [0.0, 0.0, 0.0], [-448.0, 1.5, 0.0]]
    assert rows.scales.tolist() == [[1.0], [1.0], [2.0]]


@pytest.mark.parametrize("largest", [1e-44, 1e-30, 3e38])
@pytest.mark.parametrize("quantize", [int8_rows, fp8_rows])
def test_scales_are_numbers_that_a_loader_takes(quantize, largest):
    rows = quantize(torch.tensor([[largest, -largest / 2]]))
    assert bool((rows.scales > 0).all() and rows.scales.isfinite().all())
    torch.testing.assert_close(rows.values(), torch.tensor([[largest, -largest / 2]]), rtol=0.01, atol=1e-37)


@BOTH
def test_int4_of_weights_that_lie_on_the_grid_is_exact(symmetric):
    torch.manual_seed(1)
    codes = torch.randint(0, 16, (6, 64))
    codes[:, ::32] = 0  # both ends of the range occur in each group
    codes[:, 1::32] = 15
    zeros = torch.full((6, 2), 8) if symmetric else torch.randint(0, 16, (6, 2))
    scales = torch.rand(6, 2) + 0.5
    weight = Groups(codes.to(torch.uint8), scales, zeros.to(torch.uint8)).values()
    found = int4_nearest(weight, 32, symmetric=symmetric, dtype=torch.float32)
    # Symmetric codes reach to 8 below and 7 above: the grid of the whole range is a sixteenth wider.
    torch.testing.assert_close(found.values(), weight, rtol=0, atol=0.6 if symmetric else 1e-5)
    if not symmetric:
        assert torch.equal(found.zeros, zeros.to(torch.uint8))
        torch.testing.assert_close(found.scales, scales)


@BOTH
def test_a_grid_has_the_least_error_of_the_ranges_tried_and_values_of_its_dtype(symmetric):
    torch.manual_seed(2)
    weight = torch.randn(40, 32)
    weight[:, 0] *= 6  # one large weight: a smaller range serves the others better
    unimportant = torch.ones(32)
    unimportant[0] = 0.0

    def error(importance):
        scales, zeros = int4_grid(weight, importance, symmetric=symmetric, dtype=torch.bfloat16)
        assert torch.equal(scales, scales.bfloat16().float())
        meant = int4_values(int4_codes(weight, scales, zeros), scales, zeros)
        return float(((weight - meant).square() * unimportant).sum())

    assert error(unimportant) < 0.8 * error(torch.ones(32))


def test_a_group_of_zeros_stays_zero():
    found = int4_nearest(torch.zeros(3, 64), 64, symmetric=False, dtype=torch.float16)
    assert bool((found.scales > 0).all())
    assert not found.values().any()


@pytest.mark.parametrize("act_order", [True, False])
@BOTH
def test_gptq_is_the_elimination_of_one_input_after_another(symmetric, act_order):
    """Equations 2 and 3 of the paper as they stand: the inverse is made smaller by each input."""
    x = correlated(900, 192)
    weight = torch.randn(24, 192)
    rule = Int4Rule(32, symmetric=symmetric, act_order=act_order)
    hessian = x.T @ x
    found = gptq(weight, hessian, rule)

    left, wide = weight.double(), hessian.double()
    inverse = torch.linalg.inv(wide + torch.eye(192) * 0.01 * wide.diagonal().mean())
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if act_order else torch.arange(192)
    codes = torch.zeros_like(weight)
    grids = {}
    for j in order.tolist():
        group = j // 32
        if group not in grids:
            columns = slice(32 * group, 32 * group + 32)
            of_group = (weight if act_order else left.float())[:, columns]
            grids[group] = int4_grid(of_group, hessian.diagonal()[columns], symmetric=symmetric, dtype=torch.float32)
        codes[:, j] = int4_codes(left[:, [j]].float(), *grids[group])[:, 0]
        error = (left[:, j] - int4_values(codes[:, [j]], *grids[group])[:, 0].double()) / inverse[j, j]
        left -= error[:, None] * inverse[j]
        left[:, j] = 0.0
        inverse -= inverse[:, [j]] * inverse[[j]] / inverse[j, j]
    # A weight in the middle of two codes may go either way in float32, and then all after it.
    assert float((found.codes == codes).float().mean()) > 0.98
    assert found.scales.shape == found.zeros.shape == (24, 6)


@pytest.mark.parametrize("act_order", [True, False])
@BOTH
def test_gptq_keeps_the_outputs_nearer_than_rounding_does(symmetric, act_order):
    x = correlated(2000, 256, seed=3)
    weight = torch.randn(48, 256)
    found = gptq(weight, x.T @ x, Int4Rule(64, symmetric=symmetric, act_order=act_order))
    nearest = int4_nearest(weight, 64, symmetric=symmetric, dtype=torch.float32)
    assert output_error(x, weight, found) < 0.5 * output_error(x, weight, nearest)


def test_gptq_of_few_rows_and_inputs_that_never_were_anything():
    x = correlated(5, 64)
    x[:, 7] = 0.0
    weight = torch.randn(8, 64)
    found = gptq(weight, x.T @ x, Int4Rule(32))
    nearest = int4_nearest(weight, 32, symmetric=True, dtype=torch.float32)
    assert output_error(x, weight, found) < output_error(x, weight, nearest)
    assert float((found.values()[:, 7] - weight[:, 7]).abs().max()) < 0.6 * float(found.scales.max())


def test_no_activations_at_all_give_the_nearest_codes():
    weight = torch.randn(8, 64)
    found = gptq(weight, torch.zeros(64, 64), Int4Rule(32))
    nearest = int4_nearest(weight, 32, symmetric=True, dtype=torch.float32)
    assert torch.equal(found.codes, nearest.codes)


def test_activations_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="no usable matrix"):
        inverse_factor(torch.full((4, 4), torch.nan))


def test_smoothing_factors_are_powers_of_two_by_the_papers_formula():
    largest = torch.tensor([16.0, 1.0, 0.01, 0.0, 5.0, 1e30])
    weight = torch.tensor([[1.0, 1.0, 0.01, 1.0, 0.0, 1e-30], [-0.5, -0.25, 0.005, 0.0, 0.0, 0.0]])
    assert smoothing_factors(largest, weight).tolist() == [4.0, 1.0, 1.0, 1.0, 1.0, 4096.0]
    assert smoothing_factors(largest, weight, strength=1.0).tolist()[:3] == [16.0, 1.0, 2.0**-7]


@pytest.mark.parametrize("outputs", [8, 10])
def test_codes_are_packed_as_the_layout_says(outputs):
    torch.manual_seed(4)
    codes, zeros = (torch.randint(0, 16, shape, dtype=torch.uint8) for shape in ((outputs, 64), (outputs, 2)))
    stored = packed_groups(Groups(codes, torch.ones(outputs, 2), zeros), symmetric=False)
    assert stored["weight_packed"].dtype == stored["weight_zero_point"].dtype == torch.int32
    assert stored["weight_packed"].shape == (outputs, 8)
    assert stored["weight_zero_point"].shape == (-(-outputs // 8), 2)
    for output in range(outputs):
        for inp in range(64):
            assert stored["weight_packed"][output, inp // 8] >> 4 * (inp % 8) & 15 == codes[output, inp]
        for group in range(2):
            assert stored["weight_zero_point"][output // 8, group] >> 4 * (output % 8) & 15 == zeros[output, group]
    assert stored["weight_shape"].tolist() == [outputs, 64]
    assert "weight_zero_point" not in packed_groups(Groups(codes, torch.ones(outputs, 2), zeros), symmetric=True)

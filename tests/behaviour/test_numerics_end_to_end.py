"""The numbers of a compiled model: right at every magnitude, exact where NVFP4 is exact, and never plausible nonsense.

Nearly all tests compile `F.linear` on operands of one shape, so they share their kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FEW_VALUES,
    NVFP4,
    ONE_PRODUCT,
    assert_by_hand,
    assert_close,
    assert_quantized,
    assert_untouched,
    error,
    nvfp4,
    nvfp4_linear,
    only_site,
    step,
)
from torch import Tensor, nn

M, N, K = 96, 96, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def operands(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.randn(M, K) * scale, torch.randn(N, K)


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return nvfp4(F.linear)(x, weight, bias)  # type: ignore[no-any-return]


# -- the codes --


def draw(values: Tensor, rows: int = M) -> Tensor:
    """Values with random signs, a 6 among each 16."""
    drawn = values[torch.randint(len(values), (rows, K))]
    drawn[:, ::16] = 6.0
    return drawn * (torch.randint(2, (rows, K)) * 2 - 1)


HARD: dict[str, Callable[[], Tensor]] = {
    "every binade": lambda: torch.randn(M, K) * 2.0 ** torch.randint(-20, 5, (M, K // 16)).repeat_interleave(16, 1),
    "ties": lambda: draw(MIDPOINTS),
    "next to ties": lambda: draw(MIDPOINTS) * (1 + torch.randint(-1, 2, (M, K)) * 2.0**-7),
    "any bits": lambda: torch.randint(-(2**15), 2**15, (M, K), dtype=torch.int16).view(torch.bfloat16).float(),
    "scales that underflow": lambda: torch.randn(M, K) * 2.0 ** -torch.arange(M // 4).repeat(4)[:, None],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_codes_are_those_of_the_definition(dtype: torch.dtype) -> None:
    """A product with the unit matrix shows each operand as it is quantized, value by value and bit by bit."""
    unit = torch.eye(K, dtype=dtype)
    ops = torch.ops.fp4
    for name, make in HARD.items():
        x = make().to(dtype)
        x[~torch.isfinite(x)] = 1.0
        stands_for = ops.dequantize(*ops.quantize(x, ops.amax(x)), ops.amax(x), K, dtype)
        as_input, as_weight = compiled_linear(x, unit), compiled_linear(unit, x)
        assert torch.equal(as_input, nvfp4_linear(x, unit)), name
        assert torch.equal(as_weight, nvfp4_linear(unit, x)), name
        assert torch.equal(as_weight.t(), as_input), name
        assert_by_hand(as_input, stands_for, name)


def test_values_on_the_grid_survive() -> None:
    """Wrong codes, signs or order of nibbles: https://github.com/tile-ai/tilelang/pull/2709,
    https://github.com/tenstorrent/tt-metal/issues/51971
    """
    x, weight = draw(GRID), draw(GRID, N)
    assert_untouched(compiled_linear(x, weight), x @ weight.t())
    assert_untouched(compiled_linear(x * 2**-9, weight * 2**5), (x @ weight.t()) * 2**-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_that_of_the_format(dtype: torch.dtype) -> None:
    """Less would be a layer in high precision, or one with a single operand in NVFP4 (0.096)."""
    layer, x = nn.Linear(256, 256, bias=False).to(dtype), torch.randn(256, 256).to(dtype)
    nn.init.normal_(layer.weight)
    assert only_site(layer, x).precision is NVFP4
    with torch.no_grad():
        y = nvfp4(layer)(x)
        assert 0.127 < error(y, x.double() @ layer.weight.double().t()) < 0.141
        assert_by_hand(y, nvfp4_linear(x, layer.weight))


def test_the_error_under_other_recipes() -> None:
    layer, x = nn.Linear(256, 256, bias=False), torch.randn(256, 256)
    nn.init.normal_(layer.weight)
    ops = torch.ops.fp4
    with torch.no_grad():
        plain, six, tiles = (
            nvfp4(layer, options=options)(x) for options in ({}, {"four_over_six": "all"}, {"weight_block": "16x16"})
        )
        errors = [error(y, layer(x)) for y in (plain, six, tiles)]
        assert 0.10 < errors[1] < errors[0] - 0.005, errors
        assert errors[0] < errors[2] < 0.17, errors
        x_amax, w_amax = ops.amax(x), ops.amax(layer.weight)
        weight = ops.quantize(layer.weight, w_amax, "16x16")
        assert_by_hand(tiles, ops.scaled_mm(*ops.quantize(x, x_amax), x_amax, *weight, w_amax, None, x.dtype))


def test_the_operators_compute_in_fp32_under_autocast() -> None:
    """An output dtype is what they are given; what they compute in is not the caller's business."""
    x, weight = operands()
    bias = torch.randn(N)
    want = nvfp4_linear(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nvfp4_linear(x, weight, bias), want)


# -- magnitudes --


@pytest.mark.parametrize(
    ("x_power", "weight_power"),
    [(-36, 0), (-30, -5), (-20, -10), (-8, 8), (3.7, 0), (8, 8), (15, 15), (36, -20), (0, -36), (-40, 8)],
)
def test_any_magnitude(x_power: float, weight_power: float) -> None:
    """Scales out of the range of E4M3 or FP32: https://github.com/NVIDIA/Model-Optimizer/issues/1633,
    https://github.com/flashinfer-ai/flashinfer/issues/2595
    """
    x, weight = operands()
    weight = weight * 10.0**weight_power
    for what, values in (("Gaussian", x), ("every block at the amax", x.sign())):
        a = values * 10.0**x_power
        y = compiled_linear(a, weight)
        if x_power > -38:
            assert_quantized(y, a @ weight.t(), what=what)
        assert_by_hand(y, nvfp4_linear(a, weight), what)


@pytest.mark.parametrize(("x_scale", "weight_scale"), [(5e-2, 2e-4), (1e-3, 2e-2), (200.0, 1.0), (1.0, 300.0)])
def test_half_precision_has_no_half_precision_intermediate(x_scale: float, weight_scale: float) -> None:
    """https://github.com/vllm-project/vllm/pull/37464: a product of scales that FP16 cannot hold."""
    x, weight = (torch.randn(M, K) * x_scale).half(), (torch.randn(N, K) * weight_scale).half()
    y = compiled_linear(x, weight)
    assert y.dtype is torch.float16
    assert_quantized(y, x.float() @ weight.float().t())


def test_half_precision_overflows_where_eager_does() -> None:
    x, weight = torch.full((M, K), 200.0).half(), torch.full((N, K), 6.0).half()
    x[0] = 1.0
    y = compiled_linear(x, weight)
    assert torch.isposinf(y[1:]).all() and torch.isposinf(F.linear(x, weight)[1:]).all()
    assert torch.isfinite(y[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_values_survive(dtype: torch.dtype) -> None:
    """https://github.com/jax-ml/jax/pull/30467: all zeros, and nobody noticed, as 0 @ 0 was right."""
    x, weight = (torch.rand(M, K) * 1e-5).to(dtype), (torch.randn(N, K) * 0.02).to(dtype)
    y = compiled_linear(x, weight)
    assert y.count_nonzero() > y.numel() // 2
    assert_quantized(y, F.linear(x, weight), FEW_VALUES)


def test_rows_of_very_different_size() -> None:
    """Subnormal block scales: https://github.com/local-inference-lab/b12x/pull/388"""
    powers = (0, 4, 8, 12, 14, 15)
    x, weight = operands()
    x = x * 2.0 ** -torch.tensor(powers).repeat_interleave(M // len(powers))[:, None]
    y = compiled_linear(x, weight)
    assert_by_hand(y, nvfp4_linear(x, weight))
    for group, rows, want in zip(powers, y.split(16), (x @ weight.t()).split(16), strict=True):
        # The scale of rows at 2**-14 is one of the few subnormal E4M3 values: coarse, but not off by a factor.
        coarse = group > 12
        bound, slope_within = (0.35, 0.25) if coarse else (FEW_VALUES, 0.06)
        assert_quantized(rows, want, bound, slope_within=slope_within, what=f"rows at 2**-{group}")
        if not coarse:  # each row has its own order of magnitude, so its own bits
            assert_by_hand(rows, nvfp4_linear(x, weight)[powers.index(group) * 16 :][:16], f"rows at 2**-{group}")


def test_an_outlier_is_not_clipped() -> None:
    """Without a scale for the tensor, blocks end at 6 * 448: https://github.com/kekzl/imp/issues/1544"""
    x, weight = operands()
    x[7, 33] = 2e4
    y, want = compiled_linear(x, weight), x @ weight.t()
    others = torch.arange(M) != 7
    # 20000 / amax of the rest stays inside the 28672 that block scales span.
    assert_quantized(y[others], want[others], what="rows without the outlier")
    assert_close(y[7], want[7], FEW_VALUES, what="the row with the outlier")


def test_negative_tensors() -> None:
    """An amax without abs: https://github.com/vllm-project/vllm/pull/20578"""
    x, weight = (-t.abs() for t in operands())
    x[:, 5] = weight[:, 9] = 0.01  # the largest value, and not the largest magnitude
    y = compiled_linear(x, weight)
    assert_close(y, x @ weight.t(), 0.05)  # no cancellation: the errors of K terms average out
    assert_by_hand(y, nvfp4_linear(x, weight))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_batch_mates_leave_a_row_alone(scale: float) -> None:
    """One amax for all rows: https://github.com/vllm-project/vllm/pull/39820"""
    x, weight = operands()
    x[8:] *= scale
    y = compiled_linear(x, weight)
    assert_quantized(y[:8], x[:8] @ weight.t(), what=f"batch-mates scaled by {scale}")


# -- zeros --


def test_zero_inputs_and_gradients_give_zeros() -> None:
    """amax = 0 must not become an infinite scale: https://github.com/vllm-project/compressed-tensors/pull/595"""
    layer = nn.Linear(K, N)
    compiled = nvfp4(layer)
    run = step(layer, torch.zeros(M, K), torch.randn(M, N), compiled)
    assert torch.equal(run.output, layer.bias.expand(M, N))
    assert not run.gradients["weight"].any()  # type: ignore[union-attr]
    assert torch.isfinite(run.input_gradient).all()

    x = torch.randn(M, K)
    x[7], x[:, 16:32] = 0.0, 0.0
    run = step(layer, x, torch.zeros(M, N), compiled)
    assert torch.equal(run.output[7], layer.bias.detach())
    assert_quantized(run.output, layer(x))
    assert not any(g.any() for g in (run.input_gradient, *run.gradients.values()))  # type: ignore[union-attr]


def test_zero_weights_and_blocks_give_zeros() -> None:
    """A zero block's scale becomes the NaN byte: https://github.com/NVIDIA/Model-Optimizer/pull/1397"""
    layer, x = nn.Linear(K, N), torch.randn(M, K)
    nn.init.zeros_(layer.weight)
    compiled = nvfp4(layer)
    run = step(layer, x, torch.randn(M, N), compiled)
    assert torch.equal(run.output, layer.bias.expand(M, N))
    assert not run.input_gradient.any()
    with torch.no_grad():
        assert torch.equal(compiled(x), layer.bias.expand(M, N))
        layer.weight.normal_()
        layer.weight[:, :16], layer.weight[5], layer.weight[3, 20] = 0.0, 0.0, 50.0
        assert_quantized(compiled(x), layer(x))
        assert torch.equal(compiled(x)[:, 5], layer.bias[5].expand(M))
        meets_zeros = torch.zeros(M, K)
        meets_zeros[:, :16] = x[:, :16]
        assert torch.equal(compiled(meets_zeros), layer.bias.expand(M, N))


# -- NaN and infinity --

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_is_not_finite_surfaces_and_stays_where_it_is(bad: float) -> None:
    """Clamps that swallow NaN: https://github.com/tile-ai/tilelang/issues/3024,
    https://github.com/huggingface/transformers/pull/42775
    """
    x, weight = operands()
    clean = x.clone()
    clean[3, 5] = 0.0
    x[3, 5] = bad
    others = torch.arange(M) != 3
    y = compiled_linear(x, weight)
    assert not torch.isfinite(y[3]).any(), "input"
    assert_by_hand(y[others], nvfp4_linear(clean, weight)[others], "rows without it")

    y = compiled_linear(weight, x)
    assert not torch.isfinite(y[:, 3]).any(), "weight"
    assert_by_hand(y[:, others], nvfp4_linear(weight, clean)[:, others], "columns without it")

    bias = torch.randn(N)
    bias[4] = bad
    y = compiled_linear(clean, weight, bias)
    assert not torch.isfinite(y[:, 4]).any() and torch.isfinite(y[:, 5:]).all(), "bias"

    y = compiled_linear(torch.full_like(x, bad), weight)
    assert not torch.isfinite(y).any(), "nothing but it"


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_is_not_finite_surfaces_in_a_model(bad: float) -> None:
    """Hoisted weights, and gradients, on which a gradient scaler would step:
    https://github.com/NVIDIA/Model-Optimizer/pull/2448
    """
    layer = nn.Linear(K, N)
    compiled = nvfp4(layer)
    gradient = torch.randn(M, N)
    gradient[3, 5] = bad
    run = step(layer, torch.randn(M, K), gradient, compiled)
    assert torch.isfinite(run.output).all()
    assert not torch.isfinite(run.input_gradient[3]).any()
    assert not torch.isfinite(run.gradients["weight"][5]).any()  # type: ignore[index]
    with torch.no_grad():
        x = torch.randn(M, K)
        assert torch.isfinite(compiled(x)).all()
        layer.weight[2, 2] = bad
        y = compiled(x)
        assert not torch.isfinite(y[:, 2]).any() and torch.isfinite(y[:, 3:]).all()


def test_a_padded_contraction_pads_with_zeros_next_to_infinity() -> None:
    x, weight = torch.randn(M, 100), torch.randn(N, 100)
    x[3, 99] = math.inf
    y = compiled_linear(x, weight)
    assert not torch.isfinite(y[3]).any() and torch.isfinite(y[4:]).all()
    assert_close(y[4:], x[4:] @ weight.t(), ONE_PRODUCT)

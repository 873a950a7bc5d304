"""MXFP4 against a scalar reading of its rules, at the edges of every binade and of the exponent range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_compile.numerics import E2M1_VALUES, MXFP4_BLOCK, dequantize_mxfp4, quantize_mxfp4, unpack

FP32_MAX = torch.finfo(torch.float32).max
ROUNDINGS = ["floor", "rceil"]


def exponent_of(amax: float, rounding: str) -> int:
    """The scale's exponent by the formula, in exact arithmetic on the float32 argument."""
    if amax == 0.0:
        return -127
    if rounding == "floor":
        return max(math.frexp(amax)[1] - 1 - 2, -127)
    quotient = (torch.tensor(amax) * torch.tensor(1.0 / 6.0)).item()
    mantissa, exponent = math.frexp(quotient)  # quotient = mantissa * 2**exponent, mantissa in [0.5, 1)
    return max(exponent - 1 if mantissa == 0.5 else exponent, -127) if quotient > 0.0 else -127


def nearest(y: float) -> float:
    """The E2M1 value nearest to y, the one with the even code if two are."""
    codes = sorted(range(8), key=lambda code: (abs(abs(y) - E2M1_VALUES[code]), code % 2))
    return math.copysign(E2M1_VALUES[codes[0]], y)


def blocks_with_amax(amaxes: Tensor) -> Tensor:
    """One block an amax: it, its negative half, and a spread of smaller values."""
    spread = torch.linspace(-1, 1, MXFP4_BLOCK)
    blocks = amaxes.unsqueeze(-1) * spread
    blocks[:, 3] = amaxes / 2
    return blocks


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_against_the_formula(rounding: Any) -> None:
    powers = 2.0 ** torch.arange(-140, 128, dtype=torch.float32)
    centres = torch.cat([powers, powers * 1.5, powers * 1.3, torch.tensor([FP32_MAX])])
    centres = centres[centres.isfinite()]
    amaxes = torch.cat([centres, torch.nextafter(centres, torch.tensor(0.0)), centres.nextafter(centres * 2)])
    amaxes = amaxes[amaxes.isfinite()]
    x = blocks_with_amax(amaxes)
    codes, scales = quantize_mxfp4(x, rounding)
    assert scales.dtype == torch.float8_e8m0fnu
    bytes_ = scales.view(torch.uint8).flatten().tolist()
    exponents = [exponent_of(amax, rounding) for amax in x.abs().amax(dim=-1).tolist()]
    assert bytes_ == [exponent + 127 for exponent in exponents]
    values = dequantize_mxfp4(codes, scales, MXFP4_BLOCK)
    for block, value, exponent in zip(x[::7].tolist(), values[::7].tolist(), exponents[::7], strict=True):
        # In float64 nothing here rounds but the choice of the nearest value.
        expected = [nearest(element * 2.0**-exponent) * 2.0**exponent for element in block]
        assert value == torch.tensor(expected, dtype=torch.float64).float().tolist()


def test_rceil_never_saturates_and_floor_does() -> None:
    amaxes = torch.linspace(1, 8, 500)
    for rounding, worst in (("rceil", 6.0), ("floor", 8.0)):
        _, scales = quantize_mxfp4(blocks_with_amax(amaxes), rounding)  # type: ignore[arg-type]
        ratio = amaxes / scales.to(torch.float32).flatten()
        assert ratio.max() <= worst
        assert ratio.max() > worst * 0.99


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zeros(rounding: Any) -> None:
    x = torch.zeros(2, 64)
    x[1, 40] = -1.0
    codes, scales = quantize_mxfp4(x, rounding)
    assert scales.view(torch.uint8)[:, 0].tolist() == [0, 0]
    assert codes[0].tolist() == [0] * 32
    assert torch.equal(dequantize_mxfp4(codes, scales, 64), x)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_with_a_non_finite_element_is_nan(rounding: Any, bad: float, dtype: torch.dtype) -> None:
    clean = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = clean.clone()
    x[1, 70] = bad
    codes, scales = quantize_mxfp4(x, rounding)
    clean_codes, clean_scales = quantize_mxfp4(clean, rounding)
    assert scales.view(torch.uint8)[1, 2].item() == 0xFF
    values, clean_values = (
        dequantize_mxfp4(codes, scales, 96),
        dequantize_mxfp4(clean_codes, clean_scales, 96),
    )
    assert values[1, 64:].isnan().all()
    clean_values[1, 64:] = torch.nan
    assert torch.equal(values.view(torch.int32) & 0x7FFFFFFF, clean_values.view(torch.int32) & 0x7FFFFFFF)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_padding_layouts_and_dtypes(rounding: Any) -> None:
    x = torch.randn(2, 5, 50, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    codes, scales = quantize_mxfp4(x, rounding)
    assert codes.shape == (2, 5, 32)
    assert scales.shape == (2, 5, 2)
    assert (unpack(codes)[..., 50:] == 0).all()
    padded = torch.nn.functional.pad(x, (0, 14)).float()
    assert torch.equal(codes, quantize_mxfp4(padded, rounding)[0])
    transposed = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(codes, quantize_mxfp4(transposed, rounding)[0])
    assert dequantize_mxfp4(codes, scales, 50).shape == x.shape
    assert [part.shape for part in quantize_mxfp4(torch.zeros(0, 64), rounding)] == [(0, 32), (0, 2)]
    assert [part.shape for part in quantize_mxfp4(torch.zeros(3, 0), rounding)] == [(3, 0), (3, 0)]


@pytest.mark.parametrize(("rounding", "expected"), [("floor", 1.32e-2), ("rceil", 1.33e-2)])
# Powers of two, since the error depends on where in a binade a tensor lies.
@pytest.mark.parametrize("magnitude", [2.0**-119, 1.0, 2.0**119])
def test_relative_error_of_gaussians(rounding: Any, expected: float, magnitude: float) -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2)) * magnitude
    codes, scales = quantize_mxfp4(x, rounding)
    error = (dequantize_mxfp4(codes, scales, 1024) - x).double().square().sum()
    assert (error / x.double().square().sum()).item() == pytest.approx(expected, rel=0.01)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="rounding is 'even'; use 'floor' or 'rceil'"):
        quantize_mxfp4(torch.zeros(32), "even")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x has dtype float64; convert it to float32 or bfloat16 or float16"):
        quantize_mxfp4(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(TypeError, match="scales has dtype uint8; convert it to float8_e8m0fnu"):
        dequantize_mxfp4(torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), 32)

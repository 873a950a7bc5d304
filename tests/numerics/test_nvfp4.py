"""NVFP4's numbers against an independent scalar-rule reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from quantizers import (
    DTYPES,
    E4M3_BYTES,
    F32,
    FP32_MAX,
    QUANTIZERS,
    Quantizer,
    assert_same,
    bound_of,
    every_quantizer,
    four_over_six,
    four_over_six_tiles,
    gaussian,
)

from fp4_compile.numerics import (
    E2M1_VALUES,
    E4M3_MAX,
    FOUR_OVER_SIX_BOUND,
    block_scales,
    decode_e2m1,
    decode_unscaled,
    dequantize,
    encode_scale,
    gemm_alpha,
    pack,
    quantize_1x16,
    quantize_16x16,
    tensor_amax,
    unpack,
)

# The reference: numpy float32 scalars, tables and searches


E4M3_VALUES = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)


def to_e4m3(value: NDArray[Any]) -> NDArray[Any]:
    """Index of the nearest E4M3 value; of two equally near, the even one; saturating."""
    clipped = np.minimum(value.astype(np.float64), 448.0)
    high = np.searchsorted(E4M3_VALUES, clipped)
    low = np.maximum(high - 1, 0)
    to_low, to_high = clipped - E4M3_VALUES[low], E4M3_VALUES[high] - clipped
    return np.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)


def to_e2m1(y: NDArray[Any]) -> NDArray[Any]:
    """Codes, by counting the thresholds that a magnitude has passed; ties pass only towards an even code."""
    a = np.abs(y)
    code = (a > 0.25).astype(int) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5)
    return code + 8 * np.signbit(y)


def reference(x: NDArray[Any], amax: Any, tile: int, use_four_over_six: bool) -> tuple[Any, Any]:
    """Quantize ``[rows, blocks, 16]`` in tiles of ``tile`` rows; return codes and E4M3 bytes, row by row."""
    bound = 256.0 if use_four_over_six else 448.0
    with np.errstate(all="ignore"):
        encode = np.minimum(F32(6 * bound) / amax, F32(FP32_MAX))
        decode = F32(1) / encode
        b = np.abs(x).max(axis=-1)
        b = b.reshape(-1, tile, b.shape[-1]).max(axis=1).repeat(tile, axis=0)
        if not use_four_over_six:
            candidates = [b * (encode * F32(1 / 6))]
        else:
            candidates = [b / F32(6) * encode, b / F32(6) * encode * F32(1.5)]
        results = []
        for candidate in candidates:
            scale = to_e4m3(candidate)
            s = E4M3_VALUES[scale].astype(F32)
            inverse = np.minimum(F32(1) / (s * decode), F32(FP32_MAX))
            codes = to_e2m1(x * inverse[..., None])
            value = np.array(E2M1_VALUES, dtype=F32)[codes] * s[..., None] * amax / F32(6 * bound)
            difference = np.abs(value - x)
            error = np.zeros_like(b)
            for i in range(16):
                error = error + difference[..., i]
            tree = error.reshape(-1, tile, b.shape[-1])
            while tree.shape[1] > 1:
                half = tree.shape[1] // 2
                tree = tree[:, :half] + tree[:, half:]
            results.append((codes, scale, tree[:, 0].repeat(tile, axis=0)))
    if not use_four_over_six:
        return results[0][:2]
    (codes_6, scale_6, error_6), (codes_4, scale_4, error_4) = results
    take_4 = error_4 < error_6
    return np.where(take_4[..., None], codes_4, codes_6), np.where(take_4, scale_4, scale_6)


@pytest.mark.parametrize("use_four_over_six", [False, True])
@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_against_the_reference(tile: int, use_four_over_six: bool, seed: int) -> None:
    # Rows of very different magnitude, so that all kinds of block scales occur, down to subnormal and zero.
    spread = 2.0 ** -torch.randint(0, 24, (64, 1), generator=torch.Generator().manual_seed(seed))
    if tile == 16:
        spread = spread[::16].repeat_interleave(16, dim=0)
    x = gaussian(64, 256, seed=seed) * spread * 10.0 ** (seed - 2)
    x = x.to(torch.bfloat16).float() if seed % 2 else x
    quantize = quantize_16x16 if tile == 16 else quantize_1x16
    codes, scales, amax = quantize(x, four_over_six=use_four_over_six)
    assert amax.item() == x.abs().max().item()
    expected_codes, expected_scales = reference(x.view(64, 16, 16).numpy(), F32(amax.item()), tile, use_four_over_six)
    assert np.array_equal(scales.view(torch.uint8).numpy(), expected_scales)
    assert np.array_equal(unpack(codes).numpy(), expected_codes.reshape(64, 256))


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("amax", [40, 64, 128, 224])
def test_near_ties_against_the_reference(tile: int, amax: int) -> None:
    """Integers: scales fall next to ties and errors add up to nearly the same, so every rounding decides."""
    generator = torch.Generator().manual_seed(amax)
    limits = torch.randint(1, amax + 1, (128, 64, 1), generator=generator).repeat_interleave(tile, dim=0)
    blocks = (torch.rand(128 * tile, 64, 16, generator=generator) * (2 * limits + 1)).floor() - limits
    given = torch.tensor(float(amax))
    quantize = quantize_16x16 if tile == 16 else quantize_1x16
    for use_four_over_six in (False, True):
        codes, scales, _ = quantize(blocks.flatten(1), given, four_over_six=use_four_over_six)
        expected_codes, expected_scales = reference(blocks.numpy(), F32(amax), tile, use_four_over_six)
        assert np.array_equal(scales.view(torch.uint8).numpy(), expected_scales)
        assert np.array_equal(unpack(codes).numpy(), expected_codes.reshape(-1, 1024))


def test_four_over_six_takes_both_branches() -> None:
    x = gaussian(512, 512)
    codes, scales, amax = four_over_six(x)
    largest = (unpack(codes) & 7).unflatten(-1, (-1, 16)).amax(dim=-1)
    maps_to_4 = (largest <= 6).float().mean().item()
    assert maps_to_4 == pytest.approx(0.34, abs=0.02)
    errors = [
        (dequantize(q, s, a, 512, bound) - x).square().mean().item()
        for (q, s, a), bound in (
            ((codes, scales, amax), FOUR_OVER_SIX_BOUND),
            (quantize_1x16(x), E4M3_MAX),
        )
    ]
    assert errors[0] < 0.9 * errors[1]


# Scales


def test_tensor_amax() -> None:
    for dtype in DTYPES:
        assert_same((tensor_amax(torch.tensor([[1.5, -3.25], [0.0, 2.0]], dtype=dtype)),), (torch.tensor(3.25),))
        bad = torch.tensor([torch.nan, -torch.inf, torch.inf, -2.5, 1.0], dtype=dtype)
        assert_same((tensor_amax(bad),), (torch.tensor(2.5),))
        for nothing in (bad[:3], torch.zeros(5, dtype=dtype), torch.empty(0, 16, dtype=dtype), -bad[:0]):
            assert_same((tensor_amax(nothing),), (torch.tensor(0.0),))
    assert tensor_amax(torch.tensor(-7.0)).item() == 7.0
    assert tensor_amax(gaussian(4, 6).t()[::2]).dim() == 0


def test_the_least_amax_changes_no_code_and_keeps_the_values() -> None:
    least = 2688 * 2.0**-128
    above = torch.tensor(least).nextafter(torch.tensor(1.0))
    assert tensor_amax(above).item() == above.item()
    for magnitude in (1e-45, 1e-40, 1e-38, 1e-37, 7.8e-36):
        amax = tensor_amax(torch.tensor(magnitude))
        assert amax.item() == least
        assert encode_scale(torch.tensor(magnitude)).item() == encode_scale(amax).item() == FP32_MAX
        x = gaussian(4, 32) * magnitude
        raw = x.abs().max()
        assert_same(quantize_1x16(x)[:2], quantize_1x16(x, raw)[:2])


def test_encode_scale() -> None:
    amax = torch.tensor([0.0, torch.inf, 1.0, 3.0, 1e-37, FP32_MAX, torch.nan])
    encode = encode_scale(amax)
    expected = [1.0, 1.0, 2688.0, 896.0, FP32_MAX, (F32(2688) / F32(FP32_MAX)).item()]
    assert encode[:6].tolist() == expected
    assert encode[6].isnan()
    # Division, not the product with a reciprocal: the two differ for many amaxes.
    many = gaussian(4096).abs()
    assert np.array_equal(encode_scale(many).numpy(), F32(2688) / many.numpy())
    assert np.array_equal(encode_scale(many, FOUR_OVER_SIX_BOUND).numpy(), F32(1536) / many.numpy())


def test_block_scales_of_every_e4m3_value_and_tie() -> None:
    values = E4M3_BYTES.view(torch.float8_e4m3fn).float()
    assert np.array_equal(values.numpy(), E4M3_VALUES.astype(F32))
    one = torch.tensor(6.0)  # an encode scale that multiplies by one
    assert torch.equal(block_scales(values, one).view(torch.uint8), E4M3_BYTES)
    ties = (values[1:] + values[:-1]) / 2
    even = E4M3_BYTES[1:] - E4M3_BYTES[1:] % 2
    assert torch.equal(block_scales(ties, one).view(torch.uint8), even)
    below, above = ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))
    assert torch.equal(block_scales(below, one).view(torch.uint8), E4M3_BYTES[:-1])
    assert torch.equal(block_scales(above, one).view(torch.uint8), E4M3_BYTES[1:])
    extremes = torch.tensor([449.0, 464.0, 480.0, 1e30, torch.inf, torch.nan])
    assert block_scales(extremes, one).view(torch.uint8).tolist() == [0x7E] * 5 + [0x7F]


# Decoding


def test_every_product_is_exact_in_every_dtype() -> None:
    """All 127 finite scales times all 16 codes, against float64."""
    codes = pack(torch.arange(16, dtype=torch.uint8).expand(127, 16))
    scales = E4M3_BYTES.view(torch.float8_e4m3fn).unsqueeze(-1)
    exact = scales.double() * torch.tensor(E2M1_VALUES, dtype=torch.float64)
    for dtype in DTYPES:
        decoded = decode_unscaled(codes, scales, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded.double(), exact)
        assert torch.equal(torch.signbit(decoded), torch.signbit(exact))
        nan = torch.tensor([[0x7F]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert decode_unscaled(codes[:1], nan, dtype).isnan().all()


def test_every_packed_byte_decodes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 16, 8)
    scales = torch.full((2, 16, 1), 1.25).to(torch.float8_e4m3fn)
    assert torch.equal(decode_unscaled(codes, scales, torch.float32), decode_e2m1(unpack(codes)) * 1.25)
    transposed = codes.transpose(0, 1)
    assert torch.equal(
        decode_unscaled(transposed, scales.transpose(0, 1), torch.float32),
        decode_e2m1(unpack(transposed)) * 1.25,
    )


@pytest.mark.parametrize("bound", [E4M3_MAX, FOUR_OVER_SIX_BOUND])
def test_dequantize_rounds_in_the_stated_order(bound: float) -> None:
    codes, scales, amax = quantize_1x16(gaussian(16, 64), four_over_six=bound == FOUR_OVER_SIX_BOUND)
    multiplier = scales.float().numpy() * (F32(amax.item()) * F32(1 / (6 * bound)))
    expected = decode_e2m1(unpack(codes)).numpy().reshape(16, 4, 16) * multiplier[..., None]
    assert np.array_equal(dequantize(codes, scales, amax, 64, bound).numpy(), expected.reshape(16, 64))


@every_quantizer
@pytest.mark.parametrize("magnitude", [10.0**power for power in range(-36, 37, 4)])
def test_relative_error_of_gaussians(quantize: Quantizer, magnitude: float) -> None:
    expected = {"1x16": 9.03e-3, "16x16": 1.24e-2, "stochastic": 1.89e-2}
    expected |= {"1x16-four-over-six": 7.78e-3, "16x16-four-over-six": 1.24e-2}
    if magnitude > 1e35:  # the errors to compare overflow, which is a tie, and ties map to 6
        expected["1x16-four-over-six"] = expected["1x16"]
    x = gaussian(128, 256) * magnitude
    assert x.isfinite().all()
    codes, scales, amax = quantize(x)
    error = (dequantize(codes, scales, amax, 256, bound_of(quantize)) - x).double().square().sum()
    relative = (error / x.double().square().sum()).item()
    name = next(name for name, function in QUANTIZERS.items() if function is quantize)
    assert relative == pytest.approx(expected[name], rel=0.05)


def test_gemm_alpha() -> None:
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    assert gemm_alpha(one, one).item() == F32(1 / (36 * 448 * 448))
    assert gemm_alpha(one, one, FOUR_OVER_SIX_BOUND).item() == F32(1 / (36 * 256 * 448))
    assert gemm_alpha(one, one, bound_b=FOUR_OVER_SIX_BOUND).item() == F32(1 / (36 * 256 * 448))
    assert gemm_alpha(zero, one).item() == 0.0
    a, b = torch.tensor(3.3), torch.tensor(0.7)
    assert gemm_alpha(a, b).item() == (F32(3.3) * F32(0.7)) * F32(1 / (36 * 448 * 448))


@pytest.mark.parametrize("quantize_a", [quantize_1x16, four_over_six])
@pytest.mark.parametrize("quantize_b", [quantize_16x16, four_over_six_tiles])
def test_gemm_of_unscaled_operands(quantize_a: Quantizer, quantize_b: Quantizer) -> None:
    a, b = quantize_a(gaussian(48, 64) * 100), quantize_b(gaussian(32, 64, seed=1) * 0.01)
    bound_a, bound_b = bound_of(quantize_a), bound_of(quantize_b)
    unscaled = decode_unscaled(*a[:2], torch.float32) @ decode_unscaled(*b[:2], torch.float32).t()
    product = unscaled * gemm_alpha(a[2], b[2], bound_a, bound_b)
    expected = dequantize(*a, 64, bound_a).double() @ dequantize(*b, 64, bound_b).double().t()
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)

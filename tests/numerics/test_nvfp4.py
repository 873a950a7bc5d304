"""NVFP4's quantizers against an independent scalar-rule reference, and the properties callers rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

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

FP32_MAX = torch.finfo(torch.float32).max
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3_BYTES = torch.arange(127, dtype=torch.uint8)
Quantizer = Callable[..., tuple[Tensor, Tensor, Tensor]]
F32 = np.float32


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_like(x: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, x.shape, generator=generator).to(torch.uint8)


def four_over_six(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_1x16(x, amax, four_over_six=True)


def four_over_six_tiles(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_16x16(x, amax, four_over_six=True)


def stochastic(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_1x16(x, amax, random_like(x))


QUANTIZERS: dict[str, Quantizer] = {
    "1x16": quantize_1x16,
    "stochastic": stochastic,
    "16x16": quantize_16x16,
    "1x16-four-over-six": four_over_six,
    "16x16-four-over-six": four_over_six_tiles,
}
every_quantizer = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def bound_of(quantize: Quantizer) -> float:
    return FOUR_OVER_SIX_BOUND if quantize in (four_over_six, four_over_six_tiles) else E4M3_MAX


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        one_byte = a.itemsize == 1  # float8 tensors cannot be compared themselves
        assert torch.equal(a.view(torch.uint8) if one_byte else a, b.view(torch.uint8) if one_byte else b)


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


# What quantizers promise


@every_quantizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_elements_make_their_block_nan_and_no_other(
    quantize: Quantizer, dtype: torch.dtype, bad: float
) -> None:
    clean = gaussian(32, 64).to(dtype)
    clean[20, 37] = 0.0
    x = clean.clone()
    x[20, 37] = bad
    codes, scales, amax = quantize(x)
    clean_codes, clean_scales, clean_amax = quantize(clean)
    assert amax.item() == clean_amax.item()
    rows = slice(16, 32) if "16x16" in next(n for n, q in QUANTIZERS.items() if q is quantize) else slice(20, 21)
    affected = torch.zeros(32, 4, dtype=torch.bool)
    affected[rows, 2] = True
    assert torch.equal(scales.view(torch.uint8) == 0x7F, affected)
    assert torch.equal(scales.float()[~affected], clean_scales.float()[~affected])
    kept = ~affected.repeat_interleave(8, dim=-1)
    assert torch.equal(codes[kept], clean_codes[kept])
    elements = affected.repeat_interleave(16, dim=-1)
    assert torch.equal(dequantize(codes, scales, amax, 64).isnan(), elements)
    for decoded in DTYPES:
        assert torch.equal(decode_unscaled(codes, scales, decoded).isnan(), elements)
    product = decode_unscaled(codes, scales, torch.float32) @ torch.zeros(64, 3)
    assert torch.equal(product.isnan().any(dim=-1), affected.any(dim=-1))


@every_quantizer
def test_a_tensor_without_finite_elements_is_nan_throughout(quantize: Quantizer) -> None:
    codes, scales, amax = quantize(torch.full((16, 32), torch.inf))
    assert amax.item() == 0.0
    assert (scales.view(torch.uint8) == 0x7F).all()
    assert dequantize(codes, scales, amax, 32).isnan().all()


@every_quantizer
def test_zeros_stay_zeros(quantize: Quantizer) -> None:
    codes, scales, amax = quantize(torch.zeros(16, 32))
    assert (codes.any(), scales.view(torch.uint8).any(), amax.item()) == (False, False, 0.0)
    assert torch.equal(dequantize(codes, scales, amax, 32), torch.zeros(16, 32))


@every_quantizer
@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 0), (2, 0, 48), (0, 3, 16), (3, 2, 0)])
def test_empty_tensors(quantize: Quantizer, shape: tuple[int, ...]) -> None:
    codes, scales, amax = quantize(torch.empty(shape))
    assert codes.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 16)
    assert (codes.dtype, scales.dtype, amax.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    assert amax.item() == 0.0
    assert dequantize(codes, scales, amax, shape[-1]).shape == shape
    assert decode_unscaled(codes, scales, torch.bfloat16).shape == shape


@every_quantizer
@pytest.mark.parametrize(("rows", "k"), [(16, 1), (16, 17), (5, 40), (19, 63), (1, 15)])
def test_edges_count_as_zeros(quantize: Quantizer, rows: int, k: int) -> None:
    x = gaussian(rows, k)
    padded = torch.zeros(rows + -rows % 16, k + -k % 16)
    padded[:rows, :k] = x
    if quantize is stochastic:
        random_bytes = torch.zeros(padded.shape, dtype=torch.uint8)
        random_bytes[:rows, :k] = random_like(x)
        expected = quantize_1x16(padded, None, random_bytes)
    else:
        expected = quantize(padded)
    codes, scales, amax = quantize(x)
    assert_same((codes, scales, amax), (expected[0][:rows], expected[1][:rows], expected[2]))
    bound = bound_of(quantize)
    restored = dequantize(codes, scales, amax, k, bound)
    assert torch.equal(restored, dequantize(*expected, padded.shape[1], bound)[:rows, :k])


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_equal_their_float32(quantize: Quantizer, dtype: torch.dtype) -> None:
    x = gaussian(32, 64).to(dtype)
    assert_same(quantize(x), quantize(x.float()))


@every_quantizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(quantize: Quantizer, dtype: torch.dtype) -> None:
    x = gaussian(64, 96).to(dtype)
    for view in (x.t(), x[::2, 16:80], x[:, :32].expand(64, 32), x[:1].expand(32, 96), x[:, ::3]):
        codes, scales, amax = quantize(view)
        assert codes.is_contiguous()
        assert scales.is_contiguous()
        assert_same((codes, scales, amax), quantize(view.contiguous()))


@every_quantizer
def test_leading_dimensions_are_independent(quantize: Quantizer) -> None:
    x = gaussian(2, 3, 20, 48)
    codes, scales, amax = quantize(x)
    if quantize is stochastic:
        x, codes, scales = x.flatten(0, 2), codes.flatten(0, 2), scales.flatten(0, 2)
        assert_same((codes, scales), quantize_1x16(x, amax, random_like(x))[:2])
        return
    for i in range(2):
        for j in range(3):
            assert_same((codes[i, j], scales[i, j]), quantize(x[i, j], amax)[:2])


def test_one_dimension() -> None:
    x = gaussian(40)
    codes, scales, amax = quantize_1x16(x)
    assert (codes.shape, scales.shape) == ((24,), (3,))
    assert torch.equal(codes, quantize_1x16(x.unsqueeze(0))[0][0])
    assert dequantize(codes, scales, amax, 40).shape == (40,)


@pytest.mark.parametrize("use_four_over_six", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (40, 56), (16, 16)])
def test_tiles_of_the_transpose_have_the_same_values(rows: int, columns: int, use_four_over_six: bool) -> None:
    # Four-over-six adds up a tile's errors in another order; none of these is so close that it would matter.
    w = gaussian(rows, columns)
    codes, scales, amax = quantize_16x16(w, four_over_six=use_four_over_six)
    codes_t, scales_t, amax_t = quantize_16x16(w.t(), four_over_six=use_four_over_six)
    assert amax.item() == amax_t.item()
    assert torch.equal(unpack(codes_t)[:columns, :rows], unpack(codes)[:rows, :columns].t())
    assert torch.equal(scales_t.float()[::16], scales.float()[::16].t())
    assert torch.equal(scales.float(), scales.float()[::16].repeat_interleave(16, dim=0)[:rows])


def test_random_bytes_belong_to_their_elements() -> None:
    x = gaussian(8, 24)
    random_bytes = random_like(x)
    codes, scales, amax = quantize_1x16(x, None, random_bytes)
    assert_same(quantize_1x16(x.t(), amax, random_bytes.t())[2:], (amax,))
    flipped = quantize_1x16(x.flip(0), amax, random_bytes.flip(0))
    assert_same(flipped[:2], (codes.flip(0), scales.view(torch.uint8).flip(0).view(scales.dtype)))
    rounded_down = quantize_1x16(x, amax, torch.zeros_like(random_bytes))[0]
    rounded_up = quantize_1x16(x, amax, torch.full_like(random_bytes, 255))[0]
    down, drawn, up = (unpack(packed) & 7 for packed in (rounded_down, codes, rounded_up))
    assert ((down <= drawn) & (drawn <= up)).all()
    assert (down < drawn).any()
    assert (drawn < up).any()


@pytest.mark.parametrize("use_four_over_six", [False, True])
def test_a_given_amax_is_used(use_four_over_six: bool) -> None:
    x = gaussian(4, 32)
    given = torch.tensor(50.0)
    wider = torch.cat([x, torch.full((1, 32), 50.0)])
    codes, scales, amax = quantize_1x16(x, given, four_over_six=use_four_over_six)
    expected = quantize_1x16(wider, four_over_six=use_four_over_six)
    assert amax is given
    assert_same((codes, scales), (expected[0][:4], expected[1][:4]))


# Tracing


# The others are made of the same parts; tracing is slow.
@pytest.mark.parametrize("quantize", [quantize_1x16, stochastic, four_over_six_tiles])
def test_traces_once_for_all_shapes(quantize: Quantizer) -> None:
    def round_trip(x: Tensor, random_bytes: Tensor) -> tuple[Tensor, ...]:
        drawn = quantize is stochastic
        codes, scales, amax = quantize_1x16(x, None, random_bytes) if drawn else quantize(x)
        return codes, scales, amax, dequantize(codes, scales, amax, x.shape[-1])

    def inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        x = gaussian(rows, columns, seed=rows)
        return x, random_like(x)

    graph = make_fx(round_trip, tracing_mode="symbolic")(*inputs(32, 48))
    names = {node.target.__name__ for node in graph.graph.nodes if hasattr(node.target, "overloadpacket")}
    assert "index_select.default" in names
    assert not {name for name in names if "local_scalar_dense" in name or "nonzero" in name}
    in_place = {name for name in names if name.split(".")[0].endswith("_") and not name.startswith("__")}
    assert not in_place
    for rows, columns in ((32, 48), (48, 112)):
        assert_same(graph(*inputs(rows, columns)), round_trip(*inputs(rows, columns)))


# Misuse


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(4, 32)
    with pytest.raises(TypeError, match="x has dtype float64; convert it to float32 or bfloat16 or float16"):
        quantize_1x16(x.double())
    with pytest.raises(TypeError, match="w has dtype int32"):
        quantize_16x16(x.int())
    with pytest.raises(TypeError, match="amax has dtype bfloat16; convert it to float32"):
        quantize_1x16(x, torch.tensor(1.0, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="x has dtype int64"):
        tensor_amax(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="random_bytes has dtype int8"):
        quantize_1x16(x, None, x.to(torch.int8))
    with pytest.raises(ValueError, match=r"random_bytes has shape \(4, 16\); give it that of x, \(4, 32\)"):
        quantize_1x16(x, None, torch.zeros(4, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="drop random_bytes or four_over_six"):
        quantize_1x16(x, None, torch.zeros(4, 32, dtype=torch.uint8), four_over_six=True)
    with pytest.raises(ValueError, match="w has 1 dimensions; give it at least 2"):
        quantize_16x16(x[0])
    with pytest.raises(ValueError, match="x has 0 dimensions"):
        quantize_1x16(torch.tensor(1.0))
    codes, scales, _ = quantize_1x16(x)
    with pytest.raises(TypeError, match=r"use torch.float32, torch.bfloat16 or torch.float16"):
        decode_unscaled(codes, scales, torch.float64)
    with pytest.raises(TypeError, match="codes has dtype float8_e4m3fn"):
        decode_unscaled(scales, scales, torch.float32)

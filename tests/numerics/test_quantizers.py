"""What callers rely on in every quantizer of NVFP4."""

from __future__ import annotations

import pytest
import torch
from quantizers import (
    DTYPES,
    QUANTIZERS,
    Quantizer,
    assert_same,
    bound_of,
    every_quantizer,
    four_over_six_tiles,
    gaussian,
    random_like,
    stochastic,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_compile.numerics import (
    decode_unscaled,
    dequantize,
    quantize_1x16,
    quantize_16x16,
    tensor_amax,
    unpack,
)


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

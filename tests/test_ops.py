"""The fp4 operators: what torch asks of an operator, their shapes, and the CPU kernels against the definition."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from fp4_compile import numerics, ops
from fp4_compile.codegen import cpu
from fp4_compile.numerics import decode_unscaled, quantize_1x16, quantize_16x16

fp4 = torch.ops.fp4  # the names a graph holds; importing `ops` defines them

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantized(x, block="1x16", four_over_six=False):
    amax = fp4.amax(x)
    return (*fp4.quantize(x, amax, block, four_over_six), amax)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype, dynamic):
    x, w = torch.randn(5, 40).to(dtype), torch.randn(24, 40).to(dtype)
    names = ("test_faketensor", "test_aot_dispatch_dynamic" if dynamic else "test_aot_dispatch_static")
    a, b = quantized(x), quantized(w)
    for op, args in (
        (fp4.amax, (x,)),
        (fp4.quantize, (x, a[2], "1x16", False)),
        (fp4.quantize, (w, b[2], "16x16", True)),
        (fp4.scaled_mm, (*a, *b, None, dtype)),
        (fp4.scaled_mm, (*a, *b, torch.randn(24).to(dtype), dtype)),
        (fp4.dequantize, (*a, 40, dtype)),
    ):
        # Torch's schema check cannot compare float8 tensors (allclose is missing); `test_nothing_is_mutated` does.
        float8 = op is not ops.amax.overloadpacket
        opcheck(op.default, args, test_utils=names if float8 else ("test_schema", *names))


def test_nothing_is_mutated_and_nothing_aliases():
    x = torch.randn(5, 48)
    a = quantized(x)
    for op, args in (
        (fp4.quantize, (x, a[2], "1x16", False)),
        (fp4.scaled_mm, (*a, *a, torch.randn(5), torch.float32)),
        (fp4.dequantize, (*a, 48, torch.float32)),
    ):
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        before = [t.view(torch.uint8).clone() for t in (t.reshape(-1) for t in tensors)]
        results = op(*args)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), old)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            assert result.is_contiguous()
            assert all(result.data_ptr() != t.data_ptr() for t in tensors)


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("k", [16, 17, 40, 64])
def test_shapes_agree_with_the_fake_ones(lead, k):
    x, w = torch.randn(*lead, k), torch.randn(33, k)
    codes, scales, amax = quantized(x)
    blocks = -(-k // 16)
    assert codes.shape == (*lead, blocks * 8) and scales.shape == (*lead, blocks) and amax.shape == ()
    y = fp4.scaled_mm(codes, scales, amax, *quantized(w), None, torch.float32)
    assert y.shape == (*lead, 33)
    assert fp4.dequantize(codes, scales, amax, k, torch.float32).shape == x.shape
    fake = [t.to("meta") for t in (x, w)]
    assert fp4.quantize(fake[0], fp4.amax(fake[0]))[0].shape == codes.shape
    assert fp4.scaled_mm(*quantized(fake[0]), *quantized(fake[1]), None, torch.float32).shape == y.shape


def test_batched_operands():
    x, w = torch.randn(3, 5, 64), torch.randn(3, 40, 64)
    y = fp4.scaled_mm(*quantized(x), *quantized(w), None, torch.float32)
    values = [fp4.dequantize(*quantized(t), 64, torch.float64) for t in (x, w)]
    torch.testing.assert_close(y.double(), values[0] @ values[1].mT, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_mm_is_the_exact_product_of_the_numbers_it_is_given(dtype):
    """FP32 sums of exact products against FP64: nothing but the last bits and one rounding to the output."""
    x, w, bias = torch.randn(9, 72).to(dtype), torch.randn(40, 72).to(dtype), torch.randn(40).to(dtype)
    y = fp4.scaled_mm(*quantized(x), *quantized(w), bias, dtype)
    want = fp4.dequantize(*quantized(x), 72, torch.float64) @ fp4.dequantize(*quantized(w), 72, torch.float64).t()
    want = want + bias.double()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want.to(dtype).double(), rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_shows_in_its_row_and_nowhere_else(bad):
    x, w = torch.randn(9, 64), torch.randn(40, 64)
    clean = fp4.scaled_mm(*quantized(x), *quantized(w), None, torch.float32)
    amax_elsewhere = x.clone()
    amax_elsewhere[3, 5] = 0.0
    x[3, 5] = bad
    y = fp4.scaled_mm(*quantized(x), *quantized(w), None, torch.float32)
    assert not torch.isfinite(y[3]).any()
    others = torch.arange(9) != 3
    same = fp4.scaled_mm(*quantized(amax_elsewhere), *quantized(w), None, torch.float32)
    assert torch.equal(y[others], same[others])
    assert torch.isfinite(clean).all()


def test_an_empty_contraction_gives_the_bias():
    x, w, bias = torch.empty(3, 0), torch.empty(5, 0), torch.randn(5)
    y = fp4.scaled_mm(*quantized(x), *quantized(w), bias, torch.float32)
    assert torch.equal(y, bias.expand(3, 5))


def test_an_unknown_block_is_refused():
    with pytest.raises((ValueError, RuntimeError), match="it takes '1x16' or '16x16'"):
        fp4.quantize(torch.randn(4, 16), torch.ones(()), "2x16")


def hard_cases():
    torch.manual_seed(3)
    spread = 2.0 ** torch.randint(-30, 30, (64, 80))
    return {
        "normal": torch.randn(64, 400),
        "ragged": torch.randn(7, 5, 41),
        "tiny": torch.randn(16, 64) * 1e-36,
        "denormal": torch.randn(16, 64) * 1e-40,
        "huge": torch.randn(16, 64) * 3e37,
        "spread": torch.randn(64, 80) * spread,
        "cauchy": torch.randn(64, 64).cauchy_().pow(3),
        "zeros": torch.zeros(3, 32),
        "negative zeros": -torch.zeros(3, 32),
        "one element": torch.randn(1, 1),
        "ties": torch.tensor(
            [[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5]]
        ),
        "transposed": torch.randn(80, 48).t(),
        "large": torch.randn(300, 256),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, float("nan"), -float("nan"), float("inf")])
def test_cpu_kernels_are_the_definition_byte_for_byte(dtype, bad):
    assert cpu.library() is not None, "no C++ compiler: the kernels were not tested"
    for name, x in hard_cases().items():
        x = x.to(dtype)
        if bad is not None:
            x = x.clone()
            x[0, ..., 0] = bad
        codes, scales, amax = quantize_1x16(x)
        assert torch.equal(ops.amax(x), amax), name
        got_codes, got_scales = ops.quantize(x, amax)
        assert torch.equal(got_scales.view(torch.uint8), scales.view(torch.uint8)), name
        assert torch.equal(got_codes, codes), name
        want, got = decode_unscaled(codes, scales, torch.bfloat16), cpu.decode_unscaled(codes, scales)
        assert torch.equal(got.isnan(), want.isnan()), name
        assert torch.equal(got.nan_to_num(7.0).view(torch.int16), want.nan_to_num(7.0).view(torch.int16)), name


def test_cpu_decode_is_exact_over_every_byte_and_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256).view(256, 256)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(256, 32) & 0x7F
    scales = scales.view(torch.float8_e4m3fn)
    want, got = decode_unscaled(codes, scales, torch.bfloat16), cpu.decode_unscaled(codes, scales)
    assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))
    assert got.isnan().any()


def test_cpu_scales_round_as_torch_does_between_all_neighbours():
    """Amaxes around every E4M3 rounding boundary, one block each, at an encode scale of exactly 6."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[1:] + grid[:-1]) / 2
    values = torch.cat([f(middles) for f in (lambda m: m, lambda m: m.nextafter(m * 2), lambda m: m.nextafter(m * 0))])
    x = torch.zeros(len(values), 16)
    x[:, 3] = values
    amax = torch.tensor(448.0)
    codes, scales, _ = quantize_1x16(x, amax)
    got_codes, got_scales = ops.quantize(x, amax)
    assert torch.equal(got_scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(got_codes, codes)


def test_without_a_compiler_the_operators_still_run(monkeypatch):
    x = torch.randn(5, 48)
    want = quantized(x)
    monkeypatch.setattr(cpu, "library", lambda: None)
    for got, expected in zip(quantized(x), want, strict=True):
        assert torch.equal(
            got.view(torch.uint8) if got.dtype == torch.float8_e4m3fn else got,
            expected.view(torch.uint8) if got.dtype == torch.float8_e4m3fn else expected,
        )


def test_a_16x16_weight_and_its_transpose_have_the_same_codes_through_the_operator():
    w = torch.randn(48, 64)
    codes, scales, _ = quantized(w, "16x16")
    want, _, _ = quantize_16x16(w.t().contiguous())
    assert torch.equal(numerics.unpack(codes).t(), numerics.unpack(want))
    assert not torch.equal(scales.view(torch.uint8), quantized(w)[1].view(torch.uint8))

"""The emitted Triton, run in the interpreter: quantizers byte for byte, products within summation order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels import EPS, error, quantize_rows, reference_rows, same_bytes, scaled_mm, weight_mm
from standalone import Fusion, load

from fp4_compile.simulation import interpreted
from fp4_compile.simulation.interpreter import Kernel


def every_finite_bf16():
    """All 65280 of them, in rows of 64 whose magnitudes differ, so that block scales of every kind occur."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    finite = values[torch.isfinite(values)]
    return finite[torch.randperm(finite.numel())].reshape(-1, 64)


def hard_rows(rows, k):
    x = torch.randn(rows, k) * torch.exp(2 * torch.randn(rows, 1))
    x[0, 3], x[1], x[2], x[3, :16], x[4, 5] = float("nan"), 0, x[2] * 1e-36, 0, float("inf")
    return x


@pytest.mark.parametrize("sm", [100, 120, 90, 80])
def test_all_bf16_numbers_are_quantized_to_the_reference_bytes(sm):
    x = every_finite_bf16()
    # Rows of like magnitude give all codes; rows of any magnitude give mostly zeros.
    x = torch.cat([x[:256], x.flatten().sort().values.reshape(-1, 64)[::2]])
    assert same_bytes(quantize_rows(x, sm, swizzled=sm >= 100), reference_rows(x, sm >= 100))


@pytest.mark.parametrize(
    ("rows", "k", "dtype"), [(130, 400, torch.bfloat16), (7, 100, torch.bfloat16), (9, 1040, torch.float32)]
)
@pytest.mark.parametrize(("sm", "swizzled"), [(100, True), (90, False), (80, False)])
def test_tails_zeros_nan_and_inf_give_the_reference_bytes(rows, k, sm, swizzled, dtype):
    x = hard_rows(rows, k).to(dtype)
    assert same_bytes(quantize_rows(x, sm, swizzled), reference_rows(x, swizzled))


def test_rms_norm_and_quantizer_are_one_kernel():
    x, weight = torch.randn(130, 256).bfloat16(), torch.rand(256).bfloat16() + 0.5
    normalized = torch.nn.functional.rms_norm(x.float(), (256,), weight.float(), EPS).bfloat16()
    codes, _, amax = quantize_rows(x, 100, True, norm_weight=weight)
    want = reference_rows(normalized, True)
    # The mean is summed in another order: now and then a number of BF16 differs, and its row's bytes with it.
    same = (codes == want[0]).all(1) & (amax == want[2])[:, 0]
    assert same.float().mean() > 0.9
    assert (codes != want[0]).float().mean() < 0.01


QUANTIZER_FAULTS = {
    "nibbles swapped": ("e2m1x2.f32 a, $2, $1", "e2m1x2.f32 a, $1, $2"),
    "halves swapped": ("halves[0], inverse_0), _to_e2m1(halves[2]", "halves[2], inverse_0), _to_e2m1(halves[0]"),
    "swizzle wrong": ("row % 128 // 32 * 4", "(row % 128 // 32 ^ 1) * 4"),
    "scale of the neighbour": ("_to_e2m1(halves[2], inverse_1)", "_to_e2m1(halves[2], inverse_0)"),
}


@pytest.mark.parametrize("fault", QUANTIZER_FAULTS)
def test_a_wrong_quantizer_is_caught(fault):
    x = torch.randn(130, 256).bfloat16()
    assert same_bytes(quantize_rows(x, 100, True), reference_rows(x, True))
    assert not same_bytes(quantize_rows(x, 100, True, mutate=QUANTIZER_FAULTS[fault]), reference_rows(x, True))


@pytest.mark.parametrize("size", [(128, 128, 256), (200, 300, 330), (3, 136, 1024)])
@pytest.mark.parametrize("sm", [100, 120])
@pytest.mark.parametrize("rows", [True, False])
def test_products_are_exact_but_for_the_order_of_their_sums(size, sm, rows):
    assert error(*scaled_mm(*size, sm, rows)) < 1e-6


@pytest.mark.parametrize(("size", "split"), [((3, 136, 1024), 4), ((200, 300, 352), 2), ((1, 128, 1056), 8)])
@pytest.mark.parametrize("sm", [100, 120])
def test_parts_of_the_contraction_add_up(size, split, sm):
    """Also where the last parts lie behind the end."""
    assert error(*scaled_mm(*size, sm, split=split)) < 2e-6


def test_an_epilogue_is_computed_on_the_accumulator():
    residual = torch.randn(200, 300).bfloat16()
    text = "value = value * tl.sigmoid(value) + tl.load(RESIDUAL + {0} * 300 + {1}, mask=inside).to(tl.float32)"
    out, product = scaled_mm(
        200, 300, 352, 100, epilogue=Fusion(text, ("RESIDUAL",)), extra=(residual,), dtype=torch.bfloat16
    )
    want = torch.nn.functional.silu(product) + residual.double()
    assert error(out, want) < 2**-8


@pytest.mark.parametrize(("m", "n", "k", "sm"), [(5, 200, 256, 90), (70, 130, 352, 80)])
def test_packed_weights_decode_exactly(m, n, k, sm):
    assert error(*weight_mm(m, n, k, sm)) < 1e-6


PRODUCT_FAULTS = {
    "alpha dropped": ("parts[part] * (amax_a * amax_b * 1.3840171675383317e-07)", "parts[part]"),
    "half of alpha dropped": ("amax_a * amax_b *", "amax_a *"),
    "scale column shifted": ("k * REP_K, 0, 0]", "k * REP_K + 1, 0, 0]"),
    "swizzle wrong": (".trans(0, 3, 2, 1, 4)", ".trans(0, 2, 3, 1, 4)"),
    "block of B wrong": ("tile_n * BLOCK_N, k *", "tile_n * BLOCK_N + 1, k *"),
}


@pytest.mark.parametrize("fault", PRODUCT_FAULTS)
def test_a_wrong_product_is_caught(fault):
    assert error(*scaled_mm(130, 200, 352, 100, mutate=PRODUCT_FAULTS[fault])) > 1e-2


def test_a_wrong_weight_decoder_is_caught():
    assert error(*weight_mm(5, 64, 256, 90, mutate=("low * scale, high * scale", "high * scale, low * scale"))) > 1e-2


def test_the_interpreter_is_put_back():
    import triton
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    def state():
        names = (JITFunction.__call__, interpreter.ReduceOps.generic_reduce, tl.sum, tl.dot_scaled, tl.core.load)
        return (*names, type(interpreter.interpreter_builder), triton.knobs.runtime.interpret)

    before = state()
    with pytest.raises(RuntimeError, match="stop"), interpreted():
        assert state() != before
        raise RuntimeError("stop")
    assert state() == before


def constant(out, like):
    import triton.language as tl

    place = tl.arange(0, 16)
    tl.store(out + place, tl.load(like + place) * tl.full([16], -1.5, tl.bfloat16))


def test_a_constant_of_bf16():
    out, x = torch.empty(16, dtype=torch.bfloat16), torch.randn(16).bfloat16()
    Kernel(constant)((1,), out, x)
    assert torch.equal(out, x * -1.5)


KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def fill(out):
    tl.store(out + tl.arange(0, 4), twice(tl.arange(0, 4)))
"""


def test_the_text_of_a_kernel_is_that_it_was_defined_with():
    """Another process may have replaced its file in a cache."""
    module = load(KERNEL)
    Path(module.__file__).write_text(
        KERNEL.replace("\n\n\n", "\n\n\n\n@triton.jit\ndef unrelated(x):\n    return x\n\n\n")
    )
    out = torch.zeros(4, dtype=torch.int32)
    Kernel(module.fill)((1,), out)
    assert out.tolist() == [0, 2, 4, 6]

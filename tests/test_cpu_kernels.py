"""The CPU's kernels: every instruction set gives the bits of the definition, with any number of threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_compile import numerics, ops
from fp4_compile.codegen import cpu

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SHAPES = [
    # rows, outputs, blocks: below, at and beyond the tiles of the kernels
    (1, 16, 1),
    (1, 1, 3),
    (1, 100, 70),
    (1, 37, 300),
    (1, 4100, 16),
    (2, 48, 150),
    (3, 33, 5),
    (9, 5, 200),
    (17, 64, 64),
    (40, 100, 70),
    (300, 17, 130),
]


@pytest.fixture(scope="module", params=[None, 1, 0], ids=["best", "AVX2", "plain"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return cpu.build(request.param)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_operand(rows: int, blocks: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (rows, blocks * 8), dtype=torch.uint8)
    return codes, torch.randint(0, 127, (rows, blocks), dtype=torch.uint8).view(torch.float8_e4m3fn)


def product_by_definition(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, alpha: float, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Blocks one after the other: an exact sum of 16, times both scales, added in fp32."""
    left, right = (numerics.decode_e2m1(numerics.unpack(codes)).double().unflatten(-1, (-1, 16)) for codes in (a, b))
    total = torch.zeros(len(a), len(b))
    for i in range(a_scales.shape[1]):
        dots = (left[:, i] @ right[:, i].T).float()
        total += dots * a_scales[:, i, None].float() * b_scales[None, :, i].float()
    total = total * torch.tensor(alpha)
    return (total if bias is None else total + bias.float()).to(dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(3), want.nan_to_num(3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_the_definition_bit_for_bit(kernels: Any, threads: int, shape: tuple[int, int, int]) -> None:
    rows, outputs, blocks = shape
    a, b = random_operand(rows, blocks), random_operand(outputs, blocks)
    if outputs == 100:
        a[1].view(torch.uint8)[rows - 1, 2] = b[1].view(torch.uint8)[5, 6] = 0x7F
    alpha = 0.37e-3
    for dtype in KINDS:
        for bias in (None, torch.randn(outputs), torch.randn(outputs).bfloat16(), torch.randn(outputs).half()):
            got = cpu.product(*a, *b, alpha, bias, dtype, kernels)
            assert same(got, product_by_definition(*a, *b, alpha, bias, dtype)), (dtype, bias is not None)


def test_large_products_overflow_as_their_type_does(kernels: Any) -> None:
    a = torch.full((3, 64), 0x77, dtype=torch.uint8), torch.full((3, 8), 448.0).to(torch.float8_e4m3fn)
    for dtype in KINDS:
        assert same(cpu.product(*a, *a, 1.0, None, dtype, kernels), product_by_definition(*a, *a, 1.0, None, dtype))
    assert cpu.product(*a, *a, 1.0, None, torch.float16, kernels).isinf().all()
    assert same(cpu.product(*a, *a, float("nan"), None, torch.bfloat16, kernels), torch.full((3, 3), torch.nan))


@pytest.mark.parametrize("shape", [(0, 16, 4), (5, 0, 4), (5, 16, 0)], ids=str)
def test_nothing_to_multiply(kernels: Any, shape: tuple[int, int, int]) -> None:
    rows, outputs, blocks = shape
    bias = torch.randn(outputs)
    got = cpu.product(
        *random_operand(rows, blocks), *random_operand(outputs, blocks), 1.0, bias, torch.float32, kernels
    )
    assert torch.equal(got, bias.expand(rows, outputs))


def test_batches_and_leading_dimensions(kernels: Any) -> None:
    a, b = random_operand(15, 6), random_operand(40, 6)
    want = product_by_definition(*a, *b, 1.0, None, torch.float32)
    lead = [t.unflatten(0, (3, 5)) for t in a]
    assert torch.equal(cpu.product(*lead, *b, 1.0, None, torch.float32, kernels).flatten(0, 1), want)
    batched = [t.unflatten(0, (5, 8)) for t in b]
    rows = [t.unflatten(0, (5, 3)) for t in a]
    got = cpu.product(*rows, *batched, 1.0, None, torch.float32, kernels)
    for i in range(5):
        assert torch.equal(got[i], want[3 * i : 3 * i + 3, 8 * i : 8 * i + 8])


def weight_product_by_definition(
    x: Tensor, b: Tensor, b_scales: Tensor, amax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """16 lanes, two elements each of every two blocks; sums of FP64, rounded once, are those of an FMA."""
    blocks = b_scales.shape[1]
    values = numerics.decode_e2m1(numerics.unpack(b)).double()
    padded = torch.zeros(len(x), blocks * 16, dtype=torch.float64)
    padded[:, : x.shape[1]] = x.double()
    tail = (0, blocks % 2 * 16)
    left, right = (torch.nn.functional.pad(t, tail).unflatten(-1, (-1, 16, 2)) for t in (padded, values))
    scales = torch.nn.functional.pad(b_scales.double(), (0, blocks % 2)).unflatten(-1, (-1, 2)).repeat_interleave(8, -1)
    lanes = torch.zeros(len(x), len(b), 16)
    for i in range(left.shape[1]):
        both = (left[:, None, i] * right[None, :, i]).sum(-1).float()
        lanes = (scales[None, :, i] * both.double() + lanes.double()).float()
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    total = lanes[..., 0] * (amax.flatten() * (1.0 / 2688.0))
    return (total if bias is None else total + bias.float()).to(dtype)


@pytest.mark.parametrize("shape", [(1, 5, 16), (2, 130, 100), (3, 33, 272), (4, 70, 48), (9, 300, 260)], ids=str)
def test_weight_only_products_are_the_definition_bit_for_bit(
    kernels: Any, threads: int, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    x, b = torch.randn(m, k).bfloat16(), random_operand(n, -(-k // 16))
    b[1].view(torch.uint8)[n - 1, 0] = 0x7F
    x[0, k - 1] = torch.inf
    for amax in (torch.tensor([2.5]), torch.rand(n) + 0.5):
        for bias in (None, torch.randn(n), torch.randn(n).bfloat16()):
            for dtype, kind in KINDS.items():
                out = torch.full((m, n), 99.0, dtype=dtype)
                operands = [t.data_ptr() for t in (x, *b, amax)]
                shift = (None, 0) if bias is None else (bias.data_ptr(), KINDS[bias.dtype])
                kernels.fp4_multiply_weights(
                    *operands, amax.numel() > 1, *shift, out.data_ptr(), kind, m, n, k, threads
                )
                assert same(out, weight_product_by_definition(x, *b, amax, bias, dtype))


def misaligned(t: Tensor) -> Tensor:
    """The same numbers, one element off from where an allocation starts."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype)
    moved = room[1:].view(t.shape)
    return moved.copy_(t)


@pytest.mark.parametrize("rows", [1, 19])
def test_misaligned_operands(kernels: Any, rows: int) -> None:
    a, b, bias = random_operand(rows, 37), random_operand(35, 37), torch.randn(35).bfloat16()
    want = product_by_definition(*a, *b, 0.5, bias, torch.bfloat16)
    moved = [misaligned(t.view(torch.uint8)).view(t.dtype) for t in (*a, *b)]
    assert same(cpu.product(*moved, 0.5, misaligned(bias), torch.bfloat16, kernels), want)


def hard(rows: int, k: int) -> Tensor:
    x = torch.randn(rows, k) * torch.exp(3 * torch.randn(rows, 1))
    if rows > 4:
        x[0, k // 2], x[1], x[2], x[4, k - 1] = torch.nan, 0, x[2] * 1e-30, torch.inf
    return x


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (130, 400), (3, 4099), (600, 272), (5, 1)], ids=str)
def test_quantizers_are_the_definition_byte_for_byte(
    kernels: Any, threads: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rows, k = shape
    for x in (hard(rows, k).to(dtype), misaligned(hard(rows, k).to(dtype)), torch.randn(rows, k).to(dtype)):
        amax = numerics.tensor_amax(x)
        codes, scales, _ = numerics.quantize_1x16(x, amax)
        got, got_scales = torch.full_like(codes, 99), torch.full(scales.shape, 99, dtype=torch.uint8)
        bits = kernels.fp4_amax_bits(x.data_ptr(), x.numel(), KINDS[dtype], threads)
        assert torch.equal(numerics.tensor_amax(torch.tensor(bits, dtype=torch.int32).view(torch.float32)), amax)
        encode = float(numerics.encode_scale(amax))
        pointers = (got.data_ptr(), got_scales.data_ptr())
        kernels.fp4_quantize_1x16(x.data_ptr(), rows, k, KINDS[dtype], encode, *pointers, threads)
        assert torch.equal(got_scales, scales.view(torch.uint8))
        assert torch.equal(got, codes)


def test_every_bf16_number_is_quantized_to_the_reference_bytes(kernels: Any) -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = values[values.isfinite()].sort().values.reshape(-1, 64)
    amax = torch.tensor(3.0)
    codes, scales, _ = numerics.quantize_1x16(x, amax)
    got, got_scales = torch.empty_like(codes), torch.empty(scales.shape, dtype=torch.uint8)
    pointers = (got.data_ptr(), got_scales.data_ptr())
    kernels.fp4_quantize_1x16(x.data_ptr(), *x.shape, 1, float(numerics.encode_scale(amax)), *pointers, 1)
    assert torch.equal(got_scales, scales.view(torch.uint8))
    assert torch.equal(got, codes)


@pytest.fixture(scope="module")
def operators() -> None:
    assert cpu.library() is not None, "no C++ compiler"
    for name in ("amax", "quantize", "scaled_mm", "weight_mm"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fp4::{name}", "CPU")


@pytest.mark.usefixtures("operators")
def test_scales_of_tensors_are_the_definitions_numbers() -> None:
    bits = torch.cat(
        (torch.randint(0, 0x7F800000, (2000,)), torch.tensor([0, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]))
    )
    amaxes = bits.to(torch.int32).view(torch.float32)
    one = torch.full((1, 8), 0x22, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.float8_e4m3fn)  # sixteen ones
    x = torch.tensor([[6.0, 3.0, 1.0, 0.1] * 4])
    for amax, other in zip(amaxes, amaxes[torch.randperm(len(amaxes))], strict=True):
        got = ops.scaled_mm(*one, amax, *one, other, None, torch.float32)
        assert same(got, (16.0 * numerics.gemm_alpha(amax, other)).view(1, 1))
        codes, scales = ops.quantize(x, amax)
        want, want_scales, _ = numerics.quantize_1x16(x, amax)
        assert torch.equal(codes, want) and torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
    tiny = torch.tensor([0.0, 1e-45, -3e-39, torch.nan])
    assert torch.equal(ops.amax(tiny), numerics.tensor_amax(tiny))
    assert torch.equal(ops.amax(torch.zeros(3)), torch.tensor(0.0))


@pytest.mark.usefixtures("operators")
def test_operators_read_any_layout_and_shape() -> None:
    x = torch.randn(5, 7, 50)
    for t in (x, x.transpose(0, 1), x[:, ::2], x.double(), x[0, 0], x[:0], x[..., :0]):
        amax = ops.amax(t)
        assert torch.equal(amax, numerics.tensor_amax(t.float()))
        for got, want in zip(ops.quantize(t, amax), numerics.quantize_1x16(t.float(), amax)[:2], strict=True):
            assert got.is_contiguous() and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.usefixtures("operators")
def test_products_of_operators_are_the_definition() -> None:
    a, b, amax = random_operand(6, 3), random_operand(8, 3), torch.tensor(2.5)
    for dtype in KINDS:
        for bias in (None, torch.randn(8), torch.randn(16).bfloat16()[::2]):
            got = ops.scaled_mm(*a, amax, *b, amax, bias, dtype)
            assert same(got, product_by_definition(*a, *b, float(numerics.gemm_alpha(amax, amax)), bias, dtype))
    whole = ops.scaled_mm(*a, amax, *b, amax, None, torch.float32)
    batched = [t.unflatten(0, (2, -1)) for t in (*a, *b)]
    got = ops.scaled_mm(*batched[:2], amax, *batched[2:], amax, None, torch.float32)
    assert same(got, torch.stack([whole[:3, :4], whole[3:, 4:]]))
    turned = [t.mT.contiguous().mT for t in (*a, *b)]
    assert same(ops.scaled_mm(*turned[:2], amax, *turned[2:], amax, None, torch.float32), whole)
    spread = torch.randn(6, 8)  # a bias that broadcasts is left to the general operator
    assert same(ops.scaled_mm(*a, amax, *b, amax, spread, torch.float32), whole + spread)
    none = ops.scaled_mm(a[0][:0], a[1][:0], amax, *b, amax, None, torch.bfloat16)
    assert none.shape == (0, 8) and none.dtype == torch.bfloat16
    rows = torch.full((6, 1), 2.5)  # left to the general operator
    assert same(ops.scaled_mm(*a, rows, *b, amax, None, torch.float32), whole)


@pytest.mark.usefixtures("operators")
def test_weight_only_products_of_operators() -> None:
    """By the kernel up to 16 rows, and beyond by a product of decoded weights, which sums in another order."""
    w, bias = torch.randn(40, 50), torch.randn(40).bfloat16()
    for amax in (numerics.tensor_amax(w), numerics.row_amax(w)):
        codes, scales, _ = numerics.quantize_1x16(w, amax)
        weight = numerics.dequantize(codes, scales, amax, 50).double()
        for x in (torch.randn(16, 50), torch.randn(2, 3, 50).bfloat16(), torch.randn(50, 4).t(), torch.randn(40, 50)):
            want = x.bfloat16().double() @ weight.T + bias.double()
            got = ops.weight_mm(x, codes, scales, amax, bias, torch.float32)
            assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)
        assert ops.weight_mm(torch.randn(0, 50), codes, scales, amax, bias, torch.float32).shape == (0, 40)


@pytest.mark.usefixtures("operators")
def test_operands_that_do_not_fit_are_refused() -> None:
    """A kernel would read behind them."""
    a, b, amax, x = random_operand(6, 3), random_operand(8, 3), torch.tensor(2.5), torch.randn(6, 48)
    for others in (random_operand(8, 4), (b[0], b[1][:7]), (b[0], b[1][:, :2])):
        with pytest.raises(RuntimeError, match="do not fit"):
            ops.scaled_mm(*a, amax, *others, amax, None, torch.float32)
        with pytest.raises(RuntimeError, match="do not fit"):
            ops.weight_mm(x, *others, amax, None, torch.float32)
    with pytest.raises(RuntimeError, match="do not fit"):
        ops.weight_mm(x, *b, torch.ones(5), None, torch.float32)


FIRST_CALLS = """
import torch
from torch._dispatch.python import enable_python_dispatcher
from fp4_compile import numerics, ops
from fp4_compile.codegen import cpu

if {without}:
    cpu.library = lambda: None
x = torch.randn(40, 64).bfloat16()
with enable_python_dispatcher():
    for _ in range(2):
        amax = ops.amax(x)
        codes, scales = ops.quantize(x, amax)
        product = ops.scaled_mm(codes, scales, amax, codes, scales, amax, None, torch.float32)
        by_weight = ops.weight_mm(x, codes, scales, amax, None, torch.float32)
assert torch.equal(codes, numerics.quantize_1x16(x, amax)[0])
decoded = numerics.dequantize(codes, scales, amax, 64)
assert torch.allclose(product, decoded @ decoded.T, rtol=1e-4, atol=1e-4)
assert torch.allclose(by_weight, x.float() @ decoded.T, rtol=1e-4, atol=1e-4)
assert torch._C._dispatch_has_kernel_for_dispatch_key("fp4::amax", "CPU") is not {without}
"""


@pytest.mark.parametrize("without", [False, True], ids=["first calls in a compile", "no C++ compiler"])
def test_operators_before_their_kernels_are_built(without: bool) -> None:
    """torch's Python dispatcher, at work in a compile, keeps what it found at the first call."""
    ran = subprocess.run([sys.executable, "-c", FIRST_CALLS.format(without=without)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr

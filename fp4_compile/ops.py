"""The ``fp4`` operators that a rewritten graph is made of.

    fp4::amax(Tensor x) -> Tensor                                   fp32[]
    fp4::quantize(Tensor x, Tensor amax, str block, bool four_over_six) -> (Tensor codes, Tensor scales)
    fp4::quantize_rows(Tensor x, bool swizzled) -> (Tensor codes, Tensor scales, Tensor amax)
    fp4::for_tensor_cores(Tensor codes, Tensor scales) -> (Tensor codes, Tensor scales)
    fp4::scaled_mm(a codes, scales, amax, b codes, scales, amax, Tensor? bias, ScalarType out_dtype, bool swizzled)
        -> Tensor
    fp4::weight_mm(Tensor x, b codes, scales, amax, Tensor? bias, ScalarType out_dtype) -> Tensor
    fp4::dequantize(Tensor codes, Tensor scales, Tensor amax, SymInt k, ScalarType dtype) -> Tensor

and, for training,

    fp4::quantize_stochastic(Tensor x, Tensor amax, Tensor seed, int stream) -> (Tensor codes, Tensor scales)
    fp4::hadamard(Tensor x, int size) -> Tensor                     random signs, bf16, padded
    fp4::transpose(Tensor codes, Tensor scales, SymInt k) -> (Tensor codes, Tensor scales)      of 16x16 tiles
    fp4::draw_seed(int size, int stride, *, Device device) -> Tensor    int64[], random
    fp4::mx_quantize(Tensor x, Tensor? seed, int stream) -> (Tensor codes, Tensor scales)
    fp4::mx_scaled_mm(a codes, scales, b codes, scales, Tensor? bias, ScalarType out_dtype) -> Tensor

They are functional, never alias, and return contiguous tensors. They compute the definition in
`fp4_compile.numerics` on any device (on a CPU by the kernels of `fp4_compile.codegen.cpu`): the same codes, scales
and products as a Blackwell tensor core, up to the order in which a GEMM sums in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4_compile import numerics
from fp4_compile._torch_compat import call_cpu_kernel
from fp4_compile.codegen import cpu, cpu_training

BLOCK = numerics.NVFP4_BLOCK
AMAX_PARTS = 256
"""Programs of a GPU that look for one tensor's amax."""

_library: Any = torch.library.Library("fp4", "DEF")  # type: ignore[no-untyped-call]
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def define(schema: str, kernel: Any, fake: Any, *tags: torch.Tag) -> Any:
    """Register an operator ``fp4::...`` with what computes it and what gives its result's shape."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(*_tags, *tags))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{name}", fake, lib=_library)
    return getattr(torch.ops.fp4, name).default


def define_for_cpu(schema: str, kernel: Any, fake: Any, whole: bool = False) -> Any:
    """`define`, for an operator of `fp4_compile.codegen.cpu.library`: its C++ is built at the first call.

    It answers for CPU tensors from then on. Unless it knows the ``whole`` operator, it leaves the rest to
    ``fp4::general_...``, which is ``kernel``.
    """

    def until_built(*arguments: Any) -> Any:
        if arguments[0].device.type == "cpu" and cpu.library() is not None:
            return call_cpu_kernel(op, arguments)
        return kernel(*arguments)

    if not whole:
        define(f"general_{schema}", kernel, fake)
    op = define(schema, until_built, fake)
    return op


def _padded(k: Any) -> Any:
    return (k + BLOCK - 1) // BLOCK * BLOCK


def row_bytes(k: Any) -> Any:
    """Of the codes of a row for tensor cores: TMA reads rows that begin every 16 bytes."""
    return (k + 31) // 32 * 16


def _amax_fake(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _quantize(x: Tensor, amax: Tensor, block: str = "1x16", four_over_six: bool = False) -> tuple[Tensor, Tensor]:
    if block == "16x16" and not four_over_six:
        codes, scales = cpu_training.quantize_16x16(x, amax)
    elif block == "16x16":
        codes, scales, _ = numerics.quantize_16x16(x, amax, four_over_six=four_over_six)
    elif block == "1x16":
        codes, scales, _ = numerics.quantize_1x16(x, amax, four_over_six=four_over_six)
    else:
        raise ValueError(f"block is {block!r}; it takes '1x16' or '16x16'")
    return codes, scales


def _quantize_fake(x: Tensor, amax: Tensor, block: str = "1x16", four_over_six: bool = False) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    codes = x.new_empty((*lead, _padded(k) // 2), dtype=torch.uint8)
    return codes, x.new_empty((*lead, _padded(k) // BLOCK), dtype=torch.float8_e4m3fn)


def _quantize_rows(
    x: Tensor, swizzled: bool, hadamard: int = 0, seed: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    if hadamard:
        x = numerics.random_hadamard(x, -1, hadamard)
    drawn = None if seed is None else cpu_training.random_bytes(x, seed, stream, BLOCK)
    codes, scales, amax = numerics.quantize_1x16(x, numerics.row_amax(x), drawn)
    return (*_for_tensor_cores(codes, scales), amax) if swizzled else (codes, scales, amax)


def _quantize_rows_fake(
    x: Tensor, swizzled: bool, hadamard: int = 0, seed: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = x.shape
    shape = (rows, _padded(k) // BLOCK)
    codes = x.new_empty((rows, row_bytes(k) if swizzled else _padded(k) // 2), dtype=torch.uint8)
    scales = x.new_empty(numerics.swizzled_shape(*shape) if swizzled else shape, dtype=torch.float8_e4m3fn)
    return codes, scales, x.new_empty((rows, 1), dtype=torch.float32)


def _row_amax_fake(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _quantize_both_ways(
    x: Tensor, row_amax: Tensor, hadamard: int = 0, seed: Tensor | None = None, stream: int = 0, turned_stream: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    drawn = None if seed is None else cpu_training.random_bytes(x, seed, stream, BLOCK)
    codes, scales, _ = numerics.quantize_1x16(x, row_amax, drawn)
    return *_for_tensor_cores(codes, scales), *_quantize_rows(x.mT, True, hadamard, seed, turned_stream)


def _quantize_both_ways_fake(
    x: Tensor, row_amax: Tensor, hadamard: int = 0, seed: Tensor | None = None, stream: int = 0, turned_stream: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    codes, scales, _ = _quantize_rows_fake(x, True)
    return codes, scales, *_quantize_rows_fake(x.mT, True)


def _amax_parts(tensors: list[Tensor]) -> Tensor:
    found = torch.stack([numerics.tensor_amax(x) for x in tensors])
    return torch.nn.functional.pad(found[:, None], (0, AMAX_PARTS - 1))


def _amax_parts_fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors), AMAX_PARTS), dtype=torch.float32)


def _quantize_tiles(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    largest = amax.amax()
    largest = torch.where(largest == 0, 0.0, largest.clamp_min(numerics.LEAST_AMAX))
    codes, scales, _ = numerics.quantize_16x16(w, largest)
    turned, turned_scales = numerics.transpose_16x16(codes, scales, w.shape[-1])
    return *_for_tensor_cores(codes, scales), *_for_tensor_cores(turned, turned_scales), largest


def _quantize_tiles_fake(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    results: list[Tensor] = []
    for rows, k in (w.shape, w.shape[::-1]):
        shape = numerics.swizzled_shape(rows, _padded(k) // BLOCK)
        results.append(w.new_empty((rows, row_bytes(k)), dtype=torch.uint8))
        results.append(w.new_empty(shape, dtype=torch.float8_e4m3fn))
    return results[0], results[1], results[2], results[3], w.new_empty((), dtype=torch.float32)


def _for_tensor_cores(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 16)), numerics.swizzle_scales(scales)


def _for_tensor_cores_fake(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*codes.shape[:-1], row_bytes(codes.shape[-1] * 2))
    *lead, rows, columns = scales.shape
    return codes.new_empty(shape), scales.new_empty((*lead, *numerics.swizzled_shape(rows, columns)))


def _dequantize(codes: Tensor, scales: Tensor, amax: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return numerics.dequantize(codes, scales, amax, k).to(dtype).contiguous()


def _dequantize_fake(codes: Tensor, scales: Tensor, amax: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], k), dtype=dtype)


def _scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    swizzled: bool = False,
) -> Tensor:
    """``alpha * decode(a) @ decode(b)^T + bias`` in FP32, then rounded once to ``out_dtype``.

    A decoded operand (code times block scale, without the tensor scale) has so few bits that products of blocks are
    exact, and only the order of summation differs from a tensor core's.
    """
    if swizzled:
        a_scales, b_scales = (
            numerics.unswizzle_scales(scales, codes.shape[-2], codes.shape[-1] * 2 // BLOCK)
            for codes, scales in ((a, a_scales), (b, b_scales))
        )
    alpha = numerics.gemm_alpha(a_amax, b_amax.mT if b_amax.dim() else b_amax)
    if a.device.type == "cpu":
        return _finished(cpu.product(a, a_scales, b, b_scales, 1.0, None, torch.float32).mul_(alpha), bias, out_dtype)
    lhs, rhs = (numerics.decode_unscaled(*operand, torch.float32) for operand in ((a, a_scales), (b, b_scales)))
    with torch.autocast(a.device.type, enabled=False):
        product = torch.matmul(lhs, rhs.mT) if b.dim() > 2 else torch.nn.functional.linear(lhs, rhs)
    return _finished(product.mul_(alpha), bias, out_dtype)


def _finished(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if bias is not None:
        product = product.add_(bias)
    return product.to(out_dtype)


def _scaled_mm_fake(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    swizzled: bool = False,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


def _weight_mm(
    x: Tensor, b: Tensor, b_scales: Tensor, b_amax: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``alpha * x @ decode(b)^T + bias`` in FP32; ``x`` enters as BF16, and a decoded weight is exact in it."""
    if b.device.type == "cpu":
        weight = cpu.decode_unscaled(b, b_scales).float()
    else:
        weight = numerics.decode_unscaled(b, b_scales, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        product = torch.matmul(x.to(torch.bfloat16).float(), weight[..., : x.shape[-1]].mT)
    alpha = (b_amax.mT if b_amax.dim() else b_amax) * (1.0 / (numerics.E2M1_MAX * numerics.E4M3_MAX))
    return _finished(product.mul_(alpha), bias, out_dtype)


def _weight_mm_fake(
    x: Tensor, b: Tensor, b_scales: Tensor, b_amax: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return x.new_empty((*x.shape[:-1], b.shape[-2]), dtype=out_dtype)


amax = define_for_cpu("amax(Tensor x) -> Tensor", numerics.tensor_amax, _amax_fake, whole=True)
"""Largest finite magnitude of a tensor (bf16, fp16 or fp32, any shape), fp32, 0-d; 0 for an empty one."""

quantize = define_for_cpu(
    "quantize(Tensor x, Tensor amax, str block='1x16', bool four_over_six=False) -> (Tensor codes, Tensor scales)",
    _quantize,
    _quantize_fake,
)
"""[..., K] -> codes u8 [..., ceil(K/16)*8] (two a byte, even element low) and scales e4m3 [..., ceil(K/16)]."""

quantize_rows = define(
    "quantize_rows(Tensor x, bool swizzled, int hadamard=0, Tensor? seed=None, int stream=0) "
    "-> (Tensor codes, Tensor scales, Tensor amax)",
    _quantize_rows,
    _quantize_rows_fake,
)
"""[M, K] -> codes and scales as `quantize` in blocks of 1x16, with an amax of its own for every row, fp32 [M, 1].

``swizzled``: as tensor cores read them, see `for_tensor_cores`. ``hadamard``: the
size of a transform before, 16 or none. With a ``seed`` it rounds as `quantize_stochastic`."""

row_amax = define("row_amax(Tensor x) -> Tensor", numerics.row_amax, _row_amax_fake)
"""[M, K] -> the amax of each row as `quantize_rows` has it, fp32 [M, 1]; NaN for a row with a NaN or an Inf."""

quantize_both_ways = define(
    "quantize_both_ways(Tensor x, Tensor row_amax, int hadamard=0, Tensor? seed=None, int stream=0, "
    "int turned_stream=0) -> (Tensor codes, Tensor scales, Tensor turned, Tensor turned_scales, Tensor turned_amax)",
    _quantize_both_ways,
    _quantize_both_ways_fake,
)
"""`quantize_rows` of x [M, K], whose amax is given, and of its transpose; ``hadamard`` is the transpose's."""

amax_parts = define("amax_parts(Tensor[] tensors) -> Tensor", _amax_parts, _amax_parts_fake)
"""Matrices -> fp32 [count, AMAX_PARTS], the largest of each row the `amax` of its matrix; their order is open."""

quantize_tiles = define(
    "quantize_tiles(Tensor w, Tensor amax) "
    "-> (Tensor codes, Tensor scales, Tensor turned, Tensor turned_scales, Tensor largest)",
    _quantize_tiles,
    _quantize_tiles_fake,
)
"""[R, K] in tiles of 16x16, as `quantize` has them, and as `transpose` turns them; both `for_tensor_cores`.

``amax``: of the tensor, 0-d, or parts of it [AMAX_PARTS], of which the ``largest`` counts and comes back, 0-d."""

for_tensor_cores = define(
    "for_tensor_cores(Tensor codes, Tensor scales) -> (Tensor codes, Tensor scales)",
    _for_tensor_cores,
    _for_tensor_cores_fake,
)
"""Codes [..., M, K/2], rows filled up with zeros to whole 16 bytes, and `numerics.swizzle_scales`."""

dequantize = define(
    "dequantize(Tensor codes, Tensor scales, Tensor amax, SymInt k, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
"""The numbers a quantized tensor stands for, [..., k]."""

scaled_mm = define_for_cpu(
    "scaled_mm(Tensor a, Tensor a_scales, Tensor a_amax, Tensor b, Tensor b_scales, Tensor b_amax, "
    "Tensor? bias, ScalarType out_dtype, bool swizzled=False) -> Tensor",
    _scaled_mm,
    _scaled_mm_fake,
)
"""[..., M, K] x [N, K] -> [..., M, N], or [B, M, K] x [B, N, K] -> [B, M, N]; operands as `quantize` gives them.

An amax is 0-d, or one a row ([M, 1] of a, [N, 1] of b). ``swizzled``: both operands' scales are; needs 2-D codes."""

weight_mm = define_for_cpu(
    "weight_mm(Tensor x, Tensor b, Tensor b_scales, Tensor b_amax, Tensor? bias, ScalarType out_dtype) -> Tensor",
    _weight_mm,
    _weight_mm_fake,
)
"""[..., M, K] in high precision x [N, K] quantized -> [..., M, N]: for tensor cores without FP4."""


def _quantize_stochastic(x: Tensor, amax: Tensor, seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    return cpu_training.quantize_stochastic(x, amax, seed, stream)


def _quantize_stochastic_fake(x: Tensor, amax: Tensor, seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    return _quantize_fake(x, amax)


def _hadamard(x: Tensor, size: int) -> Tensor:
    return cpu_training.random_hadamard(x, size)


def _hadamard_fake(x: Tensor, size: int) -> Tensor:
    *lead, k = x.shape
    return x.new_empty((*lead, (k + size - 1) // size * size), dtype=torch.bfloat16)


def _transpose(codes: Tensor, scales: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return cpu_training.transpose_16x16(codes, scales, k)


def _transpose_fake(codes: Tensor, scales: Tensor, k: Any) -> tuple[Tensor, Tensor]:
    *lead, rows, _ = codes.shape
    turned = codes.new_empty((*lead, k, _padded(rows) // 2))
    return turned, scales.new_empty((*lead, k, _padded(rows) // BLOCK))


def _draw_seed(size: int, stride: int, *, device: torch.device) -> Tensor:
    """Ranks of one tensor-parallel group, ``size`` of them ``stride`` apart, move it alike: as their first rank."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    moved = (rank - rank // stride % size * stride) * _RANK_STEP % 2**62
    return torch.randint(moved - 2**62, moved + 2**62, (), dtype=torch.int64, device=device)


_RANK_STEP = 0x9E3779B97F4A7C15


def _draw_seed_fake(size: int, stride: int, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _mx_quantize(x: Tensor, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    return cpu_training.quantize_mxfp4(x, seed, stream)


def _mx_quantize_fake(x: Tensor, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    blocks = (k + numerics.MXFP4_BLOCK - 1) // numerics.MXFP4_BLOCK
    codes = x.new_empty((*lead, blocks * (numerics.MXFP4_BLOCK // 2)), dtype=torch.uint8)
    return codes, x.new_empty((*lead, blocks), dtype=torch.float8_e8m0fnu)


def _mx_scaled_mm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    lhs, rhs = cpu_training.decode_mxfp4(a, a_scales), cpu_training.decode_mxfp4(b, b_scales)
    with torch.autocast(a.device.type, enabled=False):
        product = torch.matmul(lhs, rhs.mT)
    return (product if bias is None else product.add_(bias)).to(out_dtype)


def _mx_scaled_mm_fake(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


quantize_stochastic = define(
    "quantize_stochastic(Tensor x, Tensor amax, Tensor seed, int stream) -> (Tensor codes, Tensor scales)",
    _quantize_stochastic,
    _quantize_stochastic_fake,
)
"""`quantize` in blocks of 1x16 with stochastic rounding: the bytes are `numerics.philox_bytes(seed, stream, ...)`."""

hadamard = define("hadamard(Tensor x, int size) -> Tensor", _hadamard, _hadamard_fake)
"""The random Hadamard transform along the last dimension, filled up to a multiple of ``size``; bf16."""

transpose = define(
    "transpose(Tensor codes, Tensor scales, SymInt k) -> (Tensor codes, Tensor scales)", _transpose, _transpose_fake
)
"""[R, k] quantized in tiles of 16x16 -> the same numbers as [k, R]; nothing is rounded."""

draw_seed = define(
    "draw_seed(int size, int stride, *, Device device) -> Tensor",
    _draw_seed,
    _draw_seed_fake,
    torch.Tag.nondeterministic_seeded,
)
"""A seed, int64 0-d, of the device's default generator, in one launch.

It is moved by a number of the rank's own, so that data-parallel ranks with equal generators round apart.
"""

mx_quantize = define(
    "mx_quantize(Tensor x, Tensor? seed, int stream) -> (Tensor codes, Tensor scales)", _mx_quantize, _mx_quantize_fake
)
"""[..., K] to MXFP4: codes u8 [..., ceil(K/32)*16], scales e8m0 [..., ceil(K/32)]; stochastic if there is a seed."""

mx_scaled_mm = define(
    "mx_scaled_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor? bias, ScalarType out_dtype) -> Tensor",
    _mx_scaled_mm,
    _mx_scaled_mm_fake,
)
"""`scaled_mm` for operands in MXFP4, which have no tensor scale."""

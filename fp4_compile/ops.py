"""The ``fp4`` operators that a rewritten graph is made of.

    fp4::amax(Tensor x) -> Tensor                                   fp32[]
    fp4::quantize(Tensor x, Tensor amax, str block, bool four_over_six) -> (Tensor codes, Tensor scales)
    fp4::scaled_mm(a codes, scales, amax, b codes, scales, amax, Tensor? bias, ScalarType out_dtype) -> Tensor
    fp4::dequantize(Tensor codes, Tensor scales, Tensor amax, SymInt k, ScalarType dtype) -> Tensor

They are functional, never alias, and return contiguous tensors. They compute the definition in
`fp4_compile.numerics` on any device (on a CPU by the kernels of `fp4_compile.codegen.cpu`): the same codes, scales
and products as a Blackwell tensor core, up to the order in which a GEMM sums in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4_compile import numerics
from fp4_compile.codegen import cpu

BLOCK = numerics.NVFP4_BLOCK

_library: Any = torch.library.Library("fp4", "DEF")  # type: ignore[no-untyped-call]
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def _define(schema: str, kernel: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{name}", fake, lib=_library)
    return getattr(torch.ops.fp4, name).default


def _padded(k: Any) -> Any:
    return (k + BLOCK - 1) // BLOCK * BLOCK


def _amax(x: Tensor) -> Tensor:
    return cpu.tensor_amax(x) if x.device.type == "cpu" else numerics.tensor_amax(x)


def _amax_fake(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _quantize(x: Tensor, amax: Tensor, block: str = "1x16", four_over_six: bool = False) -> tuple[Tensor, Tensor]:
    if block == "16x16":
        codes, scales, _ = numerics.quantize_16x16(x, amax, four_over_six=four_over_six)
    elif block == "1x16" and x.device.type == "cpu" and not four_over_six:
        codes, scales = cpu.quantize_1x16(x, amax)
    elif block == "1x16":
        codes, scales, _ = numerics.quantize_1x16(x, amax, four_over_six=four_over_six)
    else:
        raise ValueError(f"block is {block!r}; it takes '1x16' or '16x16'")
    return codes, scales


def _quantize_fake(x: Tensor, amax: Tensor, block: str = "1x16", four_over_six: bool = False) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    codes = x.new_empty((*lead, _padded(k) // 2), dtype=torch.uint8)
    return codes, x.new_empty((*lead, _padded(k) // BLOCK), dtype=torch.float8_e4m3fn)


def _dequantize(codes: Tensor, scales: Tensor, amax: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return numerics.dequantize(codes, scales, amax, k).to(dtype).contiguous()


def _dequantize_fake(codes: Tensor, scales: Tensor, amax: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], k), dtype=dtype)


def _unscaled_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    if a.device.type == "cpu":
        return cpu.unscaled_product(a, a_scales, b, b_scales)
    lhs, rhs = (numerics.decode_unscaled(*operand, torch.float32) for operand in ((a, a_scales), (b, b_scales)))
    return torch.matmul(lhs, rhs.mT) if b.dim() > 2 else torch.nn.functional.linear(lhs, rhs)


def _scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``alpha * decode(a) @ decode(b)^T + bias`` in FP32, then rounded once to ``out_dtype``.

    A decoded operand (code times block scale, without the tensor scale) is exact even in BF16, so its products
    are exact in FP32, and only the order of summation differs from a tensor core's.
    """
    alpha = numerics.gemm_alpha(a_amax, b_amax)
    with torch.autocast(a.device.type, enabled=False):
        product = _unscaled_product(a, a_scales, b, b_scales)
    product = product.mul_(alpha)
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
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


amax = _define("amax(Tensor x) -> Tensor", _amax, _amax_fake)
"""Largest finite magnitude of a tensor (bf16, fp16 or fp32, any shape), fp32, 0-d; 0 for an empty one."""

quantize = _define(
    "quantize(Tensor x, Tensor amax, str block='1x16', bool four_over_six=False) -> (Tensor codes, Tensor scales)",
    _quantize,
    _quantize_fake,
)
"""[..., K] -> codes u8 [..., ceil(K/16)*8] (two a byte, even element low) and scales e4m3 [..., ceil(K/16)]."""

dequantize = _define(
    "dequantize(Tensor codes, Tensor scales, Tensor amax, SymInt k, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
"""The numbers a quantized tensor stands for, [..., k]."""

scaled_mm = _define(
    "scaled_mm(Tensor a, Tensor a_scales, Tensor a_amax, Tensor b, Tensor b_scales, Tensor b_amax, "
    "Tensor? bias, ScalarType out_dtype) -> Tensor",
    _scaled_mm,
    _scaled_mm_fake,
)
"""[..., M, K] x [N, K] -> [..., M, N], or [B, M, K] x [B, N, K] -> [B, M, N]; operands as `quantize` gives them."""

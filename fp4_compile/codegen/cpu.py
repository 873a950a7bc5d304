"""The CPU kernels behind the fp4 operators: C++ built once by Inductor's own toolchain and kept in its cache.

They compute what `fp4_compile.numerics` defines, bit for bit, many times faster. Without a C++ compiler the
operators fall back on that definition; a compiled model needs one anyway.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4_compile import numerics

log = logging.getLogger(__name__)


SOURCES = (
    *("formats", "blocks", "quantize", "tiles", "turn", "product", "one_row", "gemm"),
    *("weight_only", "training", "operators"),
)
"""One translation unit, in this order."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def source(isa: int | None = None, operators: bool = False) -> str:
    """The kernels' C++; arguments as of `build`."""
    texts = [Path(__file__).with_name("cpp").joinpath(f"{name}.cpp").read_text(encoding="utf-8") for name in SOURCES]
    if isa is not None:
        texts.insert(0, f"#define FP4_ISA {isa}")
    if operators:
        texts.insert(0, "#define FP4_OPERATORS")
    return "\n".join(texts)


def build(isa: int | None = None, operators: bool = False) -> Any:
    """Build and load the kernels.

    Args:
        isa: for a lesser instruction set than this machine's, 1 is AVX2 and 0 plain C++.
        operators: register the ``fp4`` operators' kernels for CPU tensors, once a process.

    Raises:
        Exception: there is no compiler, or it fails; torch's types differ.
    """
    from fp4_compile._torch_compat import build_cpp

    built = build_cpp(source(isa, operators))
    pointer, size, kind, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
    threads = ctypes.c_int32
    built.fp4_amax_bits.argtypes = [pointer, size, kind, threads]
    built.fp4_amax_bits.restype = ctypes.c_uint32
    built.fp4_quantize_1x16.argtypes = [pointer, size, size, kind, real, pointer, pointer, threads]
    built.fp4_decode.argtypes = [pointer, pointer, size, pointer]
    operands = [pointer, pointer, pointer, pointer, pointer, kind, real, pointer, kind]
    built.fp4_multiply.argtypes = [*operands, size, size, size, threads]
    weights = [pointer, pointer, pointer, pointer, kind, pointer, kind, pointer, kind]
    built.fp4_multiply_weights.argtypes = [*weights, size, size, size, threads]
    for function in (built.fp4_quantize_1x16, built.fp4_decode, built.fp4_multiply, built.fp4_multiply_weights):
        function.restype = None
    return built


@functools.cache
def library() -> Any:
    """The built kernels, or None if they cannot be built here; the operators call them from then on."""
    try:
        return build(operators=True)
    except Exception:
        log.warning("the CPU kernels cannot be built; the fp4 operators run as plain torch", exc_info=True)
        return None


def readable(x: Tensor) -> tuple[Tensor, str]:
    """A tensor the kernels of training read, and which of them: bf16 as it is, anything else as fp32."""
    return (x.contiguous(), "bf16") if x.dtype == torch.bfloat16 else (x.to(torch.float32).contiguous(), "fp32")


def product(
    codes: Tensor,
    scales: Tensor,
    other: Tensor,
    other_scales: Tensor,
    alpha: float,
    bias: Tensor | None,
    dtype: torch.dtype,
    kernels: Any = None,
) -> Tensor:
    """``alpha * decode(a) @ decode(b)^T + bias``, [..., M, K] x [N, K] or [B, M, K] x [B, N, K], rounded to ``dtype``.

    Blocks of 16 are summed exactly and added in order in fp32: the same bits for any instruction set and number of
    threads. ``alpha`` and ``bias`` are applied in fp32.

    ``kernels``: other ones than `library`'s, for tests.
    """
    kernels = kernels or library()
    if kernels is None or dtype not in _KINDS or (bias is not None and bias.dtype not in _KINDS):
        return _plain_product(codes, scales, other, other_scales, alpha, bias, dtype)
    out = torch.empty((*codes.shape[:-1], other.shape[-2]), dtype=dtype)
    a, a_scales, b, b_scales = (t.contiguous() for t in (codes, scales, other, other_scales))
    batches = zip(a, a_scales, b, b_scales, out, strict=True) if other.dim() > 2 else [(a, a_scales, b, b_scales, out)]
    shift, kind = (None, 0) if bias is None else (bias.contiguous(), _KINDS[bias.dtype])
    for operands in batches:
        *sources, target = (t.data_ptr() for t in operands)
        n, blocks = operands[3].shape[-2:]
        rows = operands[4].numel() // n if n else 0
        kernels.fp4_multiply(
            *sources,
            None if shift is None else shift.data_ptr(),
            kind,
            alpha,
            target,
            _KINDS[dtype],
            rows,
            n,
            blocks,
            torch.get_num_threads(),
        )
    return out


def _plain_product(
    codes: Tensor, scales: Tensor, other: Tensor, other_scales: Tensor, alpha: float, bias: Any, dtype: torch.dtype
) -> Tensor:
    lhs, rhs = (decode_unscaled(*operand).float() for operand in ((codes, scales), (other, other_scales)))
    with torch.autocast("cpu", enabled=False):
        result = torch.matmul(lhs, rhs.mT) if rhs.dim() > 2 else torch.nn.functional.linear(lhs, rhs)
    result = result.mul_(alpha)
    return (result if bias is None else result.add_(bias)).to(dtype)


def decode_unscaled(codes: Tensor, scales: Tensor) -> Tensor:
    """`numerics.decode_unscaled` in bf16."""
    kernels = library()
    if kernels is None or scales.numel() == 0:
        return numerics.decode_unscaled(codes, scales, torch.bfloat16)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.bfloat16)
    kernels.fp4_decode(codes.data_ptr(), scales.data_ptr(), scales.numel(), out.data_ptr())
    return out

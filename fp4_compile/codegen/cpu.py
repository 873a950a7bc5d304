"""The CPU kernels behind the fp4 operators: C++ built once by Inductor's own toolchain and kept in its cache.

They compute what `fp4_compile.numerics` defines, bit for bit, many times faster. Without a C++ compiler the
operators fall back on that definition; a compiled model needs one anyway.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4_compile import numerics

log = logging.getLogger(__name__)


@functools.cache
def library() -> Any:
    """The built kernels, or None if they cannot be built here."""
    from fp4_compile._torch_compat import build_cpp

    sources = (Path(__file__).with_name(name) for name in ("cpu_kernels.cpp", "cpu_training.cpp"))
    source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    try:
        built = build_cpp(source)
    except Exception:
        log.warning("the CPU kernels cannot be built; the fp4 operators run as plain torch", exc_info=True)
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for amax in (built.fp4_amax_bits_fp32, built.fp4_amax_bits_bf16):
        amax.argtypes = [pointer, integer]
        amax.restype = ctypes.c_uint32
    for quantize in (built.fp4_quantize_1x16_fp32, built.fp4_quantize_1x16_bf16):
        quantize.argtypes = [pointer, integer, integer, ctypes.c_float, pointer, pointer]
        quantize.restype = None
    built.fp4_decode.argtypes = [pointer, pointer, integer, pointer]
    built.fp4_decode.restype = None
    return built


def tensor_amax(x: Tensor) -> Tensor:
    """`numerics.tensor_amax`."""
    kernels = library()
    if kernels is None or x.numel() == 0:
        return numerics.tensor_amax(x)
    x, kind = readable(x)
    bits = getattr(kernels, f"fp4_amax_bits_{kind}")(x.data_ptr(), x.numel())
    # The definition floors what a tensor of one element this large would have.
    return numerics.tensor_amax(torch.tensor([bits], dtype=torch.int32).view(torch.float32))


def quantize_1x16(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of `numerics.quantize_1x16`."""
    kernels = library()
    if kernels is None or x.numel() == 0:
        return numerics.quantize_1x16(x, amax)[:2]
    *lead, k = x.shape
    blocks = -(-k // numerics.NVFP4_BLOCK)
    x, kind = readable(x)
    codes = torch.empty((*lead, blocks * 8), dtype=torch.uint8)
    scales = torch.empty((*lead, blocks), dtype=torch.float8_e4m3fn)
    encode = float(numerics.encode_scale(amax))
    quantize = getattr(kernels, f"fp4_quantize_1x16_{kind}")
    quantize(x.data_ptr(), x.numel() // k, k, encode, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def readable(x: Tensor) -> tuple[Tensor, str]:
    """A tensor the kernels read, and which of them: bf16 as it is, anything else as fp32, which is exact."""
    return (x.contiguous(), "bf16") if x.dtype == torch.bfloat16 else (x.to(torch.float32).contiguous(), "fp32")


def unscaled_product(codes: Tensor, scales: Tensor, other_codes: Tensor, other_scales: Tensor) -> Tensor:
    """[..., M, K] x [N, K], or [B, M, K] x [B, N, K], without the tensors' scales: fp32 [..., M, N].

    Decoded operands are exact in BF16, so where the CPU multiplies BF16 and adds in FP32, nothing is lost to it.
    """
    lhs, rhs = decode_unscaled(codes, scales), decode_unscaled(other_codes, other_scales)
    gemm = bf16_gemm()
    sizes = (*lhs.shape, rhs.shape[-2])
    if gemm is None or not all(0 < size < 2**31 for size in (*sizes, lhs.numel() // max(lhs.shape[-1], 1))):
        lhs, rhs = lhs.float(), rhs.float()
        return torch.matmul(lhs, rhs.mT) if rhs.dim() > 2 else torch.nn.functional.linear(lhs, rhs)
    out = torch.empty((*lhs.shape[:-1], rhs.shape[-2]), dtype=torch.float32)
    n, k = rhs.shape[-2:]
    for a, b, c in zip(lhs, rhs, out, strict=True) if rhs.dim() > 2 else ((lhs, rhs, out),):
        rows = a.numel() // k
        gemm(rows, n, k, a.data_ptr(), b.data_ptr(), c.data_ptr())
    return out


def decode_unscaled(codes: Tensor, scales: Tensor) -> Tensor:
    """`numerics.decode_unscaled` in bf16."""
    kernels = library()
    if kernels is None or scales.numel() == 0:
        return numerics.decode_unscaled(codes, scales, torch.bfloat16)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.bfloat16)
    kernels.fp4_decode(codes.data_ptr(), scales.data_ptr(), scales.numel(), out.data_ptr())
    return out


@functools.cache
def bf16_gemm() -> Callable[[int, int, int, int, int, int], None] | None:
    """MKL's ``C[M, N] = A[M, K] B[N, K]^T``, BF16 operands and an FP32 result; None where torch has no MKL."""
    from fp4_compile._torch_compat import torch_cpu_library

    row_major, as_is, transposed = 101, 111, 112
    try:
        function = torch_cpu_library().cblas_gemm_bf16bf16f32
    except (AttributeError, OSError):
        return None
    integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    function.restype = None
    function.argtypes = [integer] * 6 + [real, pointer, integer, pointer, integer, real, pointer, integer]

    def gemm(m: int, n: int, k: int, a: int, b: int, c: int) -> None:
        function(row_major, as_is, transposed, m, n, k, 1.0, a, k, b, k, 0.0, c, n)

    return gemm

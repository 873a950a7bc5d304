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


@functools.cache
def library() -> Any:
    """The built kernels, or None if they cannot be built here."""
    from fp4_compile._torch_compat import build_cpp

    source = Path(__file__).with_name("cpu_kernels.cpp").read_text(encoding="utf-8")
    try:
        built = build_cpp(source)
    except Exception:
        log.warning("the CPU kernels cannot be built; the fp4 operators run as plain torch", exc_info=True)
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    built.fp4_amax_bits.argtypes = [pointer, integer]
    built.fp4_amax_bits.restype = ctypes.c_uint32
    built.fp4_quantize_1x16.argtypes = [pointer, integer, integer, ctypes.c_float, pointer, pointer]
    built.fp4_quantize_1x16.restype = None
    built.fp4_decode.argtypes = [pointer, pointer, integer, pointer]
    built.fp4_decode.restype = None
    return built


def tensor_amax(x: Tensor) -> Tensor:
    """`numerics.tensor_amax`."""
    kernels = library()
    if kernels is None or x.numel() == 0:
        return numerics.tensor_amax(x)
    x = x.to(torch.float32).contiguous()
    bits = kernels.fp4_amax_bits(x.data_ptr(), x.numel())
    # The definition floors what a tensor of one element this large would have.
    return numerics.tensor_amax(torch.tensor([bits], dtype=torch.int32).view(torch.float32))


def quantize_1x16(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of `numerics.quantize_1x16`."""
    kernels = library()
    if kernels is None or x.numel() == 0:
        return numerics.quantize_1x16(x, amax)[:2]
    *lead, k = x.shape
    blocks = -(-k // numerics.NVFP4_BLOCK)
    x = x.to(torch.float32).contiguous()
    codes = torch.empty((*lead, blocks * 8), dtype=torch.uint8)
    scales = torch.empty((*lead, blocks), dtype=torch.float8_e4m3fn)
    encode = float(numerics.encode_scale(amax))
    kernels.fp4_quantize_1x16(x.data_ptr(), x.numel() // k, k, encode, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def decode_unscaled(codes: Tensor, scales: Tensor) -> Tensor:
    """`numerics.decode_unscaled` in fp32."""
    kernels = library()
    if kernels is None or scales.numel() == 0:
        return numerics.decode_unscaled(codes, scales, torch.float32)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.float32)
    kernels.fp4_decode(codes.data_ptr(), scales.data_ptr(), scales.numel(), out.data_ptr())
    return out

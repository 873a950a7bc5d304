"""CPU kernels of what training adds: stochastic rounding, 16x16 tiles, Hadamard transforms, MXFP4.

Each computes the definition of the same name in `fp4_compile.numerics`, bit for bit, and falls back on it where
there is no C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from fp4_compile import numerics
from fp4_compile.codegen.cpu import library, readable


@functools.cache
def kernels() -> Any:
    """The built kernels with their signatures, or None if they cannot be built here."""
    built = library()
    if built is None:
        return None
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    real, seed, stream = ctypes.c_float, ctypes.c_int64, ctypes.c_uint32
    signatures: dict[str, list[Any]] = {
        "fp4_quantize_stochastic": [integer, integer, real, seed, stream, pointer, pointer],
        "fp4_quantize_16x16": [integer, integer, integer, real, pointer, pointer],
        "fp4_mx_quantize": [integer, integer, size, seed, stream, pointer, pointer],
        "fp4_hadamard": [integer, integer, integer, integer, size, pointer, real, pointer],
    }
    for name, arguments in signatures.items():
        for kind in ("fp32", "bf16"):
            function = getattr(built, f"{name}_{kind}")
            function.argtypes, function.restype = [pointer, *arguments], None
    built.fp4_transpose_16x16.argtypes = [pointer, pointer, integer, integer, pointer, pointer]
    built.fp4_mx_decode.argtypes = [pointer, pointer, integer, pointer]
    built.fp4_transpose_16x16.restype = built.fp4_mx_decode.restype = None
    return built


def quantize_stochastic(x: Tensor, amax: Tensor, seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `numerics.quantize_1x16` with the bytes of `numerics.philox_bytes`."""
    *lead, k = x.shape
    blocks = -(-k // numerics.NVFP4_BLOCK)
    built = kernels() if x.device.type == "cpu" else None
    if built is None or x.numel() == 0:
        return numerics.quantize_1x16(x, amax, random_bytes(x, seed, stream, numerics.NVFP4_BLOCK))[:2]
    x, kind = readable(x)
    codes = torch.empty((*lead, blocks * 8), dtype=torch.uint8)
    scales = torch.empty((*lead, blocks), dtype=torch.float8_e4m3fn)
    encode = numerics.encode_scale(amax).item()
    quantize = getattr(built, f"fp4_quantize_stochastic_{kind}")
    quantize(x.data_ptr(), x.numel() // k, k, encode, int(seed), stream, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def random_bytes(x: Tensor, seed: Tensor, stream: int, block: int) -> Tensor:
    """The bytes of a tensor's elements, uint8 of its shape: those of its blocks, without the padding."""
    *lead, k = x.shape
    padded = -(-k // block) * block
    rows = x.numel() // k if k else 0
    drawn = numerics.philox_bytes(seed, stream, rows * padded // 16)
    return drawn.reshape(*lead, padded)[..., :k]


def quantize_16x16(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of `numerics.quantize_16x16`."""
    built = kernels() if w.device.type == "cpu" else None
    if built is None or w.numel() == 0:
        return numerics.quantize_16x16(w, amax)[:2]
    *lead, rows, k = w.shape
    blocks = -(-k // numerics.NVFP4_BLOCK)
    w, kind = readable(w)
    codes = torch.empty((*lead, rows, blocks * 8), dtype=torch.uint8)
    scales = torch.empty((*lead, rows, blocks), dtype=torch.float8_e4m3fn)
    encode = numerics.encode_scale(amax).item()
    quantize = getattr(built, f"fp4_quantize_16x16_{kind}")
    quantize(w.data_ptr(), w.numel() // (rows * k), rows, k, encode, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def transpose_16x16(codes: Tensor, scales: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`numerics.transpose_16x16`."""
    built = kernels() if codes.device.type == "cpu" else None
    if built is None or codes.numel() == 0 or codes.dim() != 2:
        return numerics.transpose_16x16(codes, scales, k)
    codes, scales = codes.contiguous(), scales.contiguous()
    rows = codes.shape[0]
    blocks = -(-rows // numerics.NVFP4_BLOCK)
    turned = torch.empty((k, blocks * 8), dtype=torch.uint8)
    turned_scales = torch.empty((k, blocks), dtype=torch.float8_e4m3fn)
    pointers = (turned.data_ptr(), turned_scales.data_ptr())
    built.fp4_transpose_16x16(codes.data_ptr(), scales.data_ptr(), rows, k, *pointers)
    return turned, turned_scales


def random_hadamard(x: Tensor, size: int) -> Tensor:
    """`numerics.random_hadamard` along the last dimension."""
    built = kernels() if x.device.type == "cpu" else None
    if built is None or x.numel() == 0:
        return numerics.random_hadamard(x, -1, size).contiguous()
    *lead, tokens = x.shape
    if x.dtype == torch.bfloat16 and x.dim() == 2:
        kind = "bf16"
    else:
        x, kind = readable(x)
        x = x.reshape(-1, tokens)
    padded = -(-tokens // size) * size
    out = torch.empty((*lead, padded), dtype=torch.bfloat16)
    signs = numerics.hadamard_signs(size, x.device)
    transform = getattr(built, f"fp4_hadamard_{kind}")
    transform(x.data_ptr(), *x.shape, *x.stride(), size, signs.data_ptr(), size**-0.5, out.data_ptr())
    return out


def quantize_mxfp4(x: Tensor, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_mxfp4` with scales rounded up; with a seed, elements are rounded stochastically."""
    built = kernels() if x.device.type == "cpu" else None
    if built is None or x.numel() == 0:
        drawn = None if seed is None else random_bytes(x, seed, stream, numerics.MXFP4_BLOCK)
        return numerics.quantize_mxfp4(x, "rceil", drawn)
    *lead, k = x.shape
    blocks = -(-k // numerics.MXFP4_BLOCK)
    x, kind = readable(x)
    codes = torch.empty((*lead, blocks * 16), dtype=torch.uint8)
    scales = torch.empty((*lead, blocks), dtype=torch.uint8)
    stochastic, number = (0, 0) if seed is None else (1, int(seed))
    quantize = getattr(built, f"fp4_mx_quantize_{kind}")
    quantize(x.data_ptr(), x.numel() // k, k, stochastic, number, stream, codes.data_ptr(), scales.data_ptr())
    return codes, scales.view(torch.float8_e8m0fnu)


def decode_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """`numerics.dequantize_mxfp4` with its padding, fp32."""
    built = kernels() if codes.device.type == "cpu" else None
    if built is None or codes.numel() == 0:
        return numerics.dequantize_mxfp4(codes, scales, 2 * codes.shape[-1])
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.float32)
    built.fp4_mx_decode(codes.data_ptr(), scales.data_ptr(), scales.numel(), out.data_ptr())
    return out

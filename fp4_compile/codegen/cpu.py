"""The fp4 operators on a CPU, written so that Inductor's C++ vectorizes them and fuses them with their producer.

They compute what `fp4_compile.numerics` defines, bit for bit. A CPU has no use for packed activations: the
quantizer writes the number each code stands for (code times block scale, exact in any float dtype), and the GEMM
runs on those in FP32, where every product is exact. Weights stay packed and are decoded before each GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4_compile.numerics import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, encode_scale, gemm_alpha

_FP32_MAX = torch.finfo(torch.float32).max
_SMALLEST_AMAX = E2M1_MAX * E4M3_MAX * 2.0**-128
_ONE_SIXTH = float.fromhex("0x1.555556p-3")


def amax(x: Tensor) -> Tensor:
    """`fp4_compile.numerics.tensor_amax` of a tensor that is not empty, as one reduction."""
    magnitude = x.abs()
    finite = torch.where(magnitude < torch.inf, magnitude, 0.0)
    largest = finite.amax().to(torch.float32)
    return torch.where(largest > 0.0, largest.clamp_min(_SMALLEST_AMAX), 0.0)


def quantized_values(x: Tensor, tensor_amax: Tensor) -> Tensor:
    """Quantize ``x`` [..., K] in 1x16 blocks and return code times block scale, fp32 [..., K rounded up to 16]."""
    padding = -x.shape[-1] % NVFP4_BLOCK
    blocks = F.pad(x, (0, padding)) if padding else x
    blocks = blocks.to(torch.float32).unflatten(-1, (-1, NVFP4_BLOCK))
    largest = blocks.abs().amax(-1)
    largest = torch.where(largest < torch.inf, largest, torch.nan)  # a block that holds NaN or Inf is all NaN
    encode = encode_scale(tensor_amax)
    scales = (largest * (encode * _ONE_SIXTH)).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    inverse = (scales * encode.reciprocal()).reciprocal().clamp_max(_FP32_MAX)
    scaled = blocks * inverse.unsqueeze(-1)
    magnitude = scaled.abs().clamp_max(E2M1_MAX)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    inverse_step = torch.where(magnitude < 2.0, 2.0, torch.where(magnitude < 4.0, 1.0, 0.5))
    rounded = torch.round(magnitude * inverse_step) * step  # halves of a binade, to nearest even
    return (torch.copysign(rounded, scaled) * scales.unsqueeze(-1)).flatten(-2)


def decoded_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Packed codes [..., K/2] and block scales [..., K/16] as code times block scale, fp32 [..., K]."""
    pairs = codes.to(torch.int32).unflatten(-1, (-1, NVFP4_BLOCK // 2))
    scale = scales.to(torch.float32).unsqueeze(-1)
    return torch.stack((_e2m1(pairs) * scale, _e2m1(pairs >> 4) * scale), -1).flatten(-3)


def product(
    lhs: Tensor, rhs: Tensor, lhs_amax: Tensor, rhs_amax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``alpha * lhs @ rhs^T + bias`` of values without their tensor scale: [..., M, K] x [N, K] or batched."""
    sums = torch.bmm(lhs, rhs.mT) if rhs.dim() > 2 else torch.mm(lhs.flatten(0, -2), rhs.t())
    result = sums * gemm_alpha(lhs_amax, rhs_amax)
    if bias is not None:
        result = result + bias
    return result.reshape(*lhs.shape[:-1], rhs.shape[-2]).to(dtype)


def _e2m1(code: Tensor) -> Tensor:
    """The values 0, .5, 1, 1.5, 2, 3, 4, 6: the largest of three straight lines through the code."""
    magnitude = (code & 7).to(torch.float32)
    value = torch.maximum(torch.maximum(magnitude * 0.5, magnitude - 2.0), magnitude * 2.0 - 8.0)
    return torch.where((code & 8) != 0, -value, value)

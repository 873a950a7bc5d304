"""NVFP4's two levels of scales: a float32 for the tensor, an E4M3 for each block of 16.

The rules are those of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149, appendix B), in the
order in which NVIDIA's kernels compute them. All arithmetic is float32, rounded to nearest, with IEEE
division, and a constant is rounded to float32 before it enters; another order gives other bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.checks import REAL_DTYPES, require_dtype
from fp4_compile.numerics.e2m1 import E2M1_MAX

NVFP4_BLOCK = 16
"""Elements that share one E4M3 scale; also the height of a weight tile."""

E4M3_MAX = 448.0

FOUR_OVER_SIX_BOUND = 256.0
"""Largest map-to-six scale under four-over-six: 1.5 times it is still an E4M3 value (arXiv:2512.02010)."""

_FP32_MAX = torch.finfo(torch.float32).max
LEAST_AMAX = E2M1_MAX * E4M3_MAX * 2.0**-128  # exact in float32, and its encode scale still overflows


def tensor_amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of a tensor: float32, 0-d; 0 if it is empty or holds none.

    ``x``: float32, bfloat16 or float16, any shape. An amax above zero but below ``6 * 448 * 2**-128``
    (7.9e-36) is raised to that. From there down the encode scale stays at the largest float32, so codes and
    block scales do not change, whereas a decoder given the smaller amax would shrink the tensor.
    """
    require_dtype("x", x, *REAL_DTYPES)
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0))
    amax = torch.maximum(low.abs(), high.abs()).to(torch.float32)
    return torch.where(amax > 0.0, amax.clamp_min(LEAST_AMAX), 0.0)


def row_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of every row: float32 ``[..., 1]``, raised as in `tensor_amax`.

    ``x``: float32, bfloat16 or float16, ``[..., K]``. With one scale a row, a tensor is quantized in one pass. A
    row that holds a NaN or an Inf has the amax NaN: every product of the row would be NaN in any case.
    """
    require_dtype("x", x, *REAL_DTYPES)
    if x.shape[-1] == 0:
        return torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    amax = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    raised = torch.where(amax > 0.0, amax.clamp_min(LEAST_AMAX), amax)
    return torch.where(torch.isinf(amax), torch.nan, raised)


def encode_scale(amax: Tensor, bound: float = E4M3_MAX) -> Tensor:
    """Return the float32 factor that takes a tensor's amax to ``6 * bound``.

    ``amax``: float32, any shape; ``bound``: the largest block scale to aim at. The factor is at most the
    largest float32, and 1 where the quotient is of no use, for an amax of zero or infinity.
    """
    # A Python scalar divided by a tensor would become a product with its rounded reciprocal.
    factor = (torch.full_like(amax, E2M1_MAX * bound) / amax).clamp_max(_FP32_MAX)
    return torch.where((amax == 0.0) | (factor == 0.0), 1.0, factor)


def block_scales(block_amax: Tensor, encode: Tensor) -> Tensor:
    """Return the E4M3 scales of blocks, ``block_amax * (encode / 6)``, as float8_e4m3fn.

    ``block_amax``: float32 ``[...]``; ``encode``: from `encode_scale`, broadcastable to it.
    """
    return to_e4m3(block_amax * (encode * (1.0 / E2M1_MAX)))


def to_e4m3(scales: Tensor) -> Tensor:
    """Round non-negative float32 to E4M3: nearest even, saturating at 448, NaN kept (OCP OFP8 v1.0)."""
    # abs, because a compiled clamp may set the sign of a NaN, and its byte has to be 0x7F.
    return scales.clamp_max(E4M3_MAX).abs().to(torch.float8_e4m3fn)


def divide_by_scales(blocks: Tensor, scales: Tensor, encode: Tensor) -> Tensor:
    """Return blocks in units of their scales, float32 ``[..., 16]``, ready to be rounded to E2M1.

    ``blocks``: ``[..., 16]``; ``scales``: float8_e4m3fn ``[...]``; ``encode``: from `encode_scale`. The
    divisor is the scale as rounded, so that elements make up for its error, and it divides as one rounded
    reciprocal. A zero scale multiplies by the largest float32.
    """
    inverse = (scales.to(torch.float32) * encode.reciprocal()).reciprocal().clamp_max(_FP32_MAX)
    return blocks.to(torch.float32) * inverse.unsqueeze(-1)

"""The random Hadamard transform that spreads outliers before the weight-gradient GEMM.

arXiv:2509.25149, section 4.2 and appendix C: both operands are multiplied by one orthogonal matrix along the
GEMM's inner dimension, in groups of 16, so that the product stays what it was: ``(A H) (B H)^T = A B^T``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.blocks import split_blocks
from fp4_compile.numerics.checks import REAL_DTYPES, require_dims, require_dtype

HADAMARD_SIZE = 16

HADAMARD_SIZES = (16, 32, 64, 128)
"""The sizes there are signs for."""

_NEGATIVE_SIGNS = 0x5D3CF1A26B9847E0C1F82B7D63A5D7E8
"""Bit i is set where the i-th sign is -1; one draw, for every layer and step. The low 16 are those of the paper's
authors, the rest continue them for larger sizes."""


def random_hadamard(x: Tensor, dim: int = -1, size: int = HADAMARD_SIZE) -> Tensor:
    """Transform ``x`` along ``dim`` in groups of ``size``: bfloat16, computed in float32 and rounded once.

    ``x``: float32, bfloat16 or float16, any shape; ``dim`` is filled up with zeros to a multiple of ``size``, and
    the result has that length. The signs are drawn once and for all: every layer and every step uses the
    same. The sums are those of the fast transform: neighbours first, then pairs of pairs, and so on.
    """
    require_dtype("x", x, *REAL_DTYPES)
    require_dims("x", x, 1)
    if size not in HADAMARD_SIZES:
        raise ValueError(f"size is {size}; it takes one of {HADAMARD_SIZES}")
    groups = split_blocks(x.movedim(dim, -1), size).to(torch.float32) * hadamard_signs(size, x.device)
    half = 1
    while half < size:
        pairs = groups.reshape(*groups.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    transformed = (groups * float(size**-0.5)).to(torch.bfloat16)
    return transformed.flatten(-2).movedim(-1, dim)


def hadamard_signs(size: int, device: torch.device) -> Tensor:
    """Return the signs, float32 ``[size]``."""
    signs = [-1.0 if _NEGATIVE_SIGNS >> i & 1 else 1.0 for i in range(size)]
    return torch.tensor(signs, dtype=torch.float32, device=device)


def hadamard_matrix(device: torch.device, size: int = HADAMARD_SIZE) -> Tensor:
    """Return the orthogonal float32 matrix ``diag(signs) @ H / sqrt(size)``, H in Sylvester's order."""
    index = torch.arange(size, device=device)
    common_bits = index.unsqueeze(1) & index
    for shift in (4, 2, 1):
        common_bits = common_bits ^ (common_bits >> shift)
    parity = (common_bits & 1).to(torch.float32)
    return (1.0 - 2.0 * parity) * hadamard_signs(size, device).unsqueeze(1) * float(size**-0.5)

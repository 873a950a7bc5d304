"""The 16-point random Hadamard transform that spreads outliers before the weight-gradient GEMM.

arXiv:2509.25149, section 4.2 and appendix C: both operands are multiplied by one orthogonal matrix along the
GEMM's inner dimension, in groups of 16, so that the product stays what it was: ``(A H) (B H)^T = A B^T``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.blocks import split_blocks
from fp4_compile.numerics.checks import REAL_DTYPES, require_dims, require_dtype

HADAMARD_SIZE = 16

_NEGATIVE_SIGNS = 0xD7E8  # bit i is set where the i-th sign is -1; one draw, for every layer and step


def random_hadamard(x: Tensor, dim: int = -1) -> Tensor:
    """Transform ``x`` along ``dim`` in groups of 16: bfloat16, accumulated in float32 and rounded once.

    ``x``: float32, bfloat16 or float16, any shape; ``dim`` is filled up with zeros to a multiple of 16, and
    the result has that length. The signs are drawn once and for all: every layer and every step uses the
    same.
    """
    require_dtype("x", x, *REAL_DTYPES)
    require_dims("x", x, 1)
    groups = split_blocks(x.movedim(dim, -1), HADAMARD_SIZE).to(torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        transformed = torch.matmul(groups, hadamard_matrix(x.device)).to(torch.bfloat16)
    return transformed.flatten(-2).movedim(-1, dim)


def hadamard_matrix(device: torch.device) -> Tensor:
    """Return the orthogonal 16x16 float32 matrix ``diag(signs) @ H16 / 4``, H16 in Sylvester's order."""
    index = torch.arange(HADAMARD_SIZE, device=device)
    common_bits = index.unsqueeze(1) & index
    for shift in (2, 1):
        common_bits = common_bits ^ (common_bits >> shift)
    negative = (common_bits ^ (_NEGATIVE_SIGNS >> index).unsqueeze(1)) & 1
    return 0.25 - 0.5 * negative.to(torch.float32)

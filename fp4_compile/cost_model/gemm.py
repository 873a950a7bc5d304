"""Arithmetic of one GEMM ``[batch, M, K] @ [batch, K, N]``; sizes are sympy expressions or integers."""

from __future__ import annotations

import sympy

BLOCK = 16
"""Elements along K that share one NVFP4 block scale."""


def gemm_flops(batch: sympy.Expr, m: sympy.Expr, n: sympy.Expr, k: sympy.Expr) -> sympy.Expr:
    """Floating-point operations: a multiply and an add for each of ``batch * M * N * K``."""
    return 2 * sympy.sympify(batch) * m * n * k


def padding_share(k: int) -> float:
    """Share of a padded contraction that is padding: K=40 is padded to 48, so 8/48."""
    padded = -(-k // BLOCK) * BLOCK
    return (padded - k) / padded if padded else 0.0

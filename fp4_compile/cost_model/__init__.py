"""What a matmul costs, as sympy expressions of M, N, K. Roofline and device tables join here."""

from __future__ import annotations

from fp4_compile.cost_model.gemm import gemm_flops, padding_share

__all__ = ["gemm_flops", "padding_share"]

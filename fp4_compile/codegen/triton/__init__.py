"""Triton kernels for FP4: templates that Inductor fuses into, and that compile and run alone."""

from __future__ import annotations

from fp4_compile.codegen.triton.kernel_template import KernelTemplate

__all__ = ["KernelTemplate"]

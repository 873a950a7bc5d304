"""Run Triton kernels, and whole programs that Inductor wrote for a GPU, on CPU tensors: for their numbers.

Triton's interpreter does the indexing; what it gets wrong or lacks is defined here: conversions, BF16 arithmetic, E4M3
scales of FP4 products, inline PTX and libdevice. Whatever neither covers raises `SimulationError`.
"""

from __future__ import annotations

from fp4_compile.simulation.interpreter import Kernel, interpreted

__all__ = ["Kernel", "interpreted"]

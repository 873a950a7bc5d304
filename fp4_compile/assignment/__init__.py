"""Which matmuls to put into NVFP4, as an exact optimization: a minimum cut, its Pareto front, and budgets."""

from __future__ import annotations

from fp4_compile.assignment.budgeted import Solution, solve, total_changes, unconstrained
from fp4_compile.assignment.pareto import Step, front
from fp4_compile.assignment.problem import Item, Problem, Shared

__all__ = ["Item", "Problem", "Shared", "Solution", "Step", "front", "solve", "total_changes", "unconstrained"]

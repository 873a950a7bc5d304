"""The pipeline: what happens to an ATen graph, in order.

Every pass is a function ``(graph, context) -> None`` in a module of its own name, idempotent, and leaves the
graph well formed with fake values on every node.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fp4_compile.passes.assign import assign
from fp4_compile.passes.both_ways import both_ways
from fp4_compile.passes.cleanup import cleanup
from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.find_matmuls import find_matmuls
from fp4_compile.passes.group_amaxes import group_amaxes
from fp4_compile.passes.observe import observe
from fp4_compile.passes.rewrite import rewrite
from fp4_compile.passes.rewrite_backward import rewrite_backward
from fp4_compile.passes.share import share
from fp4_compile.passes.tensor_cores import tensor_cores
from fp4_compile.passes.verify import verify

Pass = Callable[[fx.Graph, Context], None]

PIPELINE: tuple[Pass, ...] = (
    find_matmuls,
    assign,
    rewrite,
    rewrite_backward,
    share,
    tensor_cores,
    both_ways,
    group_amaxes,
    cleanup,
    observe,
    verify,
)

FOR_GPUS = frozenset({tensor_cores, both_ways, group_amaxes})
"""Passes that a CPU's graph does not go through."""

__all__ = ["FOR_GPUS", "PIPELINE", "Context", "Matmul", "Pass"]

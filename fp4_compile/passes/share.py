"""Quantize once what several matmuls read: equal views, amaxes and quantizers become one node.

before  %1 = view(%x, [16, 64]);  %2 = fp4.amax(%1);  %3 = fp4.quantize(%1, %2)      for q
        %7 = view(%x, [16, 64]);  %8 = fp4.amax(%7);  %9 = fp4.quantize(%7, %8)      for k
after   both matmuls read %3

Each weight keeps its own amax and scales: they are different tensors. Nodes are merged only within one
direction (forward or backward) and one checkpoint region, so that what is to be recomputed still is.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
from torch import fx

from fp4_compile import ops
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import is_view, region

_QUANTIZERS = (ops.quantize, ops.mx_quantize, ops.quantize_stochastic, ops.transpose)
_collectives = torch.ops._c10d_functional
_REDUCED_AMAX = (_collectives.all_reduce.default, _collectives.wait_tensor.default)


def share(graph: fx.Graph, context: Context) -> None:
    """Merge equal quantizers, and the equal views they read."""
    wanted = _read_by_quantizers(graph)
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node not in wanted:
            continue
        key = _key(node)
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def _read_by_quantizers(graph: fx.Graph) -> set[fx.Node]:
    """The quantizers, their results, and the chains of views before them."""
    wanted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        ours = _is_ours(node)
        view = node.op == "call_function" and is_view(node) and node.target is not torch.ops.aten.clone.default
        if ours or (view and wanted.intersection(node.users)):
            wanted.add(node)
    return wanted


def _is_ours(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return node.args[0].target in _QUANTIZERS  # type: ignore[union-attr]
    if node.target in _REDUCED_AMAX:
        return _is_ours(node.args[0])  # type: ignore[arg-type]
    return node.target in (ops.amax, ops.hadamard, *_QUANTIZERS)


def _key(node: fx.Node) -> Hashable:
    return (node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))), region(node))


def _frozen(arg: object) -> Hashable:
    if isinstance(arg, (list, tuple)):
        return tuple(_frozen(a) for a in arg)
    if isinstance(arg, fx.Node):
        return arg
    return (type(arg).__name__, str(arg))

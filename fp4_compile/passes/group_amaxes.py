"""Find the amaxes of many weights in one launch; on a GPU, in training, where each step quantizes them anew.

before  %2 = fp4.amax(%w0); %3 = fp4.quantize_tiles(%w0, %2); fp4.scaled_mm(..., %2, ...)
        %4 = fp4.amax(%w1); %5 = fp4.quantize_tiles(%w1, %4); fp4.scaled_mm(..., %4, ...)

after   %1 = fp4.amax_parts([%w0, %w1])
        %2 = select(%1, 0, 0); %3 = fp4.quantize_tiles(%w0, %2); fp4.scaled_mm(..., %3.4, ...)
        %4 = select(%1, 0, 1); %5 = fp4.quantize_tiles(%w1, %4); fp4.scaled_mm(..., %5.4, ...)

Only weights that are inputs of the graph are grouped: those that are computed, or cast, would all have to be held at
once. Each of these keeps its own amax, which Inductor finds in the kernel that makes it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

from torch import fx

from fp4_compile import ops
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import add_call, aten, is_view, region, value

MOST = 32
"""Tensors in a launch: each is an argument of the kernel and a branch in it."""


def group_amaxes(graph: fx.Graph, context: Context) -> None:
    """Replace the amaxes of weights in tiles."""
    tiles: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=ops.quantize_tiles, sort=True):
        amax: Any = node.args[1]
        if amax.target is ops.amax and _weight(amax.args[0]) is not None:
            tiles[node] = amax
    # What a checkpoint computes again stays together.
    regions: dict[Hashable, list[fx.Node]] = defaultdict(list)
    for node in tiles:
        regions[region(node)].append(node)
    for each in regions.values():
        for start in range(0, len(each), MOST):
            _group(graph, {node: tiles[node] for node in each[start : start + MOST]})


def _weight(node: fx.Node) -> fx.Node | None:
    """The input that the node is, or a view of all of; its elements lie side by side."""
    elements = value(node).numel()
    while is_view(node) and node.target is not aten.clone.default:
        node = node.args[0]  # type: ignore[assignment]
    whole = node.op == "placeholder" and value(node).numel() == elements
    return node if whole and value(node).is_contiguous() and value(node).dim() == 2 else None


def _group(graph: fx.Graph, tiles: dict[fx.Node, fx.Node]) -> None:
    first = next(node for node in graph.nodes if node in tiles)
    weights = [_weight(amax.args[0]) for amax in tiles.values()]  # type: ignore[arg-type]
    with graph.inserting_before(first):
        parts = add_call(graph, ops.amax_parts, (weights,), first)
    for i, (node, amax) in enumerate(tiles.items()):
        with graph.inserting_before(node):
            mine = add_call(graph, aten.select.int, (parts, 0, i), node)
        node.update_arg(1, mine)
        with graph.inserting_after(node):
            found = add_call(graph, operator.getitem, (node, 4), node)
        amax.replace_all_uses_with(found)
        graph.erase_node(amax)

"""Inference only: what quantizes a weight leaves the graph and runs once, in a prologue of its own.

before  %x, %w -> %1 = fp4.amax(%w); %2 = fp4.quantize(%w, %1); %3 = fp4.scaled_mm(..., %2.0, %2.1, %1)

after   prologue  %w -> fp4.amax(%w), fp4.quantize(%w, ...).0, .1
        main      %x, %w, %amax, %codes, %scales -> fp4.scaled_mm(..., %codes, %scales, %amax)

Only quantized weights leave: views and casts of a weight stay, since keeping one would keep the weight alive or
hold a second copy of it. A weight that is computed from parameters (weight norm, a merged adapter) is computed
in the prologue. When the prologue runs again is `fp4_compile.weights`'s matter.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fp4_compile import ops

_QUANTIZERS = (ops.amax, ops.quantize, ops.quantize_rows, ops.mx_quantize)


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A graph's weight quantizers, taken out of it.

    ``prologue`` maps the inputs at positions ``inputs`` of the main graph to the main graph's new last inputs.
    """

    prologue: fx.GraphModule
    inputs: tuple[int, ...]
    count: int


def hoist_weights(gm: fx.GraphModule, static_inputs: list[int]) -> Hoisted | None:
    """Take the weight quantizers out of an inference graph, in place.

    Args:
        gm: the functional inference graph.
        static_inputs: positions of the placeholders that hold parameters and buffers.

    Returns:
        The prologue, or None if no quantizer depends on parameters alone. The main graph has ``count`` new
        placeholders behind its own.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    constant = {placeholders[i] for i in static_inputs}
    quantized: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes or not constant.issuperset(node.all_input_nodes):
            continue
        if _is_random(node):
            continue
        constant.add(node)
        if node.target in _QUANTIZERS or quantized.intersection(node.all_input_nodes):
            quantized.add(node)
    hoisted = [n for n in gm.graph.nodes if n in quantized and not constant.issuperset(n.users)]
    if not hoisted:
        return None
    needed = _ancestors(hoisted)
    inputs = [i for i, node in enumerate(placeholders) if node in needed]
    prologue = _prologue(gm, [placeholders[i] for i in inputs], needed, hoisted)
    last = placeholders[-1]
    for node in hoisted:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"hoisted_{node.name}")
        last.meta = {"val": node.meta["val"], "fp4_hoisted": True}
        node.replace_all_uses_with(last)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return Hoisted(prologue, tuple(inputs), len(hoisted))


def _is_random(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found, stack = set(nodes), list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def _prologue(
    gm: fx.GraphModule, placeholders: list[fx.Node], needed: set[fx.Node], hoisted: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta, "fp4_param": True}
    for node in gm.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in hoisted))
    return fx.GraphModule(gm, graph)

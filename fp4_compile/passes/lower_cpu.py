"""On a CPU, replace the fp4 operators by programs that Inductor compiles and fuses.

before  %1 = fp4.amax(%x);  %2 = fp4.quantize(%x, %1)
        %3 = fp4.scaled_mm(%2.0, %2.1, %1, %codes, %scales, %amax, %bias, bf16)

after   %1 = amax(abs(%x))                          one reduction, fused with what computes %x
        %2 = round(%x / scale) * scale              fp32 [M, K], one loop, fused likewise
        %3 = mm(%2, decode(%codes, %scales)^T)      fp32
        %4 = %3 * alpha + %bias                     fused with what reads it

The numbers stay those of the operators. Runs last, on each of the graphs Inductor compiles, after partitioning
and after weight quantizers were hoisted. What Inductor cannot do as well stays an operator: four-over-six,
16x16 tiles, and tensors that may be empty.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp4_compile import ops
from fp4_compile._torch_compat import fake_mode_of, make_fx, select_decomp_table, statically_true
from fp4_compile.codegen import cpu
from fp4_compile.passes.graph import value


def lower_cpu(graph: fx.Graph) -> None:
    """Lower every fp4 GEMM on CPU tensors, and the amaxes and quantizers only they read; in place."""
    values: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is ops.scaled_mm and value(node).device.type == "cpu" and _not_empty(node):
            with graph.inserting_before(node):
                lhs, rhs = (_values(graph, *node.args[i : i + 2], values) for i in (0, 3))
                amaxes = (node.args[2], node.args[5])
                lowered = _inline(graph, cpu.product, (lhs, rhs, *amaxes, node.args[6], node.args[7]), node)
            node.replace_all_uses_with(lowered)
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        ours = node.target in (ops.quantize, operator.getitem) or node.target in (torch.ops.aten.view.default,)
        if ours and not node.users:
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is ops.amax and value(node.args[0]).device.type == "cpu" and _not_empty(node.args[0]):
            with graph.inserting_before(node):
                lowered = _inline(graph, cpu.amax, (node.args[0],), node)
            node.replace_all_uses_with(lowered)
            graph.erase_node(node)


def _values(graph: fx.Graph, codes: fx.Node, scales: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """The operand's numbers without tensor scale: straight from its quantizer if that is in the graph."""
    quantizer = codes.args[0] if codes.target is operator.getitem else None
    if isinstance(quantizer, fx.Node) and quantizer.target is ops.quantize and _is_plain(quantizer):
        if quantizer not in known:
            with graph.inserting_before(quantizer):
                known[quantizer] = _inline(graph, cpu.quantized_values, quantizer.args[:2], quantizer)
        return known[quantizer]
    return _inline(graph, cpu.decoded_values, (codes, scales), codes)


def _is_plain(quantizer: fx.Node) -> bool:
    return quantizer.args[2:] in ((), ("1x16",), ("1x16", False)) and _not_empty(quantizer.args[0])


def _not_empty(node: Any) -> bool:
    return statically_true(value(node).numel() > 0)


def _inline(graph: fx.Graph, function: Callable[..., Any], args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """Trace ``function`` into ATen operations at the insertion point; returns the node of its result."""
    nodes = [a for a in args if isinstance(a, fx.Node)]
    mode = fake_mode_of(graph)

    def on_tensors(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return function(*(next(given) if isinstance(a, fx.Node) else a for a in args))

    if mode is None:
        raise RuntimeError("the graph carries no fake values")
    with mode:
        traced = make_fx(on_tensors, decomposition_table=select_decomp_table())(*(value(n) for n in nodes))
    environment = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), nodes, strict=True))
    for node in traced.graph.nodes:
        if node.op == "output":
            return environment[node.args[0]]
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            raise RuntimeError(f"{function.__name__} holds a tensor constant")
        environment[node] = copy = graph.node_copy(node, environment.__getitem__)
        for key in ("partitioner_tag", "stack_trace", "nn_module_stack"):
            if key in like.meta:
                copy.meta[key] = like.meta[key]
    raise RuntimeError("a traced graph has an output")

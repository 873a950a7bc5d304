"""The fp4 nodes that both directions are rewritten into: amax, quantizers, seeds, products."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fp4_compile import ops
from fp4_compile.numerics import E4M3_MAX, FOUR_OVER_SIX_BOUND
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import add_call, aten, is_backward, value
from fp4_compile.plan import Precision


@dataclasses.dataclass(frozen=True)
class Quantized:
    """An operand in FP4. ``amax`` is what the product's alpha takes; None in MXFP4, which has no tensor scale."""

    codes: fx.Node
    scales: fx.Node
    amax: fx.Node | None


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """The node under exchanges of the last two dimensions, and whether their number is odd."""
    odd = False
    while node.target is aten.permute.default:
        rank = value(node).dim()
        order = [d % rank for d in node.args[1]]  # type: ignore[union-attr, operator]
        if rank < 2 or order != [*range(rank - 2), rank - 1, rank - 2]:
            break
        node, odd = node.args[0], not odd  # type: ignore[assignment]
    return node, odd


def transposed(graph: fx.Graph, operand: fx.Node, like: fx.Node) -> fx.Node:
    """``operand`` with its last two dimensions exchanged; undoes a permute instead of adding one."""
    rank = value(operand).dim()
    order = [*range(rank - 2), rank - 1, rank - 2]
    if operand.target is aten.permute.default and [d % rank for d in operand.args[1]] == order:  # type: ignore
        return operand.args[0]  # type: ignore[return-value]
    return add_call(graph, aten.permute.default, (operand, order), like)


def add_amax(graph: fx.Graph, context: Context, operand: fx.Node, like: fx.Node) -> fx.Node:
    """The amax of an operand; of the whole tensor where tensor-parallel ranks hold parts of it.

    A rank cannot see from its own graph which activations are sharded, and a maximum over equal ones changes
    nothing: so all are reduced.
    """
    # dgrad and wgrad read one gradient, one of them transposed: they share its amax.
    read = untransposed(operand)[0] if is_backward(like) else operand
    amax = add_call(graph, ops.amax, (read,), like)
    for group in context.parallel_groups:
        functional = torch.ops._c10d_functional
        reduced = add_call(graph, functional.all_reduce.default, (amax, "max", group.name), like)
        amax = add_call(graph, functional.wait_tensor.default, (reduced,), like)
    return amax


def add_quantizer(
    graph: fx.Graph,
    context: Context,
    operand: fx.Node,
    like: fx.Node,
    precision: Precision,
    block: str = "1x16",
    four_over_six: bool = False,
) -> Quantized:
    """Quantize [..., R, C] along C, to nearest."""
    if precision is Precision.MXFP4:
        return Quantized(*_pair(graph, add_call(graph, ops.mx_quantize, (operand, None, 0), like), like), None)
    amax = add_amax(graph, context, operand, like)
    quantized = add_call(graph, ops.quantize, (operand, amax, block, four_over_six), like)
    codes, scales = _pair(graph, quantized, like)
    if four_over_six:  # decoded with the bound 256, and the GEMM's alpha counts on 448
        amax = add_call(graph, aten.mul.Tensor, (amax, E4M3_MAX / FOUR_OVER_SIX_BOUND), like)
    return Quantized(codes, scales, amax)


def add_stochastic_quantizer(
    graph: fx.Graph, context: Context, operand: fx.Node, like: fx.Node, precision: Precision, stream: int
) -> Quantized:
    """Quantize [..., R, C] along C in blocks of 1x16 (MXFP4: 1x32), rounding at random."""
    seed = _seed(graph, context)
    if precision is Precision.MXFP4:
        return Quantized(*_pair(graph, add_call(graph, ops.mx_quantize, (operand, seed, stream), like), like), None)
    amax = add_amax(graph, context, operand, like)
    quantized = add_call(graph, ops.quantize_stochastic, (operand, amax, seed, stream), like)
    return Quantized(*_pair(graph, quantized, like), amax)


def add_transpose(graph: fx.Graph, quantized: Quantized, k: object, like: fx.Node) -> Quantized:
    """The transpose of a matrix [R, k] that is quantized in tiles of 16x16."""
    turned = add_call(graph, ops.transpose, (quantized.codes, quantized.scales, k), like)
    return Quantized(*_pair(graph, turned, like), quantized.amax)


def add_product(
    graph: fx.Graph, a: Quantized, b: Quantized, bias: fx.Node | None, dtype: torch.dtype, like: fx.Node
) -> fx.Node:
    """[..., M, K] x [..., N, K]."""
    if a.amax is None or b.amax is None:
        return add_call(graph, ops.mx_scaled_mm, (a.codes, a.scales, b.codes, b.scales, bias, dtype), like)
    operands = (a.codes, a.scales, a.amax, b.codes, b.scales, b.amax)
    return add_call(graph, ops.scaled_mm, (*operands, bias, dtype), like)


def _pair(graph: fx.Graph, node: fx.Node, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = (add_call(graph, operator.getitem, (node, i), like) for i in range(2))
    return first, second


def _seed(graph: fx.Graph, context: Context) -> fx.Node:
    """The graph's seed: one number drawn in each forward from the device's default generator.

    It is drawn outside all checkpointed regions and kept for the backward, so that nothing draws it again.
    """
    for node in graph.nodes:
        if node.target is ops.draw_seed:
            return node  # type: ignore[no-any-return]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    model = next(n for n in graph.nodes if not is_backward(n) and isinstance(n.meta.get("val"), torch.Tensor))
    group = context.parallel_groups[0] if context.parallel_groups else None
    ranks = (group.size, group.stride) if group else (1, 1)
    with graph.inserting_before(first):
        node = add_call(graph, ops.draw_seed, ranks, model, device=value(model).device)
    for key in ("recompute", "ac_graph_id", "nn_module_stack", "seq_nr", "stack_trace"):
        node.meta.pop(key, None)
    node.meta["partitioner_tag"] = "is_forward"
    return node

"""Rewrite each forward matmul decided for FP4 into quantize -> FP4 GEMM.

before  %5 = addmm(%bias, %x: bf16[s0, 64], permute(%w: bf16[96, 64]))

after   %1 = fp4.amax(%x)
        %2 = fp4.quantize(%x, %1)      -> codes u8[s0, 32], block scales e4m3[s0, 4]
        %3 = fp4.amax(%w)
        %4 = fp4.quantize(%w, %3)      -> codes u8[96, 32], block scales e4m3[96, 4]
        %5 = fp4.scaled_mm(%2.0, %2.1, %1, %4.0, %4.1, %3, %bias, bf16)

Both operands are quantized along K, which every FP4 tensor core wants innermost. The backward is not touched here
(see `rewrite_backward`): what of it stays in high precision reads the high-precision operands, so the gradient
passes straight through the quantizers.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import add_call, aten, is_backward, value
from fp4_compile.passes.quantizers import add_product, add_quantizer, transposed
from fp4_compile.plan import Decision, Precision, Reason, Role

log = logging.getLogger(__name__)


def rewrite(graph: fx.Graph, context: Context) -> None:
    """Replace every forward matmul whose decision is an FP4 format.

    A matmul that resists (a fault of ours) is left as it is with a reason in the plan and a warning: the model
    worked, and goes on working.
    """
    trains = any(is_backward(node) for node in graph.nodes)
    for matmul in context.matmuls:
        key = matmul.site.key
        if matmul.site.role is not Role.FPROP or context.decisions[key].precision is Precision.BF16:
            continue
        before = set(graph.nodes)
        try:
            _rewrite_matmul(graph, matmul, context, trains)
        except Exception as error:
            log.warning("%s could not be rewritten and stays in %s", key, matmul.site.dtype, exc_info=True)
            for node in [n for n in reversed(graph.nodes) if n not in before]:
                graph.erase_node(node)
            detail = f"{type(error).__name__} while rewriting"
            context.decisions[key] = Decision(matmul.site, Precision.BF16, Reason.FAILED, detail)


def _rewrite_matmul(graph: fx.Graph, matmul: Matmul, context: Context, trains: bool) -> None:
    node, options = matmul.node, context.options
    precision = context.decisions[matmul.site.key].precision
    block = options.training.weight_block if trains else options.weight_block
    with graph.inserting_before(node):
        lhs, rhs, bias = _oriented(graph, matmul)
        fine = options.four_over_six
        activation = add_quantizer(graph, context, lhs, node, precision, "1x16", fine in ("activations", "all"))
        weight = add_quantizer(graph, context, rhs, node, precision, block, fine in ("weights", "all"))
        plain_bias = bias if bias is not None and value(bias).dim() == 1 and _unscaled(node) else None
        result = add_product(graph, activation, weight, plain_bias, value(node).dtype, node)
        result.meta["fp4_op"] = matmul.site.op
        result.meta["fp4_site"] = matmul.site.key
        if bias is not None and plain_bias is None:
            result = _add_scaled(graph, result, bias, node)
        if matmul.site.op == "conv":
            result = _channels_to_front(graph, result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _oriented(graph: fx.Graph, matmul: Matmul) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """The operands as [..., M, K] and [..., N, K], and the bias."""
    node = matmul.node
    if matmul.site.op == "conv":
        rank = value(matmul.lhs).dim()
        lhs = add_call(graph, aten.permute.default, (matmul.lhs, [0, *range(2, rank), 1]), node)
        rhs = add_call(graph, aten.squeeze.dims, (matmul.rhs, list(range(2, rank))), node)
        return lhs, rhs, node.args[2]  # type: ignore[return-value]
    bias = node.args[0] if node.target in (aten.addmm.default, aten.baddbmm.default) else None
    return matmul.lhs, transposed(graph, matmul.rhs, node), bias  # type: ignore[return-value]


def _unscaled(node: fx.Node) -> bool:
    return all(node.kwargs.get(factor, 1) in (1, 1.0) for factor in ("alpha", "beta"))


def _add_scaled(graph: fx.Graph, product: fx.Node, bias: fx.Node, node: fx.Node) -> fx.Node:
    """``beta * bias + alpha * product`` for biases that are matrices, and for scaled ones."""
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if alpha != 1:
        product = add_call(graph, aten.mul.Tensor, (product, alpha), node)
    if beta == 0:
        return product
    return add_call(graph, aten.add.Tensor, (product, bias), node, alpha=beta)


def _channels_to_front(graph: fx.Graph, result: fx.Node, node: fx.Node) -> fx.Node:
    """[B, ..., O] back to [B, O, ...], in the memory format the convolution had."""
    rank = value(node).dim()
    moved = add_call(graph, aten.permute.default, (result, [0, rank - 1, *range(1, rank - 1)]), node)
    if value(moved).stride() == value(node).stride():
        return moved
    memory_format = torch.contiguous_format
    return add_call(graph, aten.clone.default, (moved,), node, memory_format=memory_format)

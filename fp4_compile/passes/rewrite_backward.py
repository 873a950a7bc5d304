"""Rewrite the dgrad and wgrad matmuls that were decided for FP4, by the recipe of arXiv:2509.25149.

before  %6 = mm(%dy: [T, N], %w: [N, K])                                        !bwd   dgrad
        %7 = mm(permute(%dy), %x: [T, K])                                       !bwd   wgrad

after   %2 = fp4.draw_seed()                                                    once a graph
        %3 = fp4.hadamard(permute(%x), 16); %4 = fp4.quantize(%3, fp4.amax(%3))        in the forward, kept
        %5 = fp4.transpose(%w codes, %w scales)                                 !bwd   the forward's codes of w
        %6 = fp4.quantize_stochastic(%dy, fp4.amax(%dy), %2, 0)                 !bwd
        %7 = fp4.scaled_mm(%6, %5)                                              !bwd   dgrad
        %8 = fp4.hadamard(permute(%dy), 16)                                     !bwd
        %9 = fp4.quantize_stochastic(%8, fp4.amax(%8), %2, 1)                   !bwd
        %10 = fp4.scaled_mm(%9, %4)                                             !bwd   wgrad

What wgrad needs of the activation is quantized in the forward, so that the partitioner keeps codes in place of the
activation. Each gradient's rounding has a stream of random bits of its own.
"""

from __future__ import annotations

import logging

from torch import fx

from fp4_compile import ops
from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import add_call, is_backward, value
from fp4_compile.passes.quantizers import (
    Quantized,
    add_product,
    add_quantizer,
    add_stochastic_quantizer,
    add_transpose,
    transposed,
    untransposed,
)
from fp4_compile.passes.recipe import gradient_nodes
from fp4_compile.plan import Decision, Precision, Reason, Role

log = logging.getLogger(__name__)


def rewrite_backward(graph: fx.Graph, context: Context) -> None:
    """Replace every backward matmul whose decision is an FP4 format; one that resists stays, with a reason."""
    chosen = [
        m
        for m in context.matmuls
        if m.site.role is not Role.FPROP and context.decisions[m.site.key].precision is not Precision.BF16
    ]
    gradients = gradient_nodes(graph) if chosen else set()
    for matmul in chosen:
        before = set(graph.nodes)
        try:
            _rewrite_matmul(graph, matmul, context, gradients)
        except Exception as error:
            key = matmul.site.key
            log.warning("%s could not be rewritten and stays in %s", key, matmul.site.dtype, exc_info=True)
            for node in [n for n in reversed(graph.nodes) if n not in before]:
                graph.erase_node(node)
            detail = f"{type(error).__name__} while rewriting"
            context.decisions[key] = Decision(matmul.site, Precision.BF16, Reason.FAILED, detail)


def _rewrite_matmul(graph: fx.Graph, matmul: Matmul, context: Context, gradients: set[fx.Node]) -> None:
    node, precision = matmul.node, context.decisions[matmul.site.key].precision
    stream = context.next_stream()
    operands = []
    for i, operand in enumerate((matmul.lhs, matmul.rhs)):
        if operand in gradients:
            with graph.inserting_before(node):
                oriented = operand if i == 0 else transposed(graph, operand, node)
                operands.append(_gradient(graph, context, matmul, oriented, precision, stream))
        elif matmul.site.role is Role.DGRAD:
            with graph.inserting_before(node):
                operands.append(_weight(graph, context, matmul, operand, i == 1, precision))
        else:
            operands.append(_activation(graph, context, matmul, operand, i == 1, precision))
    with graph.inserting_before(node):
        result = add_product(graph, operands[0], operands[1], None, value(node).dtype, node)
    result.meta["fp4_op"] = matmul.site.op
    result.meta["fp4_site"] = matmul.site.key
    gradients.add(result)  # the layers before this one read it in place of the node
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _gradient(
    graph: fx.Graph, context: Context, matmul: Matmul, operand: fx.Node, precision: Precision, stream: int
) -> Quantized:
    """[..., R, C] rounded along C; in wgrad, where C are the tokens, transformed before."""
    recipe, node = context.options.training, matmul.node
    operand = _spread(graph, context, matmul, operand, precision, node)
    if recipe.stochastic_rounding:
        return add_stochastic_quantizer(graph, context, operand, node, precision, stream)
    return add_quantizer(graph, context, operand, node, precision)


def _spread(
    graph: fx.Graph, context: Context, matmul: Matmul, operand: fx.Node, precision: Precision, like: fx.Node
) -> fx.Node:
    size = context.options.training.hadamard_size(precision.value)
    if matmul.site.role is not Role.WGRAD or size == 0:
        return operand
    return add_call(graph, ops.hadamard, (operand, size), like)


def _activation(
    graph: fx.Graph, context: Context, matmul: Matmul, operand: fx.Node, turn: bool, precision: Precision
) -> Quantized:
    """The activation for wgrad, quantized along the tokens in the forward."""
    like = matmul.owner.node if matmul.owner else operand
    with graph.inserting_before(_after(operand)):
        oriented = transposed(graph, operand, like) if turn else operand
        spread = _spread(graph, context, matmul, oriented, precision, like)
        return add_quantizer(graph, context, spread, like, precision)


def _weight(
    graph: fx.Graph, context: Context, matmul: Matmul, operand: fx.Node, turn: bool, precision: Precision
) -> Quantized:
    """The weight for dgrad: the forward's codes turned round where those are tiles, else quantized along this GEMM."""
    node, options = matmul.node, context.options
    oriented = transposed(graph, operand, node) if turn else operand
    tiles = options.training.weight_block == "16x16" and precision is Precision.NVFP4
    forward = _forward_tiles(graph, oriented) if tiles and value(oriented).dim() == 2 else None
    if forward is not None:
        return add_transpose(graph, forward, value(oriented).shape[0], node)
    four_over_six = options.four_over_six in ("weights", "all")
    return add_quantizer(graph, context, oriented, node, precision, "16x16" if tiles else "1x16", four_over_six)


def _forward_tiles(graph: fx.Graph, oriented: fx.Node) -> Quantized | None:
    """The forward's encoding, in tiles of 16x16, of the transpose of ``oriented``."""
    root, odd = untransposed(oriented)
    for node in graph.nodes:
        if node.target is not ops.scaled_mm or is_backward(node):
            continue
        codes, scales, amax = node.args[3:6]
        quantizer = codes.args[0]
        if quantizer.target is not ops.quantize or quantizer.args[2] != "16x16":
            continue
        if untransposed(quantizer.args[0]) == (root, not odd):
            return Quantized(codes, scales, amax)
    return None


def _after(node: fx.Node) -> fx.Node:
    """The first place in the graph behind a node that is not an input."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following

"""Give a GPU's kernels the operands they want; on a CPU nothing changes.

before  %1 = fp4.amax(%x);  %2 = fp4.quantize(%x, %1);  %3 = fp4.amax(%w);  %4 = fp4.quantize(%w, %3)
        %5 = fp4.scaled_mm(%2.0, %2.1, %1, %4.0, %4.1, %3, %bias, bf16)

after   on FP4 tensor cores (sm_100 and later)
        %1 = fp4.quantize_rows(%x, True);  %2 = fp4.quantize_rows(%w, True)
        %3 = fp4.scaled_mm(%1.0, %1.1, %1.2, %2.0, %2.1, %2.2, %bias, bf16, True)

        gradients, stochastic rounding and the Hadamard transform likewise:
        fp4.quantize_stochastic(fp4.hadamard(%g, 16), %6, %seed, 3)  ->  fp4.quantize_rows(%g, True, 16, %seed, 3)

        a weight in tiles of 16x16 and its transpose, at once
        fp4.quantize(%w, %3, '16x16'); fp4.transpose(...)  ->  fp4.quantize_tiles(%w, %3): both, swizzled

        on older ones, if the weight is a parameter
        %1 = fp4.quantize_rows(%w, False)
        %2 = fp4.weight_mm(%x, %1.0, %1.1, %1.2, %bias, bf16)

A scale for each row takes one pass: quantizing does not wait for the amax of the whole tensor, which would cost
another read of it. The GEMM's epilogue then multiplies with two vectors in place of one number. Block scales are
written in the order in which tensor cores read them. Tiles keep the amax of their tensor, which both directions see.

Older tensor cores multiply BF16: only the weight, which is read once a call, is worth its four bits. What is
quantized in another way (four over six, larger Hadamard transforms) keeps its quantizer and its tensor-wide amax.
"""

from __future__ import annotations

import operator

from torch import fx

from fp4_compile import ops
from fp4_compile.numerics import HADAMARD_SIZE
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import add_call, aten, value
from fp4_compile.passes.quantizers import untransposed

FIRST_FP4 = 100
"""Compute capability from which tensor cores multiply FP4."""


Quantizers = dict[tuple[fx.Node, bool], fx.Node]
"""The new quantizer for an old one, swizzled or not."""


def tensor_cores(graph: fx.Graph, context: Context) -> None:
    """Rewrite every product of 2-D operands for ``context.sm``; the rest stays as it is."""
    sm = context.sm
    if sm is None:
        return
    new: Quantizers = {}
    for node in graph.find_nodes(op="call_function", target=ops.scaled_mm, sort=True):
        if len(node.args) > 8 or value(node.args[3]).dim() != 2 or value(node.args[0]).dim() < 2:
            continue
        if sm >= FIRST_FP4:
            _for_fp4(graph, node, new)
        else:
            _for_bf16(graph, node, new)
    for node in reversed(graph.nodes):
        if not node.users and (node.target in _OLD or _is_result(node)):
            graph.erase_node(node)


_OLD = (ops.amax, ops.quantize, ops.quantize_stochastic, ops.hadamard, ops.transpose)


def _for_fp4(graph: fx.Graph, node: fx.Node, new: Quantizers) -> None:
    a, b, bias, dtype = _operands(node, 0), _operands(node, 3), node.args[6], node.args[7]
    flat = value(a[0]).dim() == 2
    with graph.inserting_before(node):
        quantized = (*_quantized(graph, a, new), *_quantized(graph, b, new))
        result = add_call(graph, ops.scaled_mm, (*quantized, bias, dtype, True), node)
        if not flat:
            result = add_call(graph, aten.view.default, (result, list(value(node).shape)), node)
    _replace(graph, node, result)


def _for_bf16(graph: fx.Graph, node: fx.Node, new: Quantizers) -> None:
    a, b, bias, dtype = _operands(node, 0), _operands(node, 3), node.args[6], node.args[7]
    source = _source(a)
    if source is None:
        return
    with graph.inserting_before(node):
        quantizer = _row_quantizer(graph, b, new, swizzled=False)
        weight = b if quantizer is None else _results(graph, quantizer, node, (0, 1, 2))
        result = add_call(graph, ops.weight_mm, (source, *weight, bias, dtype), node)
    _replace(graph, node, result)


def _quantized(graph: fx.Graph, operand: tuple[fx.Node, ...], new: Quantizers) -> tuple[fx.Node, ...]:
    """Codes, swizzled scales and amax of an operand of the product."""
    quantizer = _row_quantizer(graph, operand, new, swizzled=True)
    if quantizer is not None:
        return _results(graph, quantizer, operand[0], (0, 1, 2))
    codes, scales, amax = operand
    tiles = _tile_quantizer(graph, codes, new)
    if tiles is not None:
        turned = codes.args[0].target is ops.transpose  # type: ignore[union-attr]
        return (*_results(graph, tiles, tiles, (2, 3) if turned else (0, 1)), amax)
    if value(codes).dim() > 2:
        codes, scales = (
            add_call(graph, aten.reshape.default, (x, [-1, value(x).shape[-1]]), operand[0]) for x in (codes, scales)
        )
    ready = add_call(graph, ops.for_tensor_cores, (codes, scales), operand[0])
    return (*(add_call(graph, operator.getitem, (ready, i), operand[0]) for i in range(2)), amax)


def _row_quantizer(graph: fx.Graph, operand: tuple[fx.Node, ...], new: Quantizers, swizzled: bool) -> fx.Node | None:
    """One quantizer for each tensor, placed where the first reader had its own; None for other recipes."""
    source = _source(operand)
    old = operand[0].args[0]
    if source is None or not isinstance(old, fx.Node):
        return None
    more: tuple[object, ...] = ()
    if old.target is ops.quantize_stochastic or source.target is ops.hadamard:
        if not swizzled:
            return None
        size = 0
        if source.target is ops.hadamard and source.args[1] == HADAMARD_SIZE:
            source, size = source.args  # type: ignore[assignment]
        more = (size, *(old.args[2:4] if old.target is ops.quantize_stochastic else ()))
    if (old, swizzled) not in new:
        with graph.inserting_before(old):
            flat = source
            if value(source).dim() > 2:
                flat = add_call(graph, aten.reshape.default, (source, [-1, value(source).shape[-1]]), old)
            new[old, swizzled] = add_call(graph, ops.quantize_rows, (flat, swizzled, *more), old)
    return new[old, swizzled]


def _tile_quantizer(graph: fx.Graph, codes: fx.Node, new: Quantizers) -> fx.Node | None:
    """The quantizer of a matrix in tiles, of which these are the codes or those of its transpose."""
    old = codes.args[0] if codes.target is operator.getitem else None
    if isinstance(old, fx.Node) and old.target is ops.transpose:
        first: fx.Node = old.args[0]  # type: ignore[assignment]
        old = first.args[0] if first.target is operator.getitem else None
    if not isinstance(old, fx.Node) or old.target is not ops.quantize or value(codes).dim() != 2:
        return None
    if list(old.args[2:]) not in (["16x16"], ["16x16", False]):
        return None
    if (old, True) not in new:
        with graph.inserting_before(old):
            new[old, True] = add_call(graph, ops.quantize_tiles, old.args[:2], old)
    return new[old, True]


def _source(operand: tuple[fx.Node, ...]) -> fx.Node | None:
    """The tensor that was quantized in blocks of 1x16 with its own amax, or None."""
    codes, _, amax = operand
    quantizer = codes.args[0] if codes.target is operator.getitem else None
    if not isinstance(quantizer, fx.Node) or amax.target is not ops.amax:
        return None
    x, used, *recipe = quantizer.args
    nearest = quantizer.target is ops.quantize and recipe in ([], ["1x16"], ["1x16", False])
    if not (nearest or quantizer.target is ops.quantize_stochastic) or used is not amax:
        return None
    # A gradient's two orientations may share an amax.
    return x if untransposed(amax.args[0])[0] is untransposed(x)[0] else None  # type: ignore[arg-type, return-value]


def _operands(node: fx.Node, first: int) -> tuple[fx.Node, ...]:
    return tuple(node.args[first : first + 3])  # type: ignore[arg-type]


def _results(graph: fx.Graph, quantizer: fx.Node, like: fx.Node, which: tuple[int, ...]) -> tuple[fx.Node, ...]:
    found = {user.args[1]: user for user in quantizer.users if user.target is operator.getitem}
    with graph.inserting_after(quantizer):
        return tuple(found[i] if i in found else add_call(graph, operator.getitem, (quantizer, i), like) for i in which)


def _replace(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    result.meta.update({key: node.meta[key] for key in ("fp4_op", "fp4_site") if key in node.meta})
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_result(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in (*_OLD, ops.quantize_rows)

"""Read once what is quantized for two products, one contracting its columns and one its rows; on a GPU, in training.

before  %1 = fp4.quantize_rows(%g, True, 0, %seed, 3)                                     for dgrad
        %2 = fp4.quantize_rows(permute(%g, [1, 0]), True, 16, %seed, 4)                   for wgrad

after   %1 = fp4.row_amax(%g)
        %2 = fp4.quantize_both_ways(%g, %1, 16, %seed, 3, 4)     both codes and scales, and the columns' amax

The same bytes result. It gains where the kernel that makes the tensor leaves the rows' amax behind, a reduction that
Inductor fuses into it: where that is a pointwise operation, or a concatenation. What a library or a GEMM's epilogue
makes would have to be read once more for its amax, and keeps two quantizers, the first of which finds it as it goes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable
from typing import Any

from torch import fx

from fp4_compile import ops
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import add_call, aten, is_backward, is_pointwise, is_view, region, value
from fp4_compile.passes.quantizers import untransposed

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_PRODUCTS = (ops.scaled_mm, ops.weight_mm)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A quantizer of rows: of which tensor as it lies, whether of its transpose, and how."""

    node: fx.Node
    tensor: fx.Node
    turned: bool
    hadamard: int
    seed: fx.Node | None
    stream: int

    @property
    def key(self) -> Hashable:
        """What two readers have in common that may be one: the numbers, how they round, and when."""
        return _source(self.tensor), tuple(map(str, value(self.tensor).shape)), self.seed, region(self.node)


def both_ways(graph: fx.Graph, context: Context) -> None:
    """Replace pairs of quantizers by one."""
    readers = [_reader(node) for node in graph.find_nodes(op="call_function", target=ops.quantize_rows, sort=True)]
    columns = {reader.key: reader for reader in reversed(readers) if reader.turned}
    for rows in readers:
        if not rows.turned and rows.hadamard == 0 and rows.key in columns and _leaves_amax_behind(rows):
            _merge(graph, rows, columns.pop(rows.key))


def _reader(node: fx.Node) -> Reader:
    given = dict(zip(("x", "swizzled", "hadamard", "seed", "stream"), node.args, strict=False))
    tensor, turned = untransposed(given["x"])  # type: ignore[arg-type]
    recipe: Any = (given.get("hadamard", 0), given.get("seed"), given.get("stream", 0))
    return Reader(node, tensor, turned, *recipe)


def _source(node: fx.Node) -> fx.Node:
    """The node under changes of shape, which leave the order of elements."""
    while node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _leaves_amax_behind(rows: Reader) -> bool:
    """Whether Inductor writes a kernel for the tensor that a reduction of its rows can be part of."""
    node = _source(rows.tensor)
    made = is_pointwise(node) or node.target is aten.cat.default
    if not made or is_view(node):  # a copy of a transpose goes another way through memory
        return False
    return is_backward(node) == is_backward(rows.node) and not _in_epilogue(node)


def _in_epilogue(node: fx.Node) -> bool:
    """Whether a chain of operations that nothing else reads leads from one of our products to ``node``."""
    for source in node.all_input_nodes:
        if is_backward(source) != is_backward(node):
            continue
        if sum(is_backward(user) == is_backward(node) for user in source.users) > 1:
            continue
        if source.target in _PRODUCTS:
            return True
        if (is_pointwise(source) or is_view(source)) and _in_epilogue(source):
            return True
    return False


def _merge(graph: fx.Graph, rows: Reader, columns: Reader) -> None:
    first = next(node for node in graph.nodes if node in (rows.node, columns.node))
    with graph.inserting_before(first):
        tensor = rows.tensor if first is rows.node else columns.tensor
        amax = add_call(graph, ops.row_amax, (tensor,), first)
        recipe = (columns.hadamard, rows.seed, rows.stream, columns.stream)
        quantized = add_call(graph, ops.quantize_both_ways, (tensor, amax, *recipe), first)
        results = [add_call(graph, operator.getitem, (quantized, i), first) for i in range(5)]
    for reader, found in ((rows, (results[0], results[1], amax)), (columns, results[2:])):
        for user in list(reader.node.users):
            user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(reader.node)

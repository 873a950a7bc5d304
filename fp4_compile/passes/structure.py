"""What a matmul is for, read from the structure of the graph around it, never from names.

One sweep over the forward nodes from the outputs back tells where each value goes before it meets another
matmul: into a softmax that weighs another product (attention), into a final softmax, argmax or loss (scores),
into a top-k (routing), or straight out of the graph. One sweep forward tells which values are softmax weights.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from torch import fx

from fp4_compile.passes.context import Matmul
from fp4_compile.passes.graph import aten, base, is_backward, is_cast, is_pointwise, is_view


class Fate(enum.Flag):
    """Where a value goes through views, casts and pointwise operations alone."""

    NONE = 0
    MATMUL = enum.auto()
    ATTENTION = enum.auto()
    SCORES = enum.auto()
    ROUTING = enum.auto()
    OUTPUT = enum.auto()


_SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default})
_LOG_SOFTMAX = frozenset({aten._log_softmax.default})
_SELECTS = frozenset(
    {aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.multinomial.default}
)
_WINNER = frozenset({aten.argmax.default, aten.max.dim, aten.nll_loss_forward.default})


class Structure:
    """The roles of a graph's values.

    Args:
        graph: an ATen graph, forward or joint.
        matmuls: its matrix multiplications.
    """

    def __init__(self, graph: fx.Graph, matmuls: Iterable[Matmul]) -> None:
        self._matmul_nodes = {m.node for m in matmuls}
        self.has_backward = any(is_backward(node) for node in graph.nodes)
        """Whether the graph trains."""
        self._exponentials = {node for node in graph.nodes if _is_softmax_exponential(node)}
        self._fate: dict[fx.Node, Fate] = {}
        self.embedded = {
            base(node.args[0])
            for node in graph.nodes
            if node.op == "call_function" and node.target is aten.embedding.default
        }
        """Tables that an embedding looks up; a projection with one of them as its weight is tied to it."""
        for node in reversed(graph.nodes):
            if not is_backward(node):
                self._fate[node] = self._meet(node)
        self._weights: set[fx.Node] = set()
        for node in graph.nodes:
            passes_on = self._passes_on(node) and self._weights.intersection(node.all_input_nodes)
            if self._is_softmax(node) or passes_on:
                self._weights.add(node)

    def fate(self, node: fx.Node) -> Fate:
        """Where the value of a forward node goes."""
        return self._fate.get(node, Fate.NONE)

    def is_softmax_weight(self, node: fx.Node) -> bool:
        """Whether the value comes out of a softmax."""
        return node in self._weights

    def _is_softmax(self, node: fx.Node) -> bool:
        return node in self._exponentials or node.target in _SOFTMAX

    @staticmethod
    def _passes_on(node: fx.Node) -> bool:
        return node.op == "call_function" and (is_view(node) or is_cast(node) or is_pointwise(node))

    def _meet(self, node: fx.Node) -> Fate:
        fate = Fate.NONE
        for user in node.users:
            if is_backward(user):
                continue
            if user.op == "output":
                fate |= Fate.OUTPUT
            elif user in self._matmul_nodes:
                fate |= Fate.MATMUL
            elif user.target in _SELECTS:
                fate |= Fate.ROUTING
            elif user.target in _WINNER or user.target in _LOG_SOFTMAX:
                fate |= Fate.SCORES
            elif self._is_softmax(user):
                after = self._fate.get(user, Fate.NONE)
                fate |= after & ~(Fate.MATMUL | Fate.OUTPUT)
                fate |= Fate.ATTENTION if Fate.MATMUL in after else Fate.SCORES
            elif self._passes_on(user):
                fate |= self._fate.get(user, Fate.NONE)
        return fate


def _is_softmax_exponential(node: fx.Node) -> bool:
    """``exp(x - amax(x))``, which is how a decomposed softmax or log-softmax begins."""
    if node.target is not aten.exp.default:
        return False
    shifted = node.args[0]
    if not isinstance(shifted, fx.Node) or shifted.target is not aten.sub.Tensor:
        return False
    largest = shifted.args[1]
    return isinstance(largest, fx.Node) and base(largest).target is aten.amax.default

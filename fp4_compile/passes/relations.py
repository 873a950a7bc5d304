"""Which matmuls read one tensor, use one weight, or must be decided alike; read from the graph, never from names.

Siblings are matmuls that read one tensor and whose results first meet in the same later layers: q, k and v meet
in the attention's output projection, gate and up in the down projection. A serving engine fuses them into one
GEMM, so they are decided alike. Layers that read one tensor and go separate ways (an MLP beside an attention)
share its quantizer and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from torch import fx

from fp4_compile.passes.context import Matmul
from fp4_compile.passes.graph import base, is_backward, is_view
from fp4_compile.plan import Role


class Relations:
    """What the forward matmuls of a graph have in common.

    Args:
        graph: an ATen graph, forward or joint.
        matmuls: its matrix multiplications.
        parameters: the nodes that depend on parameters alone.
    """

    def __init__(self, graph: fx.Graph, matmuls: Iterable[Matmul], parameters: set[fx.Node]) -> None:
        self._forward = [m for m in matmuls if m.site.role is Role.FPROP]
        self._parameters = parameters
        self._reach = self._later_layers(graph)

    def reads(self, matmul: Matmul) -> fx.Node:
        """The tensor that is quantized for the left operand, under all its views."""
        node = matmul.lhs
        while node.op == "call_function" and is_view(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def weight(self, matmul: Matmul) -> fx.Node | None:
        """The parameter that is the right operand; None if it is an activation."""
        return base(matmul.rhs) if matmul.rhs in self._parameters else None

    def groups(self) -> tuple[frozenset[str], ...]:
        """Keys of matmuls that must be decided alike: siblings, and those that use one weight."""
        together: dict[Hashable, list[str]] = defaultdict(list)
        for matmul in self._forward:
            weight = self.weight(matmul)
            if weight is None:
                continue
            together["weight", weight].append(matmul.site.key)
            later = self._reach.get(matmul.node, 0)
            if later:
                together["siblings", self.reads(matmul), later].append(matmul.site.key)
        return tuple(dict.fromkeys(frozenset(keys) for keys in together.values() if len(keys) > 1))

    def _later_layers(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """Per forward node the layers with weights that its value reaches first, as a bit mask."""
        layers = {m.node: 1 << i for i, m in enumerate(self._forward) if self.weight(m) is not None}
        reach: dict[fx.Node, int] = {}
        for node in reversed(graph.nodes):
            if is_backward(node):
                continue
            mask = 0
            for user in node.users:
                mask |= layers.get(user) or reach.get(user, 0)
            reach[node] = mask
        return reach


def first_of(keys: Sequence[str], nodes: Sequence[fx.Node | None]) -> list[str | None]:
    """For each node the key of the first site with the same node: a name for what sites have in common."""
    first: dict[fx.Node, str] = {}
    return [None if node is None else first.setdefault(node, key) for key, node in zip(keys, nodes, strict=True)]

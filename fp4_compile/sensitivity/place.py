"""What a matmul does in its block, read from the graph: queries and keys, values, a gate, what follows attention.

A softmax evens out errors of queries and keys, and averaging over positions those of values; an activation
function shrinks those of a gate. The factors below are fitted to scores measured one site at a time on two models,
a sentence encoder (6 layers, GELU) and a causal language model (30 layers, SwiGLU); they rank, and no more.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import fx

from fp4_compile.passes.context import Matmul
from fp4_compile.passes.graph import aten, base, is_backward, is_cast, is_pointwise, is_view
from fp4_compile.passes.structure import Fate, Structure


class Place(enum.Enum):
    """A matmul's part in its block; the value is what it makes of an error there, 1 for a plain layer."""

    QUERY_OR_KEY = 0.35
    VALUE = 0.9
    AFTER_ATTENTION = 0.5
    GATE = 0.8
    NARROWING = 0.95
    PLAIN = 1.0


_ACTIVATIONS = frozenset(
    {aten.sigmoid.default, aten.exp.default, aten.erf.default, aten.tanh.default, aten.relu.default, aten.silu.default}
    | {aten.gelu.default, aten.hardtanh.default, aten.clamp_min.default}
)


def places(graph: fx.Graph, matmuls: Iterable[Matmul]) -> dict[str, Place]:
    """The place of every forward matmul, by its site's key.

    Args:
        graph: an ATen graph, forward or joint; attention as one operator or as two products around a softmax.
        matmuls: its matrix multiplications.
    """
    found = list(matmuls)
    structure = Structure(graph, found)
    products = {m.node: m for m in found}
    uses = _uses(graph, products, structure)
    result = {}
    for matmul in found:
        use = uses.get(matmul.node, frozenset())
        n, k = matmul.site.n, matmul.site.k
        if Place.VALUE in use:
            place = Place.VALUE
        elif Place.QUERY_OR_KEY in use:
            place = Place.QUERY_OR_KEY
        elif _comes_from_attention(matmul.lhs, products, structure):
            place = Place.AFTER_ATTENTION
        elif Place.GATE in use and _multiplies(matmul.node, products):
            place = Place.GATE
        elif n.is_Integer and k.is_Integer and n < k:
            place = Place.NARROWING
        else:
            place = Place.PLAIN
        result[matmul.site.key] = place
    return result


def _uses(graph: fx.Graph, products: dict[fx.Node, Matmul], structure: Structure) -> dict[fx.Node, frozenset[Place]]:
    """What each forward value comes to through views, casts and pointwise operations."""
    uses: dict[fx.Node, frozenset[Place]] = {}
    for node in reversed(graph.nodes):
        found: set[Place] = set()
        for user in () if is_backward(node) else node.users:
            if is_backward(user) or user.op != "call_function":
                continue
            if _is_attention(user):
                found.update(p for arg, p in zip(user.args, _ATTENTION_OPERANDS, strict=False) if arg is node)
            elif (product := products.get(user)) is not None:
                if Fate.ATTENTION in structure.fate(user):
                    found.add(Place.QUERY_OR_KEY)
                elif product.rhs is node and structure.is_softmax_weight(product.lhs):
                    found.add(Place.VALUE)
            elif user.target in _ACTIVATIONS:
                found.add(Place.GATE)
            elif is_view(user) or is_cast(user) or is_pointwise(user) or user.target is aten.cat.default:
                found |= uses.get(user, frozenset())
        uses[node] = frozenset(found)
    return uses


_ATTENTION_OPERANDS = (Place.QUERY_OR_KEY, Place.QUERY_OR_KEY, Place.VALUE)


def _is_attention(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and "scaled_dot_product" in node.target._schema.name


def _comes_from_attention(node: fx.Node, products: dict[fx.Node, Matmul], structure: Structure) -> bool:
    """Whether a value is an attention's result under views, casts and the choice of an output."""
    node = base(node)
    if _is_attention(node) or any(_is_attention(source) for source in node.all_input_nodes if len(node.args) == 2):
        return True
    product = products.get(node)
    return product is not None and structure.is_softmax_weight(product.lhs)


def _multiplies(node: fx.Node, products: dict[fx.Node, Matmul]) -> bool:
    """Whether the value, through pointwise operations, meets another matmul's result in a product (SwiGLU, GeGLU)."""
    seen, front = {node}, [node]
    while front:
        for user in front.pop().users:
            if user in seen or is_backward(user):
                continue
            if user.target is aten.mul.Tensor and any(
                isinstance(arg, fx.Node) and base(arg) in products and base(arg) is not node for arg in user.args
            ):
                return True
            if user.op == "call_function" and (is_view(user) or is_cast(user) or is_pointwise(user)):
                seen.add(user)
                front.append(user)
    return False

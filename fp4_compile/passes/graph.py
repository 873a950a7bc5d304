"""What every pass needs to know about ATen graphs: views, casts, parameters, and how to add a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp4_compile._torch_compat import dynamo_input_position, fake_mode_of

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})
_COPIES = frozenset({aten.clone.default, aten._unsafe_view.default, aten.contiguous.default})
_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "seq_nr", "stack_trace")
_PARTITION = ("partitioner_tag", "recompute", "ac_graph_id")


def is_view(node: fx.Node) -> bool:
    """A node that only rearranges its first operand: views, and copies that keep every value."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target in _COPIES)


def is_cast(node: fx.Node) -> bool:
    """A change of dtype."""
    return node.target in _CASTS


def is_pointwise(node: fx.Node) -> bool:
    """A node whose every output element depends on one element of each operand (casts count)."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or is_cast(node))


def region(node: fx.Node) -> tuple[object, ...]:
    """The direction, and the checkpoint, that a node belongs to: only within one may two nodes become one."""
    return tuple(node.meta.get(key) for key in _PARTITION)


def base(node: fx.Node) -> fx.Node:
    """The tensor a node is a view or a cast of."""
    while node.op == "call_function" and (is_view(node) or is_cast(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd put the node into the backward."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor a node stands for."""
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"node {node.name} holds {type(result).__name__}, not one tensor")
    return result


def parameter_nodes(graph: fx.Graph, static_inputs: frozenset[int]) -> set[fx.Node]:
    """Nodes whose value depends on parameters and buffers alone, so on nothing that changes from call to call.

    Args:
        graph: an ATen graph.
        static_inputs: positions of parameters and buffers among the Dynamo graph's inputs.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if dynamo_input_position(node) in static_inputs and not is_backward(node):
                found.add(node)
        elif node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
                continue
            found.add(node)
    return found


def add_call(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Insert a call at the graph's insertion point, with its fake value and the metadata of ``like``.

    The partitioner, later passes and Inductor all read that metadata; recomputation tags must follow, or
    activation checkpointing would save what it is asked to recompute.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: like.meta[key] for key in (*_ORIGIN, *_PARTITION) if key in like.meta})
    mode = fake_mode_of_node(like) or fake_mode_of(graph)
    real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    if mode is None:
        node.meta["val"] = target(*real_args, **real_kwargs)
    else:
        with mode:
            node.meta["val"] = target(*real_args, **real_kwargs)
    return node


def fake_mode_of_node(node: fx.Node) -> Any:
    """The fake mode of one node's value, or None."""
    return getattr(node.meta.get("val"), "fake_mode", None)

"""Move a functional graph that was traced on CPU tensors to the device code is generated for.

before  %1 = full([8], 0, device=cpu); %2 = _scaled_dot_product_flash_attention_for_cpu(%q, %k, %v); %3 = %2.0
after   %1 = full([8], 0, device=cuda:0); %2 = _scaled_dot_product_flash_attention(%q, %k, %v); %3 = %2.0

Backward graphs cannot be traced on fake CUDA tensors without a GPU, so every graph is traced on the CPU. What
differs between the devices is little: where tensors are created, and the attention operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fp4_compile._torch_compat import FakeTensor, fake_mode_of
from fp4_compile.passes.graph import add_call

aten = torch.ops.aten

GPU = torch.device("cuda", 0)


def retarget(gm: fx.GraphModule, strides: Mapping[str, tuple[int, ...]] | None = None) -> list[Any]:
    """Move a graph and the graphs inside it to `GPU`, in place.

    Args:
        gm: a functional ATen graph; its values are fake CPU tensors.
        strides: of placeholders that lie otherwise on the GPU, by name.

    Returns:
        What its placeholders hold: fake tensors on the GPU, and sizes.
    """
    mode = fake_mode_of(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            inner = getattr(gm, str(node.target), None)
            if isinstance(inner, fx.GraphModule):
                retarget(inner)
            elif isinstance(inner, torch.Tensor) and inner.dim() and mode is not None:
                delattr(gm, str(node.target))
                setattr(gm, str(node.target), _moved(mode.from_tensor(inner.detach())))
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = torch.utils._pytree.tree_map(_moved, node.meta["val"])
        node.args = torch.utils._pytree.tree_map(_moved_device, node.args)
        node.kwargs = torch.utils._pytree.tree_map(_moved_device, node.kwargs)
    for node in list(gm.graph.nodes):
        swap = _SWAPS.get(node.target)
        if swap is not None:
            with gm.graph.inserting_before(node):
                swap(gm.graph, node)
            gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="placeholder"):
        if strides and node.name in strides:
            node.meta["val"] = _laid_out(node.meta["val"], strides[node.name])
    gm.graph.lint()
    gm.recompile()
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _moved(value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


def _laid_out(value: Any, stride: tuple[int, ...]) -> Any:
    if tuple(value.stride()) == stride:
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)


def _moved_device(argument: Any) -> Any:
    return GPU if isinstance(argument, torch.device) and argument.type == "cpu" else argument


def _attention(graph: fx.Graph, node: fx.Node) -> None:
    """``(q, k, v, dropout, is_causal, *, attn_mask, scale) -> (out, logsumexp)``."""
    operands: Any = node.args
    q, k, v = operands[:3]
    given = list(operands[3:])
    dropout, causal = given + [0.0, False][len(given) :]
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    forward, args = _gpu_attention(q, k, v, dropout, causal, mask)
    new = add_call(graph, forward, args, node, scale=scale)
    _replace_results(graph, node, new, {0: 0, 1: 1})


def _gpu_attention(q: Any, k: Any, v: Any, dropout: Any, causal: Any, mask: Any) -> tuple[Any, tuple[Any, ...]]:
    """With a mask, CUDA takes the memory-efficient kernel; without, the flash kernel."""
    if mask is None:
        return aten._scaled_dot_product_flash_attention.default, (q, k, v, dropout, causal)
    return aten._scaled_dot_product_efficient_attention.default, (q, k, v, mask, True, dropout, causal)


def _attention_backward(graph: fx.Graph, node: fx.Node) -> None:
    """``(grad_out, q, k, v, out, logsumexp, dropout, is_causal, *, attn_mask, scale) -> (dq, dk, dv)``."""
    operands: Any = node.args
    grad, q, k, v, out, logsumexp, dropout, causal = operands
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    seed, offset = (
        # Never read, because the CPU's operator has no dropout.
        add_call(graph, aten.empty.memory_format, ([2],), node, dtype=torch.int64, device=GPU)
        for _ in range(2)
    )
    forward, given = _gpu_attention(q, k, v, dropout, causal, mask)
    saved = (out, logsumexp)
    if mask is None:
        backward = aten._scaled_dot_product_flash_attention_backward.default
        lengths = (q.meta["val"].shape[2], k.meta["val"].shape[2])
        args: tuple[Any, ...] = (grad, q, k, v, *saved, None, None, *lengths, dropout, causal, seed, offset)
    else:
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        args = (grad, q, k, v, mask, *saved, seed, offset, dropout, [True, True, True, False], causal)
    new = add_call(graph, backward, args, node, scale=scale)
    values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in given]
    for result, value in zip(saved, forward(*values, scale=scale)[:2], strict=True):
        if result.op == "placeholder":  # as the GPU's forward leaves it: strides differ, and sums may be padded
            result.meta["val"] = value
    _replace_results(graph, node, new, {0: 0, 1: 1, 2: 2})


def _replace_results(graph: fx.Graph, old: fx.Node, new: fx.Node, positions: dict[int, int]) -> None:
    for user in list(old.users):
        result = add_call(graph, operator.getitem, (new, positions[int(user.args[1])]), user)  # type: ignore[arg-type]
        user.replace_all_uses_with(result)
        graph.erase_node(user)


_SWAPS: dict[Any, Callable[[fx.Graph, fx.Node], None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}

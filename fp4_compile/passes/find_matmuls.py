"""Find every matrix multiplication and give it a key that stays the same from compile to compile.

    %2 = mm(%0: bf16[s0, 64], %1: bf16[64, 96])            -> layers.0:mm.fprop
    %3 = addmm(%bias, %0, %1)                              -> layers.1:mm.fprop
    %4 = bmm(%q, %k)                                       -> attn:bmm.fprop
    %5 = convolution(%x, %w: [48, 32, 1, 1], ...)          -> proj:conv.fprop
    %6 = mm(permute(%grad), %0)      (backward)            -> layers.0:mm.wgrad

The graph is not changed. A backward GEMM belongs to the forward one with its ``seq_nr``, or, where autograd
left none, to the one whose operand it multiplies the gradient with: the weight in dgrad, the activation in wgrad.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import sympy
import torch
from torch import fx

from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import aten, base, is_backward, value
from fp4_compile.plan import Role, Site

_OPERANDS = {
    aten.mm.default: ("mm", 0, 1),
    aten.addmm.default: ("mm", 1, 2),
    aten.bmm.default: ("bmm", 0, 1),
    aten.baddbmm.default: ("bmm", 1, 2),
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def find_matmuls(graph: fx.Graph, context: Context) -> None:
    """Fill ``context.matmuls`` with the graph's matrix multiplications, in graph order."""
    symbols: dict[sympy.Symbol, sympy.Symbol] = {}
    forward: list[Matmul] = []
    context.matmuls = []
    for node in graph.nodes:
        found = _operands(node)
        if found is None:
            continue
        op, *positions = found
        lhs, rhs = (node.args[i] for i in positions)
        module, role, owner = module_path(node), Role.FPROP, None
        if is_backward(node):
            owner, role = _owner_and_role(node, lhs, rhs, forward, context.matmuls)
            module = owner.site.module if owner else module
        # A graph may come again, split or inside another one: what was found in it keeps its name.
        if "fp4_site" not in node.meta:
            node.meta["fp4_site"] = (module, op, role, context.next_ordinal(module, op, role))
        module, op, role, ordinal = node.meta["fp4_site"]
        batch, m, n, k = _sizes(op, lhs, rhs, symbols)
        site = Site(module, op, role, ordinal, batch, m, n, k, dtype_name(value(lhs).dtype))
        matmul = Matmul(site, node, (positions[0], positions[1]), owner)
        context.matmuls.append(matmul)
        if role is Role.FPROP:
            forward.append(matmul)


def module_path(node: fx.Node) -> str:
    """Where in the model a node comes from: ``encoder.layer.0.output``; ``top`` for code outside any submodule."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    path = re.sub(r"^L\['args'\]\[0\]", "", path)  # a decorated forward: the module is its first argument
    path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2] or m[3]), path)
    parts = [part for part in path.split(".") if part and part != "_orig_mod"]
    # Where Dynamo found the root: L['self'], L['fn'].__self__. A submodule may be called "self" too (BERT's is).
    below_root = itertools.dropwhile(lambda part: part in ("L", "G", "self", "fn", "__self__"), parts)
    return ".".join(below_root) or "top"


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``fp32``, ``fp16``, or torch's own name."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def is_linear_convolution(node: fx.Node) -> bool:
    """A convolution that is a matmul over channels: 1x1 filter, stride 1, no padding, one group."""
    if node.target is not aten.convolution.default:
        return False
    _, weight, _, stride, padding, dilation, transposed, output_padding, groups = node.args
    window = value(weight).shape[2:]  # type: ignore[arg-type]
    numbers = (*stride, *padding, *dilation, *output_padding, groups)  # type: ignore[misc]
    if transposed or any(isinstance(n, fx.Node) for n in numbers):
        return False
    ones = (*window, *stride, *dilation, groups)  # type: ignore[misc]
    return all(n == 1 for n in ones) and not any((*padding, *output_padding))  # type: ignore[misc]


def _operands(node: fx.Node) -> tuple[str, int, int] | None:
    """The kind of matmul, and where its operands stand among the arguments."""
    if node.op != "call_function":
        return None
    if is_linear_convolution(node):
        return "conv", 0, 1
    return _OPERANDS.get(node.target)  # type: ignore[call-overload, no-any-return]


def _sizes(op: str, lhs: fx.Node, rhs: fx.Node, symbols: dict[sympy.Symbol, sympy.Symbol]) -> tuple[sympy.Expr, ...]:
    a, b = value(lhs).shape, value(rhs).shape
    batch: object = 1
    if op == "conv":
        m = a[0]
        for size in a[2:]:
            m = m * size
        n, k = b[0], a[1]
    else:
        m, k, n = a[-2], a[-1], b[-1]
        batch = a[0] if op == "bmm" else 1
    return tuple(_expression(size, symbols) for size in (batch, m, n, k))


def _expression(size: object, symbols: dict[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    """A size as sympy; symbols are renamed s0, s1, ... (u0, u1, ... if unbacked) in order of appearance."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
    for symbol in sorted(expr.free_symbols, key=str):
        if symbol not in symbols:
            letter = "u" if str(symbol).startswith("u") else "s"
            count = sum(str(s).startswith(letter) for s in symbols.values())
            symbols[symbol] = sympy.Symbol(f"{letter}{count}", integer=True, nonnegative=True)
    return expr.xreplace(symbols)


def _owner_and_role(
    node: fx.Node, lhs: fx.Node, rhs: fx.Node, forward: Sequence[Matmul], known: Sequence[Matmul]
) -> tuple[Matmul | None, Role]:
    operands = {base(lhs), base(rhs)}
    number = node.meta.get("seq_nr")
    twins = [m for m in forward if number is not None and m.node.meta.get("seq_nr") == number]
    for owner in twins or forward:
        meets_weight, meets_activation = base(owner.rhs) in operands, base(owner.lhs) in operands
        if meets_weight and meets_activation:
            taken = {m.site.role for m in known if m.site.module == owner.site.module and is_backward(m.node)}
            return owner, Role.WGRAD if Role.DGRAD in taken else Role.DGRAD
        if meets_weight or meets_activation:
            return owner, Role.DGRAD if meets_weight else Role.WGRAD
    return (twins[0] if twins else None), Role.DGRAD

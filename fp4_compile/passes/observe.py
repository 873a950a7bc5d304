"""Only for `fp4_compile.monitor`: look at every quantizer's operand, and at what rounding does to weight gradients.

before  %2 = fp4.quantize(%x, %1);  %5 = fp4.scaled_mm(%2.0, %2.1, %1, ...)

after   %2 = fp4.quantize(%x, %1);  %3 = fp4.observe(%x, %2.0, %2.1, %1, 'fc:mm.fprop', 'x')
        %5 = fp4.scaled_mm(%3, %2.1, %1, ...)
        %9 = fp4.observe_product(%8, %dy, ...)                                  behind each wgrad product
"""

from __future__ import annotations

import operator

from torch import fx

from fp4_compile import observations, ops
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import add_call, is_backward, parameter_nodes
from fp4_compile.passes.recipe import gradient_nodes
from fp4_compile.plan import Role

_SOURCES = (ops.quantize, ops.quantize_stochastic, ops.mx_quantize)
_NAMES = {Role.FPROP: ("x", "w"), Role.DGRAD: ("dy", "w"), Role.WGRAD: ("dy", "x")}
"""What the operands of a site are; in the backward the gradient's first."""


def observe(graph: fx.Graph, context: Context) -> None:
    """Add the observers, if the options ask for them."""
    if not context.options.monitor:
        return
    gradients = gradient_nodes(graph)
    # A weight that no step changes is not worth a look at every call.
    settled = set() if any(map(is_backward, graph.nodes)) else parameter_nodes(graph, context.static_inputs)
    sites = {decision.site.key: decision.site for decision in context.plan}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in order:
        site = sites.get(node.meta.get("fp4_site", ""))
        if site is None:
            continue
        stride = 3 if node.target is ops.scaled_mm else 2
        operands = [list(node.args[start : start + stride]) for start in (0, stride)]
        if stride == 2:
            operands = [[*operand, None] for operand in operands]
        turned = site.role is not Role.FPROP and operands[1][0] in gradients and operands[0][0] not in gradients
        names = _NAMES[site.role][::-1] if turned else _NAMES[site.role]
        for i, (operand, name) in enumerate(zip(operands, names, strict=True)):
            source = _source(operand[0])
            if source is None or source in settled:
                continue
            codes = operand[0]
            with graph.inserting_after(max((n for n in operand if n is not None), key=order.__getitem__)):
                seen = add_call(graph, observations.observe, (source, *operand, site.key, name), codes)
            node.update_arg(i * stride, seen)
        if site.role is Role.WGRAD:
            gradient, other = reversed(operands) if turned else operands
            source = _source(gradient[0])
            if source is not None:
                with graph.inserting_after(node):
                    call = (node, source, *gradient, *other, site.key)
                    seen = add_call(graph, observations.observe_product, call, node)
                node.replace_all_uses_with(seen, delete_user_cb=lambda user, seen=seen: user is not seen)


def _source(codes: fx.Node) -> fx.Node | None:
    """The tensor that was quantized; None for codes that another quantizer's were turned into."""
    if codes.target is not operator.getitem or codes.args[0].target not in _SOURCES:  # type: ignore[union-attr]
        return None
    return codes.args[0].args[0]  # type: ignore[union-attr, return-value]

"""Decide for every matmul that `find_matmuls` found: NVFP4 or BF16, and why. The graph is not changed.

Four things decide, the later over the earlier: the default policy (`fp4_compile.passes.policy`), the planner
(`fp4_compile.planner`, if the options hold a budget, pins or a target), the training recipe
(`fp4_compile.passes.recipe`), and a given plan.
"""

from __future__ import annotations

import logging

from torch import fx

from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import parameter_nodes
from fp4_compile.passes.policy import decide, uneven, unsupported
from fp4_compile.passes.recipe import decide_backward, forward_as_asked, gradient_nodes, impossible, keep_last_layers
from fp4_compile.passes.structure import Structure
from fp4_compile.passes.tensor_cores import FIRST_FP4
from fp4_compile.plan import Decision, Plan, Precision, Reason, Role

log = logging.getLogger(__name__)


def assign(graph: fx.Graph, context: Context) -> None:
    """Add a decision for each of ``context.matmuls`` to ``context.decisions``, and look at what they share.

    Raises:
        OptionError, BudgetError: the options ask the planner for what cannot be.
    """
    structure = Structure(graph, context.matmuls)
    parameters = parameter_nodes(graph, context.static_inputs)
    decisions = [decide(matmul, structure, parameters) for matmul in context.matmuls]
    options = context.options
    if context.sm is not None:
        decisions = [
            _with_kernel(m, d, context.sm, structure.has_backward or m.rhs not in parameters)
            for m, d in zip(context.matmuls, decisions, strict=True)
        ]
    if options.plans:
        from fp4_compile.planner.compile_time import replan

        decisions = replan(graph, context, decisions, parameters, structure.has_backward)
    recipe, given = options.training, options.plan
    if structure.has_backward and options.budget is None:
        decisions = keep_last_layers(context.matmuls, decisions, parameters, recipe.bf16_share)
    layers = {m.node: d for m, d in zip(context.matmuls, decisions, strict=True) if m.site.role is Role.FPROP}
    gradients = gradient_nodes(graph)
    seconds: dict[str, tuple[float, float]] = {}
    if options.target is not None:
        from fp4_compile.planner.compile_time import backward_times

        seconds = backward_times(context.matmuls, layers, options.target)
    for matmul, decision in zip(context.matmuls, decisions, strict=True):
        if matmul.site.role is Role.FPROP:
            decided = forward_as_asked(decision, recipe)
            refused = unsupported(matmul) or uneven(matmul)
        else:
            layer = layers.get(matmul.owner.node) if matmul.owner else None
            decided = decide_backward(matmul, layer, recipe, gradients, given, seconds.get(matmul.site.key))
            refused = impossible(matmul, gradients)
        if given is not None:
            decided = _follow(given, matmul, decided, refused)
        context.decisions[matmul.site.key] = decided


def _with_kernel(matmul: Matmul, decision: Decision, sm: int, weight_changes: bool) -> Decision:
    """The default decision, if a GPU has a kernel for it that gains."""
    if decision.precision is not Precision.NVFP4:
        return decision
    if matmul.site.op == "bmm":
        return Decision(matmul.site, Precision.BF16, Reason.NO_KERNEL, "batched")
    if sm < FIRST_FP4 and weight_changes:
        detail = f"sm_{sm} multiplies BF16, and the weight changes"
        return Decision(matmul.site, Precision.BF16, Reason.NO_KERNEL, detail)
    return decision


def _follow(given: Plan, matmul: Matmul, default: Decision, refused: tuple[Reason, str] | None) -> Decision:
    key = matmul.site.key
    if key not in given:
        return default
    wanted = given[key].precision
    if wanted is default.precision:
        return default
    if wanted is not Precision.BF16 and refused is not None:
        log.warning(
            "the given plan wants %s in %s, but %s: left in %s", key, wanted.value, refused[1], matmul.site.dtype
        )
        return Decision(matmul.site, Precision.BF16, *refused)
    detail = f"default would be {default.precision.value}: {default.reason.value}"
    return Decision(matmul.site, wanted, Reason.PLAN, detail)

"""Decide for every matmul that `find_matmuls` found: NVFP4 or BF16, and why. The graph is not changed.

Three things decide, the later over the earlier: the default policy (`fp4_compile.passes.policy`), the planner
(`fp4_compile.planner`, if the options hold a budget, pins or a target), and a given plan.
"""

from __future__ import annotations

import logging

from torch import fx

from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import parameter_nodes
from fp4_compile.passes.policy import decide, uneven, unsupported
from fp4_compile.passes.structure import Structure
from fp4_compile.plan import Decision, Plan, Precision, Reason

log = logging.getLogger(__name__)


def assign(graph: fx.Graph, context: Context) -> None:
    """Add a decision for each of ``context.matmuls`` to ``context.decisions``, and look at what they share.

    Raises:
        OptionError, BudgetError: the options ask the planner for what cannot be.
    """
    structure = Structure(graph, context.matmuls)
    parameters = parameter_nodes(graph, context.static_inputs)
    decisions = [decide(matmul, structure, parameters) for matmul in context.matmuls]
    if context.options.plans:
        from fp4_compile.planner.compile_time import replan

        decisions = replan(graph, context, decisions, parameters)
    given = context.options.plan
    if given is not None:
        decisions = [_follow(given, m, d) for m, d in zip(context.matmuls, decisions, strict=True)]
    context.decisions.update((m.site.key, d) for m, d in zip(context.matmuls, decisions, strict=True))


def _follow(given: Plan, matmul: Matmul, default: Decision) -> Decision:
    key = matmul.site.key
    if key not in given:
        return default
    wanted = given[key].precision
    if wanted is default.precision:
        return default
    refused = unsupported(matmul) or uneven(matmul)
    if wanted is Precision.NVFP4 and refused is not None:
        log.warning("the given plan wants %s in nvfp4, but %s: left in %s", key, refused[1], matmul.site.dtype)
        return Decision(matmul.site, Precision.BF16, *refused)
    detail = f"default would be {default.precision.value}: {default.reason.value}"
    return Decision(matmul.site, wanted, Reason.PLAN, detail)

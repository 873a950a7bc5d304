"""The planner inside a compile: options with a budget, pins or a target, and one graph at a time.

Without calibration the scores are static, computed from the weights at hand. Dynamic rows are decided by guards:
``M >= threshold`` for a few powers of two, so that decode and prefill each get their own graph and decisions,
and no cached graph is ever used outside the rows it was decided for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fp4_compile._torch_compat import free_unbacked_symbols, outside_fake_mode
from fp4_compile.cost_model import Device, break_even_rows, power_of_two_threshold
from fp4_compile.options import find_device
from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import base, value
from fp4_compile.passes.policy import uneven
from fp4_compile.passes.recipe import unwise
from fp4_compile.plan import Decision, Precision, Reason, Role
from fp4_compile.planner.decide import make_plan
from fp4_compile.planner.seconds import backward_seconds
from fp4_compile.planner.survey import survey
from fp4_compile.sensitivity.static import static_scores

log = logging.getLogger(__name__)

MOST_THRESHOLDS = 2
"""Guards on one dynamic dimension: each can double the number of graphs."""


def replan(
    graph: fx.Graph, context: Context, defaults: Sequence[Decision], parameters: set[fx.Node], trains: bool
) -> list[Decision]:
    """The planner's decisions for ``context.matmuls``; backward sites keep theirs.

    Raises:
        OptionError, BudgetError, DeviceError: the options ask for what cannot be.
    """
    options = context.options
    # The cost model and the scores compute on real tensors.
    with outside_fake_mode():
        on = find_device(options.target) if options.target is not None else None
        settled: set[str] = set()
        if on is not None:
            defaults, settled = decide_by_rows(context.matmuls, defaults, on, trains)
        backward = _backward(context, trains)
        looked_at = survey(graph, context.matmuls, defaults, parameters, backward)
        scores = static_scores(looked_at, context.matmuls, context.weights)
        plan = make_plan(scores, options.budget, pins=options.pins, target=on, whole_model=False)
    by_key = {decision.site.key: decision for decision in plan}
    if options.budget is None:
        # Without a budget only time decides, and a guard knows more of it than a guess at the rows.
        by_key = {k: d for k, d in by_key.items() if k not in settled or d.reason is Reason.PINNED}
    return [by_key.get(default.site.key, default) for default in defaults]


def _backward(context: Context, trains: bool) -> dict[fx.Node, tuple[Role, ...]] | None:
    """For each forward matmul the products of its backward that the recipe would quantize; None in inference."""
    if not trains:
        return None
    found: dict[fx.Node, tuple[Role, ...]] = {}
    if context.options.training.backward == Precision.BF16.value:
        return found
    for matmul in context.matmuls:
        if matmul.owner is not None and unwise(matmul) is None:
            found[matmul.owner.node] = (*found.get(matmul.owner.node, ()), matmul.site.role)
    return found


def decide_by_rows(
    matmuls: Sequence[Matmul], defaults: Sequence[Decision], on: Device, trains: bool = False
) -> tuple[list[Decision], set[str]]:
    """Keep in NVFP4 only sites that have, by a guard, the rows from which NVFP4 pays; static ones are left alone.

    A site whose rows are known only at run time and cannot be guarded stays in BF16. ``trains``: its weight is
    quantized in each step.

    Returns:
        The decisions, and the keys of the sites that were decided here.
    """
    needed: dict[int, int | None] = {}
    for i, (matmul, decision) in enumerate(zip(matmuls, defaults, strict=True)):
        site = matmul.site
        dynamic = bool((site.batch * site.m).free_symbols)
        if decision.precision is Precision.NVFP4 and site.role is Role.FPROP and dynamic and site.n.is_Integer:
            rows = break_even_rows(on, int(site.n), int(site.k), training=trains)
            needed[i] = None if rows is None else power_of_two_threshold(rows)
    thresholds = _few([t for t in needed.values() if t is not None])
    decided = list(defaults)
    for i, wanted in needed.items():
        site = matmuls[i].site
        if wanted is None:
            detail = f"never pays on {on.name}"
        else:
            threshold = min(t for t in thresholds if t >= wanted)
            if _guard_at_least(matmuls[i], threshold):
                detail = f"guarded: M >= {threshold}, where it pays on {on.name}"
                decided[i] = dataclasses.replace(decided[i], detail=detail)
                continue
            detail = f"pays from M >= {wanted} on {on.name}, this graph is for fewer"
        decided[i] = Decision(site, Precision.BF16, Reason.SLOWER, detail)
    return decided, {matmuls[i].site.key for i in needed}


def _few(thresholds: Sequence[int]) -> list[int]:
    """At most `MOST_THRESHOLDS` of the thresholds: the largest, and those that most sites ask for."""
    if not thresholds:
        return []
    counts = Counter(thresholds)
    largest = max(counts)
    others = sorted((t for t in counts if t != largest), key=lambda t: (-counts[t], t))
    return sorted([largest, *others[: MOST_THRESHOLDS - 1]])


def _guard_at_least(matmul: Matmul, rows: int) -> bool:
    """Whether the left operand has so many rows; what is found becomes a guard of the compiled graph."""
    size: Any = 1
    shape = value(matmul.lhs).shape
    dims = (shape[0], *shape[2:]) if matmul.site.op == "conv" else shape[:-1]
    for each in dims:
        size = size * each
    if free_unbacked_symbols(size):
        return False
    return bool(size >= rows)


def backward_times(
    matmuls: Sequence[Matmul], layers: Mapping[fx.Node, Decision], target: str
) -> dict[str, tuple[float, float]]:
    """Seconds on the target of each backward matmul in BF16, and in NVFP4 with its quantizers.

    ``layers``: the decisions for the forward matmuls; those in NVFP4 that read one activation share its quantizer.
    """
    found = {}
    quantized = [m for m in matmuls if m.node in layers and layers[m.node].precision is Precision.NVFP4]
    consumers = Counter(base(matmul.lhs) for matmul in quantized)
    with outside_fake_mode():
        device = find_device(target)
        for matmul in matmuls:
            owner = matmul.owner
            if owner is not None and uneven(owner) is None:
                shared = consumers[base(owner.lhs)]
                found[matmul.site.key] = backward_seconds(owner.site, matmul.site.role, shared, device)
    return found

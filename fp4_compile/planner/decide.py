"""From scores, a budget and pins to a plan: state the problem, solve it exactly, say why for each site."""

from __future__ import annotations

from collections.abc import Mapping

from fp4_compile.assignment import Problem, Solution, front, solve, total_changes, unconstrained
from fp4_compile.cost_model import Device, break_even_rows
from fp4_compile.errors import BudgetError, OptionError
from fp4_compile.options import find_device
from fp4_compile.plan import Decision, Plan, Precision, Reason
from fp4_compile.planner.analysis import Analysis, FrontPoint
from fp4_compile.planner.budget import (
    METRICS,
    Budget,
    Totals,
    make_problem,
    parse_budget,
)
from fp4_compile.planner.pins import Pins, parse_pins, pinned, require_known
from fp4_compile.planner.scores import Scores
from fp4_compile.planner.seconds import activation_seconds, layer_seconds, own_seconds
from fp4_compile.planner.survey import Entry

FRONT_POINTS = 200
"""Most points of the front that a plan carries along."""


def make_plan(
    scores: Scores,
    budget: Mapping[str, float] | None,
    *,
    pins: Mapping[str, object],
    target: str | Device | None,
    whole_model: bool = True,
    siblings_agree: bool = True,
) -> Plan:
    """See `Scores.plan`. ``whole_model``: whether a pin that fits no site is a mistake."""
    chosen_budget, chosen_pins = parse_budget(budget), parse_pins(pins)
    if whole_model:
        require_known([entry.site for entry in scores.survey], chosen_pins)
    on = find_device(target) if isinstance(target, str) else target
    _check_scores_fit(chosen_budget, scores, on)
    problem, totals = make_problem(scores, chosen_pins, on, siblings_agree)
    solution = _choose(problem, totals, chosen_budget, on)
    chosen = solution.chosen
    by_time = chosen_budget is None and on is not None
    decisions = tuple(
        _decision(entry, entry.key in chosen, scores, chosen_pins, on, by_time) for entry in scores.survey
    )
    return Plan(decisions, _analysis(scores, problem, totals, solution, chosen_budget, on))


def _check_scores_fit(budget: Budget | None, scores: Scores, on: Device | None) -> None:
    if budget is None:
        return
    if budget.name == "loss_increase" and scores.unit == "relative":
        raise OptionError(
            "budget 'loss_increase' needs scores in the loss's unit, and static scores only rank; "
            "make some with fp4_compile.calibrate(model, batches, loss_fn)"
        )
    if budget.name == "speedup" and on is None:
        raise OptionError("budget 'speedup' needs a target device, such as target='sm_100'")


def _choose(problem: Problem, totals: Totals, budget: Budget | None, on: Device | None) -> Solution:
    """The best choice: all candidates, those that pay, or the optimum under the budget."""
    if budget is None:
        return unconstrained(problem, {"seconds": 1.0} if on is not None else {"flops": 1.0})
    minimize = "loss"
    if budget.name == "loss_increase":
        minimize = "seconds" if on is not None else "flops"
    try:
        return solve(problem, minimize=minimize, subject_to=METRICS[budget.name], at_most=totals.limit(budget))
    except BudgetError as error:
        closest = totals.measure(budget.name, {METRICS[budget.name]: error.closest})
        raise BudgetError(
            f"budget {budget.name} = {budget.value:g} cannot be met with these matmuls and pins; "
            f"the closest is {budget.name} = {closest:.6g}",
            closest,
        ) from None


def _decision(entry: Entry, chosen: bool, scores: Scores, pins: Pins, on: Device | None, by_time: bool) -> Decision:
    """The decision for a site, with its reason, its score and its times."""
    score = scores.values.get(entry.key)
    loss = None if score is None else score.loss
    seconds = _seconds(entry, on) if entry.possible and on is not None else None
    precision = Precision.NVFP4 if chosen else Precision.BF16
    reason, detail = _reason(entry, chosen, scores, seconds, pins, on, by_time)
    return Decision(entry.site, precision, reason, detail, loss, seconds)


def _reason(
    entry: Entry,
    chosen: bool,
    scores: Scores,
    seconds: tuple[float, float] | None,
    pins: Pins,
    on: Device | None,
    by_time: bool,
) -> tuple[Reason, str]:
    pin = pinned(entry.site, pins)
    if pin is not None and chosen == (pin[1] is Precision.NVFP4):
        return Reason.PINNED, f"by {pin[0]!r}"
    if pin is not None or not (entry.advised or chosen):
        return entry.default.reason, entry.default.detail
    score = scores.values.get(entry.key)
    if score is None:
        return Reason.UNSCORED, "no batch reached it with a gradient"
    gain = "" if seconds is None else f", {1e6 * seconds[0]:.3g} -> {1e6 * seconds[1]:.3g} us"
    if not chosen and on is not None:
        consumers = scores.survey.consumers[entry.reads]
        bf16, nvfp4 = layer_seconds(entry, on, consumers)
        nvfp4 += activation_seconds(entry, on)
        if by_time or nvfp4 >= bf16:
            if entry.backward is None:
                return Reason.SLOWER, pays_from(entry, on, consumers)
            return Reason.SLOWER, f"with its backward {1e6 * bf16:.3g} -> {1e6 * nvfp4:.3g} us on {on.name}"
    return (Reason.QUANTIZED if chosen else Reason.SENSITIVE), f"error {score.loss:.2g}{gain}"


def pays_from(entry: Entry, on: Device, consumers: int) -> str:
    """``pays from M >= 384 on sm_100``, or that it never does; ``consumers`` share the activation's quantizer."""
    if not entry.site.n.is_Integer:
        return f"no gain on {on.name}"
    rows = break_even_rows(on, int(entry.site.n), int(entry.site.k), consumers=consumers)
    return f"never pays on {on.name}" if rows is None else f"pays from M >= {rows} on {on.name}"


def _seconds(entry: Entry, on: Device) -> tuple[float, float]:
    """Seconds in BF16, and in NVFP4 with a quantizer of its own."""
    bf16, nvfp4 = own_seconds(entry, on)
    return bf16, nvfp4 + activation_seconds(entry, on)


def _analysis(
    scores: Scores, problem: Problem, totals: Totals, solution: Solution, budget: Budget | None, on: Device | None
) -> Analysis:
    limited = "loss" if budget is None else METRICS[budget.name]
    traded = limited if limited != "loss" else "flops" if on is None else "seconds"
    points = front(problem, traded, "loss")
    step = max(1, len(points) // FRONT_POINTS)
    kept = [point for i, point in enumerate(points) if i % step == 0 or i == len(points) - 1]
    planned = None if totals.seconds is None else totals.seconds + solution.totals.get("seconds", 0.0)
    return Analysis(
        depth=scores.depth,
        unit=scores.unit,
        target=None if on is None else on.name,
        budget=None if budget is None else f"{budget.name} = {budget.value:g}",
        loss=solution.totals.get("loss", 0.0),
        flops_share=1 - totals.measure("bf16_flops", solution.totals),
        effective_bits=totals.measure("effective_bits", solution.totals),
        bf16_seconds=totals.seconds,
        seconds=planned,
        gap=solution.gap,
        traded=traded,
        front=tuple(
            FrontPoint(
                sites=point.count,
                loss=changes.get("loss", 0.0),
                flops_share=1 - totals.measure("bf16_flops", changes),
                seconds=None if totals.seconds is None else totals.seconds + changes.get("seconds", 0.0),
            )
            for point, changes in ((point, total_changes(problem, point.chosen)) for point in kept)
        ),
    )

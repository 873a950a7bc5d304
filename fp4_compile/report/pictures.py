"""The pictures of a report, as matplotlib figures drawn without touching the user's own plots."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

from fp4_compile.errors import PlanError
from fp4_compile.plan import Decision, Plan, Precision, Role

# Okabe and Ito's palette: told apart by the colour-blind too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
NVFP4_COLOUR, BF16_COLOUR = COLOURS[0], COLOURS[1]
MOST_KINDS = len(COLOURS) - 1


def draw(plan: Plan) -> dict[str, bytes]:
    """PNG files by name; a picture that a plan has no numbers for is left out.

    Raises:
        PlanError: matplotlib is not installed.
    """
    drawn = {"pareto.png": _pareto(plan), "sensitivity.png": _sensitivity(plan), "time.png": _time(plan)}
    return {name: png for name, png in drawn.items() if png is not None}


def kind(decision: Decision) -> str:
    """The kind of layer: the last name of its module path that is not a number."""
    names = [name for name in decision.site.module.split(".") if not name.isdigit()]
    return names[-1] if names else decision.site.module


def _figure(width: float = 8.0, height: float = 4.0) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("a report needs matplotlib: pip install 'fp4_compile[report]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.25)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _pareto(plan: Plan) -> bytes | None:
    analysis = plan.analysis
    if analysis is None or len(analysis.front) < 2:
        return None
    figure, axes = _figure()
    timed = analysis.traded == "seconds"
    points = [(1e6 * (p.seconds or 0.0) if timed else 100 * p.flops_share, p.loss) for p in analysis.front]
    here = (1e6 * (analysis.seconds or 0.0) if timed else 100 * analysis.flops_share, analysis.loss)
    axes.plot(*zip(*points, strict=True), "o-", color=NVFP4_COLOUR, markersize=4, label="best choices")
    axes.plot(*here, "D", color=COLOURS[5], markersize=9, label="this plan")
    axes.set_xlabel(f"predicted us a call on {analysis.target}" if timed else "matmul FLOPs in NVFP4, %")
    axes.set_ylabel(f"predicted error ({analysis.unit})")
    axes.set_ylim(bottom=min(0.0, min(y for _, y in points)))
    axes.legend(frameon=False)
    return _png(figure)


def _sensitivity(plan: Plan) -> bytes | None:
    scored = [(i, d) for i, d in enumerate(_forward(plan)) if d.loss is not None and d.loss > 0]
    if not scored:
        return None
    figure, axes = _figure(9.0, 4.2)
    colours = _colours(plan)
    for name, colour in zip(dict.fromkeys(colours.values()), COLOURS, strict=False):
        of_kind = [(i, d) for i, d in scored if colours[kind(d)] == name]
        axes.scatter([], [], color=colour, label=name)
        for precision, marker in ((Precision.NVFP4, "o"), (Precision.BF16, "x")):
            found = [(i, d.loss) for i, d in of_kind if d.precision is precision]
            if found:
                axes.scatter(*zip(*found, strict=True), marker=marker, s=28, color=colour)
    axes.set_yscale("log")
    axes.set_xlabel("matmul, in the order of the model (dot: NVFP4, cross: left in BF16)")
    axes.set_ylabel("predicted error in NVFP4")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


def _time(plan: Plan) -> bytes | None:
    timed = [d for d in _forward(plan) if d.seconds is not None]
    if not timed or plan.analysis is None:
        return None
    colours = _colours(plan)
    before: dict[str, float] = defaultdict(float)
    after: dict[str, float] = defaultdict(float)
    for d in timed:
        bf16, nvfp4 = d.seconds or (0.0, 0.0)
        before[colours[kind(d)]] += 1e6 * bf16
        after[colours[kind(d)]] += 1e6 * (nvfp4 if d.precision is Precision.NVFP4 else bf16)
    names = sorted(before, key=lambda name: before[name])
    figure, axes = _figure(8.0, 1.2 + 0.45 * len(names))
    places = range(len(names))
    axes.barh([y + 0.2 for y in places], [before[n] for n in names], 0.38, color=BF16_COLOUR, label="all in BF16")
    axes.barh([y - 0.2 for y in places], [after[n] for n in names], 0.38, color=NVFP4_COLOUR, label="as planned")
    axes.set_yticks(list(places), names)
    axes.set_xlabel(f"predicted us a call on {plan.analysis.target}, each quantizer counted at every reader")
    axes.legend(frameon=False)
    return _png(figure)


def _forward(plan: Plan) -> list[Decision]:
    return [d for d in plan if d.site.role is Role.FPROP]


def _colours(plan: Plan) -> dict[str, str]:
    """Each kind of layer, and the name it is drawn under: rare kinds go together."""
    counts: dict[str, int] = defaultdict(int)
    for d in _forward(plan):
        counts[kind(d)] += 1
    common = sorted(counts, key=lambda name: -counts[name])[: MOST_KINDS if len(counts) > len(COLOURS) else None]
    return {name: name if name in common else "other" for name in counts}

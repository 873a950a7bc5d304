"""The pictures of a report, as matplotlib figures drawn without touching the user's own plots or style."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fp4_compile.errors import PlanError
from fp4_compile.plan import Decision, Plan, Precision, Role

# Okabe and Ito's palette, told apart by the colour-blind too; their yellow is too faint for dots on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
OTHER, OTHER_COLOUR = "other kinds", "#999999"
UNTIMED = "never in NVFP4"
NVFP4_COLOUR, BF16_COLOUR, CHOSEN_COLOUR = COLOURS[0], COLOURS[1], COLOURS[5]
LONGEST_LABEL = 24


def draw(plan: Plan) -> dict[str, bytes]:
    """PNG files by name; a picture that a plan has no numbers for is left out.

    Raises:
        PlanError: matplotlib is not installed.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise PlanError("a report needs matplotlib: pip install 'fp4_compile[report]'") from error
    with style.context("default"):
        drawn = {
            "pareto.png": _pareto(plan),
            "sensitivity.png": _sensitivity(plan),
            "time.png": _time(plan),
            "share.png": _share(plan),
        }
    return {name: png for name, png in drawn.items() if png is not None}


def kind(decision: Decision) -> str:
    """The kind of layer: the last name of its module path that is not a number."""
    names = [name for name in decision.site.module.split(".") if not name.isdigit()]
    return names[-1] if names else decision.site.module


def _figure(height: float = 4.0) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")  # small, so that text is legible on a phone
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _pareto(plan: Plan) -> bytes | None:
    analysis = plan.analysis
    if analysis is None or len(analysis.front) < 2:
        return None
    figure, axes = _figure()
    timed = analysis.traded == "seconds"
    points = [(1e6 * (p.seconds or 0.0) if timed else 100 * p.flops_share, p.loss) for p in analysis.front]
    here = (1e6 * (analysis.seconds or 0.0) if timed else 100 * analysis.flops_share, analysis.loss)
    axes.plot(*zip(*points, strict=True), "o-", color=NVFP4_COLOUR, markersize=3.5, label="best choices")
    axes.plot(*here, "D", color=CHOSEN_COLOUR, markersize=9, label="this plan")
    axes.set_xlabel(f"predicted us a call, on {_label(analysis.target or '')}" if timed else "matmul FLOPs in NVFP4, %")
    axes.set_ylabel(f"predicted error ({analysis.unit})")
    axes.set_ylim(bottom=min(0.0, min(y for _, y in points)))
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False)
    return _png(figure)


def _sensitivity(plan: Plan) -> bytes | None:
    scored = [(i, d) for i, d in enumerate(_forward(plan)) if d.loss is not None]
    shown = [(i, d) for i, d in scored if d.loss is not None and d.loss > 0]
    if not shown:
        return None
    groups = _groups([d for _, d in shown], [1.0] * len(shown))
    names = list(dict.fromkeys(groups[kind(d)] for _, d in shown if groups[kind(d)] != OTHER))
    colours = {**dict(zip(names, COLOURS, strict=False)), OTHER: OTHER_COLOUR}
    figure, axes = _figure(4.6)
    for precision, marker, label in ((Precision.NVFP4, "o", "runs in NVFP4"), (Precision.BF16, "x", "left in BF16")):
        found = [(i, d.loss, colours[groups[kind(d)]]) for i, d in shown if d.precision is precision]
        if found:
            xs, ys, of_kind = zip(*found, strict=True)
            axes.scatter(xs, ys, marker=marker, s=24, c=of_kind, linewidths=1.2)
            axes.scatter([], [], marker=marker, s=24, color="#444444", label=label)
    for name in (n for n in colours if n in groups.values()):
        axes.scatter([], [], marker="s", s=24, color=colours[name], label=_label(name))
    axes.set_yscale("log")
    hidden = len(scored) - len(shown)
    axes.set_xlabel("place in the model" + (f" ({hidden} without error not shown)" if hidden else ""))
    axes.set_ylabel("predicted error in NVFP4" + (f" ({plan.analysis.unit})" if plan.analysis else ""))
    axes.grid(visible=True, axis="y", alpha=0.25)
    long = any(len(name) > LONGEST_LABEL // 2 for name in colours)
    figure.legend(loc="outside lower center", ncols=2 if long else 3, frameon=False, fontsize=9)
    return _png(figure)


def _time(plan: Plan) -> bytes | None:
    timed = [(d, d.seconds) for d in _forward(plan) if d.seconds is not None]
    if not timed:
        return None
    groups = _groups([d for d, _ in timed], [bf16 for _, (bf16, _) in timed])
    before: dict[str, float] = defaultdict(float)
    after: dict[str, float] = defaultdict(float)
    for d, (bf16, nvfp4) in timed:
        before[groups[kind(d)]] += 1e6 * bf16
        after[groups[kind(d)]] += 1e6 * (nvfp4 if d.precision is Precision.NVFP4 else bf16)
    target = plan.analysis.target if plan.analysis else None
    total = plan.analysis.bf16_seconds if plan.analysis else None
    rest = 0.0 if total is None else 1e6 * total - sum(before.values())
    if total and rest > 1e4 * total:  # a hundredth; less would be no bar to see
        before[UNTIMED] = after[UNTIMED] = rest
    figure, axes, names = _bars(before)
    for shift, values, colour, label in (
        (0.2, before, BF16_COLOUR, "all in BF16"),
        (-0.2, after, NVFP4_COLOUR, "as planned"),
    ):
        places = [y + shift for y in range(len(names))]
        axes.barh(places, [values[n] for n in names], 0.38, color=colour, label=label)
    axes.set_xlabel(f"predicted us a call, on {_label(target or 'the target')}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return _png(figure)


def _share(plan: Plan) -> bytes | None:
    flops = [d.site.flops for d in plan]
    total = sum(flops)
    groups = _groups(plan.decisions, flops)
    if len(set(groups.values())) < 2 or not total:
        return None
    shares = {precision: dict.fromkeys(groups.values(), 0.0) for precision in Precision}
    for d, value in zip(plan, flops, strict=True):
        shares[d.precision][groups[kind(d)]] += 100 * value / total
    sums = {name: sum(of_kind[name] for of_kind in shares.values()) for name in groups.values()}
    figure, axes, names = _bars(sums)
    nvfp4, bf16 = ([shares[precision][n] for n in names] for precision in (Precision.NVFP4, Precision.BF16))
    axes.barh(range(len(names)), nvfp4, 0.6, color=NVFP4_COLOUR, label="in NVFP4")
    axes.barh(range(len(names)), bf16, 0.6, left=nvfp4, color=BF16_COLOUR, label="left in BF16")
    dynamic = any((d.site.batch * d.site.m * d.site.n * d.site.k).free_symbols for d in plan)
    axes.set_xlabel("share of the matmul FLOPs, %" + (" (dynamic sizes as 1024)" if dynamic else ""))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return _png(figure)


def _bars(lengths: dict[str, float]) -> tuple[Any, Any, list[str]]:
    """A figure for horizontal bars, and the names from its bottom to its top: the longest last, the rest first."""
    names = sorted(lengths, key=lambda name: (name not in (OTHER, UNTIMED), lengths[name]))
    figure, axes = _figure(1.4 + 0.42 * len(names))
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x", alpha=0.25)
    return figure, axes, names


def _forward(plan: Plan) -> list[Decision]:
    return [d for d in plan if d.site.role is Role.FPROP]


def _groups(decisions: Sequence[Decision], weights: Sequence[float]) -> dict[str, str]:
    """Each kind of layer, and the name it is drawn under: where they are many, the light ones go together."""
    sums: dict[str, float] = defaultdict(float)
    for d, weight in zip(decisions, weights, strict=True):
        sums[kind(d)] += weight
    most = len(COLOURS)
    named = sorted(sums, key=lambda name: -sums[name])[: most if len(sums) > most else None]
    return {name: name if name in named else OTHER for name in sums}


def _label(name: str) -> str:
    """A name as matplotlib shows it whole: no formula between dollars, no leading underscore, which hides it."""
    if len(name) > LONGEST_LABEL:
        half = LONGEST_LABEL // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")

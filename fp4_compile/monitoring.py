"""Watch a training run's quantizers: how much of each operand is lost, and whether gradients still rise above noise."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4_compile.errors import DumpError, OptionError
from fp4_compile.observations import Sums, collected
from fp4_compile.switching import recompile

log = logging.getLogger(__name__)

USEFUL_RATIO = math.sqrt(3)
"""Below this ratio of a gradient to its quantization noise, further training in FP4 gains little (arXiv:2505.19115)."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """What one step's quantizers did to one operand of one site. Shares are of elements, from 0 to 1."""

    step: int
    site: str
    operand: str
    """``x``, ``w`` or ``dy``; in wgrad after the Hadamard transform."""
    underflow: float
    """Share that is zero in FP4 and was not before."""
    saturated: float
    """Share cut off at the largest number of its block."""
    error: float
    """Norm of the quantization error relative to the operand's."""
    gradient_to_noise: float | None = None
    """Of wgrad's ``dy``: norm of the weight gradient relative to that of the noise which rounding adds to it."""


class Monitor:
    """A running watch. Made by `monitor`; call `step` after each optimizer step, `close` or leave ``with`` at the end.

    ``observations`` holds everything seen. With a folder, each step is appended to ``monitor.jsonl`` there, and
    `close` draws ``monitor.png``.
    """

    def __init__(self, model: nn.Module, out: Path | None, every: int, writer: Any) -> None:
        self.observations: list[Observation] = []
        self._model, self._out, self._every, self._writer = model, out, every, writer
        self._step = 0
        self._sums: Sums = {}
        self._open = contextlib.ExitStack()
        recompile(model, lambda options: {**options, "monitor": True})
        self._open.callback(recompile, model, lambda options: {**options, "monitor": False})
        self._collect()

    def _collect(self) -> None:
        self._collecting = contextlib.ExitStack()
        if self._step % self._every == 0:
            self._collecting.enter_context(collected(self._sums))

    def step(self) -> None:
        """Close a training step: what its calls did, gradient accumulation included, becomes one observation a site."""
        self._collecting.close()
        new = _observations(self._step, self._sums)
        self._sums.clear()
        self.observations += new
        if new and self._out is not None:
            with (self._out / "monitor.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(dataclasses.asdict(seen)) + "\n" for seen in new)
        if self._writer is not None:
            for seen in new:
                for name, value in _curves(seen).items():
                    self._writer.add_scalar(f"fp4/{name}/{seen.site}/{seen.operand}", value, seen.step)
        low = [o for o in new if o.gradient_to_noise is not None and o.gradient_to_noise < USEFUL_RATIO]
        if low:
            log.warning(
                "step %d: the weight gradients of %d layers are below sqrt(3) of their rounding noise, first %s: "
                "training gains little in FP4 from here (fp4_compile.switch_precision)",
                *(self._step, len(low), low[0].site),
            )
        self._step += 1
        self._collect()

    def close(self) -> None:
        """Let the model go on without being watched, and draw the curves."""
        self._collecting.close()
        self._open.close()
        if self._out is not None and self.observations:
            draw(self.observations, self._out / "monitor.png")

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        """A table of the last step watched, the largest error first."""
        if not self.observations:
            return "nothing was observed yet: call step() after each optimizer step"
        last = self.observations[-1].step
        rows = sorted((o for o in self.observations if o.step == last), key=lambda o: -o.error)
        width = max(len("site"), *(len(o.site) for o in rows))
        lines = [f"{'site':{width}}  operand  underflow  saturated   error  gradient/noise   (step {last})"]
        for o in rows:
            ratio = "" if o.gradient_to_noise is None else f"{o.gradient_to_noise:.2f}"
            shares = f"{o.underflow:9.2%}  {o.saturated:9.2%}  {o.error:6.3f}"
            lines.append(f"{o.site:{width}}  {o.operand:7}  {shares}  {ratio:>14}".rstrip())
        return "\n".join(lines)


def monitor(
    model: nn.Module, out: str | os.PathLike[str] | None = None, *, every: int = 1, writer: Any = None
) -> Monitor:
    """Watch the quantizers of a compiled model from its next call on.

    The model is compiled anew with observers in its graphs. They change no number, but look at each operand before
    and after, which costs time; ``every`` spares most of it. ::

        with fp4_compile.monitor(compiled, "watch", every=10) as watch:
            for batch in batches:
                ...
                optimizer.step()
                watch.step()

    Args:
        model: what ``torch.compile(model, backend="nvfp4")`` returned, or anything that contains such modules.
        out: folder for ``monitor.jsonl``, a line an operand and step, and ``monitor.png``, the curves.
        every: look at one step in so many.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``.

    Raises:
        OptionError: nothing in the model was compiled with this backend, or ``every`` is below 1.
        DumpError: the folder cannot be written.
    """
    if every < 1:
        raise OptionError(f"every is {every}; it counts steps, from 1 on")
    folder = None if out is None else Path(out)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "monitor.jsonl").write_text("", encoding="utf-8")
        except OSError as error:
            raise DumpError(f"the folder {folder} for a monitor's curves cannot be written: {error}") from error
    return Monitor(model, folder, every, writer)


def _observations(step: int, sums: Sums) -> list[Observation]:
    if not sums:
        return []
    found = []
    kept = {key: value.tolist() for key, value in sums.items()}
    for (site, operand), seen in sorted(kept.items()):
        if operand == "product":
            continue
        underflow, saturated, count, error, squares = seen
        ratio = None
        if operand == "dy" and (site, "product") in kept:
            noise, signal = kept[site, "product"]
            ratio = math.sqrt(signal / noise) if noise else math.inf
        relative = math.sqrt(error / squares) if squares else (math.nan if math.isnan(squares) else 0.0)
        count = max(count, 1)
        found.append(Observation(step, site, operand, underflow / count, saturated / count, relative, ratio))
    return found


def _curves(seen: Observation) -> dict[str, float]:
    names = ("underflow", "saturated", "error", "gradient_to_noise")
    return {name: value for name in names if (value := getattr(seen, name)) is not None}


_PANELS = {
    "underflow": "share that became zero",
    "saturated": "share cut off at the largest",
    "error": "quantization error / norm",
    "gradient_to_noise": "weight gradient / rounding noise",
}


def draw(observations: list[Observation], path: Path) -> None:
    """Curves over the steps: the median site of each operand, and the span of all. Without matplotlib, none."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no curves drawn: pip install matplotlib")
        return
    with style.context("default"):
        figure = Figure(figsize=(8, 6), layout="constrained")
        for axes, (name, label) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
            series: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
            for seen in observations:
                if name in (curves := _curves(seen)):
                    role = seen.site.rpartition(".")[2].partition("#")[0]
                    series[f"{seen.operand} ({role})"][seen.step].append(curves[name])
            for operand, steps in sorted(series.items()):
                middle = [float(torch.tensor(values).median()) for values in steps.values()]
                axes.plot(list(steps), middle, label=operand, linewidth=1.2)
                low, high = [min(v) for v in steps.values()], [max(v) for v in steps.values()]
                axes.fill_between(list(steps), low, high, alpha=0.12, linewidth=0)
            axes.set_title(label, fontsize=10, loc="left")
            axes.set_xlabel("step")
            axes.spines[["top", "right"]].set_visible(False)
            if name == "gradient_to_noise":
                axes.axhline(USEFUL_RATIO, color="black", linestyle=":", linewidth=1)
                axes.set_yscale("log")
                axes.annotate("sqrt(3)", (0, USEFUL_RATIO), xytext=(2, 2), textcoords="offset points", fontsize=8)
            else:
                axes.set_ylim(bottom=0)
            if series:
                axes.legend(fontsize=8, frameon=False)
        figure.savefig(path, dpi=120)

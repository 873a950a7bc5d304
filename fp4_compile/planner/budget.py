"""Budgets, and the optimization problem that a survey, its scores and a budget make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fp4_compile.assignment import Item, Problem, Shared
from fp4_compile.cost_model import Device
from fp4_compile.errors import OptionError
from fp4_compile.options import suggest
from fp4_compile.plan import Precision
from fp4_compile.planner.pins import Pins, pinned
from fp4_compile.planner.scores import Scores
from fp4_compile.planner.seconds import activation_seconds, layer_seconds
from fp4_compile.planner.survey import Entry

NVFP4_BITS = 4.5
"""A 4-bit code, and the 8-bit block scale shared by 16."""
BF16_BITS = 16.0

BUDGETS = {
    "loss_increase": "largest predicted increase of the loss, in the loss's own unit; needs calibrated scores",
    "effective_bits": "bits per element of the matmuls' weights, 4.5 in NVFP4 and 16 in BF16",
    "bf16_flops": "largest share of the forward matmuls' FLOPs left in BF16, 0 to 1",
    "bf16_params": "largest share of the matmuls' weight elements left in BF16, 0 to 1",
    "speedup": "least predicted speedup of the forward matmuls, quantizers included; needs a target",
}

METRICS = {
    "loss_increase": "loss",
    "effective_bits": "bits",
    "bf16_flops": "flops",
    "bf16_params": "params",
    "speedup": "seconds",
}
"""The metric each budget limits."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """One limit: a name of `BUDGETS` and its value."""

    name: str
    value: float


def parse_budget(given: Mapping[str, Any] | None) -> Budget | None:
    """Check a user's budget.

    Raises:
        OptionError: not exactly one known name, or a value out of its range.
    """
    if given is None:
        return None
    if len(given) != 1:
        raise OptionError(f"a budget names exactly one of {list(BUDGETS)}; this one names {list(given)}")
    [(name, value)] = given.items()
    if name not in BUDGETS:
        near = suggest(str(name), list(BUDGETS))
        raise OptionError(f"unknown budget {name!r}{near}; the budgets are {list(BUDGETS)}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise OptionError(f"budget {name!r} is {value!r}; it takes a number: {BUDGETS[name]}")
    if (name.startswith("bf16_") and not 0 <= value <= 1) or (name in ("effective_bits", "speedup") and value <= 0):
        raise OptionError(f"budget {name!r} is {value!r}, out of its range: {BUDGETS[name]}")
    return Budget(str(name), float(value))


@dataclasses.dataclass(frozen=True)
class Totals:
    """The matmuls of a model in high precision: what a choice of NVFP4 sites changes.

    ``flops`` and ``params`` are the forward's, ``seconds`` in training the backward's too.
    """

    flops: float
    params: float
    seconds: float | None

    def measure(self, name: str, change: Mapping[str, float]) -> float:
        """A budget's quantity after changes to the metrics."""
        if name == "loss_increase":
            return change.get("loss", 0.0)
        if name == "effective_bits":
            return BF16_BITS + (change.get("bits", 0.0) / self.params if self.params else 0.0)
        if name == "speedup":
            if self.seconds is None:
                raise OptionError("the speedup is known for a target device only")
            return self.seconds / (self.seconds + change.get("seconds", 0.0)) if self.seconds else 1.0
        metric = METRICS[name]
        total = self.flops if metric == "flops" else self.params
        return 1 + change.get(metric, 0.0) / total if total else 0.0

    def limit(self, budget: Budget) -> float:
        """The largest change of the budget's metric that meets it."""
        if budget.name == "loss_increase":
            return budget.value
        if budget.name == "effective_bits":
            return (budget.value - BF16_BITS) * self.params
        if budget.name == "speedup":
            return (self.seconds or 0.0) * (1 / budget.value - 1)
        return (budget.value - 1) * (self.flops if budget.name == "bf16_flops" else self.params)


def candidates(scores: Scores, pins: Pins) -> list[Entry]:
    """The matmuls that are to be decided: advised by the default policy or pinned to NVFP4, scored, not pinned out."""
    found = []
    for entry in scores.survey:
        pin = pinned(entry.site, pins)
        wanted = entry.advised if pin is None else pin[1] is Precision.NVFP4
        if wanted and entry.possible and (pin is not None or entry.key in scores.values):
            found.append(entry)
    return found


def make_problem(
    scores: Scores, pins: Pins, device: Device | None, siblings_agree: bool = True
) -> tuple[Problem, Totals]:
    """The choice among a model's candidates as an optimization problem, and what it starts from.

    Metrics: ``loss``, ``bits``, ``flops``, ``params``, and with a device ``seconds``; each a change relative to
    the model in BF16.
    """
    chosen = candidates(scores, pins)
    first_use = {e.weight: e.key for e in reversed(scores.survey.entries) if e.weight is not None}
    items, shared = [], {}
    for entry in chosen:
        elements = entry.elements if entry.weight is not None and first_use[entry.weight] == entry.key else 0
        score = scores.values.get(entry.key)
        change = {
            "loss": score.loss if score else 0.0,
            "bits": (NVFP4_BITS - BF16_BITS) * elements,
            "flops": -entry.flops,
            "params": -float(elements),
        }
        if device is not None:
            bf16, nvfp4 = layer_seconds(entry, device, scores.survey.consumers[entry.reads])
            change["seconds"] = nvfp4 - bf16
            shared[entry.reads] = Shared(entry.reads, {"seconds": activation_seconds(entry, device)})
        items.append(Item(entry.key, change, frozenset({entry.reads} if device is not None else ())))
    keys = {item.key for item in items}
    free = {e.key for e in chosen if pinned(e.site, pins) is None}
    weight = {entry.key: entry.weight for entry in scores.survey}
    groups = tuple(
        group & free
        for group in scores.survey.groups
        if len(group & free) > 1 and (siblings_agree or len({weight[key] for key in group}) == 1)
    )
    forced = dict.fromkeys(keys - free, True)
    weights = [e for e in scores.survey if e.weight is not None and first_use[e.weight] == e.key]
    totals = Totals(
        flops=sum(e.flops for e in scores.survey),
        params=float(sum(e.elements for e in weights)),
        seconds=None if device is None else _total_seconds(scores, device),
    )
    return Problem(tuple(items), tuple(shared.values()), groups, forced), totals


def _total_seconds(scores: Scores, device: Device) -> float:
    known = [e for e in scores.survey if e.site.k.is_Integer and e.site.k > 0]
    return math.fsum(layer_seconds(entry, device, 1)[0] for entry in known)

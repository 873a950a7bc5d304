"""The options of ``torch.compile(model, backend="nvfp4", options={...})``: typed, frozen, checked."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import get_type_hints

from fp4_compile.errors import OptionError
from fp4_compile.plan import Plan
from fp4_compile.recipe import Training

if TYPE_CHECKING:
    from fp4_compile.cost_model import Device

WeightBlock = Literal["1x16", "16x16"]
FourOverSix = Literal["none", "weights", "activations", "all"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a model is compiled. Every field has a default; an unknown or ill-typed key is an `OptionError`."""

    dump: str | None = None
    """Folder that receives, per compiled graph, the captured graph, the graph after each pass, the plan and
    the program that runs. Created if missing. Does not change the generated code."""

    plan: Plan | None = None
    """A `Plan` (or the path of a saved one) whose decisions replace the default policy's, site by site.
    Sites the plan does not name follow the default policy; a plan that names no site of the graph is a
    `PlanError`."""

    budget: Mapping[str, float] | None = None
    """One limit that the planner meets with the least error, e.g. ``{"effective_bits": 6}``, by static scores;
    `fp4_compile.planner.budget.BUDGETS` has them all. Plans from calibrated scores come through ``plan``."""

    pins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Shell-style patterns on module paths or site keys, and ``"nvfp4"`` or ``"bf16"``; the last that fits counts.
    A pattern that fits nothing is an `OptionError`."""

    target: str | None = None
    """The device whose times decide what pays, e.g. ``"sm_100"``; a name in `fp4_compile.cost_model.DEVICES`, or
    the path of a table that `fp4_compile.cost_model.measure` saved. None: NVFP4 wherever it is safe."""

    weight_block: WeightBlock = "1x16"
    """Elements that share one block scale in a weight outside training: ``"1x16"`` along the contraction (least
    error), or ``"16x16"``, as training has it by default."""

    four_over_six: FourOverSix = "none"
    """Which operands choose, block by block, between a largest code of 6 and of 4 (arXiv:2512.02010)."""

    training: Training = dataclasses.field(default_factory=Training)
    """The training recipe, a `fp4_compile.recipe.Training` or a dict of its fields: what forward and backward run in,
    stochastic rounding, Hadamard transform, weight tiles, the share of layers left in BF16."""

    monitor: bool = False
    """Let the graph tell what its quantizers do; `fp4_compile.monitor` sets this and reads it."""

    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of ``torch._inductor.config`` for this compile, as ``torch.compile``'s own ``options`` takes
    them for Inductor; for instance ``{"max_autotune": True}``."""

    @property
    def plans(self) -> bool:
        """Whether the planner has a say."""
        return self.budget is not None or bool(self.pins) or self.target is not None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Check a user's dictionary and make it an `Options`.

        Raises:
            OptionError: a key is unknown (the message suggests the nearest), or a value is of the wrong type.
            PlanError: the ``plan`` file cannot be read as a plan.
            DeviceError: the ``target`` is unknown.
        """
        given = dict(given or {})
        names = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                raise OptionError(f"unknown option {key!r}{suggest(key, names)}; the options are {names}")
        if isinstance(given.get("plan"), (str, os.PathLike)):
            given["plan"] = Plan.load(given["plan"])
        if isinstance(given.get("dump"), os.PathLike):
            given["dump"] = os.fspath(given["dump"])
        if "training" in given:
            given["training"] = Training.parse(given["training"])
        for key, value in given.items():
            _check(key, value, get_type_hints(cls)[key])
        if {"budget", "pins", "target"}.intersection(given):
            _check_planner(given)
        return cls(**given)

    def digest(self) -> str:
        """Hex digest of everything here that can change generated code (``dump`` cannot)."""
        plan = self.plan.digest() if self.plan else None
        planner = (self.budget, self.pins, self.target and find_device(self.target).digest())
        recipe = (self.weight_block, self.four_over_six, self.training.key())
        fields = (recipe, self.monitor, plan, planner, sorted(self.inductor.items(), key=str))
        return hashlib.sha256(json.dumps(fields, default=repr).encode()).hexdigest()


def suggest(word: str, known: list[str]) -> str:
    """``, did you mean ...?`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _check(key: str, value: object, hint: object) -> None:
    if hint in (WeightBlock, FourOverSix):
        choices = list(get_args(hint))
        if value not in choices:
            near = suggest(value, choices) if isinstance(value, str) else ""
            raise OptionError(f"option {key!r} is {value!r}{near}; it takes one of {choices}")
        return
    expected: dict[str, tuple[type, ...]] = {
        "dump": (str, type(None)),
        "plan": (Plan, type(None)),
        "training": (Training,),
        "monitor": (bool,),
        "inductor": (Mapping,),
        "budget": (Mapping, type(None)),
        "pins": (Mapping,),
        "target": (str, type(None)),
    }
    if not isinstance(value, expected[key]):
        wants = {
            "dump": "a folder's path",
            "plan": "a Plan or the path of a saved one",
            "training": "a dict",
            "monitor": "True or False",
            "inductor": "a dict",
            "budget": "a dict of one name and its value",
            "pins": "a dict of patterns and precisions",
            "target": "a device's name",
        }
        raise OptionError(f"option {key!r} is {value!r} of type {type(value).__name__}; it takes {wants[key]}")


def find_device(target: str) -> Device:
    """The table of a target: one of the known devices, or a saved measurement.

    Raises:
        DeviceError: neither.
    """
    from fp4_compile.cost_model import device, load

    return load(target) if target.endswith(".json") else device(target)


def _check_planner(given: Mapping[str, Any]) -> None:
    from fp4_compile.planner.budget import parse_budget
    from fp4_compile.planner.pins import parse_pins

    parse_budget(given.get("budget"))
    parse_pins(given.get("pins") or {})
    if given.get("target") is not None:
        find_device(given["target"])

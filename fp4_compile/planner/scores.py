"""Sensitivity scores of a model's matmuls as data: saved, loaded, and turned into plans under any budget."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping

from fp4_compile.errors import CalibrationError, PlanError
from fp4_compile.plan import Plan
from fp4_compile.planner.survey import Survey

SCHEMA = 1

UNITS = {
    "loss": "predicted increase of the loss",
    "output": "predicted squared error of the model's output, relative to the output",
    "relative": "relative squared error of the matmul, weighed by its place in the model: ranks, and nothing more",
}


@dataclasses.dataclass(frozen=True)
class Score:
    """What NVFP4 at one site does.

    ``loss`` is the site's part of the model's error, in the unit of its `Scores`; ``error`` the relative squared
    error of the matmul's own result, where it was measured.
    """

    loss: float
    error: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """How much each matmul of a model minds NVFP4.

    ``depth`` is ``"static"``, ``"calibrated"`` or ``"exact"``; ``unit`` one of `UNITS`; ``baseline`` the
    unquantized model's loss, and ``everything`` the measured loss with all advised sites in NVFP4 (None if unknown).
    """

    survey: Survey
    values: Mapping[str, Score]
    depth: str
    unit: str
    batches: int = 0
    baseline: float | None = None
    everything: float | None = None

    def plan(
        self,
        budget: Mapping[str, float] | None = None,
        *,
        pins: Mapping[str, str] | None = None,
        target: str | None = None,
        siblings_agree: bool = True,
    ) -> Plan:
        """The best plan under a budget, from these scores; nothing is measured again.

        Args:
            budget: one of `fp4_compile.planner.budget.BUDGETS` and its value; None for NVFP4 wherever the default
                policy advises it and, with a target, it pays.
            pins: patterns on module paths, and the precision they get.
            target: the device whose times count, a name in `fp4_compile.cost_model.DEVICES`.
            siblings_agree: whether q/k/v and gate/up are decided alike, as serving engines that fuse them want;
                False gives less error at the same budget. Uses of one weight are decided alike in any case.

        Raises:
            BudgetError: no choice meets the budget; says the closest that can be met.
            OptionError, DeviceError: a mistake in the arguments.
        """
        from fp4_compile.planner.decide import make_plan

        return make_plan(self, budget, pins=pins or {}, target=target, siblings_agree=siblings_agree)

    def digest(self) -> str:
        """Hex digest of the scores, for cache keys."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The scores as JSON text; `from_json` gives equal ones back."""
        values = {key: [score.loss, score.error] for key, score in self.values.items()}
        data = {
            "schema": SCHEMA,
            "depth": self.depth,
            "unit": self.unit,
            "batches": self.batches,
            "baseline": self.baseline,
            "everything": self.everything,
            "scores": values,
            **self.survey.to_dict(),
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Scores:
        """Read what `to_json` wrote.

        Raises:
            CalibrationError: the text is not that, or of a schema this version does not know.
        """
        try:
            data = json.loads(text)
            if data.get("schema") != SCHEMA:
                raise CalibrationError(f"the scores have schema {data.get('schema')!r}; this version reads {SCHEMA}")
            values = {str(key): Score(float(loss), float(error)) for key, (loss, error) in data["scores"].items()}
            if not all(math.isfinite(score.loss) for score in values.values()):
                raise CalibrationError("a score is not finite")
            return cls(
                Survey.from_dict(data),
                values,
                str(data["depth"]),
                str(data["unit"]),
                int(data["batches"]),
                data["baseline"],
                data["everything"],
            )
        except (AttributeError, KeyError, TypeError, ValueError, PlanError) as error:
            raise CalibrationError(f"not a file of scores: {error!r}; they are what Scores.save wrote") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the scores as JSON, all or nothing."""
        temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(self.to_json())
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scores:
        """Read saved scores.

        Raises:
            CalibrationError: the file is missing or holds no scores.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except OSError as error:
            raise CalibrationError(f"cannot read the scores {os.fspath(path)!r}: {error.strerror}") from error

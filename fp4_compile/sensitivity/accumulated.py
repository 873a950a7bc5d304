"""What a calibration has added up so far: small, savable, and summable over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4_compile.errors import CalibrationError, PlanError
from fp4_compile.planner.scores import Score, Scores
from fp4_compile.planner.survey import Survey, merge_surveys

log = logging.getLogger(__name__)

SCHEMA = 1


@dataclasses.dataclass
class Accumulated:
    """Sums over batches. ``sums`` has per site: second-order increase, squared change, squared result."""

    identity: str
    """Digest of the model and the loss: sums of another model are never gone on with."""
    batches: int = 0
    loss: float = 0.0
    increases: list[float] = dataclasses.field(default_factory=list)
    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    survey: Survey = dataclasses.field(default_factory=lambda: Survey((), ()))

    def add(self, survey: Survey, sums: Mapping[str, Tensor], loss: float, increase: float | None) -> None:
        """Add one batch."""
        self.batches += 1
        self.loss += loss
        if increase is not None:
            self.increases.append(increase)
        for key, values in sums.items():
            values = values.cpu()
            self.sums[key] = self.sums[key] + values if key in self.sums else values
        if len(survey) != len(self.survey):
            self.survey = merge_surveys([self.survey, survey])

    def scores(self, unit: str) -> Scores:
        """The scores these sums make: scaled so that they add up to the increase that was measured.

        Raises:
            CalibrationError: no batches, or sums that are not finite.
        """
        if not self.batches:
            raise CalibrationError("there are no batches; calibration needs at least one")
        means = {key: (values / self.batches).tolist() for key, values in self.sums.items()}
        broken = [key for key, values in means.items() if not all(map(math.isfinite, values))]
        if broken:
            raise CalibrationError(f"the score of {broken[0]} is not finite: an overflow in its result or gradient")
        predicted = math.fsum(second_order for second_order, _, _ in means.values())
        measured, uncertainty = self._measured_increase()
        scale = measured / predicted if predicted > 0 else 1.0
        if measured <= 2 * uncertainty:
            log.info(
                "measured increase %.3g +- %.2g, predicted %.3g: the predictions stay unscaled",
                measured,
                uncertainty,
                predicted,
            )
            scale = 1.0
        unreached = [e.key for e in self.survey if e.advised and e.key not in means]
        if unreached:
            log.warning("%d matmuls got no gradient and stay in BF16, the first is %s", len(unreached), unreached[0])
        values = {
            key: Score(scale * second_order, change / result if result else 0.0)
            for key, (second_order, change, result) in means.items()
        }
        baseline = self.loss / self.batches if unit == "loss" else 0.0
        return Scores(self.survey, values, "calibrated", unit, self.batches, baseline, baseline + measured)

    def _measured_increase(self) -> tuple[float, float]:
        """Mean over the batches measured, and its standard error: a loss off its minimum moves either way."""
        count = len(self.increases)
        if not count:
            return 0.0, 0.0
        mean = math.fsum(self.increases) / count
        spread = math.fsum((x - mean) ** 2 for x in self.increases)
        return mean, math.sqrt(spread / (count - 1) / count) if count > 1 else 0.0

    def reduce_over_ranks(self) -> None:
        """Sum over the ranks of a ``torch.distributed`` job, so that all of them get the same scores."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        mine = self._to_dict()
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        if len({each["identity"] for each in everyone}) > 1:
            raise CalibrationError("the ranks calibrate different models or losses; each rank needs the whole model")
        total = Accumulated(self.identity)
        for each in everyone:
            other = Accumulated._from_dict(each)
            total.batches += other.batches
            total.loss += other.loss
            total.increases += other.increases
            for key, values in other.sums.items():
                total.sums[key] = total.sums[key] + values if key in total.sums else values
            total.survey = merge_surveys([total.survey, other.survey])
        self.__dict__.update(total.__dict__)

    def save(self, path: str | None) -> None:
        """Keep the sums beside ``path``, all or nothing."""
        if path is None or not self.batches:
            return
        temporary = f"{_partial(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self._to_dict(), file)
        os.replace(temporary, _partial(path))

    @staticmethod
    def forget(path: str) -> None:
        """Remove what `save` kept."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(_partial(path))

    @classmethod
    def resume(cls, path: str | None, identity: str) -> Accumulated:
        """What `save` kept for this model and loss, or nothing yet."""
        if path is None or not os.path.exists(_partial(path)):
            return cls(identity)
        try:
            with open(_partial(path), encoding="utf-8") as file:
                found = cls._from_dict(json.load(file))
        except (OSError, AttributeError, KeyError, TypeError, ValueError, PlanError) as error:
            log.warning("%s cannot be read (%r): calibration starts anew", _partial(path), error)
            return cls(identity)
        if found.identity != identity:
            log.warning("%s is of another model or loss: calibration starts anew", _partial(path))
            return cls(identity)
        log.info("calibration goes on after %d batches", found.batches)
        return found

    def _to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in ("identity", "batches", "loss", "increases")}
        sums = {key: values.tolist() for key, values in self.sums.items()}
        return {"schema": SCHEMA, **data, "sums": sums, "survey": self.survey.to_dict()}

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Accumulated:
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        names = ("identity", "batches", "loss", "increases")
        sums = {key: torch.tensor(values, dtype=torch.float64) for key, values in data["sums"].items()}
        return cls(**{n: data[n] for n in names}, sums=sums, survey=Survey.from_dict(data["survey"]))


def identity(model: Any, loss_fn: Any) -> str:
    """Digest of a model's parameters (names, shapes, a sample of their values) and of its loss's name."""
    digest = hashlib.sha256(getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__).encode())
    for name, parameter in model.named_parameters() if isinstance(model, torch.nn.Module) else ():
        digest.update(repr((name, tuple(parameter.shape), parameter.dtype)).encode())
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64]
        digest.update(repr(sample.float().cpu().tolist()).encode())
    return digest.hexdigest()


def _partial(path: str) -> str:
    return f"{path}.partial"

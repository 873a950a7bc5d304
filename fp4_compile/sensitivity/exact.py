"""The yardstick: put one matmul at a time into NVFP4, run the model, and measure. One forward a site and batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4_compile._torch_compat import compile_apart
from fp4_compile.errors import CalibrationError
from fp4_compile.passes.context import Matmul
from fp4_compile.planner.scores import Score, Scores
from fp4_compile.planner.survey import Survey
from fp4_compile.progress import progress
from fp4_compile.sensitivity.batches import call, evaluating
from fp4_compile.sensitivity.capture import SiteRunner, quantized_result

Distance = Callable[[Any, Any, Any], Tensor]
"""(output, output in high precision, batch) -> scalar: a loss's increase, a divergence, 1 - cosine."""


class ChosenSites:
    """A model that runs in eager mode with any set of its matmuls in NVFP4.

    Set ``chosen`` to the keys and call it as the model is called. The numbers are those of the compiled model, up
    to the order of summation.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.chosen: Collection[str] = ()
        self._runner = SiteRunner(self._at_site)
        self._compiled = compile_apart(model, self._runner)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the model, without gradients."""
        with torch.no_grad():
            return self._compiled(*inputs, **keywords)

    @property
    def survey(self) -> Survey:
        """The matmuls met so far."""
        return self._runner.survey

    def _at_site(self, matmul: Matmul, args: tuple[Any, ...], result: Tensor) -> Tensor:
        return quantized_result(matmul, args, result.dtype) if matmul.site.key in self.chosen else result


def exact_scores(
    model: Callable[..., Any],
    batches: Iterable[Any],
    distance: Distance,
    *,
    keys: Collection[str] | None = None,
) -> Scores:
    """Measure every advised site by itself.

    Args:
        model: a module or a function; run in evaluation mode.
        batches: as for `fp4_compile.calibrate`.
        distance: what is measured, averaged over the batches; see `kl_divergence`.
        keys: sites to measure; None for all that the default policy advises.

    Raises:
        CalibrationError: no batches, or a distance that is not finite.
    """
    sites = ChosenSites(model)
    sums: dict[str, float] = {}
    everything = count = 0.0
    with evaluating(model):
        for count, batch in enumerate(batches, 1):
            sites.chosen = ()
            reference = call(sites, batch)
            advised = [entry.key for entry in sites.survey if entry.advised]
            wanted = advised if keys is None else [key for key in advised if key in keys]
            for key in progress(wanted, f"exact scores, batch {count}"):
                sites.chosen = (key,)
                sums[key] = sums.get(key, 0.0) + _finite(distance(call(sites, batch), reference, batch), key)
            sites.chosen = frozenset(advised)
            everything += _finite(distance(call(sites, batch), reference, batch), "all sites")
    if not count:
        raise CalibrationError("there are no batches; exact scores need at least one")
    values = {key: Score(total / count, float("nan")) for key, total in sums.items()}
    return Scores(sites.survey, values, "exact", "loss", int(count), 0.0, everything / count)


def kl_divergence(output: Any, reference: Any, _: Any = None) -> Tensor:
    """KL(reference || output) of logits [..., vocabulary], the mean over all positions, in nats."""
    logits, wanted = (getattr(x, "logits", x).flatten(0, -2).float().log_softmax(-1) for x in (output, reference))
    return F.kl_div(logits, wanted, log_target=True, reduction="batchmean")


def cosine_distance(output: Any, reference: Any, _: Any = None) -> Tensor:
    """1 - cosine of vectors [..., d], the mean over all of them."""
    return 1 - F.cosine_similarity(output.float(), reference.float(), dim=-1).mean()


def _finite(value: Tensor, where: str) -> float:
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise CalibrationError(f"the distance is {number} with {where} in NVFP4; check the batch, or mask its padding")
    return number

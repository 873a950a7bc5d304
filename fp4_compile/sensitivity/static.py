"""Scores without data: the weights' own quantization error, and the place of a matmul in the model.

What a matmul adds to the model's error is the error of its result, times how much of that the model keeps. The
first is known: NVFP4's error on this very weight, measured, and on an activation, taken as that of a Gaussian.
The second is guessed from what the matmul does in its block (`place`) and from depth: the first layers' errors pass
through all others, the last ones' meet nothing that evens them out (arXiv:2509.25149 section 4.1 keeps both ends in
BF16). Such scores rank; they predict no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4_compile import ops
from fp4_compile._torch_compat import compile_apart, outside_fake_mode
from fp4_compile.passes.context import Matmul
from fp4_compile.passes.graph import is_cast, is_view
from fp4_compile.planner.scores import Score, Scores
from fp4_compile.planner.survey import Survey
from fp4_compile.sensitivity.batches import call, evaluating
from fp4_compile.sensitivity.capture import SiteRunner
from fp4_compile.sensitivity.place import places

GAUSSIAN_ERROR = 0.0092
"""Relative squared error of a Gaussian tensor in NVFP4: 0.096 squared."""
ENDS = 1.3
"""How much more an error in the first or the last layers counts than one in the middle; fitted, as `Place` is."""
END_SHARE = 0.05
"""Share of the depth, at each end, that counts more."""


def score_statically(model: Callable[..., Any], batch: Any) -> Scores:
    """Static scores of a whole model; the batch is run once, to capture the graphs.

    Args:
        model: a module or a function.
        batch: a mapping of keywords, a tuple or list of arguments, or the one argument.
    """
    found: list[Scores] = []
    runner = SiteRunner(
        lambda matmul, args, result: result,
        look=lambda survey, matmuls, weights: found.append(static_scores(survey, matmuls, weights)),
    )
    with evaluating(model), torch.no_grad():
        call(compile_apart(model, runner), batch)
    values = {key: score for scores in reversed(found) for key, score in scores.values.items()}
    return Scores(runner.survey, values, "static", "relative")


def static_scores(survey: Survey, matmuls: Sequence[Matmul], weights: Mapping[int, Tensor]) -> Scores:
    """Score the advised sites of a graph.

    Args:
        survey: the graph's matmuls.
        matmuls: the same as nodes of the graph.
        weights: real parameters and buffers, by their position among the Dynamo graph's inputs.
    """
    nodes = {matmul.site.key: matmul for matmul in matmuls}
    errors: dict[str, float] = {}
    depth = max(len(survey) - 1, 1)
    place = places(matmuls[0].node.graph, matmuls) if matmuls else {}
    values = {}
    for i, entry in enumerate(survey):
        if not entry.possible:
            continue
        name = entry.weight or entry.key
        if name not in errors:
            errors[name] = weight_error(nodes[entry.key], weights)
        error = errors[name] + GAUSSIAN_ERROR
        values[entry.key] = Score(error * place[entry.key].value * end_factor(i / depth), error)
    return Scores(survey, values, "static", "relative")


def end_factor(depth: float) -> float:
    """What a site's depth, 0 first and 1 last, makes of its error: `ENDS` at both ends, 1 in the middle."""
    distance = min(depth, 1 - depth)
    return 1 + (ENDS - 1) * max(0.0, 1 - distance / END_SHARE)


def weight_error(matmul: Matmul, weights: Mapping[int, Tensor]) -> float:
    """Relative squared error of the site's weight in NVFP4; a Gaussian's where the right operand is no plain weight."""
    node, transposed = matmul.rhs, matmul.site.op != "conv"
    while node.op == "call_function" and (is_view(node) or is_cast(node)):
        transposed ^= node.target in (torch.ops.aten.permute.default, torch.ops.aten.t.default)
        node = node.all_input_nodes[0]
    weight = weights.get(node.meta.get("fp4_input", -1))
    if weight is None or type(weight) not in (Tensor, torch.nn.Parameter) or weight.dim() < 2 or not weight.numel():
        return GAUSSIAN_ERROR
    with outside_fake_mode(), torch.no_grad():
        matrix = weight.detach().flatten(1) if weight.dim() == 2 or matmul.site.op == "conv" else weight.detach()
        matrix = matrix.mT if transposed else matrix
        return relative_error(matrix)


def relative_error(x: Tensor) -> float:
    """Squared error of a tensor [..., K] in NVFP4, relative to its squared norm; 0 for zeros, inf if not finite."""
    amax = ops.amax(x)
    decoded = ops.dequantize(*ops.quantize(x, amax), amax, x.shape[-1], torch.float32)
    energy = x.float().square().sum(dtype=torch.float64)
    error = (decoded - x.float()).square().sum(dtype=torch.float64)
    return float(error / energy) if energy else 0.0

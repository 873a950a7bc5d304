"""Other ways to choose the sites, for benchmarks/planner.py: position, even spacing, and NVIDIA ModelOpt."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp4_compile.planner.scores import Scores
from fp4_compile.planner.survey import Entry, Survey
from fp4_compile.sensitivity.static import score_statically


def static(model: Any, batch: Any) -> Scores:
    """Our own scores without data, as the compile makes them."""
    return score_statically(model, batch)


def share_of(survey: Survey, choice: frozenset[str]) -> float:
    """Share of the candidates' FLOPs that a choice puts into NVFP4."""
    total = math.fsum(entry.flops for entry in survey if entry.advised)
    return math.fsum(entry.flops for entry in survey if entry.key in choice) / total


def last_in_bf16(survey: Survey, share: float) -> frozenset[str]:
    """All but the last layers (arXiv:2509.25149 section 4.1): leave out from the end while the share allows it."""
    return _leave_out(survey, reversed, share)


def uniform(survey: Survey, share: float) -> frozenset[str]:
    """Leave out sites evenly spread over the depth: in the order of a bit-reversed count."""

    def spread(entries: list[Entry]) -> list[Entry]:
        bits = max(1, (len(entries) - 1).bit_length())
        order = sorted(range(len(entries)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
        return [entries[i] for i in order]

    return _leave_out(survey, spread, share)


def _leave_out(survey: Survey, order: Callable[[list[Entry]], Any], share: float) -> frozenset[str]:
    entries = [entry for entry in survey if entry.advised]
    left = math.fsum(entry.flops for entry in entries) * (1 - share) * (1 + 1e-9)
    chosen = {entry.key for entry in entries}
    for entry in order(entries):
        if entry.flops <= left:
            left -= entry.flops
            chosen.discard(entry.key)
    return frozenset(chosen)


def modelopt(study: Any, survey: Survey, shares: Sequence[float]) -> list[frozenset[str] | None]:
    """What ModelOpt's auto_quantize chooses between NVFP4 and no quantization; Nones if it is not installed.

    Its budget is bits per weight, 4.5 in NVFP4 and 16 otherwise, over all Linear layers: the share becomes that.
    """
    try:
        import modelopt.torch.quantization as mtq
    except ImportError:
        return [None] * len(shares)
    keys = {entry.site.module: entry.key for entry in survey if entry.advised}
    out = [name for name, m in study.model.named_modules() if isinstance(m, torch.nn.Linear) and name not in keys]
    elements = {name: m.weight.numel() for name, m in study.model.named_modules() if isinstance(m, torch.nn.Linear)}
    total, free = sum(elements.values()), sum(elements[name] for name in keys)
    budgets = [16 - 11.5 * share * free / total for share in shares]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, state = mtq.auto_quantize(
            copy.deepcopy(study.model),
            constraints={"effective_bits": budgets[0] + 1e-6},
            quantization_formats=[_nvfp4_on_a_cpu(mtq)],
            data_loader=study.calibration,
            forward_step=lambda m, b: m(**b),
            loss_func=_loss(study),
            num_calib_steps=len(study.calibration),
            num_score_steps=len(study.calibration),
            disabled_layers=[f"*{name}*" for name in out] or None,
        )
    return [_modelopt_choice(state["candidate_stats"], total, bits, keys) for bits in budgets]


def _modelopt_choice(stats: dict[str, Any], total: int, bits: float, keys: dict[str, str]) -> frozenset[str]:
    """What ModelOpt's solver makes of its scores at another budget, with the lower bounds it tries in turn."""
    from modelopt.torch.opt.searcher import LPS

    groups = list(stats.values())
    # Layers that it was told to leave alone cost 16 bits and count.
    most = total * bits / 16 - (total - sum(max(group["costs"]) for group in groups))
    for share in (None, 0.99, 0.90):
        bounds = {"weight": (None if share is None else share * most, most * (1 + 1e-6))}
        costs, scores = [group["costs"] for group in groups], [group["scores"] for group in groups]
        picked, status = LPS("auto_quantize", bounds, {"weight": costs}, scores, "minimize", False)()
        if status == "Optimal":
            break
    chosen = set()
    for group, i in zip(groups, picked, strict=True):
        if group["costs"][i] < max(group["costs"]):
            chosen.update(keys[name] for name in group["module_names"] if name in keys)
    return frozenset(chosen)


def _loss(study: Any) -> Callable[..., Any]:
    if study.loss_fn is not None:
        return study.loss_fn  # type: ignore[no-any-return]
    # Without a loss: a random probe of the output, which is what our own calibration takes.
    generator = torch.Generator().manual_seed(0)
    return lambda output, _: (output * torch.randn(output.shape, generator=generator)).sum()


def _nvfp4_on_a_cpu(mtq: Any) -> Any:
    """ModelOpt's NVFP4 format with its own quantizer class, which runs on a CPU where its kernels do not."""
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import register_quant_backend
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def quantize(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
        amax = getattr(quantizer, "_amax", None)
        amax = x.abs().amax() if amax is None else amax
        packed, scale, second = NVFP4QTensor.quantize(
            x.detach().float(), 16, weights_scaling_factor_2=amax.float() / (6 * 448)
        )
        decoded = packed.dequantize(dtype=torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
        return x + (decoded.to(x.dtype) - x).detach()

    register_quant_backend("cpu_nvfp4", quantize)
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    for entry in config["quant_cfg"]:
        if entry.get("cfg"):
            entry["cfg"]["backend"] = "cpu_nvfp4"
    return config

"""The planner on real models: how well scores rank, what plans cost, what planning costs. Tables, and JSON.

    python benchmarks/planner.py [--quick] [--json PATH]

Models: the sentence encoder all-MiniLM-L6-v2 (distance: 1 - cosine of embeddings) and the language model
SmolLM2-135M (distance: KL of next-token distributions), both in FP32. All methods calibrate on the same batches
and are measured on the same other ones. ``--quick`` leaves out the language model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import cost_model_tables
import minilm
import planner_baselines as baselines
import planner_costs as costs
import torch

from fp4_compile.planner.scores import Scores
from fp4_compile.sensitivity.batches import call
from fp4_compile.sensitivity.calibrated import calibrate
from fp4_compile.sensitivity.exact import ChosenSites, cosine_distance, exact_scores, kl_divergence

SHARES = (0.50, 0.75, 0.90, 1.00)
"""Shares of the candidates' FLOPs in NVFP4."""


class Study:
    """A model, its batches, and what is measured on them."""

    def __init__(self, name: str, model: Any, calibration: list[Any], evaluation: list[Any], exact: list[Any]) -> None:
        self.name, self.model = name, model
        self.calibration, self.evaluation, self.exact = calibration, evaluation, exact
        self.distance: Callable[..., Any] = cosine_distance
        self.loss_fn: Any = None


def encoder(quick: bool) -> Study:
    """The sentence encoder."""
    batches = minilm.batches(minilm.Texts().all, 32)
    half = len(batches) // 2
    rest = batches[half:]
    exact = rest[: 1 if quick else 3]
    return Study("all-MiniLM-L6-v2", minilm.load_encoder(), batches[:half], rest[:2] if quick else rest, exact)


def language_model() -> Study:
    """The language model."""
    import smollm2

    model, tokenizer = smollm2.load()
    study = Study(
        "SmolLM2-135M",
        model,
        smollm2.batches(tokenizer, 8),
        smollm2.batches(tokenizer, 4, skip=8),
        smollm2.batches(tokenizer, 1, skip=8),
    )
    study.distance, study.loss_fn = kl_divergence, smollm2.next_token_loss
    return study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the encoder alone, fewer batches and shapes")
    parser.add_argument("--json", metavar="PATH", help="write the numbers there")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "WHAT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        name, what = arguments.peak
        study = encoder(True) if name == "all-MiniLM-L6-v2" else language_model()
        print(costs.peak(study, what))
        return
    result: dict[str, Any] = {"torch": torch.__version__, "quick": arguments.quick, "models": {}}

    def show(table: str) -> None:
        print(table, flush=True)
        if arguments.json:  # after every part: the whole takes the better part of an hour
            Path(arguments.json).write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")

    result["solver"] = costs.solver(arguments.quick)
    show(costs.solver_table(result["solver"]))
    result["cpu_ranking"] = cost_model_tables.cpu_ranking(arguments.quick)
    show(cost_model_tables.cpu_table(result["cpu_ranking"]))
    result["published"] = cost_model_tables.published()
    show(cost_model_tables.published_table(result["published"]))
    for study in [encoder(arguments.quick)] if arguments.quick else [encoder(False), language_model()]:
        models = result["models"]
        models[study.name] = planned(study, arguments.quick)
        for depth in ("static", "calibrated"):
            result[f"rank_correlation_{depth}"] = min(m["rank_correlation"][depth] for m in models.values())
        result["best_at_every_share"] = all(m["best_at_every_share"] for m in models.values())
        show(model_table(study.name, models[study.name]))


def planned(study: Study, quick: bool) -> dict[str, Any]:
    """Rank correlations, distances at every share, and costs for one model."""
    scores = {
        "calibrated": calibrate(study.model, study.calibration, study.loss_fn),
        "static": baselines.static(study.model, study.calibration[0]),
        "exact": exact_scores(study.model, study.exact, study.distance),
    }
    keys = list(scores["exact"].values)
    losses = {depth: torch.tensor([s.values[key].loss for key in keys]) for depth, s in scores.items()}
    correlation = {d: minilm.spearman(losses[d], losses["exact"]) for d in ("static", "calibrated")}
    result: dict[str, Any] = {
        "sites": len(scores["calibrated"].survey),
        "candidates": len(keys),
        "rank_correlation": correlation,
        "predicted_sum": sum(s.loss for s in scores["calibrated"].values.values()),
        "exact_sum": float(losses["exact"].sum()),
        "everything": scores["exact"].everything,
        "distance": distances(study, scores),
        "cost": costs.calibration(study, quick),
    }
    ours = result["distance"]["ours, calibrated"]
    others = [row for name, row in result["distance"].items() if not name.startswith("ours, cal")]
    result["best_at_every_share"] = all(
        mine[1] <= theirs[1] * (1 + 1e-9) for row in others for mine, theirs in zip(ours, row, strict=True) if theirs
    )
    return result


def distances(study: Study, scores: dict[str, Scores]) -> dict[str, list[tuple[float, float] | None]]:
    """For each method and share: the share it came to, and the distance measured there."""
    calibrated = scores["calibrated"]
    choices: dict[str, list[frozenset[str] | None]] = {
        "ours, calibrated": [ours(calibrated, share, siblings_agree=False) for share in SHARES],
        "ours, calibrated, q/k/v alike": [ours(calibrated, share) for share in SHARES],
        "ours, static": [ours(scores["static"], share, siblings_agree=False) for share in SHARES],
        "uniform": [baselines.uniform(calibrated.survey, share) for share in SHARES],
        "last layers in BF16": [baselines.last_in_bf16(calibrated.survey, share) for share in SHARES],
        "ModelOpt auto_quantize": baselines.modelopt(study, calibrated.survey, SHARES),
    }
    sites = ChosenSites(study.model)
    references = [call(sites, batch) for batch in study.evaluation]
    wanted = dict.fromkeys(choice for row in choices.values() for choice in row if choice is not None)
    measured = {}
    for choice in minilm.progress(list(wanted), "distances"):
        sites.chosen = choice
        found = [study.distance(call(sites, b), r, b) for b, r in zip(study.evaluation, references, strict=True)]
        measured[choice] = (baselines.share_of(calibrated.survey, choice), float(torch.stack(found).mean()))
    return {name: [None if c is None else measured[c] for c in row] for name, row in choices.items()}


def ours(scores: Scores, share: float, siblings_agree: bool = True) -> frozenset[str]:
    """The sites of our plan with so much of the candidates' FLOPs in NVFP4."""
    total = math.fsum(entry.flops for entry in scores.survey)
    candidates = math.fsum(entry.flops for entry in scores.survey if entry.advised)
    budget = min(1.0, 1 - share * candidates / total + 1e-9)
    plan = scores.plan({"bf16_flops": budget}, siblings_agree=siblings_agree)
    return frozenset(d.site.key for d in plan if d.precision.value == "nvfp4")


def model_table(name: str, found: dict[str, Any]) -> str:
    """One model's numbers for people."""
    correlation, cost = found["rank_correlation"], found["cost"]
    unit = "KL, nats" if "SmolLM2" in name else "1 - cosine"
    lines = [
        "",
        f"{name}: {found['candidates']} of {found['sites']} matmuls to decide",
        f"rank correlation with exact: static {correlation['static']:.3f}, calibrated {correlation['calibrated']:.3f}",
        f"calibration, against forward and backward: {cost['time_ratio']:.2f} x the time of a batch "
        f"({cost['time_ratio_with_capture']:.2f} x for {cost['batches']}, capture included), "
        f"{cost['memory_ratio']:.2f} x the peak memory",
        f"{unit + ' at a share of FLOPs in NVFP4 of':<38}" + "".join(f"{share:>12.0%}" for share in SHARES),
    ]
    for method, row in found["distance"].items():
        lines.append(f"{method:<38}" + "".join("           -" if cell is None else f"{cell[1]:>12.5f}" for cell in row))
    lines.append(f"ours, calibrated, is best at every share: {'yes' if found['best_at_every_share'] else 'no'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

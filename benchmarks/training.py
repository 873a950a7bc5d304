"""Training a small hybrid language model in every variant of the recipe: final losses, bytes kept, rounding's mean.

    python benchmarks/training.py [--quick] [--json PATH] [--steps N] [--seeds N]

Each variant trains the model of ``examples/hybrid_lm.py`` from the same seeds on the same batches; all are evaluated
in BF16 on the same held-out text, and compared with BF16 training seed by seed. ``--quick``: three variants, one
seed, few steps, which shows that everything runs and little more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import train_hybrid_lm
import training_memory
from torch import nn

import fp4_compile

LATE = {"late-bf16-forward": {"forward": "bf16"}, "late-bf16": {"forward": "bf16", "backward": "bf16"}}
"""The recipe until `SWITCH`, and then this."""
SWITCH = 0.82
"""Share of the steps after which arXiv:2509.25149 switches (appendix D)."""
PUBLISHED = {
    "bf16": "baseline",
    "nvfp4": "+1 to 1.5 % at 12B (arXiv:2509.25149), +1.6 to 2.9 % at 30-200M (arXiv:2601.22813)",
    "nvfp4-no-sr": "worse",
    "nvfp4-no-rht": "worse",
    "nvfp4-1d-weights": "worse at 12B; better by 0.2 to 0.4 at 30-200M, forward only",
    "nvfp4-all-layers": "diverges at 12B; converges at 30-200M",
    "nvfp4-forward-only": "most of the gap: +1.4 to 2.5 %",
    "nvfp4-backward-only": "+0.3 to 0.45 %",
    "nvfp4-four-over-six": "better by 0.1 to 0.2",
    "mxfp4": "+2.5 % where NVFP4 has 1.5 % (8B)",
    "late-bf16-forward": "1.5 % becomes 0.5 %",
    "late-bf16": "the gap closes",
}


def train(variant: str, seeds: int, steps: int) -> list[float]:
    """Validation losses in BF16, one a seed."""
    losses = []
    for seed in range(seeds):
        run = train_hybrid_lm.Run(steps, seed)
        call = train_hybrid_lm.compiled(run.model, "nvfp4" if variant in LATE else variant)
        if variant in LATE:
            run.train(call, round(SWITCH * steps))
            fp4_compile.switch_precision(call, **LATE[variant])
        run.train(call, steps)
        losses.append(run.validation_loss(run.model))
    return losses


def train_apart(variant: str, seeds: int, steps: int) -> dict[str, Any]:
    """`train` in a process of its own, on one thread: two of them fill two cores."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--variant", variant, "--seeds", str(seeds), "--steps", str(steps)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{variant} failed with exit status {done.returncode}")
    return {"losses": json.loads(done.stdout.splitlines()[-1]), "seconds": time.perf_counter() - start}


def gaps(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Percent above BF16 of the same seed: mean, and half the span of the seeds."""
    base = torch.tensor(found["bf16"]["losses"])
    result = {}
    for name, run in found.items():
        gap = (torch.tensor(run["losses"]) / base - 1) * 100
        result[name] = {"mean": gap.mean().item(), "spread": ((gap.max() - gap.min()) / 2).item()}
    return result


def losses_table(found: dict[str, Any]) -> str:
    """One line a variant."""
    lines = [f"{'variant':22} {'validation':>10} {'to BF16, %':>15}   published trend"]
    for name, gap in gaps(found).items():
        loss = sum(found[name]["losses"]) / len(found[name]["losses"])
        lines.append(f"{name:22} {loss:10.4f} {gap['mean']:+7.2f} ± {gap['spread']:5.2f}   {PUBLISHED[name]}")
    return "\n".join(lines)


def rounding(quick: bool) -> dict[int, dict[str, float]]:
    """Mean of a layer's weight gradients over many seeds: its distance from exact ones, and the slope on them.

    ``bf16``: the gradient without any quantization; the activation's, which is to nearest, stays. ``rounded``: the
    same with the activation as quantized, which leaves the gradient's stochastic rounding alone.
    """
    ops = torch.ops.fp4
    torch.manual_seed(0)
    layer = nn.Linear(128, 96, bias=False).bfloat16()
    x, g = torch.randn(256, 128).bfloat16(), torch.randn(256, 96).bfloat16()
    spread = ops.hadamard(x.t().contiguous(), 16)
    amax = ops.amax(spread)
    kept = ops.dequantize(*ops.quantize(spread, amax), amax, 256, torch.float32)
    exact = {"bf16": g.float().t() @ x.float(), "rounded": ops.hadamard(g.t().contiguous(), 16).float() @ kept.t()}
    call = torch.compile(layer, backend="nvfp4", options={"training": {"bf16_share": 0}})
    total, found = torch.zeros(96, 128), {}
    for count in range(1, (64 if quick else 1024) + 1):
        layer.zero_grad()
        call(x).backward(g)
        total += layer.weight.grad.float()
        if count & (count - 1) == 0 and count.bit_length() % 2:
            mean, row = total / count, {}
            for name, wanted in exact.items():
                row[f"{name}_error"] = ((mean - wanted).norm() / wanted.norm()).item()
                row[f"{name}_slope"] = ((mean * wanted).sum() / wanted.square().sum()).item()
            found[count] = row
    return found


def rounding_table(found: dict[int, dict[str, float]]) -> str:
    """One line a number of seeds."""
    lines = [
        "mean of a layer's weight gradients over seeds, relative to the exact gradient, and to that of x as quantized",
        "seeds   error    slope |  error    slope",
    ]
    for seeds, row in found.items():
        exact, rounded = (f"{row[f'{name}_error']:.4f}  {row[f'{name}_slope']:.4f}" for name in ("bf16", "rounded"))
        lines.append(f"{seeds:5}  {exact} | {rounded}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three variants, one seed, few steps")
    parser.add_argument("--json", metavar="PATH", help="write the numbers there")
    parser.add_argument("--steps", type=int, help="steps of a run (default 240; quick 10)")
    parser.add_argument("--seeds", type=int, help="seeds a variant (default 3; quick 1)")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    steps, seeds = given.steps or (10 if given.quick else 240), given.seeds or (1 if given.quick else 3)
    if given.variant:
        print(json.dumps(train(given.variant, seeds, steps)))
        return
    result: dict[str, Any] = {"torch": torch.__version__, "steps": steps, "seeds": seeds, "runs": {}}

    def save() -> None:
        if given.json:  # after each part: the whole takes most of an hour
            Path(given.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    result["saved"] = training_memory.measure()
    result["saved_bytes_ratio"] = result["saved"]["linear_inputs"]["ratio"]
    print(training_memory.table(result["saved"]), "\n", flush=True)
    result["rounding"] = rounding(given.quick)
    print(rounding_table(result["rounding"]), "\n", flush=True)
    save()
    variants = ["bf16", "nvfp4", "mxfp4"] if given.quick else list(PUBLISHED)
    with ThreadPoolExecutor(2) as pool:
        pending = {pool.submit(train_apart, name, seeds, steps): name for name in variants}
        for i, done in enumerate(as_completed(pending), 1):
            name = pending[done]
            result["runs"][name] = done.result()
            print(f"[{i}/{len(variants)}] {name}: {result['runs'][name]}", file=sys.stderr, flush=True)
            save()
    result["runs"] = {name: result["runs"][name] for name in variants}
    result["gaps_percent"] = gaps(result["runs"])
    for name in ("nvfp4", "mxfp4"):
        result[f"{name}_gap_percent"] = result["gaps_percent"][name]["mean"]
    print(losses_table(result["runs"]), flush=True)
    save()


if __name__ == "__main__":
    main()

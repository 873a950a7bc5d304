"""Train a small hybrid Mamba-2/attention language model in NVFP4, or in something else to compare with.

    python examples/train_hybrid_lm.py [--precision nvfp4] [--steps 240] [--out run]

The model code knows nothing of precisions: the recipe is chosen by options of ``torch.compile``. Run the command
again after it was stopped, and it goes on from its last checkpoint with the numbers it would have had. ``run/``
receives the checkpoint, the losses, and a curve of all precisions that were trained into the same folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrid_lm
import torch

RECIPES: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "nvfp4": {},
    "nvfp4-forward-only": {"backward": "bf16"},
    "nvfp4-backward-only": {"forward": "bf16"},
    "nvfp4-no-sr": {"stochastic_rounding": False},
    "nvfp4-no-rht": {"hadamard": 0},
    "nvfp4-1d-weights": {"weight_block": "1x16"},
    "nvfp4-all-layers": {"bf16_share": 0.0},
    "nvfp4-four-over-six": {},
    "mxfp4": {"forward": "mxfp4", "backward": "mxfp4"},
}
"""Precisions by name, as ``options={"training": ...}``; None: Inductor alone."""
ROWS = 16
EVERY = 50
"""Steps between checkpoints."""


def compiled(model: torch.nn.Module, precision: str) -> Callable[..., torch.Tensor]:
    """The model in a precision: the one line that differs."""
    recipe = RECIPES[precision]
    if recipe is None:
        return torch.compile(model)
    fine = "all" if precision == "nvfp4-four-over-six" else "none"
    return torch.compile(model, backend="nvfp4", options={"training": recipe, "four_over_six": fine})


class Run:
    """One training run: everything that a checkpoint holds."""

    def __init__(self, steps: int, seed: int, rate: float = 4e-3) -> None:
        torch.manual_seed(seed)
        self.steps, self.seed, self.rate, self.done = steps, seed, rate, 0
        self.model = hybrid_lm.HybridLM()
        self.text = hybrid_lm.Text()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.losses: list[float] = []

    def train(self, call: Callable[..., torch.Tensor], until: int) -> None:
        """Go on to a step: warm up, hold, decay to a hundredth over the last fifth."""
        while self.done < until:
            warm, left = (self.done + 1) / (0.05 * self.steps), (self.steps - self.done) / (0.2 * self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, warm, max(left, 0.01))
            ids, targets = self.text.batch(self.done, ROWS, self.seed)
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(ids, targets)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.losses.append(loss.item())
            if not math.isfinite(self.losses[-1]):
                raise FloatingPointError(f"the loss is {self.losses[-1]} at step {self.done}")
            self.done += 1

    def validation_loss(self, call: Callable[..., torch.Tensor]) -> float:
        """Mean cross-entropy of held-out text, nats a byte, in the precision of ``call``."""
        batches = self.text.validation(ROWS, 24)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return sum(call(*batch).item() for batch in batches) / len(batches)

    def save(self, path: Path) -> None:
        """Write a checkpoint, all or nothing."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "losses": self.losses,
            "settings": [self.steps, self.seed, self.rate],
        }
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def resume(self, path: Path) -> bool:
        """Take up a checkpoint of the same settings; False if there is none."""
        if not path.exists():
            return False
        state = torch.load(path)
        if state["settings"] != [self.steps, self.seed, self.rate]:
            sys.exit(f"{path} is of a run with other settings {state['settings']}; give another --out, or remove it")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.losses = state["losses"]
        self.done = len(self.losses)
        return True


def main() -> None:
    """Train, with checkpoints, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precision", choices=RECIPES, default="nvfp4")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder for checkpoints, losses and the curve")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.steps, arguments.seed)
    checkpoint = arguments.out / f"{arguments.precision}.pt"
    if run.resume(checkpoint):
        print(f"going on from step {run.done} of {checkpoint}")
    call = compiled(run.model, arguments.precision)
    start, first = time.perf_counter(), run.done
    while run.done < run.steps:
        run.train(call, min(run.steps, run.done + 10))
        if run.done % EVERY == 0 or run.done == run.steps:
            run.save(checkpoint)
        pace = (time.perf_counter() - start) / (run.done - first)
        print(
            f"\r{arguments.precision}: step {run.done}/{run.steps}, loss {run.losses[-1]:.3f}, {pace:.2f} s a step",
            end="",
            flush=True,
        )
    loss = run.validation_loss(call)
    print(f"\nvalidation loss {loss:.4f} nats a byte")
    results = arguments.out / f"{arguments.precision}.json"
    results.write_text(json.dumps({"losses": run.losses, "validation": loss}) + "\n", encoding="utf-8")
    draw(arguments.out)


def draw(folder: Path) -> None:
    """The loss curves of every precision in the folder, smoothed over 20 steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no curve: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        smooth = torch.tensor(found["losses"]).unfold(0, min(20, len(found["losses"])), 1).mean(-1)
        axes.plot(smooth, label=f"{file.stem}: {found['validation']:.4f}", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a byte")
    axes.legend(title="validation loss", frameon=False)
    figure.savefig(folder / "losses.png", dpi=120)
    print(f"curve: {folder / 'losses.png'}")


if __name__ == "__main__":
    main()

"""What planning costs, for benchmarks/planner.py: calibration's time and memory, and the solver."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import minilm

from fp4_compile.assignment import Item, Problem, Shared, front, solve
from fp4_compile.sensitivity.batches import call
from fp4_compile.sensitivity.calibrated import calibrate


def calibration(study: Any, quick: bool) -> dict[str, float]:
    """Calibration against a plain forward and backward over the same batches: time here, memory in new processes.

    ``time_ratio`` is for the batches after the first, ``time_ratio_with_capture`` for all of them: the first call
    also captures the model's graphs, which takes the same seconds however many batches follow.
    """
    first, batches = study.calibration[:1], study.calibration[: 3 if quick else 5]
    calls = {
        "plain": lambda: train(study, batches),
        "first": lambda: calibrate(study.model, first, study.loss_fn),
        "calibration": lambda: calibrate(study.model, batches, study.loss_fn),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 if quick else 3):
        for name, run in calls.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    times = {name: median(values) for name, values in seconds.items()}
    plain_rest = times["plain"] * (len(batches) - 1) / len(batches)
    peaks = {name: in_new_process(study.name, name) for name in ("plain", "calibration")}
    return {
        **{f"{name}_seconds": value for name, value in times.items()},
        "batches": len(batches),
        "time_ratio": (times["calibration"] - times["first"]) / plain_rest,
        "time_ratio_with_capture": times["calibration"] / times["plain"],
        **{f"{name}_peak_mib": value for name, value in peaks.items()},
        "memory_ratio": peaks["calibration"] / peaks["plain"],
    }


def train(study: Any, batches: list[Any]) -> None:
    """Forward and backward in eager mode, with gradients of all weights."""
    for batch in batches:
        output = call(study.model, batch)
        loss = output.square().sum() if study.loss_fn is None else study.loss_fn(output, batch)
        loss.backward()
        study.model.zero_grad(set_to_none=True)


def in_new_process(name: str, what: str) -> float:
    """`peak` where nothing else ran before."""
    script = Path(__file__).with_name("planner.py")
    command = [sys.executable, str(script), "--peak", name, what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the peak memory of {what} cannot be measured:\n{done.stderr[-4000:]}")
    return float(done.stdout.split()[-1])


def peak(study: Any, what: str) -> float:
    """Largest resident memory, MiB, while two batches are worked on, the model included."""
    batches = study.calibration[:2]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of loading the model
    train(study, batches) if what == "plain" else calibrate(study.model, batches, study.loss_fn)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def solver(quick: bool) -> dict[str, Any]:
    """The solver against brute force on small problems, and its time on a large one."""
    tried = 100 if quick else 1000
    equal = sum(equals_brute_force(random.Random(seed)) for seed in minilm.progress(range(tried), "brute force"))
    large = random_problem(random.Random(0), items=10_000, shared=4_000)
    start = time.perf_counter()
    points = front(large, "seconds", "loss")
    front_seconds = time.perf_counter() - start
    start = time.perf_counter()
    half = 0.5 * min(point.totals["seconds"] for point in points)
    solution = solve(large, minimize="loss", subject_to="seconds", at_most=half)
    return {
        "instances": tried,
        "equal_to_brute_force": equal,
        "sites": len(large.items),
        "front_seconds": front_seconds,
        "front_points": len(points),
        "solve_seconds": time.perf_counter() - start,
        "gap": solution.gap,
    }


def random_problem(rng: random.Random, items: int, shared: int) -> Problem:
    """Sites that save time, cost error, and share quantizers."""
    quantizers = tuple(Shared(f"q{i}", {"seconds": rng.uniform(0, 0.5)}) for i in range(shared))
    return Problem(
        tuple(
            Item(
                f"i{i:05}",
                {"loss": 10 ** rng.uniform(-6, -2), "seconds": -rng.uniform(0, 1)},
                frozenset({f"q{rng.randrange(shared)}"} if shared else ()),
            )
            for i in range(items)
        ),
        quantizers,
    )


def equals_brute_force(rng: random.Random) -> bool:
    """Whether the solver's choice is as good as the best of all."""
    problem = random_problem(rng, rng.randint(1, 10), rng.randint(1, 4))
    totals = [_totals(problem, c) for c in itertools.product((False, True), repeat=len(problem.items))]
    limit = rng.uniform(min(seconds for _, seconds in totals), 0)
    best = min(loss for loss, seconds in totals if seconds <= limit)
    found = solve(problem, minimize="loss", subject_to="seconds", at_most=limit)
    return abs(found.totals.get("loss", 0.0) - best) <= 1e-12


def _totals(problem: Problem, choice: tuple[bool, ...]) -> tuple[float, float]:
    chosen = [item for item, taken in zip(problem.items, choice, strict=True) if taken]
    needed = set().union(*(item.needs for item in chosen)) if chosen else set()
    seconds = sum(item.change["seconds"] for item in chosen)
    seconds += sum(s.change["seconds"] for s in problem.shared if s.key in needed)
    return sum(item.change["loss"] for item in chosen), seconds


def solver_table(found: dict[str, Any]) -> str:
    """The solver's numbers for people."""
    return (
        f"solver: {found['equal_to_brute_force']} of {found['instances']} random problems equal brute force; "
        f"{found['sites']} sites: front of {found['front_points']} points {found['front_seconds']:.1f} s, "
        f"one budget {found['solve_seconds']:.1f} s, gap {found['gap']:.1e}"
    )

"""NVFP4 against Inductor on a trained sentence encoder: accuracy, first compile, warm calls. One table.

    python benchmarks/encoder.py [--quick] [--json PATH]

A first compile is timed from torch.compile to the first result, in a new process with an empty Inductor
cache; torch and the model are loaded before, Inductor is not. The backends take turns. ``compile_ratio`` is
the ratio of the medians for the BF16 model. What any first compile spends on starting Inductor and the C++
compiler is timed with ``x + 1``; ``compile_ratio_without_startup`` leaves it out. Warm calls take turns in
one process; ``warm_ratio`` is the ratio of the medians at the worst batch size. Both run the same BF16 model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import minilm
import torch

import fp4_compile

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = {1: 40, 8: 20, 64: 10}
"""Batch sizes, and how often each is called."""
COMPILE_BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one compile each, BF16 model; batch 64 only")
    parser.add_argument("--json", metavar="PATH", help="write the numbers there")
    parser.add_argument("--first-compile", nargs=2, metavar=("BACKEND", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_compile:
        print(first_compile(*arguments.first_compile))
        return
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "fp4_compile": fp4_compile.__version__,
        "threads": torch.get_num_threads(),
        "quick": arguments.quick,
    }
    result |= compile_times(arguments.quick)
    result |= accuracy_and_warm_calls({64: 5} if arguments.quick else ROUNDS)
    print(table(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compile_times(quick: bool) -> dict[str, Any]:
    """Seconds of first compiles, and their ratios."""
    kinds = [f"{backend} {dtype}" for dtype in DTYPES for backend in ("nvfp4", "inductor")] + ["startup fp32"]
    order = ["nvfp4 bf16", "inductor bf16"] if quick else kinds * 3
    seconds: dict[str, list[float]] = {kind: [] for kind in order}
    for kind in minilm.progress(order, "first compiles"):
        seconds[kind].append(in_new_process(*kind.split()))
    middle = {kind: median(values) for kind, values in seconds.items()}
    result: dict[str, Any] = {"compile_s": seconds}
    for dtype in DTYPES:
        if f"nvfp4 {dtype}" not in middle:
            continue
        ours, theirs = middle[f"nvfp4 {dtype}"], middle[f"inductor {dtype}"]
        suffix = "" if dtype == "bf16" else f"_{dtype}"
        result[f"compile_ratio{suffix}"] = ours / theirs
        if "startup fp32" in middle:
            startup = middle["startup fp32"]
            result[f"compile_ratio_without_startup{suffix}"] = (ours - startup) / (theirs - startup)
    return result


def in_new_process(backend: str, dtype: str) -> float:
    """`first_compile` where nothing is cached."""
    command = [sys.executable, __file__, "--first-compile", backend, dtype]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling with {backend} in {dtype} failed:\n{done.stderr[-4000:]}")
    return float(done.stdout.split()[-1])


def first_compile(backend: str, dtype: str) -> float:
    """Seconds from torch.compile to the first result; of a trivial function if the backend is ``startup``."""
    model = minilm.load_encoder(DTYPES[dtype])
    batch = minilm.batches(first_texts(COMPILE_BATCH), COMPILE_BATCH)[0]
    with torch.no_grad():
        model(**batch)
        start = time.perf_counter()
        if backend == "startup":
            torch.compile(lambda x: x + 1)(torch.zeros(64))
        else:
            torch.compile(model, backend=backend)(**batch)
        return time.perf_counter() - start


def accuracy_and_warm_calls(rounds: dict[int, int]) -> dict[str, Any]:
    """Embeddings against FP32's, at the largest batch, and milliseconds of warm calls at each batch size."""
    texts = minilm.Texts()
    model = minilm.load_encoder(torch.bfloat16)
    largest = max(rounds)
    inputs = minilm.batches(texts.all, largest)
    with tempfile.TemporaryDirectory() as dump:
        ours = torch.compile(model, backend="nvfp4", dynamic=False, options={"dump": dump})
        theirs = torch.compile(model, dynamic=False)
        exact = minilm.embed(minilm.load_encoder(), inputs, "embed, FP32")
        nvfp4 = texts.compare(minilm.embed(ours, inputs, "embed, NVFP4"), exact)
        bf16 = texts.compare(minilm.embed(theirs, inputs, "embed, BF16"), exact)
        plan = fp4_compile.Plan.load(Path(dump, "graph_000", "plan.json"))
        warm = {}
        for size in minilm.progress(sorted(rounds, reverse=True), "warm calls"):
            batch = minilm.batches(first_texts(size), size)[0]
            calls = {"nvfp4": partial(ours, **batch), "inductor": partial(theirs, **batch)}
            warm[size] = summary(minilm.warm_ms(calls, rounds[size]))
    return {
        "fp4_sites": len(plan.select(fp4_compile.Precision.NVFP4)),
        "sites": len(plan),
        "texts": len(texts.all),
        "tokens": minilm.TOKENS,
        **nvfp4,
        "inductor_bf16": bf16,
        "right_fp32": texts.compare(exact, exact)["top1_right"],
        "warm_ratio": max(times["ratio"] for times in warm.values()),
        "warm": warm,
    }


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians, best, and the ratio of the medians."""
    result = {f"{name}_median_ms": median(values) for name, values in times.items()}
    result |= {f"{name}_min_ms": min(values) for name, values in times.items()}
    return {**result, "ratio": result["nvfp4_median_ms"] / result["inductor_median_ms"]}


def first_texts(count: int) -> list[str]:
    """So many of the texts."""
    return minilm.Texts().all[:count]


def table(result: dict[str, Any]) -> str:
    """The numbers for people."""
    rows = [("", "NVFP4", "Inductor", "ratio")]
    seconds = {kind: median(values) for kind, values in result["compile_s"].items()}
    startup = seconds.get("startup fp32")
    for dtype in DTYPES:
        if f"nvfp4 {dtype}" in seconds:
            ours, theirs = seconds[f"nvfp4 {dtype}"], seconds[f"inductor {dtype}"]
            rows.append(timed(f"first compile, {dtype} model, s", ours, theirs))
            if startup is not None:
                label = f"  less {startup:.1f} s for starting Inductor"
                rows.append(timed(label, ours - startup, theirs - startup))
    for size, times in result["warm"].items():
        label = f"warm call, bf16 model, {size} x {result['tokens']} tokens, ms"
        rows.append(timed(label, times["nvfp4_median_ms"], times["inductor_median_ms"]))
    bf16 = result["inductor_bf16"]
    for key, label in (
        ("cosine_mean", "cosine to FP32's embedding, mean"),
        ("cosine_min", "cosine to FP32's embedding, least"),
        ("spearman", "rank correlation of pair similarities with FP32's"),
        ("top1_agreement", "top-1 passage is FP32's"),
        ("top1_right", f"top-1 passage is the right one (FP32: {result['right_fp32']:.4f})"),
    ):
        rows.append((label, f"{result[key]:.4f}", f"{bf16[key]:.4f}", ""))
    lines = [f"{label:<52}{ours:>12}{theirs:>12}{ratio:>10}".rstrip() for label, ours, theirs, ratio in rows]
    head = (
        f"all-MiniLM-L6-v2 on a CPU, {result['threads']} threads, torch {result['torch']}: "
        f"{result['fp4_sites']} of {result['sites']} matmuls in NVFP4, {result['texts']} texts"
    )
    return "\n".join([head, *lines])


def timed(label: str, ours: float, theirs: float) -> tuple[str, str, str, str]:
    """A row of the table with a ratio."""
    return label, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"


if __name__ == "__main__":
    main()

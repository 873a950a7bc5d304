"""How well the cost model predicts: on this CPU against the clock, on GPUs against published measurements.

    python benchmarks/cost_model_tables.py [--quick] [--json PATH]

On the CPU, `measure` fits its figures on other shapes, then 30 GEMMs are predicted and timed in turn; Kendall's
tau-b says how alike the two rankings are. For GPUs every published time, rate or ratio of an NVFP4 or BF16 GEMM or
an NVFP4 quantizer that names device and shape stands beside the prediction. The model predicts what a good kernel
takes, so errors are also summed up over the fastest published implementation of each shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from math import prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fp4_compile.ops as ops
from fp4_compile import cost_model

CPU_SHAPES = (
    *((m, 768, 768) for m in (1, 8, 64, 256)),
    *((m, 3072, 768) for m in (1, 16, 128, 512)),
    *((m, 768, 3072) for m in (1, 16, 128, 512)),
    *((m, 2048, 2048) for m in (1, 4, 32, 256)),
    *((m, 384, 384) for m in (16, 128, 1024)),
    *((m, 1536, 384) for m in (32, 256, 2048)),
    *((m, 128, 1024) for m in (64, 512, 4096)),
    *((m, 4096, 1024) for m in (2, 48, 192)),
    (640, 640, 640),
    (1280, 1280, 1280),
)
"""(M, N, K); none is among those that `measure` fits."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Published:
    """A measurement that somebody published. ``shape`` is (M, N, K) of a GEMM, (rows, K) of a quantizer."""

    device: str
    kind: str
    shape: Shape
    value: float
    unit: str
    by: str
    source: str


def rows_of(device: str, kind: str, unit: str, source: str, *rows: tuple[Shape, dict[str, float]]) -> list[Published]:
    return [Published(device, kind, s, v, unit, by, source) for s, values in rows for by, v in values.items()]


GLUON = "triton python/examples/gluon"
DYNAMIC = {1024: 0.46, 2048: 0.76, 4096: 1.37, 8192: 1.97, 16384: 2.77}
STATIC = {1024: 0.55, 2048: 0.95, 4096: 1.69, 8192: 2.29, 16384: 2.98}
PUBLISHED = [
    *rows_of(
        *("sm_100", "nvfp4 gemm", "TFLOP/s", "triton#9697"),
        ((8192, 8192, 8192), {"Gluon, 1 CTA": 4782, "Gluon, 2 CTAs": 5730, "cuBLAS": 5590}),
        ((16384, 16384, 16384), {"Gluon, 1 CTA": 4837, "Gluon, 2 CTAs": 5562, "cuBLAS": 4314}),
        ((32768, 32768, 32768), {"Gluon, 1 CTA": 4723, "Gluon, 2 CTAs": 5362, "cuBLAS": 4933}),
    ),
    *rows_of(
        *("sm_100", "nvfp4 gemm", "TFLOP/s", "vllm#42235"),
        ((1, 7168, 2048), {"CuTe-DSL": 7.75, "CUTLASS": 7.59, "TRT-LLM": 8.87}),
        ((2, 7168, 2048), {"CuTe-DSL": 15.96, "CUTLASS": 13.99, "TRT-LLM": 16.72}),
        ((4, 7168, 2048), {"CuTe-DSL": 30.94, "CUTLASS": 28.99, "TRT-LLM": 33.14}),
        ((8, 7168, 2048), {"CuTe-DSL": 72.41, "CUTLASS": 60.67, "TRT-LLM": 70.36}),
        ((16, 7168, 2048), {"CuTe-DSL": 144.98, "CUTLASS": 120.89, "TRT-LLM": 130.30}),
        ((32, 7168, 2048), {"CuTe-DSL": 290.41}),
    ),
    *rows_of(
        *("sm_100", "bf16 gemm", "TFLOP/s", "vllm#20646"),
        ((1, 6144, 4096), {"cuBLAS": 5.924}),
        ((16, 6144, 4096), {"cuBLAS": 94.81}),
        ((64, 6144, 4096), {"cuBLAS": 402.5}),
        ((128, 6144, 4096), {"cuBLAS": 729.1}),
        ((256, 6144, 4096), {"cuBLAS": 1127}),
        ((512, 6144, 4096), {"cuBLAS": 1284}),
        ((1024, 6144, 4096), {"cuBLAS": 1326}),
        ((2048, 6144, 4096), {"cuBLAS": 1355}),
        ((4096, 6144, 4096), {"cuBLAS": 1365}),
        ((8192, 6144, 4096), {"cuBLAS": 1421}),
        ((16384, 6144, 4096), {"cuBLAS": 1360}),
        ((1, 4096, 4096), {"cuBLAS": 2.743}),
    ),
    *rows_of(
        *("sm_100", "nvfp4 gemm", "TFLOP/s", "vllm#20646"),
        ((1, 6144, 4096), {"CUTLASS, untuned": 4.439}),
        ((16, 6144, 4096), {"CUTLASS, untuned": 71.16}),
        ((64, 6144, 4096), {"CUTLASS, untuned": 282.0}),
        ((128, 6144, 4096), {"CUTLASS, untuned": 549.5}),
        ((256, 6144, 4096), {"CUTLASS, untuned": 1102}),
        ((512, 6144, 4096), {"CUTLASS, untuned": 2188}),
        ((1024, 6144, 4096), {"CUTLASS, untuned": 2895}),
        ((2048, 6144, 4096), {"CUTLASS, untuned": 3411}),
        ((4096, 6144, 4096), {"CUTLASS, untuned": 3646}),
        ((8192, 6144, 4096), {"CUTLASS, untuned": 3779}),
        ((16384, 6144, 4096), {"CUTLASS, untuned": 3904}),
        ((1, 4096, 4096), {"CUTLASS, untuned": 2.960}),
    ),
    *rows_of(
        *("sm_100", "nvfp4 gemm, one-pass quantizer", "TFLOP/s", "vllm#20646"),
        ((1, 6144, 4096), {"CUTLASS, untuned": 3.738}),
        ((128, 6144, 4096), {"CUTLASS, untuned": 454.2}),
        ((1024, 6144, 4096), {"CUTLASS, untuned": 2221}),
        ((8192, 6144, 4096), {"CUTLASS, untuned": 3025}),
        ((16384, 6144, 4096), {"CUTLASS, untuned": 3039}),
    ),
    *rows_of(
        *("sm_100", "nvfp4 gemm", "TFLOP/s", "flashinfer#1979"),
        ((1024, 7168, 4608), {"cuDNN": 2976, "CUTLASS": 3370, "TRT-LLM": 2187}),
    ),
    *rows_of(*("sm_100", "nvfp4 gemm", "TB/s of weight", "flashinfer#1732"), ((1, 8192, 8192), {"CUTLASS": 1.78})),
    *rows_of(*("sm_100", "bf16 gemm", "TB/s of weight", "flashinfer#1732"), ((1, 8192, 8192), {"cuBLAS": 5.5})),
    *rows_of(
        *("sm_100", "nvfp4 gemm", "us", "helion#3046"),
        ((1, 4096, 4096), {"Helion": 5.1, "torch.compile": 23.8, "CUTLASS": 9.4}),
        ((1, 8192, 8192), {"Helion": 14.3, "torch.compile": 158.6, "CUTLASS": 19.9}),
        ((1, 8192, 28672), {"Helion": 38.5, "torch.compile": 522, "CUTLASS": 59.1}),
        ((1, 28672, 4096), {"Helion": 23.4, "torch.compile": 181, "CUTLASS": 24.7}),
    ),
    *rows_of(*("sm_100", "nvfp4 gemm", "us", "helion#2417"), ((1, 8192, 28672), {"CUDA": 24.2})),
    *rows_of(
        *("sm_100", "w4a16 gemm", "us", "helion#3046"),
        ((1, 4096, 4096), {"Helion": 6.4, "torch.compile": 18.6, "CUTLASS": 12.7}),
        ((1, 8192, 8192), {"Helion": 17.2, "CUTLASS": 20.6, "CUDA": 18.8}),
    ),
    *rows_of(
        *("sm_103", "nvfp4 gemm", "TFLOP/s", GLUON),
        ((8192, 8192, 8192), {"K=64": 6410, "K=96 mixed": 7030, "K=96": 7270}),
        ((16384, 16384, 16384), {"K=64": 6640, "K=96 mixed": 7230, "K=96": 7920}),
        ((32768, 32768, 32768), {"K=64": 6710, "K=96 mixed": 7240, "K=96": 7460}),
        ((256, 16384, 16128), {"M=256 tile": 4110}),
        ((128, 16384, 16128), {"M=256 tile": 2120}),
    ),
    *rows_of(
        *("sm_120", "nvfp4 gemm", "TFLOP/s", "vllm#38338"),
        ((4096, 10240, 8192), {"Triton": 858}),
        ((4096, 8192, 8192), {"Triton": 874}),
        ((4096, 28672, 8192), {"Triton": 871}),
        ((4096, 8192, 28672), {"Triton": 845}),
        ((4096, 10240, 5120), {"Triton": 815}),
        ((4096, 27648, 5120), {"Triton": 843}),
        ((4096, 6144, 4096), {"Triton": 801}),
        ((4096, 28672, 4096), {"Triton": 851}),
        ((4096, 4096, 4096), {"Triton": 758}),
    ),
    *rows_of(
        *("sm_120", "bf16 gemm", "TFLOP/s", "vllm#38338"),
        ((4096, 10240, 8192), {"cuBLAS": 233}),
        ((4096, 8192, 8192), {"cuBLAS": 213}),
        ((4096, 28672, 8192), {"cuBLAS": 233}),
        ((4096, 8192, 28672), {"cuBLAS": 215}),
        ((4096, 10240, 5120), {"cuBLAS": 229}),
        ((4096, 27648, 5120), {"cuBLAS": 235}),
        ((4096, 6144, 4096), {"cuBLAS": 221}),
        ((4096, 28672, 4096), {"cuBLAS": 233}),
        ((4096, 4096, 4096), {"cuBLAS": 185}),
    ),
    *rows_of(
        *("sm_120", "gemm speedup", "x", "vllm#38338"),
        ((1, 4096, 4096), {"Triton": 0.44}),
        ((1, 6144, 4096), {"Triton": 0.45}),
        ((1, 8192, 8192), {"Triton": 2.0}),
    ),
    *rows_of(
        *("sm_120-pro6000", "nvfp4 gemm", "TFLOP/s", "NVIDIA/cutlass#3272"),
        ((8192, 8192, 8192), {"CuTe-DSL": 1629}),
    ),
    *rows_of(
        *("sm_100", "quantizer, one pass", "us", "pytorch/pytorch#167098"),
        ((16384, 16384), {"Inductor": 168, "MSLK": 173}),
    ),
    *rows_of(*("sm_100", "quantizer, one pass", "us", "vllm#32171"), ((1, 4096), {"FlashInfer": 1.42})),
    *rows_of(
        *("sm_100", "quantizer, one pass", "TB/s", "pytorch/MSLK#428 (MXFP4)"),
        ((16384, 5120), {"MSLK": 0.46 * 8}),
    ),
    *rows_of(*("sm_120-pro6000", "quantizer, one pass", "us", "vllm#48548"), ((8192, 8192), {"vLLM": 135})),
    *rows_of(
        *("sm_100", "relu, linear: speedup, dynamic scale", "x", "torchao README"),
        *(((n, n, n), {"torchao": x}) for n, x in DYNAMIC.items()),
    ),
    *rows_of(
        *("sm_100", "relu, linear: speedup, static scale", "x", "torchao README"),
        *(((n, n, n), {"torchao": x}) for n, x in STATIC.items()),
    ),
]
"""Left out: figures without a shape or a device, speed-of-light targets, MXFP8, and serving throughputs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="rougher timings on the CPU")
    parser.add_argument("--json", metavar="PATH", help="write the numbers there")
    arguments = parser.parse_args()
    result = {"cpu": cpu_ranking(arguments.quick), "published": published()}
    print(cpu_table(result["cpu"]), published_table(result["published"]), sep="\n\n")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def cpu_ranking(quick: bool = False) -> dict[str, Any]:
    """Predicted and measured milliseconds of `CPU_SHAPES`, in BF16 and in emulated NVFP4, and Kendall's tau-b."""
    device = cost_model.measure(quick=quick)
    shapes = []
    for m, n, k in CPU_SHAPES:
        predicted = cost_model.evaluate(device, 1, m, n, k)
        a, b = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16)
        operands = [part for x in (a, b) for part in quantized(x)]
        bf16 = milliseconds(lambda a=a, b=b: torch.nn.functional.linear(a, b), quick)
        nvfp4 = milliseconds(lambda operands=operands: ops.scaled_mm(*operands, None, torch.bfloat16), quick)
        shapes.append(
            {
                "shape": (m, n, k),
                "bf16": (1e3 * predicted.bf16, bf16),
                "nvfp4": (1e3 * predicted.gemm, nvfp4),
            }
        )
    tau = {f"tau_{p}": kendall_tau([s[p] for s in shapes]) for p in ("bf16", "nvfp4")}
    errors = {f"median_error_{p}": median(abs(a / b - 1) for a, b in (s[p] for s in shapes)) for p in ("bf16", "nvfp4")}
    return {"device": device.to_dict(), "threads": torch.get_num_threads(), **tau, **errors, "shapes": shapes}


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    amax = ops.amax(x)
    return (*ops.quantize(x, amax), amax)


def milliseconds(call: Callable[[], object], quick: bool) -> float:
    """The fastest of five or more calls."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + (0.05 if quick else 0.3)
    while len(samples) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
    return min(samples)


def kendall_tau(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau-b of two rankings given as pairs; ties count for neither side."""
    signs = [(sign(a - c), sign(b - d)) for (a, b), (c, d) in combinations(pairs, 2)]
    scale = sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs))
    return sum(x * y for x, y in signs) / scale


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def published() -> dict[str, Any]:
    """Every published measurement with its prediction, and median absolute relative errors of the two's times.

    ``fastest``: only the fastest implementation of each device, kind and shape. Errors are of times, predicted less
    published; of the ratio where that is what was published.
    """
    rows = [{**dataclasses.asdict(row), "predicted": predict(row)} for row in PUBLISHED]
    rows.sort(key=lambda row: row["kind"])
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        over = row["predicted"] / row["value"] - 1
        row["error"] = over if row["unit"] in ("us", "x") else 1 / (1 + over) - 1
        key = (row["device"], row["kind"], row["shape"])
        # A longer time makes a smaller error against the same prediction.
        if key not in best or row["error"] > best[key]["error"]:
            best[key] = row
    groups = {kind: [r for r in best.values() if r["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in rows)}
    return {
        "rows": rows,
        "median_error": error_of(rows),
        "median_error_fastest": error_of(best.values()),
        "median_signed_error_fastest": median(row["error"] for row in best.values()),
        "median_error_by_kind": {kind: error_of(group) for kind, group in groups.items()},
    }


def error_of(rows: Any) -> float:
    return median(abs(row["error"]) for row in rows)


def predict(row: Published) -> float:
    """The model's figure in the row's unit."""
    # What was published finds the amax of a whole tensor first, or has it from calibration.
    device = dataclasses.replace(cost_model.device(row.device), quantizer_passes=2)
    if row.kind.startswith("quantizer"):
        seconds = float(cost_model.quantizer_seconds(device, *row.shape, fused=True))
        return 1e6 * seconds if row.unit == "us" else 2.5625 * prod(row.shape) / seconds / 1e12
    m, n, k = row.shape
    t = cost_model.evaluate(device, 1, m, n, k, fused="dynamic" not in row.kind)
    if row.kind == "gemm speedup":
        return t.bf16 / t.gemm
    if row.kind.startswith("relu"):
        relu = device.launch + 4 * m * k / (device.memory * device.bf16_memory_fraction)
        return (relu + t.bf16) / (relu + t.nvfp4)
    seconds = t.bf16 if row.kind.startswith("bf16") else t.nvfp4 if "quantizer" in row.kind else t.gemm
    weight = n * k * (2 if row.kind.startswith("bf16") else 0.5625)
    return {"us": 1e6, "TFLOP/s": 2e-12 * m * n * k / seconds**2, "TB/s of weight": 1e-12 * weight / seconds**2}[
        row.unit
    ] * seconds


def cpu_table(result: dict[str, Any]) -> str:
    lines = [f"{'MxNxK':<18}{'BF16 ms':>10}{'predicted':>11}{'NVFP4 ms':>11}{'predicted':>11}"]
    for row in result["shapes"]:
        (bf16, bf16_real), (nvfp4, nvfp4_real) = row["bf16"], row["nvfp4"]
        shape = "x".join(map(str, row["shape"]))
        lines.append(f"{shape:<18}{bf16_real:>10.3f}{bf16:>11.3f}{nvfp4_real:>11.3f}{nvfp4:>11.3f}")
    name, threads = result["device"]["title"], result["threads"]
    lines.append(
        f"{name}, {threads} threads: Kendall tau {result['tau_bf16']:.3f} in BF16, {result['tau_nvfp4']:.3f} in "
        f"emulated NVFP4; median error {result['median_error_bf16']:.0%} and {result['median_error_nvfp4']:.0%}"
    )
    return "\n".join(lines)


def published_table(result: dict[str, Any]) -> str:
    return "\n".join(published_lines(result))


def published_lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{'device':<15}{'shape':<19}{'by':<18}{'published':>11}{'predicted':>11} {'unit':<15}{'error':>6}  source"
    kind = None
    for row in result["rows"]:
        if row["kind"] != kind:
            kind = row["kind"]
            yield f"-- {kind}: median error {result['median_error_by_kind'][kind]:.0%} against the fastest"
        shape = "x".join(map(str, row["shape"]))
        yield (
            f"{row['device']:<15}{shape:<19}{row['by']:<18}{row['value']:>11.4g}{row['predicted']:>11.4g} "
            f"{row['unit']:<15}{row['error']:>+6.0%}  {row['source']}"
        )
    yield (
        f"{len(result['rows'])} published measurements: median error {result['median_error']:.0%}, against the "
        f"fastest implementation of each shape {result['median_error_fastest']:.0%} "
        f"(signed {result['median_signed_error_fastest']:+.0%})"
    )


if __name__ == "__main__":
    main()

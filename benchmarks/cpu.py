"""NVFP4 on this CPU beside torch's BF16: products, quantizers, whole models. Tables, and JSON.

    python benchmarks/cpu.py [--quick] [--json PATH]

Everything is timed in turns in one process, and ratios are of medians. Decode rotates through weights of at least
eight times the last-level cache, so that memory is really read; activations are quantized within the time of a call.
``--quick``: fewer rounds, two shapes, the encoder at one batch size. ``--ggml FOLDER`` adds llama.cpp's kernels from
its built ``libggml-*.so``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import cpu_peers
import minilm
import torch
import torch.nn.functional as F
from tables import columns
from torch import Tensor

import fp4_compile
import fp4_compile.ops
from fp4_compile.codegen import cpu as codegen

ops = torch.ops.fp4
DECODE = ((4096, 4096), (14336, 4096))
PREFILL = (512, 2048)


def cache_bytes() -> int:
    """The last-level cache; 64 MiB where the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes), default=2**26)


def copies(size: int) -> int:
    """How many weights of so many bytes fill eight times the last-level cache."""
    return -(-8 * cache_bytes() // size)


def turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    amax = ops.amax(x)
    return (*ops.quantize(x, amax), amax)


def linear(x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
    """One layer as a compiled model runs it: the weight quantized before, the activation here."""
    return ops.scaled_mm(*quantized(x), *weight, None, x.dtype)


def stream() -> float:
    """Bytes a second of reading memory, on all threads."""
    data = torch.ones(max(8 * cache_bytes(), 2**28) // 4)
    return 4 * data.numel() / turns({"sum": data.sum}, 7)["sum"]


def decode(rows: int, n: int, k: int, rounds: int, bandwidth: float) -> dict[str, float]:
    """A few rows by weights that no cache holds."""
    count = copies(n * k * 9 // 16)
    packed = [quantized(torch.randn(n, k).bfloat16()) for _ in range(count)]
    plain = [torch.randn(n, k).bfloat16() for _ in range(max(2, copies(2 * n * k)))]
    x = torch.randn(rows, k).bfloat16()
    seconds = turns(
        {
            "nvfp4": lambda: [linear(x, weight) for weight in packed],
            "bf16": lambda: [F.linear(x, weight) for weight in plain],
            "weight_only": lambda: [ops.weight_mm(x, *weight, None, x.dtype) for weight in packed],
        },
        rounds,
    )
    ours, theirs = seconds["nvfp4"] / len(packed), seconds["bf16"] / len(plain)
    weight_only = seconds["weight_only"] / len(packed)
    return {
        "rows": rows,
        "n": n,
        "k": k,
        "nvfp4_ms": ours * 1e3,
        "bf16_ms": theirs * 1e3,
        "speedup": theirs / ours,
        "share_of_stream": n * k * 9 / 16 / ours / bandwidth,
        "w4a16_ms": weight_only * 1e3,
        "w4a16_speedup": theirs / weight_only,
    }


def prefill(rows: int, n: int, k: int, rounds: int) -> dict[str, float]:
    """Many rows, and what of it is quantizing."""
    weight = torch.randn(n, k).bfloat16()
    packed, x = quantized(weight), torch.randn(rows, k).bfloat16()
    activation = quantized(x)
    seconds = turns(
        {
            "nvfp4": lambda: linear(x, packed),
            "bf16": lambda: F.linear(x, weight),
            "quantize": lambda: quantized(x),
            "product": lambda: ops.scaled_mm(*activation, *packed, None, torch.bfloat16),
        },
        rounds,
    )
    return {
        "rows": rows,
        "n": n,
        "k": k,
        "nvfp4_ms": seconds["nvfp4"] * 1e3,
        "bf16_ms": seconds["bf16"] * 1e3,
        "speedup": seconds["bf16"] / seconds["nvfp4"],
        "quantizer_share": seconds["quantize"] / seconds["product"],
    }


def rotating(parts: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """Copies of a weight, so that each product reads one that no cache holds."""
    return [tuple(part.clone() for part in parts) for _ in range(count)]


def instruction_sets(rows: int, n: int, k: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the product alone with what other CPUs have; weights as in `decode` for a few rows."""
    few = rows <= 16
    first, x = quantized(torch.randn(n, k).bfloat16()), torch.randn(rows, k).bfloat16()
    packed = rotating(first[:2], copies(n * k * 9 // 16) if few else 1)
    plain = [torch.randn(n, k).bfloat16() for _ in range(max(2, copies(2 * n * k)) if few else 1)]
    activation = quantized(x)[:2]
    calls: dict[str, Callable[[], object]] = {"torch bf16": lambda: [F.linear(x, weight) for weight in plain]}
    for name, isa in (("avx512 vnni", None), ("avx2", 1), ("plain c++", 0)):
        multiply = partial(codegen.product, alpha=1e-4, bias=None, dtype=torch.bfloat16, kernels=codegen.build(isa))
        calls[name] = lambda multiply=multiply: [multiply(*activation, *weight) for weight in packed]  # type: ignore[misc]
    seconds = turns(calls, rounds)
    counts = {name: len(plain if name == "torch bf16" else packed) for name in seconds}
    return {"rows": rows, "n": n, "k": k, **{f"{name} ms": 1e3 * t / counts[name] for name, t in seconds.items()}}


def ggml(rows: int, n: int, k: int, rounds: int, folder: str) -> dict[str, float]:
    """Milliseconds of ours and of ggml's 4-bit products, weights as in `decode` for a few rows."""
    count = copies(n * k * 9 // 16) if rows <= 16 else 1
    weight, x = torch.randn(n, k).bfloat16(), torch.randn(rows, k).bfloat16()
    first = quantized(weight)
    packed = rotating(first, count)
    calls: dict[str, Callable[[], object]] = {"nvfp4": lambda: [linear(x, one) for one in packed]}
    frees = []
    library = cpu_peers.Ggml(folder)
    for kind in cpu_peers.TYPES:
        calls[f"ggml {kind}"], free = library.products(kind, weight, x, count)
        frees.append(free)
    seconds = turns(calls, rounds)
    for free in frees:
        free()
    return {"rows": rows, "n": n, "k": k, **{f"{name} ms": 1e3 * value / count for name, value in seconds.items()}}


def models(quick: bool) -> Iterator[dict[str, Any]]:
    """Whole models in BF16: nvfp4 and Inductor in turns."""
    encoder = minilm.load_encoder(torch.bfloat16)
    texts = minilm.Texts().all
    for size in (8,) if quick else (1, 8, 64):
        batch = minilm.batches(texts[:size], size)[0]
        yield compare(f"encoder, batch {size}", encoder, batch, size * minilm.TOKENS, 5 if quick else 11)
    if not quick:
        import smollm2

        model, tokenizer = smollm2.load()
        model.bfloat16()
        ids = smollm2.batches(tokenizer, 1)[0]["input_ids"][:1]
        for name, tokens in (("SmolLM2 prefill, 256 tokens", 256), ("SmolLM2 decode, 1 token, no history", 1)):
            batch = {"input_ids": ids[:, :tokens], "use_cache": False}
            yield compare(name, model, batch, tokens, 11)


def compare(name: str, model: Any, batch: dict[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    ours = torch.compile(model, backend="nvfp4", dynamic=False)
    planned = torch.compile(model, backend="nvfp4", dynamic=False, options={"target": "cpu"})
    theirs = torch.compile(model, dynamic=False)
    with torch.no_grad():
        seconds = turns(
            {"nvfp4": partial(ours, **batch), "target": partial(planned, **batch), "bf16": partial(theirs, **batch)},
            rounds,
        )
        plan = fp4_compile.explain(model, **batch, options={"target": "cpu"}).plan
    return {
        "model": name,
        "nvfp4_tokens_s": tokens / seconds["nvfp4"],
        "target_tokens_s": tokens / seconds["target"],
        "bf16_tokens_s": tokens / seconds["bf16"],
        "speedup": seconds["bf16"] / seconds["nvfp4"],
        "target_speedup": seconds["bf16"] / seconds["target"],
        "target_sites": f"{len(plan.select(fp4_compile.Precision.NVFP4))}/{len(plan)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--json", metavar="PATH", help="write the numbers there")
    parser.add_argument("--ggml", metavar="FOLDER", help="where libggml-base.so and libggml-cpu.so lie")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.manual_seed(0)
    bandwidth = stream()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "stream_gb_s": bandwidth / 1e9,
        "cache_mib": cache_bytes() / 2**20,
    }
    print(f"{result['threads']} threads, {result['stream_gb_s']:.1f} GB/s read, cache {result['cache_mib']:.0f} MiB\n")
    shapes = DECODE[:1] if quick else DECODE
    result["decode"] = [decode(m, n, k, 3 if quick else 9, bandwidth) for n, k in shapes for m in (1, 4)]
    print(columns(result["decode"]), "\n", flush=True)
    result["prefill"] = [prefill(m, 4096, 4096, 3 if quick else 7) for m in (PREFILL[:1] if quick else PREFILL)]
    result["prefill"].append(prefill(2048, 2048, 2048, 3 if quick else 7))
    print(columns(result["prefill"]), "\n", flush=True)
    result["decode_speedup"] = min(row["speedup"] for row in result["decode"])
    result["prefill_speedup"] = min(row["speedup"] for row in result["prefill"] if row["n"] == 4096)
    result["quantizer_share"] = result["prefill"][-1]["quantizer_share"]
    if not quick:
        result["instruction_sets"] = [instruction_sets(m, 4096, 4096, 3) for m in (1, 4, 512)]
        print(columns(result["instruction_sets"]), "\n", flush=True)
    if arguments.ggml:
        result["ggml"] = [ggml(m, 4096, 4096, 3 if quick else 5, arguments.ggml) for m in (1, 4, 512)]
        print(columns(result["ggml"]), "\n", flush=True)
    result["models"] = []
    save(arguments.json, result)
    for row in models(quick):
        result["models"].append(row)
        save(arguments.json, result)
        print(columns([row]), flush=True)


def save(path: str | None, result: dict[str, Any]) -> None:
    """After each part: what was measured stays if a later part is stopped."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

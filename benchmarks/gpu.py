"""On an NVIDIA GPU: every kernel against the reference, then its speed beside cuBLAS and a copy. A table, and JSON.

    python benchmarks/gpu.py [--quick] [--json PATH]

Needs a GPU of sm_80 or later; under 8 minutes. Below sm_100 there are no FP4 tensor cores: products of two FP4 operands
are left out, and weight-only products take their place. ``--device cpu`` goes the same way with small sizes and the
operators of a CPU: it tries the script, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from offline_models import LlamaBlock
from tables import columns
from torch import Tensor
from torch.utils.benchmark import Timer

from fp4_compile import numerics, ops
from fp4_compile.codegen.library import scaled_mm_by_library
from fp4_compile.codegen.lowering import register_lowerings

Row = dict[str, Any]


def seconds(call: Callable[..., object], least: float, *arguments: Any) -> float:
    """Median time of a call, measured for ``least`` seconds; the device is waited for."""
    call(*arguments)
    return float(
        Timer("call(*arguments)", globals={"call": call, "arguments": arguments})
        .blocked_autorange(min_run_time=least)
        .median
    )


def compiled(function: Callable[..., Any], backend: str = "inductor", autotuned: bool = False) -> Callable[..., Any]:
    """A function with the kernels of this device; those of other sizes are forgotten, since Dynamo keeps but eight."""
    torch._dynamo.reset()
    options = {"max_autotune_gemm": True} if autotuned else None
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)


def quantize(x: Tensor, hadamard: int = 0, seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = ops.quantize_rows(x, True, hadamard, seed, 3)
    return result


def both_ways(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = ops.quantize_both_ways(x, ops.row_amax(x), 16, seed, 3, 4)
    return result


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    def as_bytes(x: Tensor) -> Tensor:
        return x.cpu().reshape(-1).view(torch.uint8)

    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(got, want, strict=True))


def correctness(device: str, fp4: bool) -> list[Row]:
    """Each kernel on odd and even sizes: bytes of the quantizers, and the largest relative error of products."""
    rows = []
    seed = torch.tensor(0x1234567, dtype=torch.int64)
    for m, n, k in ((130, 96, 330), (1, 128, 64), (512, 1024, 2048)):
        generator = torch.Generator().manual_seed(m)
        x, w = (torch.randn(size, k, generator=generator).bfloat16() for size in (m, n))
        quantizers: dict[str, Callable[..., Any]] = {
            "quantizer": quantize,
            "quantizer, producer inside": lambda t: quantize(torch.relu(t) * t),
            "quantizer, Hadamard": lambda t: quantize(t, 16),
            "quantizer, transposed": lambda t: quantize(t.t()),
            "quantizer, stochastic": lambda t: quantize(t, 16, seed.to(t.device)),
            "quantizer, both ways": lambda t: both_ways(torch.relu(t) * t, seed.to(t.device)),
            "quantizer, 16x16": lambda t: ops.quantize_tiles(t, ops.amax_parts([t, t])[1]),
        }
        for name, function in quantizers.items() if fp4 else ():
            good = same(compiled(function)(x.to(device)), function(x))
            rows.append({"kernel": name, "size": f"{m}x{k}", "error": 0.0 if good else 1.0, "right": good})
        weight = decoded(w)
        if fp4:
            on = [t.to(device) for t in (*quantize(x), *quantize(w))]
            exact = F.linear(decoded(x), weight).double()
            got = compiled(lambda *t: ops.scaled_mm(*t, None, torch.float32, True))(*on)
            rows.append(product_row("product", (m, n, k), got, exact))
            rows += library_rows((m, n, k), on, exact)
        codes, scales, amax = (t.to(device) for t in numerics.quantize_1x16(w, numerics.row_amax(w)))
        got = compiled(lambda *t: ops.weight_mm(*t, None, torch.float32))(x.to(device), codes, scales, amax)
        rows.append(product_row("product, weight-only", (m, n, k), got, F.linear(x.float(), weight).double()))
    return rows


def library_rows(size: tuple[int, int, int], operands: list[Tensor], exact: Tensor) -> list[Row]:
    """cuBLASLt's product, a choice of autotuning, with the amaxes of rows; none where torch has none."""
    try:
        got = scaled_mm_by_library(*operands, torch.float32)
    except NotImplementedError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return []
    return [product_row("product, cuBLASLt", size, got, exact)]


def decoded(x: Tensor) -> Tensor:
    return numerics.dequantize(*numerics.quantize_1x16(x, numerics.row_amax(x)), x.shape[-1])


def product_row(name: str, size: tuple[int, int, int], got: Tensor, exact: Tensor) -> Row:
    error = float((got.cpu().double() - exact).abs().max() / exact.abs().max())
    return {"kernel": name, "size": "x".join(map(str, size)), "error": error, "right": error < 2e-3}


def products(device: str, fp4: bool, sizes: list[tuple[int, int, int]], least: float) -> list[Row]:
    """TFLOP/s of a product, operands quantized before, beside cuBLAS."""
    rows = []
    for m, n, k in sizes:
        x, w = (torch.randn(size, k, device=device).bfloat16() for size in (m, n))
        flops = 2e-12 * m * n * k
        row: Row = {"M": m, "N": n, "K": k, "cuBLAS BF16": flops / seconds(F.linear, least, x, w)}
        if fp4:
            a, b = (compiled(quantize)(t) for t in (x, w))
            ours = compiled(lambda *t: ops.scaled_mm(*t, None, torch.bfloat16, True))
            row["ours"] = flops / seconds(ours, least, *a, *b)
            tuned = compiled(lambda *t: ops.scaled_mm(*t, None, torch.bfloat16, True), autotuned=True)
            row["ours, autotuned"] = flops / seconds(tuned, least, *a, *b)
            row["cuBLAS NVFP4"] = library_nvfp4(a, b, flops, least)
        codes, scales, amax = compiled(lambda t: ops.quantize_rows(t, False))(w)
        weight_only = compiled(lambda *t: ops.weight_mm(*t, None, torch.bfloat16))
        row["ours, weight-only"] = flops / seconds(weight_only, least, x, codes, scales, amax)
        rows.append(row)
    return rows


def library_nvfp4(a: tuple[Tensor, ...], b: tuple[Tensor, ...], flops: float, least: float) -> float | None:
    """torch's own NVFP4 product of the same codes and scales, one amax for each tensor; None where it has none."""
    operands = [*a[:2], a[2].amax(), *b[:2], b[2].amax()]
    try:
        return flops / seconds(scaled_mm_by_library, least, *operands, torch.bfloat16)
    except NotImplementedError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return None


def fused(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return quantize(F.silu(x) * y)


def quantizers(device: str, sizes: list[tuple[int, int]], least: float) -> list[Row]:
    """GB/s read and written by a quantizer, alone and with SiLU*mul inside, beside a copy of the tensor."""
    rows = []
    for m, k in sizes:
        x, y = (torch.randn(m, k, device=device).bfloat16() for _ in range(2))
        target, half = torch.empty_like(x), 2 * m * k + 0.5625 * m * k
        rows.append(
            {
                "M": m,
                "K": k,
                "copy": 4e-9 * m * k / seconds(target.copy_, least, x),
                "quantizer": 1e-9 * half / seconds(compiled(quantize), least, x),
                "with SiLU*mul": 1e-9 * (half + 2 * m * k) / seconds(compiled(fused), least, x, y),
                "transposed": 1e-9 * half / seconds(compiled(lambda a: quantize(a.t())), least, x),
            }
        )
    return rows


def blocks(device: str, tokens: list[int], narrow: bool, least: float) -> list[Row]:
    """Tokens a second of a Llama-style block, NVFP4 wherever it is safe, beside Inductor's BF16."""
    torch.manual_seed(0)
    block = (LlamaBlock(512, 8, 2, 1536) if narrow else LlamaBlock()).bfloat16().to(device)
    rows = []
    for m in tokens:
        x = torch.randn(1, m, block.q.in_features, device=device).bfloat16()
        mine, theirs = (m / seconds(compiled(block, backend), least, x) for backend in ("nvfp4", "inductor"))
        rows.append({"tokens": m, "ours": mine, "Inductor BF16": theirs, "ratio": mine / theirs})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try the script")
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    if not small and not torch.cuda.is_available():
        parser.error("there is no GPU here; fp4_compile.compile_for writes its kernels, and testing.simulate runs them")
    sm = 100 if small else torch.cuda.get_device_capability()[0] * 10 + torch.cuda.get_device_capability()[1]
    fp4, least = sm >= 100, 0.01 if small else 0.3
    register_lowerings()
    sizes = [(1, 4096, 4096), (128, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096)]
    tall = [(512, 4096), (4096, 4096), (8192, 8192), (16384, 14336)]
    tokens = [1, 8, 64, 512, 2048, 8192]
    if arguments.quick:
        sizes, tall, tokens = sizes[:3], tall[:2], tokens[::3]
    if small:
        sizes, tall, tokens = [(16, 256, 256)], [(64, 256)], [1, 16]
    name = "CPU" if small else torch.cuda.get_device_name()
    result: Row = {"torch": torch.__version__, "device": name, "sm": sm}
    with torch.no_grad():
        parts: dict[str, tuple[str, Callable[[], list[Row]]]] = {
            "correctness": ("kernels against the reference", lambda: correctness(arguments.device, fp4)),
            "products": ("products, TFLOP/s", lambda: products(arguments.device, fp4, sizes, least)),
            "quantizers": ("quantizers, GB/s", lambda: quantizers(arguments.device, tall, least) if fp4 else []),
            "blocks": ("a Llama-style block, tokens/s", lambda: blocks(arguments.device, tokens, small, least)),
        }
        for key, (title, measure) in parts.items():
            result[key] = measure()
            shown = columns(result[key]) if result[key] else "nothing for this device"
            print(f"\n{title} ({name}, sm_{sm})\n{shown}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(row["right"] for row in result["correctness"]):
        sys.exit("a kernel differs from the reference")


if __name__ == "__main__":
    main()

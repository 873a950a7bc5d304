"""What is emitted for GPUs that are not here: kernels, bytes, instructions and predicted times, beside Inductor's BF16.

    python benchmarks/offline.py [--quick] [--json PATH] [--models NAME ...] [--targets NAME ...] [--tokens N]

Every program is generated and compiled on this machine; nothing runs, and times are the cost model's. ``--quick``: a
narrow Llama-style block, inference, on sm_100 and sm_90, all its products in NVFP4. Where torchao is installed, its
dynamic NVFP4 inference is generated the same way: its quantizer in plain torch, which Inductor fuses, since its own
Triton kernel is part of another package.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from offline_models import NAMES, make
from tables import columns

import fp4_compile
from fp4_compile.offline.compile_for import Offline, compile_traced
from fp4_compile.offline.inspect import has_fp4_instruction
from fp4_compile.offline.kernels import Kernel
from fp4_compile.offline.machine import Target, find_target
from fp4_compile.offline.summary import Summary
from fp4_compile.offline.trace import trace

TARGETS = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def generate(
    name: str, target: str, training: bool, quick: bool, tokens: int
) -> tuple[Offline, Summary, Summary | None]:
    """Ours, and the summaries of what Inductor writes for the same model in BF16 and as torchao quantizes it."""
    model, inputs = make(name, tokens, quick)
    if training and isinstance(inputs, torch.Tensor):
        inputs.requires_grad_()
    options = {"target": None} if quick else None  # narrow layers do not pay, and are to be seen all the same
    with contextlib.nullcontext() if training else torch.no_grad():
        ours = fp4_compile.compile_for(model, inputs, target, options=options)
        torch._dynamo.reset()
        gpu = find_target(target)
        bf16 = compile_traced(trace(model, inputs, None, gpu.sm), gpu, {}, ptx=False)
        torch._dynamo.reset()
        theirs = None
        if not training and gpu.sm >= 100 and importlib.util.find_spec("torchao"):
            theirs = by_torchao(name, quick, inputs, gpu)
    return ours, bf16.summary, theirs


def by_torchao(name: str, quick: bool, inputs: Any, gpu: Target) -> Summary | None:
    """The program of the model as torchao quantizes it, or None if Inductor cannot write it."""
    quantized = with_torchao_weights(name, quick)
    try:
        return compile_traced(trace(quantized, inputs, None, gpu.sm), gpu, {}, ptx=False).summary
    except Exception as error:
        print(f"{name} {gpu.name}, torchao: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return None
    finally:
        torch._dynamo.reset()


@functools.cache
def with_torchao_weights(name: str, quick: bool) -> Any:
    """The model with torchao's NVFP4 weights, activations to be quantized in each call; its check for a GPU passed."""
    from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig, inference_workflow
    from torchao.quantization import quantize_

    model, _ = make(name, 256, quick)  # its weights alone are wanted
    with mock.patch.object(inference_workflow, "is_sm_at_least_100", lambda: True):
        quantize_(model, NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False))
    return model


def row(
    name: str, target: str, training: bool, ours: Offline, bf16: Summary, torchao: Summary | None
) -> dict[str, Any]:
    each = ours.summary.each_call
    kernels = [k for k in ours.kernels.values() if isinstance(k, Kernel)]
    products = [k for k in ours.summary.kernels if k.role == "fp4 gemm"]
    quantizers = sum(k.launches for k in each.kernels if k.role == "quantizer")
    worst = each.worst
    return {
        "model": name,
        "target": target,
        "pass": "train" if training else "infer",
        "quantized": f"{sum(d.precision is fp4_compile.Precision.NVFP4 for d in ours.plan)}/{len(list(ours.plan))}",
        "kernels": len(ours.kernels),
        "failed": len(ours.kernels) - len(kernels),
        "no_fp4_instruction": sum(
            not has_fp4_instruction(ours.kernels[source])  # type: ignore[arg-type]
            for program in ours.programs
            for launch in program.launches
            if "nvfp4" in launch.flops and isinstance(ours.kernels[source := program.kernels[launch.kernel]], Kernel)
        ),
        "fp4_gemms": sum(k.launches for k in products),
        "spills": sum(k.spills for k in kernels),
        "faults": [f"{k.part} {k.name}: {fault}" for k in ours.summary.kernels for fault in k.faults],
        "launches": each.launches,
        "quantizers": quantizers,
        "bf16_launches": bf16.launches,
        "ao_launches": torchao and torchao.launches,
        "MB": each.bytes / 1e6,
        "bf16_MB": bf16.bytes / 1e6,
        "ao_MB": torchao and torchao.bytes / 1e6,
        "us": each.seconds * 1e6,
        "bf16_us": bf16.seconds * 1e6,
        "ao_us": torchao and torchao.seconds * 1e6,
        "worst": worst.explanation if worst else "",
        "summary": ours.summary.to_dict(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    whole = [{key: "-" if r[key] is None else r[key] for key in r} for r in rows]
    block = ("model", "target", "pass")
    compiled = (*block, "quantized", "kernels", "failed", "fp4_gemms", "no_fp4_instruction", "spills")
    launches = ("launches", "quantizers", "bf16_launches", "ao_launches")
    compared = (*block, *launches, "MB", "bf16_MB", "ao_MB", "us", "bf16_us", "ao_us")
    parts = [columns([{key: r[key] for key in keys} for r in whole], str.ljust) for keys in (compiled, compared)]
    lost = ["The kernel that loses most time to the roofline, by the cost model:"]
    lost += [f"  {r['model']} {r['target']} {r['pass']}: {r['worst']}" for r in rows]
    faults = [f"  {r['model']} {r['target']} {r['pass']}: {f}" for r in rows for f in r["faults"]]
    return "\n\n".join([*parts, "\n".join(lost), *faults])


def _fewest_bytes(row: dict[str, Any]) -> bool:
    return bool(row["MB"] <= min(row["bf16_MB"], row["ao_MB"] or float("inf")))


def _few_launches(row: dict[str, Any]) -> bool:
    return bool(row["launches"] <= row["bf16_launches"] + row["quantizers"])


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kernels": sum(r["kernels"] for r in rows),
        "kernels_failed": sum(r["failed"] for r in rows),
        "fp4_gemms_without_fp4_instruction": sum(r["no_fp4_instruction"] for r in rows),
        "spills": sum(r["spills"] for r in rows),
        "fewest_bytes": all(map(_fewest_bytes, rows)),
        "fewest_bytes_in_inference": all(_fewest_bytes(r) for r in rows if r["pass"] == "infer"),
        "few_launches": all(map(_few_launches, rows)),
        "few_launches_in_inference": all(_few_launches(r) for r in rows if r["pass"] == "infer"),
        "blocks": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrow block on two targets, under two minutes")
    parser.add_argument("--json", type=Path, help="write the figures, and every kernel, here")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--tokens", type=int, default=4096, help="in a call; 4096 unless given, a multiple of 256")
    arguments = parser.parse_args()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    names, targets, tokens = arguments.models, arguments.targets, arguments.tokens
    passes = (False, True)
    if arguments.quick:
        names, targets, tokens, passes = ["llama"], ["sm_100", "sm_90"], 256, (False,)
    rows: list[dict[str, Any]] = []
    for name in names:
        for target in targets:
            for training in passes:
                start = time.perf_counter()
                generated = generate(name, target, training, arguments.quick, tokens)
                rows.append(row(name, target, training, *generated))
                print(f"{name} {target} {rows[-1]['pass']}: {time.perf_counter() - start:.0f} s", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(result(rows), indent=1), encoding="utf-8")
    print(table(rows))
    totals = {key: value for key, value in result(rows).items() if key != "blocks"}
    print(", ".join(f"{key} {value}" for key, value in totals.items()))


if __name__ == "__main__":
    main()

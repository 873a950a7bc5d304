"""What a compiled kernel must hold to run at its device's speed, read off its PTX and cubin."""

from __future__ import annotations

import re

from fp4_compile.offline.generate import Launch
from fp4_compile.offline.kernels import TENSOR_MEMORY_COLUMNS, Kernel
from fp4_compile.offline.machine import Target

FP4_INSTRUCTION = r"(?:tcgen05\.mma|mma\.sync)\S*kind::mxf4nvf4"
_COUNTED = {
    "tcgen05.mma mxf4nvf4": r"tcgen05\.mma\S*kind::mxf4nvf4",
    "mma.sync mxf4nvf4": r"mma\.sync\S*kind::mxf4nvf4",
    "tcgen05.mma f16": r"tcgen05\.mma\S*kind::f16",
    "tcgen05.cp": r"tcgen05\.cp",
    "wgmma": r"wgmma\.mma_async",
    "mma.sync": r"mma\.sync(?!\S*mxf4nvf4)",
    "cvt e2m1": r"cvt\.r[ns]\.satfinite\.e2m1x\d",
    "TMA load": r"cp\.async\.bulk\.tensor\S*\.shared\S*\.global",
    "async copy": r"cp\.async\.c[ag]\.shared",
}
_LOAD = re.compile(r"^\s*(?:@!?%p\d+ )?ld\.global(\S*?)(?:\.v(\d))?\.[busf](\d+)\s", re.MULTILINE)
_BULK = 16
"""Bytes that a thread moves at once where a kernel is to use the memory's bandwidth."""


def instructions(kernel: Kernel) -> dict[str, int]:
    """Tensor-core, conversion and copy instructions in the PTX, those that occur."""
    counts = {name: kernel.count(pattern) for name, pattern in _COUNTED.items()}
    return {name: count for name, count in counts.items() if count}


def has_fp4_instruction(kernel: Kernel) -> bool:
    """Whether the tensor cores get FP4."""
    return kernel.count(FP4_INSTRUCTION) > 0


def load_widths(kernel: Kernel) -> dict[int, int]:
    """How many loads from global memory of each width, in bytes, a thread has in its PTX."""
    widths: dict[int, int] = {}
    for _, vector, bits in _LOAD.findall(kernel.ptx):
        width = int(bits) // 8 * int(vector or 1)
        widths[width] = widths.get(width, 0) + 1
    return widths


def faults(kernel: Kernel, launch: Launch, target: Target) -> tuple[str, ...]:
    """What is wrong with a kernel on its target; nothing, if it is as it should be."""
    found = [*_resources(kernel, target)]
    if "nvfp4" in launch.flops:
        found += _fp4_gemm(kernel, target)
    if launch.gemm is not None or launch.quantizes is not None:
        found += _global_loads(kernel)
    return tuple(found)


def _resources(kernel: Kernel, target: Target) -> list[str]:
    found = []
    if kernel.spills or kernel.stack:
        found.append(f"{kernel.spills} spills, {kernel.stack} bytes of local memory")
    if kernel.shared_memory > target.shared_memory:
        found.append(f"{kernel.shared_memory} bytes of shared memory, and a block has {target.shared_memory}")
    if kernel.tensor_memory > TENSOR_MEMORY_COLUMNS:
        found.append(f"{kernel.tensor_memory} columns of tensor memory, and there are {TENSOR_MEMORY_COLUMNS}")
    return found


def _fp4_gemm(kernel: Kernel, target: Target) -> list[str]:
    found = []
    if not has_fp4_instruction(kernel):
        found.append("no FP4 tensor-core instruction")
    if target.sm in (100, 103):
        if not kernel.count(r"tcgen05\.cp"):
            found.append("block scales reach tensor memory through registers, not by tcgen05.cp")
        if kernel.count(_COUNTED["tcgen05.mma f16"]):
            found.append("multiplies in 16 bits")
        if "is_async" not in kernel.ttgir:
            found.append("waits for every tensor-core instruction")
    return found


def _global_loads(kernel: Kernel) -> list[str]:
    """Byte-wise loads, and bulk operands that come in pieces of less than 16 bytes."""
    widths = load_widths(kernel)
    found = [f"{widths[1]} byte-wise loads"] if 1 in widths else []
    copied = kernel.count(_COUNTED["TMA load"]) or kernel.count(_COUNTED["async copy"])
    if not copied and widths and max(widths) < _BULK:
        found.append(f"no global load is wider than {max(widths)} bytes")
    return found

"""From the text of a Triton kernel to PTX and a cubin for the target, and what they hold. No GPU is needed."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4_compile._torch_compat import load_kernel
from fp4_compile.offline.machine import Target, offline_device

TENSOR_MEMORY_COLUMNS = 512
"""Columns of tensor memory of a multiprocessor (PTX ISA 9.7.16.1)."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled Triton kernel in one configuration."""

    name: str
    config: str
    """Tile sizes, warps and stages, as Triton prints them."""
    source: str
    """Triton, as Inductor wrote it."""
    ttgir: str
    """Triton's last own representation."""
    ptx: str
    cubin: bytes
    threads: int
    """Of a block."""
    shared_memory: int
    """Bytes of a block."""
    tensor_memory: int
    """Columns of a block; 0 where the target has none."""
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of local memory of a thread: spilled registers, and arrays that are indexed."""
    instructions: Counter[str] = dataclasses.field(hash=False)
    """SASS instructions by opcode, as they stand in the cubin."""

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.instructions["LDL"] + self.instructions["STL"]

    def count(self, pattern: str) -> int:
        """How many PTX instructions match a regular expression at their start; inline PTX counts."""
        return len(re.findall(rf"(?<![\w.]){pattern}", self.ptx))


def compile_kernel(name: str, source: str, target: Target) -> Kernel:
    """Compile a kernel that Inductor wrote, in the configuration that runs when nothing is autotuned.

    Raises:
        Exception: whatever Triton or ptxas raise.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with offline_device(target):
        kernel = load_kernel(name, source)
        meta = kernel.meta
        binary = triton.compile(
            ASTSource(kernel.tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=GPUTarget("cuda", target.sm, 32),
            options=kernel.options,
        )
    return read_kernel(name, kernel.config.all_kwargs(), source, binary)


def read_kernel(name: str, config: Mapping[str, Any], source: str, binary: Any) -> Kernel:
    """What a kernel holds that ``triton.compile`` made."""
    asm, metadata = binary.asm, binary.metadata
    cubin = asm["cubin"]
    return Kernel(
        name=name,
        config=", ".join(f"{key}={value}" for key, value in config.items() if value is not None),
        source=source,
        ttgir=asm["ttgir"],
        ptx=asm["ptx"],
        cubin=cubin,
        threads=metadata.num_warps * 32,
        shared_memory=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
        **_resources(cubin),
        instructions=_instructions(cubin),
    )


def _resources(cubin: bytes) -> dict[str, int]:
    text = _run("cuobjdump", cubin, "-res-usage")
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"] + found["LOCAL"]}


def _instructions(cubin: bytes) -> Counter[str]:
    text = _run("nvdisasm", cubin, "-c")
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)", text, re.MULTILINE)
    return Counter(opcodes)


def _run(tool: str, cubin: bytes, *flags: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([_tool(tool), *flags, path], check=True, capture_output=True, text=True).stdout


@functools.cache
def _tool(name: str) -> str:
    """NVIDIA's tools that Triton carries along."""
    from triton import knobs

    return str(getattr(knobs.nvidia, name).path)

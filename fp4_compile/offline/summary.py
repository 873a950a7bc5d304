"""What was generated, as a value: per kernel, per part, and for the whole model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fp4_compile.offline.generate import Launch, Program
from fp4_compile.offline.inspect import faults, instructions, load_widths
from fp4_compile.offline.kernels import Kernel
from fp4_compile.offline.machine import Target
from fp4_compile.offline.predict import Prediction, predict

ONCE = "weight_prologue"
"""The part that runs when a weight has changed, and not in each call."""


@dataclasses.dataclass(frozen=True)
class KernelSummary:
    """One kernel of one part, all its launches together."""

    part: str
    name: str
    role: str
    """``fp4 gemm``, ``weight gemm``, ``quantizer``, ``fused`` for what Inductor wrote, or ``library``."""
    sizes: tuple[int, ...]
    """M, N, K of a product; rows and columns of a quantized tensor; empty otherwise."""
    launches: int
    bytes: int
    """Moved by all launches."""
    flops: Mapping[str, int]
    """By all launches, by precision."""
    seconds: float
    """Predicted for all launches."""
    roofline_share: float
    bound: str
    why: str = ""
    """What keeps it from the roofline, in figures."""
    config: str = ""
    registers: int = 0
    shared_memory: int = 0
    tensor_memory: int = 0
    spills: int = 0
    stack: int = 0
    instructions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    load_widths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    faults: tuple[str, ...] = ()
    error: str = ""
    """Why it does not compile."""

    @property
    def explanation(self) -> str:
        """Where it stands to the roofline, and why."""
        sizes = "x".join(map(str, self.sizes))
        lost = 1e6 * self.seconds * (1 - self.roofline_share)
        return (
            f"{self.role} {self.name} {sizes}, {self.launches} launches, {self.roofline_share:.0%} of the roofline, "
            f"{lost:.3g} us above it: {self.why}"
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """All kernels of a model on a target. Prints as a table."""

    target: str
    kernels: tuple[KernelSummary, ...]

    def of(self, *parts: str) -> Summary:
        """The kernels of some parts alone."""
        return Summary(self.target, tuple(k for k in self.kernels if k.part in parts))

    @property
    def each_call(self) -> Summary:
        """Without what runs only when a weight has changed."""
        return Summary(self.target, tuple(k for k in self.kernels if k.part != ONCE))

    @property
    def launches(self) -> int:
        """Kernels launched."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Moved in the device's memory."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        """Predicted, one kernel after another."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def flops(self) -> dict[str, int]:
        """Of matrix multiplications, by precision."""
        total: Counter[str] = Counter()
        for kernel in self.kernels:
            total.update(kernel.flops)
        return dict(total)

    @property
    def failed(self) -> tuple[KernelSummary, ...]:
        """Kernels that do not compile."""
        return tuple(kernel for kernel in self.kernels if kernel.error)

    @property
    def worst(self) -> KernelSummary | None:
        """The kernel that loses most time to the roofline."""
        return max(self.kernels, key=lambda k: k.seconds * (1 - k.roofline_share), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"target": self.target, "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels]}

    def render(self) -> str:
        """A line for each kernel, and the totals."""
        rows = [_HEADER, *(_row(kernel) for kernel in self.kernels)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        each = self.each_call
        flops = ", ".join(f"{count / 1e9:.4g} GFLOP in {name}" for name, count in each.flops.items())
        lines.append(
            f"{self.target}, each call: {each.launches} launches, {each.bytes / 1e6:.4g} MB, {flops or 'no products'}, "
            f"{1e6 * each.seconds:.4g} us predicted"
        )
        if (worst := each.worst) is not None:
            lines.append(f"most time lost: {worst.explanation}")
        for kernel in self.kernels:
            lines += [f"{kernel.part} {kernel.name}: {fault}" for fault in (*kernel.faults, kernel.error) if fault]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


_HEADER = (
    "part", "kernel", "role", "sizes", "launches", "MB", "us", "roofline", "bound", "regs", "smem", "tmem", "spills",
    "instructions",
)  # fmt: skip


def _row(kernel: KernelSummary) -> tuple[str, ...]:
    found = ", ".join(f"{name} {count}" for name, count in kernel.instructions.items())
    compiled = (kernel.registers, kernel.shared_memory, kernel.tensor_memory, kernel.spills)
    return (
        kernel.part,
        kernel.name if len(kernel.name) <= 40 else kernel.name[:39] + "…",
        kernel.role,
        "x".join(map(str, kernel.sizes)),
        str(kernel.launches),
        f"{kernel.bytes / 1e6:.4g}",
        f"{1e6 * kernel.seconds:.4g}",
        f"{100 * kernel.roofline_share:.0f}%",
        kernel.bound,
        *(("",) * 4 if kernel.role == "library" else map(str, compiled)),
        found,
    )


def summarize(program: Program, kernels: Mapping[str, Kernel | Exception], target: Target) -> tuple[KernelSummary, ...]:
    """The kernels of a program, in the order of their first launch; ``kernels`` holds Triton's, compiled or not."""
    together: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in program.launches:
        key = (launch.kernel, launch.gemm, launch.quantizes, launch.product)
        together.setdefault(key, []).append(launch)
    return tuple(_summary(program.part, group, kernels.get(group[0].kernel), target) for group in together.values())


def _summary(part: str, group: list[Launch], kernel: Kernel | Exception | None, target: Target) -> KernelSummary:
    launch = group[0]
    predictions = [predict(each, target.device) for each in group]
    flops: Counter[str] = Counter()
    for each in group:
        flops.update(each.flops)
    summary = KernelSummary(
        part=part,
        name=launch.kernel,
        role=_role(launch),
        sizes=launch.gemm or launch.quantizes or (launch.product or ())[1:],
        launches=len(group),
        bytes=sum(each.bytes for each in group),
        flops=dict(flops),
        seconds=sum(prediction.seconds for prediction in predictions),
        roofline_share=_share(predictions),
        bound=predictions[0].bound,
        why=predictions[0].why,
    )
    if isinstance(kernel, Exception):
        return dataclasses.replace(summary, error=f"{type(kernel).__name__}: {kernel}".strip().splitlines()[0])
    if kernel is None:
        return summary
    return dataclasses.replace(
        summary,
        config=kernel.config,
        registers=kernel.registers,
        shared_memory=kernel.shared_memory,
        tensor_memory=kernel.tensor_memory,
        spills=kernel.spills,
        stack=kernel.stack,
        instructions=instructions(kernel),
        load_widths=load_widths(kernel),
        faults=faults(kernel, launch, target),
    )


def _share(predictions: Iterable[Prediction]) -> float:
    each = list(predictions)
    return sum(p.roofline for p in each) / sum(p.seconds for p in each)


def _role(launch: Launch) -> str:
    if not launch.is_triton:
        return "library"
    if launch.gemm is not None:
        return "fp4 gemm" if "nvfp4" in launch.flops else "weight gemm"
    return "fused" if launch.quantizes is None else "quantizer"

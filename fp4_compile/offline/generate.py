"""From a functional graph to the program Inductor writes for the target, launch by launch.

A launch is one call of a kernel, Triton's or a library's. What it moves is what Inductor's scheduler counts: every
buffer that it reads or writes, once. Caches are taken to be perfect within a launch and empty between two.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import sympy
from torch import fx

from fp4_compile._torch_compat import generate_program, inductor
from fp4_compile.offline.machine import Target, offline_device
from fp4_compile.offline.retarget import retarget

TRITON = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
"""A kernel in a program: its name and its source."""
_TRITON_CALL = re.compile(r"^\s*(\w+)\.run\(")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel in a program."""

    kernel: str
    """A Triton kernel's name, or the library operator's."""
    is_triton: bool
    bytes: int
    """Read and written, in the device's memory."""
    flops: Mapping[str, int]
    """Floating-point operations of its matrix multiplication, by the precision of its operands."""
    gemm: tuple[int, int, int] | None = None
    """Sizes M, N, K of a product with an FP4 operand."""
    quantizes: tuple[int, int] | None = None
    """Rows and columns of the tensor that it quantizes."""
    product: tuple[int, int, int, int] | None = None
    """Sizes batch, M, N, K of a library's matrix product."""
    split: int = 1
    """Parts of K that are summed apart."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs for one graph: ``inference``, ``weight_prologue``, ``forward`` or ``backward``."""

    part: str
    source: str
    """Inductor's Python: every Triton kernel, and ``call``, which launches them."""
    kernels: Mapping[str, str]
    """Source of each Triton kernel, by name."""
    launches: tuple[Launch, ...]

    @property
    def bytes(self) -> int:
        """Moved by all launches."""
        return sum(launch.bytes for launch in self.launches)


Strides = dict[str, tuple[int, ...]]


def generate(
    part: str, gm: fx.GraphModule, settings: Mapping[str, Any], target: Target, kept: Strides | None = None
) -> Program:
    """Write the program of a functional graph that was traced on the CPU; the graph is consumed.

    ``kept``: how a forward lays out its results, by name, which it notes and its backward reads. Inductor pads rows
    of what is kept for the backward.
    """
    returned = [node.name if isinstance(node, fx.Node) else "" for node in gm.graph.output_node().args[0]]  # type: ignore
    with offline_device(target):
        inputs = retarget(gm, kept if part == "backward" else None)
        source, (found, strides) = generate_program(
            gm,
            inputs,
            settings,
            is_inference=part in ("inference", "weight_prologue"),
            is_backward=part == "backward",
            look=lambda scheduler: (_scheduled(scheduler), _result_strides()),
        )
    if kept is not None and part == "forward":
        kept.update((name, stride) for name, stride in zip(returned, strides, strict=True) if stride is not None)
    kernels = dict(TRITON.findall(source))
    return Program(part, source, kernels, tuple(_name_launches(source, kernels, found)))


def _result_strides() -> list[tuple[int, ...] | None]:
    """Of each result; None where it has none, or they depend on a size, which Inductor does not pad."""
    found: list[tuple[int, ...] | None] = []
    for result in inductor().V.graph.graph_outputs:
        stride = result.maybe_get_stride() if isinstance(result, inductor().ir.IRNode) else None
        if stride is None or not all(isinstance(step, (int, sympy.Integer)) for step in stride):
            found.append(None)
        else:
            found.append(tuple(map(int, stride)))
    return found


def _scheduled(scheduler: Any) -> list[Launch]:
    """The launches the scheduler planned, in order; Triton kernels have no name yet."""
    found = []
    for node in scheduler.nodes:
        kind = type(node).__name__
        if kind == "NopKernelSchedulerNode":
            continue
        if kind == "ExternKernelSchedulerNode":
            if isinstance(node.node, _no_kernels()):
                continue
            flops = node.estimate_flops() or 0
            by_precision = {"bf16": flops} if flops else {}
            product = _library_product(node.node)
            found.append(Launch(_library_name(node.node), False, _library_bytes(node), by_precision, product=product))
            continue
        template = node.get_template_node() if node.is_template() else None
        notes = getattr(template, "annotations", None) or {}
        found.append(
            Launch(
                "",
                True,
                _bytes(scheduler, node),
                notes.get("fp4_flops", {}),
                notes.get("fp4_gemm"),
                notes.get("fp4_quantizes"),
                split=notes.get("fp4_split", 1),
            )
        )
    return found


def _no_kernels() -> tuple[type, ...]:
    """Scheduled nodes that launch nothing: one result of several, a buffer that something else fills."""
    ir = inductor().ir
    return (ir.MultiOutput, ir.AllocatingMultiOutput) if hasattr(ir, "AllocatingMultiOutput") else (ir.MultiOutput,)


def _library_name(node: Any) -> str:
    overload = getattr(node, "op_overload", None)
    return str(overload) if overload is not None else str(getattr(node, "python_kernel_name", None) or type(node))


def _library_bytes(node: Any) -> int:
    return int(node.get_read_write_buffers_sizes())


def _library_product(node: Any) -> tuple[int, int, int, int] | None:
    """Batch, M, N, K of a library's product, from its two last operands; bias and scales come before or after."""
    if not re.search(r"\b(mm|addmm|bmm|baddbmm|_scaled_mm)\b", _library_name(node)):
        return None
    hint = inductor().V.graph.sizevars.optimization_hint
    operands = [[int(hint(n, fallback=0)) for n in x.get_size()] for x in node.inputs]
    matrices = [size for size in operands if len(size) >= 2]
    pairs = [(a, b) for a, b in itertools.pairwise(matrices) if a[-1] == b[-2]]
    if not pairs:
        return None
    a, b = pairs[-1]
    return (a[0] if len(a) == 3 else 1, a[-2], b[-1], a[-1])


def _is_packed(node: Any) -> bool:
    return node.inputs[0].get_dtype().itemsize == 1 and "float8" not in str(node.inputs[0].get_dtype())


def _bytes(scheduler: Any, node: Any) -> int:
    """Bytes of all buffers that a launch reads and writes; of a buffer at most as many as it has.

    Inductor's own count takes a template for a loop over its output, and a fused kernel for one that reads whole
    buffers.
    """
    inside = {id(inner) for inner in node.get_nodes()}
    written = {name for inner in node.get_nodes() for name in inner.get_buffer_names()}
    moved: dict[tuple[str, str], int] = {}
    for kind, deps in (("write", node.read_writes.writes), ("read", node.read_writes.reads)):
        for dep in deps:
            real = scheduler.mutation_real_name.get(dep.name, dep.name)
            unread = kind == "write" and real == dep.name and not _is_read_elsewhere(scheduler, dep.name, inside)
            if unread or (
                kind == "read" and (dep.name in written or (("write", real) in moved and node.is_template()))
            ):
                continue
            total = _buffer_bytes(real)
            moved[kind, real] = min(total, moved.get((kind, real), 0) + _accessed(dep, total))
    return sum(moved.values())


def _is_read_elsewhere(scheduler: Any, name: str, inside: set[int]) -> bool:
    return any(id(user.node) not in inside for user in scheduler.name_to_buf[name].users)


def _buffer_bytes(name: str) -> int:
    graph = inductor().V.graph
    buffer = graph.try_get_buffer(name) or graph.graph_inputs.get(name)
    try:
        size = buffer.get_size()
    except (AttributeError, NotImplementedError):
        return 0
    return int(graph.sizevars.optimization_hint(prod(size), fallback=0)) * int(buffer.get_dtype().itemsize)


def _accessed(dep: Any, total: int) -> int:
    """Bytes that one dependency touches, all of the buffer if that is not known."""
    graph = inductor().V.graph
    try:
        return int(graph.get_dep_size_hint(dep)) or total
    except (AttributeError, NotImplementedError):
        return total


def _name_launches(source: str, kernels: Mapping[str, str], launches: Sequence[Launch]) -> list[Launch]:
    """Give Triton's launches the names that the program calls, in order.

    Raises:
        RuntimeError: the program does not call as many kernels as were planned; a fault of ours.
    """
    calls = (_TRITON_CALL.match(line) for line in source.splitlines())
    names = [call.group(1) for call in calls if call and call.group(1) in kernels]
    planned = sum(launch.is_triton for launch in launches)
    if planned != len(names):
        raise RuntimeError(
            f"the scheduler planned {planned} Triton launches, and the program has {len(names)}: {names}"
        )
    left = iter(names)
    return [dataclasses.replace(x, kernel=next(left)) if x.is_triton else x for x in launches]

"""For tests: a canonical text of graphs that stays the same across torch versions, and programs for GPUs run here."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

__all__ = ["canonical_graph", "count_ops", "simulate"]

_DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "e4m3",
}


def canonical_graph(graph: fx.Graph | fx.GraphModule) -> str:
    """Print a graph so that equal programs give equal text.

    Values are numbered in graph order, symbols in order of appearance; a value shows its dtype and shape (and its
    strides where it is not contiguous) if the graph carries fake tensors. Names, devices, paths and traces are
    left out; backward nodes are marked ``!bwd``, nodes that activation checkpointing recomputes ``!recompute``.

        %0 = input: bf16[s0, 64]
        %1 = param: bf16[96, 64]
        %2 = permute(%1, [1, 0]): bf16[64, 96]{1, 64}
        %3 = mm(%0, %2): bf16[s0, 96]
        return (%3)
    """
    printer = _Printer()
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return "\n".join(printer.line(node) for node in graph.nodes) + "\n"


def count_ops(graph: fx.Graph | fx.GraphModule) -> Counter[str]:
    """How often each operation occurs, by the name `canonical_graph` prints."""
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return Counter(_op_name(node) for node in graph.nodes if node.op in ("call_function", "call_method"))


def simulate(model: Callable[..., Any], inputs: Any, target: str, options: Mapping[str, Any] | None = None) -> Any:
    """Run the program that ``torch.compile(model, backend="nvfp4")`` would run on a GPU, on this CPU, for its numbers.

    The program is the one `fp4_compile.compile_for` writes; its Triton kernels run in Triton's interpreter with a
    GPU's arithmetic, which takes seconds for matrices of a few hundred rows. A backward of what is returned runs
    the emitted backward.

    Fused kernels keep FP32 where eager PyTorch rounds to BF16 between two operations, on a GPU as here. With
    ``options={"inductor": {"emulate_precision_casts": True}}`` they round there too, and the result differs from that
    of the rewritten graph's operators by order of summation alone.

    Args:
        model: a module or a function on the CPU.
        inputs: what it is called with: one tensor, a tuple, or a mapping of keyword arguments.
        target: a GPU in `fp4_compile.cost_model.DEVICES`: ``"sm_100"``.
        options: as for the backend. ``"target"``, whose times decide what pays, is ``target`` unless given.

    Returns:
        What the model returns.

    Raises:
        SimulationError: the program does something that is not simulated.
        TargetError, DeviceError: the target is unknown, no GPU, or this installation cannot compile for it.
        OptionError, PlanError: a mistake in the options.
    """
    from fp4_compile.offline.compile_for import prepared
    from fp4_compile.offline.trace import execute
    from fp4_compile.simulation.program import simulated

    gpu, chosen, settings = prepared(target, options)
    return execute(model, inputs, chosen, gpu.sm, simulated(gpu, settings))[0]


class _Printer:
    def __init__(self) -> None:
        self.numbers: dict[fx.Node, int] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self.arg(node.args[0])}"
        self.numbers[node] = len(self.numbers)
        return f"%{self.numbers[node]} = {self.head(node)}{self.type(node)}{_marks(node)}"

    def head(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return _input_role(node)
        if node.op == "get_attr":
            return "attr"
        if node.target is operator.getitem and isinstance(node.args[1], int):
            return f"{self.arg(node.args[0])}.{node.args[1]}"
        given = [self.arg(a) for a in node.args] + [f"{k}={self.arg(v)}" for k, v in sorted(node.kwargs.items())]
        return f"{_op_name(node)}({', '.join(given)})"

    def arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"%{self.numbers[arg]}"
        if isinstance(arg, tuple):
            return "(" + ", ".join(self.arg(a) for a in arg) + ")"
        if isinstance(arg, list):
            return "[" + ", ".join(self.arg(a) for a in arg) + "]"
        if isinstance(arg, float):
            return f"{arg:.4g}"
        if isinstance(arg, torch.dtype):
            return _DTYPES.get(arg, str(arg).removeprefix("torch."))
        if isinstance(arg, (torch.SymInt, torch.SymFloat)):
            return self.size(arg)
        if isinstance(arg, torch.device):
            return "device"
        return str(arg).removeprefix("torch.")

    def type(self, node: fx.Node) -> str:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            return f": {self.tensor(value)}"
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return f": {self.size(value)}"
        return ""

    def tensor(self, value: torch.Tensor) -> str:
        sizes = ", ".join(self.size(s) for s in value.shape)
        strides = ""
        if value.layout is torch.strided and not _contiguous(value):
            strides = "{" + ", ".join(self.size(s) for s in value.stride()) + "}"
        return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]{strides}"

    def size(self, size: Any) -> str:
        expr = getattr(getattr(size, "node", None), "expr", None)
        if expr is None:
            return str(size)
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self.symbols:
                letter = "u" if str(symbol).startswith("u") else "s"
                count = sum(str(s).startswith(letter) for s in self.symbols.values())
                self.symbols[symbol] = sympy.Symbol(f"{letter}{count}", integer=True)
        return str(expr.xreplace(self.symbols))


def _op_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        packet, _, overload = str(node.target).rpartition(".")
        namespace, _, name = packet.partition(".")
        name = name if overload == "default" else f"{name}.{overload}"
        return name if namespace in ("aten", "prims") else f"{namespace}.{name}"
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def _input_role(node: fx.Node) -> str:
    if isinstance(node.meta.get("val"), torch.SymInt):
        return "symint"
    description = type(node.meta.get("desc")).__name__
    if "Tangent" in description:
        return "tangent"
    if node.meta.get("fp4_hoisted"):
        return "hoisted"
    return "param" if node.meta.get("fp4_param") or "Param" in description else "input"


def _contiguous(value: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, int) and size == 1:
            continue
        if str(stride) != str(expected):
            return False
        expected = size * expected
    return True


def _marks(node: fx.Node) -> str:
    marks = " !bwd" if node.meta.get("partitioner_tag") == "is_backward" and node.op != "placeholder" else ""
    recompute = node.meta.get("recompute")
    if recompute is not None and "RECOMPUTE" in str(recompute).upper():
        marks += " !recompute"
    return marks

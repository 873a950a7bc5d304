"""Run a whole program that Inductor wrote for a GPU on CPU tensors.

The program's own Python runs, with the CPU where it names the GPU: its Triton kernels in the interpreter, in the
configuration and the grid that they would be launched with; matrix products and other operators of a library on the
CPU. What cannot be put onto the CPU is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fp4_compile._torch_compat import TorchDispatchMode, load_kernel
from fp4_compile.errors import SimulationError
from fp4_compile.offline.generate import TRITON, Program, Strides, generate
from fp4_compile.offline.machine import Target, offline_device
from fp4_compile.offline.trace import Executor, Lowered
from fp4_compile.simulation.interpreter import Kernel

aten = torch.ops.aten

# What Inductor writes into a program for a GPU, and what stands there for the CPU.
_ON_THE_CPU = (
    (r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = lambda device: None"),
    (r"^async_compile = AsyncCompile\(\)$", ""),
    (r"^from torch\._inductor\.runtime\.runtime_utils import assert_tensor_metadata$", ""),
    (r"^empty_strided_cuda = .*$", ""),
    (r"\bempty_strided_cuda\b", "empty_strided_cpu"),
    (r"torch\.cuda\._DeviceGuard\(0\)", "contextlib.nullcontext()"),
    (r"torch\.cuda\.set_device\(0\)", "pass"),
    (r"device\(type='cuda', index=0\)", "device(type='cpu')"),
)
_SELF_TEST = re.compile(r"^def (get_args|benchmark_compiled_module)\(.*", re.DOTALL | re.MULTILINE)


def simulated(target: Target, settings: Mapping[str, Any]) -> Executor:
    """An executor that generates the program of each graph and runs it here."""

    kept: Strides = {}

    def executor(lowered: Lowered) -> Callable[[list[Any]], Sequence[Any]]:
        nonlocal kept
        kept = kept if lowered.part == "backward" else {}  # a backward follows its forward
        mine, loaded = kept, list[SimulatedProgram]()

        def run(inputs: list[Any]) -> Sequence[Any]:
            hoisted = lowered.hoisted
            if not loaded:  # at the first call, and not in the middle of the trace
                parts = [("weight_prologue", hoisted.prologue)] if hoisted is not None else []
                for part, gm in [*parts, (lowered.part, lowered.gm)]:
                    loaded.append(SimulatedProgram(generate(part, gm, settings, target, mine), target))
            if hoisted is None:
                return loaded[0](inputs)
            return loaded[1]([*inputs, *loaded[0]([inputs[i] for i in hoisted.inputs])])

        return run

    return executor


class SimulatedProgram:
    """A program on CPU tensors.

    Raises:
        SimulationError: it does something that is not simulated.
    """

    def __init__(self, program: Program, target: Target) -> None:
        text = TRITON.sub(r"async_compile.triton('\1')", _SELF_TEST.sub("", program.source))
        for written, instead in _ON_THE_CPU:
            text = re.sub(written, instead, text, flags=re.MULTILINE)
        left = next((line.strip() for line in text.splitlines() if _names_a_gpu(line)), None)
        if left is not None:
            raise SimulationError(f"{program.part}: not simulated: {left}")
        space: dict[str, Any] = {
            "__name__": program.part,
            "async_compile": _Kernels(program.kernels, target),
            "assert_tensor_metadata": _lay_out,
        }
        exec(compile("import contextlib\n" + text, f"<{program.part} for {target.name}>", "exec"), space)
        self._call = space["call"]

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The program's results; ``inputs`` as its graph has them."""
        with torch.no_grad(), _Attention():  # type: ignore[no-untyped-call]
            results: Sequence[Any] = self._call(list(inputs))
        return results


def _names_a_gpu(line: str) -> bool:
    return "cuda" in line.partition("#")[0]


def _lay_out(result: Any, size: Any, stride: Any, dtype: torch.dtype, operator: str) -> None:
    """In the place of the check of a library's result: give it the strides that the GPU's would have."""
    if result is None:
        return
    if result.dtype != dtype or tuple(result.shape) != tuple(size):
        raise SimulationError(f"{operator} returns {result.dtype} {list(result.shape)}, on a GPU {dtype} {list(size)}")
    if result.stride() != tuple(stride):
        result.data = torch.empty_strided(size, stride, dtype=dtype).copy_(result)


class _Kernels:
    """In the place of Inductor's pool of compilers."""

    def __init__(self, sources: Mapping[str, str], target: Target) -> None:
        self._sources, self._target = sources, target

    def triton(self, name: str) -> SimulatedKernel:
        return SimulatedKernel(name, self._sources[name], self._target)

    def wait(self, scope: Mapping[str, Any]) -> None:
        pass

    def __getattr__(self, kind: str) -> Any:
        raise SimulationError(f"a kernel in another language than Triton ({kind}) is not simulated")


class SimulatedKernel:
    """A Triton kernel that Inductor wrote, launched as its program does."""

    def __init__(self, name: str, source: str, target: Target) -> None:
        with offline_device(target):
            self._kernel = load_kernel(name, source)
        function, known = self._kernel.tuner.fn, self._kernel.meta["constants"]
        names = function.arg_names
        self._constants = {names[i]: known[names[i]] for i in function.constexprs if names[i] in known}
        self._names = [name for name in names if name not in self._constants]
        self._simulated = Kernel(function)

    def run(self, *arguments: Any, stream: Any) -> None:
        """Launch; behind the kernel's own arguments may stand the grid."""
        names = [*self._names, *self._kernel.tuner.inductor_meta.get("extra_launcher_args", ())]
        grid = self._kernel.grid(dict(zip(names, arguments, strict=True)))
        self._simulated(grid, *arguments[: len(self._names)], **self._constants)


class _Attention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The GPU's attention operators by the CPU's, whose results have the same meaning but for the random state."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        attend = _ATTENTION.get(func)
        if attend is None:
            return func(*args, **given)
        return attend(*args, scale=given.get("scale"))


def _flash(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any, scale: Any) -> Any:
    out, logsumexp = _FORWARD(q, k, v, dropout, causal, attn_mask=None, scale=scale)
    return (out, logsumexp, None, None, q.shape[2], k.shape[2], None, None, None)


def _efficient(
    q: Any, k: Any, v: Any, mask: Any, _: Any, dropout: float = 0.0, causal: bool = False, *, scale: Any
) -> Any:
    out, logsumexp = _FORWARD(q, k, v, dropout, causal, attn_mask=mask, scale=scale)
    return (out, F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32)), None, None)  # the GPU's has rows of multiples of 32


def _flash_backward(*args: Any, scale: Any) -> Any:
    grad, q, k, v, out, logsumexp, _, _, _, _, dropout, causal, *_ = args
    return _BACKWARD(grad, q, k, v, out, logsumexp, dropout, causal, attn_mask=None, scale=scale)


def _efficient_backward(*args: Any, scale: Any) -> Any:
    grad, q, k, v, mask, out, logsumexp, _, _, dropout, _, *rest = args
    causal = rest[0] if rest else False  # left out where it is the default
    logsumexp = logsumexp[..., : q.shape[2]]
    return (*_BACKWARD(grad, q, k, v, out, logsumexp, dropout, causal, attn_mask=mask, scale=scale), None)


_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_ATTENTION: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}

"""Trace a model on the CPU into the functional graphs that code is generated from; nothing is computed.

The way is the backend's own: Dynamo, AOTAutograd, the pipeline, the partitioner. Where Inductor would compile a
graph, the graph is kept, and in its place runs a function whose results are zeros of the right shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp4_compile._torch_compat import (
    BackendCompilerFailed,
    FakeTensor,
    backward_at_once,
    compile_apart,
    compile_with_inductor,
    custom_passes,
    size_hint,
    without_autograd_cache,
)
from fp4_compile.errors import Fp4CompileError
from fp4_compile.options import Options
from fp4_compile.passes.hoist_weights import hoist_weights
from fp4_compile.pipeline import Pipeline
from fp4_compile.plan import Plan
from fp4_compile.recorder import FolderRecorder, Recorder


@dataclasses.dataclass
class Traced:
    """One Dynamo graph: its plan, and the functional graphs made of it, by part, in the order they run."""

    plan: Plan
    recorder: Recorder
    parts: list[tuple[str, fx.GraphModule]] = dataclasses.field(default_factory=list)


def trace(model: Callable[..., Any], inputs: Any, options: Options | None, sm: int) -> list[Traced]:
    """The graphs of a model, and of its backward if gradients are enabled and something requires them.

    Args:
        model: a module or a function on the CPU.
        inputs: what it is called with: one tensor, a tuple, or a mapping of keyword arguments.
        options: of the backend; None traces what plain Inductor would be given.
        sm: compute capability of the GPU that kernels are for.

    Raises:
        Fp4CompileError: a mistake in the options.
    """
    tracer = _Tracer(options, sm)
    compiled = compile_apart(model, tracer)
    positional, keywords = _arguments(inputs)
    try:
        compiled(*positional, **keywords)
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, Fp4CompileError):
            raise failure.inner_exception from None
        raise
    return tracer.traced


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


class _Tracer:
    """A Dynamo backend."""

    def __init__(self, options: Options | None, sm: int) -> None:
        self._options = options
        self._sm = sm
        self.traced: list[Traced] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        options = self._options
        recorder = FolderRecorder(options.dump) if options is not None and options.dump else Recorder()
        current = Traced(Plan(()), recorder)
        self.traced.append(current)
        settings: dict[str, Any] = {}
        pipeline = None
        if options is not None:
            recorder.graph("captured", gm)
            pipeline = Pipeline(options, example_inputs, recorder, self._sm)
            settings["joint_custom_pre_pass"] = (*custom_passes("joint_custom_pre_pass"), pipeline)
        try:
            with without_autograd_cache(), backward_at_once():
                compiled = compile_with_inductor(gm, example_inputs, _Keeper(current), settings)
            if pipeline is not None:
                pipeline.check_fit()
                current.plan = pipeline.context.plan
            return compiled
        finally:
            if pipeline is not None:
                pipeline.context.weights = {}


class _Keeper:
    """In the place of Inductor's compile of one functional graph."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        returned: Any = gm.graph.output_node().args[0]
        results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in returned]
        part = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        static = sorted(kwargs.get("static_input_idxs") or ())
        hoisted = hoist_weights(gm, static) if part == "inference" else None
        if hoisted is not None:
            self._keep("weight_prologue", hoisted.prologue)
        self._keep(part, gm)

        def run(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return [_zeros(result) for result in results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _keep(self, part: str, gm: fx.GraphModule) -> None:
        self._traced.recorder.graph(f"{part}_to_inductor", gm)
        self._traced.parts.append((part, gm))


def _zeros(result: Any) -> Any:
    if isinstance(result, FakeTensor):
        size, stride = ([size_hint(x) for x in sizes] for sizes in (result.shape, result.stride()))
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
        return torch.zeros(span, dtype=result.dtype).as_strided(size, stride)
    return size_hint(result) if isinstance(result, torch.SymInt) else result

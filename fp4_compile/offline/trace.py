"""Trace a model on the CPU into the functional graphs that code is generated from.

The way is the backend's own: Dynamo, AOTAutograd, the pipeline, the partitioner. Where Inductor would compile a
graph, the graph is kept, and something else runs in its place: a function whose results are zeros of the right
shapes, so that nothing is computed, or what a caller makes of the graph.
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
from fp4_compile.backend import inductor_settings
from fp4_compile.errors import Fp4CompileError
from fp4_compile.options import Options
from fp4_compile.passes.hoist_weights import Hoisted, hoist_weights
from fp4_compile.pipeline import Pipeline
from fp4_compile.plan import Plan
from fp4_compile.recorder import FolderRecorder, Recorder


@dataclasses.dataclass
class Traced:
    """One Dynamo graph: its plan, and the functional graphs made of it, by part, in the order they run."""

    plan: Plan
    recorder: Recorder
    parts: list[tuple[str, fx.GraphModule]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One functional graph as Inductor would be given it, and what it returns, as fake tensors."""

    part: str
    gm: fx.GraphModule
    hoisted: Hoisted | None
    """The weights' prologue, whose results are ``gm``'s last inputs."""
    results: tuple[Any, ...]


Executor = Callable[[Lowered], Callable[[list[Any]], Sequence[Any]]]
"""From a graph to the function that runs in its place, given all inputs but the hoisted ones."""


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
    return execute(model, inputs, options, sm, _returning_zeros)[1]


def execute(
    model: Callable[..., Any], inputs: Any, options: Options | None, sm: int, executor: Executor
) -> tuple[Any, list[Traced]]:
    """`trace`, with what ``executor`` makes of the graphs run in their place.

    Returns:
        What the model returns then, and the graphs.
    """
    tracer = _Tracer(options, sm, executor)
    compiled = compile_apart(model, tracer)
    positional, keywords = _arguments(inputs)
    try:
        return compiled(*positional, **keywords), tracer.traced
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, Fp4CompileError):
            raise failure.inner_exception from None
        raise


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


class _Tracer:
    """A Dynamo backend."""

    def __init__(self, options: Options | None, sm: int, executor: Executor) -> None:
        self._options = options
        self._sm = sm
        self._executor = executor
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
            settings = inductor_settings(options, None, on_cpu=False)
            pipeline = Pipeline(options, example_inputs, recorder, self._sm)
            settings["joint_custom_pre_pass"] = (*custom_passes("joint_custom_pre_pass"), pipeline)
        try:
            with without_autograd_cache(), backward_at_once():
                compiled = compile_with_inductor(gm, example_inputs, _Keeper(current, self._executor), settings)
            if pipeline is not None:
                pipeline.check_fit()
                current.plan = pipeline.context.plan
            return compiled
        finally:
            if pipeline is not None:
                pipeline.context.weights = {}


class _Keeper:
    """In the place of Inductor's compile of one functional graph."""

    def __init__(self, traced: Traced, executor: Executor) -> None:
        self._traced = traced
        self._executor = executor

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        returned: Any = gm.graph.output_node().args[0]
        results = tuple(node.meta["val"] if isinstance(node, fx.Node) else node for node in returned)
        part = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        static = sorted(kwargs.get("static_input_idxs") or ())
        hoisted = hoist_weights(gm, static) if part == "inference" else None
        if hoisted is not None:
            self._keep("weight_prologue", hoisted.prologue)
        self._keep(part, gm)
        run = self._executor(Lowered(part, gm, hoisted, results))

        def boxed(inputs: list[Any]) -> list[Any]:
            given = list(inputs)
            inputs.clear()
            return list(run(given))

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _keep(self, part: str, gm: fx.GraphModule) -> None:
        self._traced.recorder.graph(f"{part}_to_inductor", gm)
        self._traced.parts.append((part, gm))


def _returning_zeros(lowered: Lowered) -> Callable[[list[Any]], Sequence[Any]]:
    return lambda inputs: [_zeros(result) for result in lowered.results]


def _zeros(result: Any) -> Any:
    if isinstance(result, FakeTensor):
        size, stride = ([size_hint(x) for x in sizes] for sizes in (result.shape, result.stride()))
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
        return torch.zeros(span, dtype=result.dtype).as_strided(size, stride)
    return size_hint(result) if isinstance(result, torch.SymInt) else result

"""What the backend would do to a model, as a value: nothing is generated, Inductor does not run."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fp4_compile._torch_compat import (
    BackendCompilerFailed,
    aot_autograd,
    compile_apart,
    graph_breaks,
    make_boxed_func,
    min_cut_rematerialization_partition,
    select_decomp_table,
)
from fp4_compile.errors import Fp4CompileError
from fp4_compile.options import Options
from fp4_compile.passes.find_matmuls import is_linear_convolution
from fp4_compile.passes.graph import aten, is_backward
from fp4_compile.pipeline import Pipeline
from fp4_compile.plan import Plan, merge
from fp4_compile.recorder import FolderRecorder, Recorder


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One compiled graph: its plan, and its text after each stage, in order."""

    plan: Plan
    stages: Mapping[str, str]
    convolutions: int
    """Those of the forward that are no matmuls."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. Prints as a table of at most 100 columns."""

    graphs: tuple[GraphReport, ...]
    graph_breaks: Mapping[str, int]
    """Why Dynamo split the model, and how often."""

    @property
    def plan(self) -> Plan:
        """The plan of the whole model; give it back with ``options={"plan": ...}``."""
        return merge(graph.plan for graph in self.graphs)

    @property
    def graph_count(self) -> int:
        """How many graphs Dynamo made of the model."""
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        """How often Dynamo had to leave the model's code."""
        return sum(self.graph_breaks.values())

    @property
    def convolution_count(self) -> int:
        """Convolutions of the forward that are no matmuls, since their windows are wider than one: not in the plan."""
        return sum(graph.convolutions for graph in self.graphs)

    def advice(self) -> tuple[str, ...]:
        """What to change to get more into FP4, most matmuls first."""
        lines = list(self.plan.advice())
        if self.graph_breaks:
            lines.append(f"{self.graph_break_count} graph breaks: torch.compile(..., fullgraph=True) shows where")
        return tuple(lines)

    def render(self, width: int = 100) -> str:
        """The table, the graph count, and the advice."""
        breaks = f"{self.graph_break_count} graph break{'s' * (self.graph_break_count != 1)}"
        lines = [self.plan.render(width), f"{self.graph_count} graph{'s' * (self.graph_count != 1)}, {breaks}"]
        if self.convolution_count:
            wider = f"{self.convolution_count} convolution{'s' * (self.convolution_count > 1)}"
            lines.append(f"beside them {wider} with windows wider than one, as in the model")
        lines += [_wrap(f"  break: {reason.splitlines()[0]}", width) for reason in self.graph_breaks]
        advice = self.advice()
        if advice:
            lines += ["to get more into FP4:", *(_wrap(f"  {line}", width) for line in advice)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def explain(
    model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Explanation:
    """Plan a model without generating code: which matmuls run in NVFP4, which do not, and why.

    Runs the model once on the inputs, through the rewritten graphs; plans the backward too if gradients are
    enabled and something requires them. The model, and what ``torch.compile`` has made of it, stay as they are.

    Args:
        model: a module or a function.
        inputs: what it is called with.
        options: as for ``torch.compile(..., backend="nvfp4", options=...)``.
        keywords: keyword arguments the model is called with.

    Raises:
        OptionError, PlanError, DumpError: a mistake in the options.
    """
    chosen = Options.parse(options)
    planner = _Planner(chosen)
    before = graph_breaks()
    compiled = compile_apart(model, planner)
    try:
        compiled(*inputs, **keywords)
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, Fp4CompileError):
            raise failure.inner_exception from None
        raise
    breaks = graph_breaks() - before
    reports = tuple(
        GraphReport(pipeline.context.plan, dict(recorder.stages), sum(convolutions))
        for pipeline, recorder, convolutions in planner.compiled
    )
    return Explanation(reports, dict(breaks))


class _Planner:
    """A Dynamo backend that plans and rewrites like `fp4_compile.backend.nvfp4`, and runs the graphs as they are."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.compiled: list[tuple[Pipeline, Recorder, list[int]]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        recorder = FolderRecorder(self._options.dump) if self._options.dump else Recorder()
        recorder.graph("captured", gm)
        pipeline = Pipeline(self._options, example_inputs, recorder)
        convolutions: list[int] = []
        self.compiled.append((pipeline, recorder, convolutions))

        def run_as_it_is(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(graph.forward)

        def plan_inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            convolutions.append(_run_over_regions(pipeline, graph))
            return run_as_it_is(graph, inputs)

        def plan_training(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            convolutions.append(_run_over_regions(pipeline, joint))
            return min_cut_rematerialization_partition(joint, inputs, **kwargs)

        backend = aot_autograd(
            fw_compiler=run_as_it_is,
            bw_compiler=run_as_it_is,
            inference_compiler=plan_inference,
            partition_fn=plan_training,
            decompositions=select_decomp_table(),
        )
        try:
            compiled = backend(gm, example_inputs)
            pipeline.check_fit()
            return compiled
        finally:
            pipeline.context.weights = {}


def _run_over_regions(pipeline: Pipeline, graph: fx.GraphModule) -> int:
    """The pipeline over a graph and, as Inductor has it, over the regions and branches inside.

    Returns:
        How many convolutions of the forward are no matmuls.
    """
    found = sum(
        not (is_linear_convolution(node) or is_backward(node))
        for node in graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    )
    for node in graph.graph.find_nodes(op="get_attr"):
        inner = getattr(graph, str(node.target), None)
        if isinstance(inner, fx.GraphModule):
            found += _run_over_regions(pipeline, inner)
    pipeline(graph.graph)
    graph.recompile()
    return found


def _wrap(text: str, width: int) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text.strip(), width, initial_indent=indent, subsequent_indent=indent + "  ")

"""The passes as one object that Inductor runs on its joint graph and counts in its cache keys."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fp4_compile
from fp4_compile._torch_compat import (
    CustomGraphPass,
    dynamo_input_position,
    graph_breaks,
    is_static_input,
    observe_pass,
)
from fp4_compile.errors import Fp4CompileError
from fp4_compile.options import Options
from fp4_compile.passes import FOR_GPUS, PIPELINE, Context
from fp4_compile.passes.context import ParallelGroup
from fp4_compile.planner.pins import parse_pins, require_known
from fp4_compile.recorder import Recorder

log = logging.getLogger("fp4_compile")


class Pipeline(CustomGraphPass):
    """Runs `fp4_compile.passes.PIPELINE` over the ATen graph of one Dynamo graph.

    Inductor may call it more than once for one Dynamo graph (nested regions, a graph split already); the
    decisions of all calls make up one plan.
    """

    def __init__(
        self, options: Options, example_inputs: Sequence[Any], recorder: Recorder, sm: int | None = None
    ) -> None:
        static = frozenset(i for i, example in enumerate(example_inputs) if is_static_input(example))
        # Held until the compile is over (see backend.nvfp4), and only if something is to be scored.
        weights = {i: example_inputs[i] for i in static} if options.plans else {}
        self.context = Context(options, static, weights, parallel_groups(example_inputs), sm)
        self._recorder = recorder

    def __call__(self, graph: fx.Graph) -> None:
        """Decide and rewrite, in place."""
        for node in graph.nodes:
            if node.op == "placeholder":
                mark_parameter(node, self.context.static_inputs)
        self._recorder.graph("aten", graph)
        owner = graph.owning_module
        if owner is None:
            raise TypeError("the pipeline runs on the graph of a GraphModule")
        for run in PIPELINE:
            if run in FOR_GPUS and self.context.sm is None:
                continue  # a CPU's graph has no such stages
            name = f"fp4_{run.__name__}"
            observe_pass(owner, name, lambda graph, run=run: run(graph, self.context))  # type: ignore[misc]
            self._recorder.graph(run.__name__, graph)
        plan = self.context.plan
        self._recorder.plan(plan)
        log.info("plan of this graph:\n%s", plan)

    def check_fit(self) -> None:
        """After all graphs of a compile were seen: do the given plan and pins name anything in it?

        After a graph break they may be meant for another part of the model, and it is only logged.

        Raises:
            PlanError: the plan names none of the sites.
            OptionError: a pin fits none of the sites.
        """
        sites = [decision.site for decision in self.context.plan]
        options = self.context.options
        if not sites or not (options.plan or options.pins):
            return
        try:
            if options.plan is not None:
                options.plan.require_fit(sites)
            require_known(sites, parse_pins(options.pins))
        except Fp4CompileError as error:
            if not graph_breaks():
                raise
            log.info("a part of a model: %s", error)

    def uuid(self) -> str:
        """Everything the result depends on besides the graph: the sources, the options, what is a weight."""
        static = sorted(self.context.static_inputs)
        given = (self.context.options.digest(), static, self.context.parallel_groups, self.context.sm)
        key = (fp4_compile.__version__, source_digest(), torch.__version__, *given)
        return hashlib.sha256(repr(key).encode()).hexdigest()


def parallel_groups(example_inputs: Sequence[Any]) -> tuple[ParallelGroup, ...]:
    """The process groups over which any input of a graph is a sharded DTensor: tensor parallelism."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ()
    from torch.distributed.tensor import DTensor

    found: dict[str, ParallelGroup] = {}
    for example in example_inputs:
        if not isinstance(example, DTensor):
            continue
        mesh = example.device_mesh
        for dim, placement in enumerate(example.placements):
            if placement.is_replicate() or mesh.size(dim) == 1:
                continue
            name = mesh.get_group(dim).group_name
            found[name] = ParallelGroup(name, mesh.size(dim), mesh.mesh.stride(dim))
    return tuple(found[name] for name in sorted(found))


def mark_parameter(placeholder: fx.Node, static_inputs: frozenset[int]) -> None:
    """Note on a placeholder which parameter or buffer it is."""
    position = dynamo_input_position(placeholder)
    if position in static_inputs:
        placeholder.meta["fp4_param"] = True
        placeholder.meta["fp4_input"] = position


@functools.cache
def source_digest() -> str:
    """Digest of fp4_compile's sources: an edited kernel or pass must never meet an older one's cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()

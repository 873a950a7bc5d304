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
from fp4_compile._torch_compat import CustomGraphPass, dynamo_input_position, is_static_input, observe_pass
from fp4_compile.options import Options
from fp4_compile.passes import PIPELINE, Context
from fp4_compile.recorder import Recorder

log = logging.getLogger("fp4_compile")


class Pipeline(CustomGraphPass):
    """Runs `fp4_compile.passes.PIPELINE` over the ATen graph of one Dynamo graph.

    Inductor may call it more than once for one Dynamo graph (nested regions, a graph split already); the
    decisions of all calls make up one plan.
    """

    def __init__(self, options: Options, example_inputs: Sequence[Any], recorder: Recorder) -> None:
        static = frozenset(i for i, example in enumerate(example_inputs) if is_static_input(example))
        self.context = Context(options, static)
        self._recorder = recorder

    def __call__(self, graph: fx.Graph) -> None:
        """Decide and rewrite, in place."""
        for node in graph.nodes:
            if node.op == "placeholder" and dynamo_input_position(node) in self.context.static_inputs:
                node.meta["fp4_param"] = True
        self._recorder.graph("aten", graph)
        owner = graph.owning_module
        if owner is None:
            raise TypeError("the pipeline runs on the graph of a GraphModule")
        for run in PIPELINE:
            name = f"fp4_{run.__name__}"
            observe_pass(owner, name, lambda graph, run=run: run(graph, self.context))  # type: ignore[misc]
            self._recorder.graph(run.__name__, graph)
        plan = self.context.plan
        self._recorder.plan(plan)
        log.info("plan of this graph:\n%s", plan)

    def uuid(self) -> str:
        """Everything the result depends on besides the graph: the sources, the options, what is a weight."""
        static = sorted(self.context.static_inputs)
        key = (fp4_compile.__version__, source_digest(), torch.__version__, self.context.options.digest(), static)
        return hashlib.sha256(repr(key).encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """Digest of fp4_compile's sources: an edited kernel or pass must never meet an older one's cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()

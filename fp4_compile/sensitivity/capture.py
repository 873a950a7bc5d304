"""Run a model's captured graphs in eager mode, with a handler standing in at every matrix multiplication.

This is what calibration and exact measurement see: the same ATen graphs, sites and keys as the compile, and
real tensors. Nothing is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp4_compile import ops
from fp4_compile._torch_compat import aot_autograd, is_static_input, make_boxed_func, matmul_decompositions
from fp4_compile.options import Options
from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.find_matmuls import find_matmuls
from fp4_compile.passes.graph import aten, parameter_nodes
from fp4_compile.passes.policy import decide
from fp4_compile.passes.structure import Structure
from fp4_compile.pipeline import mark_parameter
from fp4_compile.planner.survey import Survey, merge_surveys, survey

Handler = Callable[[Matmul, tuple[Any, ...], Tensor], Tensor]
"""Called at a site with its arguments and its result in high precision; what it returns takes the result's place."""

Look = Callable[[Survey, Sequence[Matmul], Mapping[int, Tensor]], None]
"""Called once a captured graph: its survey, its matmuls, and its weights by their position among the inputs."""


class SiteRunner:
    """A Dynamo backend: ``torch.compile(model, backend=SiteRunner(handler))``, to be called without gradients.

    With ``with_gradients`` the graphs themselves record gradients, of activations alone: parameters and buffers
    are detached.
    """

    def __init__(self, handler: Handler, with_gradients: bool = False, look: Look | None = None) -> None:
        self.handler = handler
        self._look_at = look
        self.with_gradients = with_gradients
        self._surveys: list[Survey] = []
        self.advised: set[str] = set()
        """Keys of the sites captured so far that the default policy runs in NVFP4."""

    @property
    def survey(self) -> Survey:
        """The matmuls of every graph captured so far."""
        return merge_surveys(self._surveys)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Capture one Dynamo graph."""
        static = frozenset(i for i, example in enumerate(example_inputs) if is_static_input(example))

        def run_with_handler(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            placeholders = graph.graph.find_nodes(op="placeholder")
            for node in placeholders:
                mark_parameter(node, static)
            weights = {i for i, node in enumerate(placeholders) if node.meta.get("fp4_param")}
            sites = self._look(graph.graph, {i: example_inputs[i] for i in static})

            def run(*args: Any) -> Any:
                given = [a.detach() if i in weights else a for i, a in enumerate(args)]
                with torch.set_grad_enabled(self.with_gradients):
                    return _Interpreter(graph, sites, self).run(*given)

            return make_boxed_func(run)

        backend = aot_autograd(
            fw_compiler=run_with_handler,
            bw_compiler=run_with_handler,
            inference_compiler=run_with_handler,
            decompositions=matmul_decompositions(),
        )
        with torch.no_grad():
            return backend(gm, example_inputs)

    def _look(self, graph: fx.Graph, weights: Mapping[int, Tensor]) -> dict[fx.Node, Matmul]:
        static = frozenset(weights)
        context = Context(Options(), static)
        find_matmuls(graph, context)
        structure, parameters = Structure(graph, context.matmuls), parameter_nodes(graph, static)
        defaults = [decide(matmul, structure, parameters) for matmul in context.matmuls]
        found = survey(graph, context.matmuls, defaults, parameters)
        self._surveys.append(found)
        self.advised.update(entry.key for entry in found if entry.advised)
        if self._look_at is not None:
            self._look_at(found, context.matmuls, weights)
        return {matmul.node: matmul for matmul in context.matmuls}


class _Interpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, sites: Mapping[fx.Node, Matmul], runner: SiteRunner) -> None:
        super().__init__(graph)
        self._sites = sites
        self._runner = runner

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        matmul = self._sites.get(n)
        if matmul is None:
            return result
        return self._runner.handler(matmul, self.fetch_args_kwargs_from_env(n)[0], result)


def operands(matmul: Matmul, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The operands as [..., M, K] and [..., N, K]."""
    lhs, rhs = (args[i] for i in matmul.positions)
    if matmul.site.op == "conv":
        return lhs.movedim(1, -1), rhs.flatten(1)
    return lhs, rhs.mT


def factors(matmul: Matmul) -> tuple[float, float]:
    """``alpha`` and ``beta`` of a product with a bias."""
    return float(matmul.node.kwargs.get("alpha", 1)), float(matmul.node.kwargs.get("beta", 1))  # type: ignore[arg-type]


def quantized_product(lhs: Tensor, rhs: Tensor) -> Tensor:
    """[..., M, K] x [..., N, K] in NVFP4, fp32 [..., M, N]."""
    a, b = ops.amax(lhs), ops.amax(rhs)
    return ops.scaled_mm(*ops.quantize(lhs, a), a, *ops.quantize(rhs, b), b, None, torch.float32)  # type: ignore[no-any-return]


def quantized_result(matmul: Matmul, args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """What the site gives in NVFP4, with its bias."""
    product = quantized_product(*operands(matmul, args))
    alpha, beta = factors(matmul)
    bias = None
    if matmul.site.op == "conv":
        bias = args[2]
    elif matmul.node.target in (aten.addmm.default, aten.baddbmm.default):
        bias = args[0]
    if alpha != 1:
        product = product * alpha
    if bias is not None:
        product = product + bias * beta
    if matmul.site.op == "conv":
        product = product.movedim(-1, 1)
    return product.to(dtype)

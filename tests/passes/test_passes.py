"""What every pass owes: idempotence, an effect, and a reason where it has none."""

from __future__ import annotations

import importlib

import pytest
import torch

import fp4_compile
from fp4_compile.options import Options
from fp4_compile.passes import PIPELINE, Context
from fp4_compile.testing import canonical_graph, count_ops


def traced(function, *inputs):
    """An ATen graph with fake values, as the passes get it."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        return make_fx(function)(*fakes)


def three_layers(x, w, v, u):
    y = torch.mm(x, w)
    return torch.mm(y, v), torch.mm(x, u), torch.mm(y, y.t())


THREE = [torch.randn(*s) for s in ((32, 64), (64, 64), (64, 96), (64, 40))]


def test_the_pipeline_is_idempotent():
    gm = traced(three_layers, *THREE)
    context = Context(Options())
    for run in PIPELINE:
        run(gm.graph, context)
    once, plan = canonical_graph(gm.graph), context.plan
    assert count_ops(gm.graph)["fp4.scaled_mm"] == 4
    for run in PIPELINE:
        run(gm.graph, context)
    assert canonical_graph(gm.graph) == once
    assert context.plan == plan


@pytest.mark.parametrize("run", PIPELINE, ids=lambda run: run.__name__)
def test_each_pass_is_idempotent_by_itself(run):
    gm = traced(three_layers, *THREE)
    context = Context(Options())
    for earlier in PIPELINE[: PIPELINE.index(run)]:
        earlier(gm.graph, context)
    run(gm.graph, context)
    once = canonical_graph(gm.graph)
    if run.__name__ == "rewrite":  # a second rewrite starts from what is left to rewrite
        PIPELINE[0](gm.graph, context)
    run(gm.graph, context)
    gm.graph.lint()
    assert canonical_graph(gm.graph) == once


def test_the_rewritten_graph_computes_what_the_operators_do_by_hand():
    gm = traced(three_layers, *THREE)
    context = Context(Options())
    for run in PIPELINE:
        run(gm.graph, context)
    gm.recompile()

    def linear(x, w):
        a, b, w = torch.ops.fp4.amax(x), torch.ops.fp4.amax(w), w.t()
        return torch.ops.fp4.scaled_mm(
            *torch.ops.fp4.quantize(x, a), a, *torch.ops.fp4.quantize(w, b), b, None, x.dtype
        )

    x, w, v, u = THREE
    y = linear(x, w)
    for got, want in zip(gm(*THREE), (linear(y, v), linear(x, u), linear(y, y.t())), strict=True):
        assert torch.equal(got, want)


def test_a_matmul_that_resists_stays_and_says_so(monkeypatch, caplog):
    module = importlib.import_module("fp4_compile.passes.rewrite")  # the package's attribute is the function

    def broken(graph, matmul, context):
        graph.call_function(torch.ops.aten.relu.default, (matmul.node,))
        raise RuntimeError("on purpose")

    monkeypatch.setattr(module, "_rewrite_matmul", broken)
    gm = traced(three_layers, *THREE)
    before = canonical_graph(gm.graph)
    context = Context(Options())
    for run in PIPELINE:
        run(gm.graph, context)
    assert canonical_graph(gm.graph) == before
    assert {d.reason for d in context.plan} == {fp4_compile.Reason.FAILED}
    assert "stays in fp32" in caplog.text


def test_verify_catches_a_decision_that_was_not_carried_out():
    from fp4_compile.errors import VerificationError

    gm = traced(three_layers, *THREE)
    context = Context(Options())
    for run in PIPELINE:
        if run.__name__ not in ("rewrite", "verify"):
            run(gm.graph, context)
    with pytest.raises(VerificationError, match="decided nvfp4"):
        PIPELINE[-1](gm.graph, context)


def test_roles_are_found_without_sequence_numbers():
    """Structure alone tells dgrad from wgrad: the operand the gradient is multiplied with."""
    from torch._functorch.aot_autograd import aot_function

    seen = {}

    def partition(joint, inputs, **kwargs):
        from torch._functorch.partitioners import default_partition

        for node in joint.graph.nodes:
            node.meta.pop("seq_nr", None)
        context = Context(Options())
        PIPELINE[0](joint.graph, context)
        for matmul in context.matmuls:
            seen[matmul.site.key] = matmul.site.shape
        return default_partition(joint, inputs, **kwargs)

    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(64, 96, requires_grad=True)
    compiled = aot_function(
        lambda x, w: torch.mm(x, w).sin(),
        fw_compiler=lambda g, _: g,
        bw_compiler=lambda g, _: g,
        partition_fn=partition,
    )
    compiled(x, w)
    assert seen == {"top:mm.fprop": "32x96x64", "top:mm.dgrad": "32x64x96", "top:mm.wgrad": "64x96x32"}

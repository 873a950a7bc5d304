"""What a user sees: explain, dumps, logs, and the canonical text of a graph."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fp4_compile
from fp4_compile import Plan, Precision
from fp4_compile.testing import canonical_graph, count_ops


def mlp():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def test_a_dump_holds_every_stage_in_order_and_the_program(tmp_path):
    compiled = torch.compile(mlp(), backend="nvfp4", options={"dump": str(tmp_path / "new" / "folder")})
    with torch.no_grad():
        compiled(torch.randn(4, 64))
    compiled(torch.randn(4, 64, requires_grad=True)).sum().backward()
    first, second = sorted((tmp_path / "new" / "folder").iterdir())
    assert [p.name for p in sorted(first.iterdir())] == [
        "00_captured.txt",
        "01_aten.txt",
        "02_find_matmuls.txt",
        "03_assign.txt",
        "04_rewrite.txt",
        "05_rewrite_backward.txt",
        "06_share.txt",
        "07_cleanup.txt",
        "08_observe.txt",
        "09_verify.txt",
        "10_plan.txt",
        "11_weight_prologue.txt",
        "12_inference_to_inductor.txt",
        "13_inference_program.py",
        "plan.json",
    ]
    assert "fp4.scaled_mm" not in (first / "03_assign.txt").read_text()
    assert (first / "04_rewrite.txt").read_text().count("fp4.scaled_mm") == 2
    assert "hoisted" in (first / "12_inference_to_inductor.txt").read_text()
    assert "torch.ops.fp4.scaled_mm" in (first / "13_inference_program.py").read_text()
    assert len(Plan.load(first / "plan.json").select(Precision.NVFP4)) == 2
    assert {"11_forward_to_inductor.txt", "14_backward_program.py"} <= {p.name for p in second.iterdir()}


def test_a_dump_does_not_change_the_program(tmp_path):
    model, x = mlp(), torch.randn(4, 64)
    with torch.no_grad():
        plain = torch.compile(model, backend="nvfp4")(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="nvfp4", options={"dump": str(tmp_path)})(x), plain)


def test_explain_counts_graphs_and_breaks_and_names_the_reason():
    def broken(x):
        y = torch.mm(x, x.t())
        torch._dynamo.graph_break()
        return y + 1

    explanation = fp4_compile.explain(broken, torch.randn(32, 32))
    assert (explanation.graph_count, explanation.graph_break_count) == (2, 1)
    assert "2 graphs, 1 graph break" in str(explanation)
    assert any("fullgraph=True" in line for line in explanation.advice())
    whole = fp4_compile.explain(mlp(), torch.randn(3, 64))
    assert (whole.graph_count, whole.graph_break_count) == (1, 0)


def test_a_frame_that_dynamo_gives_up_on_counts_as_a_break():
    """It captures no recurrent layer, and runs what follows as plain PyTorch: the second layer is in no graph."""

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(32, 64)
            self.between = torch.nn.GRU(64, 32)

        def forward(self, x):
            x = torch.relu(self.first(x)).unsqueeze(1)
            return self.second(self.between(x)[0])

    model, x = Recurrent(), torch.randn(8, 64)
    with torch.no_grad():
        explanation = fp4_compile.explain(model, x)
        assert [d.site.key for d in explanation.plan] == ["first:mm.fprop"]
        assert explanation.graph_break_count == 1
        assert "RNN, GRU, or LSTM" in str(explanation)
        torch._dynamo.reset()
        plan = {"first:mm.fprop": "bf16", "second:mm.fprop": "bf16"}
        torch.compile(model, backend="nvfp4", options={"pins": plan})(x)  # a part of the model is all that is seen


def test_explain_takes_keywords_says_what_to_change_and_fits():
    def model(*, x, w):
        return torch.mm(x, w)

    explanation = fp4_compile.explain(model, x=torch.randn(8, 40), w=torch.randn(40, 64))
    text = str(explanation)
    assert "make the layer's input width a multiple of 16" in text
    assert "K=40 pads to 48" in text
    assert max(map(len, text.splitlines())) <= 100


def test_explain_leaves_the_model_and_what_was_compiled_alone():
    model, x = mlp(), torch.randn(4, 64)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    compiled = torch.compile(model, backend="nvfp4")
    with torch.no_grad():
        before = compiled(x)
        fp4_compile.explain(model, x)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert torch.equal(compiled(x), before)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_explain_agrees_with_what_is_compiled(tmp_path):
    model, x = mlp(), torch.randn(4, 64, requires_grad=True)
    plan = fp4_compile.explain(model, x).plan
    torch.compile(model, backend="nvfp4", options={"dump": str(tmp_path)})(x)
    assert Plan.load(tmp_path / "graph_000" / "plan.json") == plan


def test_a_graph_without_any_matmul():
    explanation = fp4_compile.explain(lambda x: x.sin() + 1, torch.randn(4))
    assert len(explanation.plan) == 0
    assert "0 of 0 matmuls" in str(explanation)
    assert torch.equal(torch.compile(lambda x: x * 2, backend="nvfp4")(torch.ones(3)), torch.full((3,), 2.0))


def test_the_plan_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="fp4_compile"), torch.no_grad():
        torch.compile(mlp(), backend="nvfp4")(torch.randn(4, 64))
    assert "2 of 2 matmuls in NVFP4" in caplog.text


SCRIPT = """
import torch
model = torch.compile(torch.nn.Linear(64, 96), backend="nvfp4")
with torch.no_grad():
    model(torch.randn(4, 64))
"""


def test_torch_logs_shows_the_plan_and_nothing_is_said_without_it(tmp_path):
    quiet = {k: v for k, v in os.environ.items() if k != "TORCH_LOGS"} | {"PYTHONWARNINGS": "ignore"}
    for environment, shown in ((quiet | {"TORCH_LOGS": "+fp4_compile"}, True), (quiet, False)):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert ("top:mm.fprop" in run.stderr) == shown
        assert run.stdout == ""


def test_importing_the_package_is_light():
    code = "import sys, fp4_compile; print(json.dumps([m for m in sys.modules if m.startswith('torch')]))"
    run = subprocess.run([sys.executable, "-c", "import json;" + code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_unknown_names_of_the_package_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        fp4_compile.explian  # noqa: B018


def test_canonical_text_depends_on_the_program_alone():
    def program(x):
        return (x @ x.t()).relu() * 0.123456789

    def same(different):
        first = different @ different.t()
        return first.relu() * 0.123456789

    from torch.fx.experimental.proxy_tensor import make_fx

    texts = {canonical_graph(make_fx(f)(torch.randn(3, 4))) for f in (program, same)}
    assert texts == {
        "%0 = input: f32[3, 4]\n"
        "%1 = t(%0): f32[4, 3]{1, 4}\n"
        "%2 = mm(%0, %1): f32[3, 3]\n"
        "%3 = relu(%2): f32[3, 3]\n"
        "%4 = mul.Tensor(%3, 0.1235): f32[3, 3]\n"
        "return %4\n"
    }
    assert count_ops(make_fx(program)(torch.randn(3, 4))) == {"t": 1, "mm": 1, "relu": 1, "mul.Tensor": 1}


def test_explaining_often_takes_nothing_from_the_model():
    """Dynamo compiles one piece of code a limited number of times; explanations must not use those up."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(4, 64)
    with torch.no_grad():
        for _ in range(torch._dynamo.config.recompile_limit + 2):
            assert len(fp4_compile.explain(model, x).plan) == 2
        compiled = torch.compile(model, backend="nvfp4", fullgraph=True)
        assert not torch.equal(compiled(x), model(x))


def test_convolutions_that_are_no_matmuls_are_counted() -> None:
    """Else a network of them would look as if all of it ran in NVFP4."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(1024, 64)
    )
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            found = fp4_compile.explain(model, torch.randn(2, 3, 8, 8))
        assert found.convolution_count == 2
        assert "beside them 2 convolutions with windows wider than one" in str(found)
    assert "convolutions" not in str(fp4_compile.explain(nn.Linear(64, 64), torch.randn(4, 64)))

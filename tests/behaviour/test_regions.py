"""Computed weights, nested regions, and branches of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    NVFP4,
    Quantizations,
    assert_by_hand,
    assert_quantized,
    assert_same_step,
    by_hand,
    error,
    forward_plan,
    nvfp4,
    nvfp4_linear,
    step,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp4_compile
from behaviour.test_machinery import G, X, assert_works
from fp4_compile import Plan, Precision
from fp4_compile.plan import Role

# -- computed weights --


class Symmetric(nn.Module):
    """One sum for each element, so that eager and compiled code agree on every bit."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.t()


def test_a_parametrized_weight_trains() -> None:
    layer = nn.Linear(64, 64)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    compiled, optimizer = nvfp4(layer), torch.optim.SGD(layer.parameters(), lr=0.1)
    assert forward_plan(layer, X) == {"top": NVFP4}
    runs = Quantizations()
    for turn in range(3):
        twin = by_hand(layer)
        with torch.no_grad():
            for _ in range(2):
                assert_by_hand(compiled(X), nvfp4_linear(X, layer.weight, layer.bias), f"turn {turn}")
        assert runs.count == turn + 1
        run, hand = step(layer, X, G, compiled), step(twin, X, G)
        assert_same_step(run, hand, f"turn {turn}")
        wgrad = G.t() @ X
        assert_by_hand(run.gradients["parametrizations.weight.original"], wgrad + wgrad.t())  # type: ignore[arg-type]
        optimizer.step()


def test_weight_norm_trains() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    compiled, optimizer = nvfp4(layer), torch.optim.SGD(layer.parameters(), lr=0.01)
    for turn in range(3):
        twin = by_hand(layer)
        with torch.no_grad():
            want = layer(X)
            y = compiled(X)
            assert_quantized(y, want, what=f"turn {turn}")
            # The norm's last bit may move a weight over a rounding boundary.
            assert error(y, nvfp4_linear(X, layer.weight, layer.bias)) < 0.02
        run, hand = step(layer, X, G, compiled), step(twin, X, G)
        assert error(run.output, hand.output) < 0.02
        assert list(run.gradients) == list(hand.gradients)
        for name, gradient in hand.gradients.items():
            assert error(run.gradients[name], gradient) < 1e-5, f"{name}, turn {turn}"  # type: ignore[arg-type]
        optimizer.step()


# -- regions and branches --


@torch.compiler.nested_compile_region
def region(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(layer(x))


class Regional(nn.Module):
    """Three layers of one kind, compiled as one region, and a layer of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.last = nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = region(layer, x)
        return self.last(x)


def test_regions_of_one_kind_are_compiled_once(tmp_path: Path) -> None:
    model = Regional()
    assert_works(model, nvfp4(model, fullgraph=True, options={"dump": tmp_path}), by_hand(model))
    inference, training = sorted(tmp_path.iterdir())
    for folder in (inference, training):
        assert {d.site.module for d in Plan.load(folder / "plan.json").select(NVFP4)} == {"layers.0", "last"}
    rewritten = [p.read_text().count("fp4.scaled_mm") for p in sorted(inference.glob("*_rewrite.txt"))]
    assert rewritten == [1, 1]


def test_regions_see_new_weights() -> None:
    model = Regional()
    compiled = nvfp4(model)
    with torch.no_grad():
        for turn in range(3):
            want = by_hand(model)(X)
            for _ in range(2):
                assert_by_hand(compiled(X), want, f"turn {turn}")
            for i, p in enumerate(model.parameters()):
                p.mul_(-1.5 if i % 2 else 1.5)


class Branching(nn.Module):
    """Two branches in one graph, one of them deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.yes = nn.Linear(64, 64)
        self.no = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x), (x,))


def test_branches_train() -> None:
    """What the backward computes again of a branch has the forward's codes."""
    model = Branching()
    compiled, twin = nvfp4(model), by_hand(model)
    for branch, x in (("yes", X.abs()), ("no", -X.abs())):
        run, hand = step(model, x, G, compiled), step(twin, x, G, getattr(twin, branch))
        assert_by_hand(run.output, hand.output)
        assert_by_hand(run.input_gradient, hand.input_gradient)
        for name, got in run.gradients.items():
            want = hand.gradients[name]
            assert (want is not None) == name.startswith(branch)
            if want is None:
                assert got is None or not got.any(), f"{name} is in the other branch"
            else:
                assert_by_hand(got, want, name)  # type: ignore[arg-type]


def plan_of_what_runs(model: Callable[..., Any], x: Tensor, folder: Path) -> Plan:
    torch._dynamo.reset()
    nvfp4(model, options={"dump": folder})(x)
    (graph,) = folder.iterdir()
    return Plan.load(graph / "plan.json")


@pytest.mark.parametrize("model", [Regional, Branching])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_explain_looks_into_regions_and_branches(model: type[nn.Module], training: bool, tmp_path: Path) -> None:
    made = model()
    with torch.set_grad_enabled(training):
        found = fp4_compile.explain(made, X.clone()).plan
        runs = plan_of_what_runs(made, X.clone(), tmp_path)
    assert {d.site.key for d in runs.select(NVFP4) if d.site.role is Role.FPROP} == {
        d.site.key for d in found.select(NVFP4) if d.site.role is Role.FPROP
    }


def test_branches_without_modules_have_sites_of_their_own(tmp_path: Path) -> None:
    """Sites that share a key share a decision, and a plan could not tell them apart."""
    w, v = torch.randn(64, 64), torch.randn(64, 64)

    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: torch.relu(x @ v) @ w, (x,))

    with torch.no_grad():
        assert len(plan_of_what_runs(model, X, tmp_path)) == 3
        compiled = nvfp4(model)
        assert_by_hand(compiled(X.abs()), nvfp4_linear(X.abs(), w.t()))
        assert_by_hand(compiled(-X.abs()), nvfp4_linear(nvfp4_linear(-X.abs(), v.t()).relu(), w.t()))


@pytest.mark.parametrize("kept", ["last", "layers.0"])
def test_a_plan_for_a_part_of_a_model_with_regions(kept: str, tmp_path: Path) -> None:
    """Sites that a plan does not name follow the default policy, in a region as elsewhere."""
    model = Regional()
    with torch.no_grad():
        plan = plan_of_what_runs(model, X, tmp_path)
        (decision,) = (d for d in plan if d.site.module == kept)
        wish = Plan((dataclasses.replace(decision, precision=Precision.BF16),))
        twin = by_hand(model)
        for name, layer in twin.named_modules():
            if isinstance(layer, nn.Linear) and name.startswith(kept.split(".")[0]):
                del layer.forward  # back to high precision
        assert_by_hand(nvfp4(model, options={"plan": wish})(X), twin(X))

"""Training with an NVFP4 forward and a backward that is the model's own: `STRAIGHT_THROUGH`. The full recipe is in
test_recipe.py.

The reference is `by_hand`, an eager twin whose layers run in NVFP4 and whose gradients pass straight through the
quantizers. The models have ReLU between their layers, which is exact, so that the twin meets the same codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BF16,
    NVFP4,
    STRAIGHT_THROUGH,
    TWO_PRODUCTS,
    Quantizations,
    _StraightThrough,
    assert_by_hand,
    assert_close,
    assert_quantized,
    assert_same_gradients,
    assert_same_step,
    assert_untouched,
    by_hand,
    error,
    forward_plan,
    nvfp4,
    nvfp4_linear,
    parameter_gradients,
    step,
    two_layers,
)
from torch import Tensor, nn

import fp4_compile
from fp4_compile import Reason
from fp4_compile.plan import Role

X = torch.randn(64, 64, generator=torch.Generator().manual_seed(7))
G = torch.randn(64, 64, generator=torch.Generator().manual_seed(8))


def explain(model: Any, *inputs: Any) -> fp4_compile.explanation.Explanation:
    return fp4_compile.explain(model, *inputs, options=STRAIGHT_THROUGH)


# -- a step --


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_gradients_pass_straight_through(dtype: torch.dtype, bias: bool) -> None:
    """An operand quantized in the backward would show as 0.096 of error."""
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    x, g = torch.randn(2, 24, 64).to(dtype), torch.randn(2, 24, 96).to(dtype)
    plan = explain(layer, x.clone().requires_grad_()).plan
    assert {d.site.role: (d.precision, d.reason) for d in plan} == {
        Role.FPROP: (NVFP4, Reason.QUANTIZED),
        Role.DGRAD: (BF16, Reason.RECIPE),
        Role.WGRAD: (BF16, Reason.RECIPE),
    }
    run = step(layer, x, g, nvfp4(layer))
    weight, rows = layer.weight.detach(), g.flatten(0, 1)
    assert_by_hand(run.output, nvfp4_linear(x, weight, None if layer.bias is None else layer.bias.detach()))
    assert_quantized(run.output, layer(x).detach())
    assert_untouched(run.input_gradient, g @ weight, "dgrad")
    assert_untouched(run.gradients["weight"], rows.t() @ x.flatten(0, 1), "wgrad")  # type: ignore[arg-type]
    if bias:
        assert_untouched(run.gradients["bias"], rows.float().sum(0).to(dtype), "bias")  # type: ignore[arg-type]
    assert_same_step(run, step(by_hand(layer), x, g))


def test_two_layers_are_their_twin() -> None:
    model = two_layers()
    run, hand, eager = step(model, X, G, nvfp4(model)), step(by_hand(model), X, G), step(model, X, G)
    assert_same_step(run, hand)
    assert_quantized(run.output, eager.output, TWO_PRODUCTS)
    for name, want in eager.gradients.items():
        # The last bias sees the incoming gradient and nothing that is quantized; below it 4 % of the gates differ.
        least = 0.0 if name == "2.bias" else 0.02
        assert_close(run.gradients[name], want, 0.4, least=least, slope_within=0.12, what=name)  # type: ignore[arg-type]


COMBINATIONS = ["x", "weight", "bias", "x weight", "x bias", "weight bias", "x weight bias"]


@pytest.mark.parametrize("wanted", COMBINATIONS)
def test_what_requires_a_gradient_gets_one_and_nothing_else_does(wanted: str) -> None:
    layer, g = nn.Linear(64, 96), torch.randn(64, 96)
    x = X.clone().requires_grad_("x" in wanted.split())
    layer.weight.requires_grad_("weight" in wanted)
    layer.bias.requires_grad_("bias" in wanted)
    roles = {d.site.role for d in explain(layer, x).plan}
    assert (Role.DGRAD in roles) == x.requires_grad
    assert (Role.WGRAD in roles) == layer.weight.requires_grad
    y = nvfp4(layer)(x)
    y.backward(g)
    with torch.no_grad():
        assert_by_hand(y.detach(), nvfp4_linear(x, layer.weight, layer.bias))
        for leaf, want in ((x, g @ layer.weight), (layer.weight, g.t() @ X), (layer.bias, g.sum(0))):
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.grad is not None:
                assert_untouched(leaf.grad, want)


def test_nothing_requires_a_gradient() -> None:
    """Frozen as a whole, a layer is inference even where gradients are enabled: its weight is quantized once."""
    layer = nn.Linear(64, 96).requires_grad_(False)
    compiled = nvfp4(layer)
    runs = Quantizations()
    for _ in range(3):
        y = compiled(X)
        assert not y.requires_grad
        assert_by_hand(y, nvfp4_linear(X, layer.weight, layer.bias))
    assert runs.count == 1


def test_double_backward_is_refused_as_inductor_refuses_it() -> None:
    layer = nn.Linear(64, 96)
    messages = []
    for backend in ("inductor", "nvfp4"):
        torch._dynamo.reset()
        x = X.clone().requires_grad_()
        y = torch.compile(layer, backend=backend)(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward") as caught:
            first.square().sum().backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# -- what is not finite --


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_incoming_gradient_surfaces_where_it_belongs(bad: float) -> None:
    layer, g = nn.Linear(64, 96), torch.randn(64, 96)
    g[3, 5] = bad
    run = step(layer, X, g, nvfp4(layer))
    weight, wgrad, bias = layer.weight.detach(), run.gradients["weight"], run.gradients["bias"]
    assert wgrad is not None and bias is not None
    assert_by_hand(run.output, nvfp4_linear(X, weight, layer.bias.detach()))
    assert not torch.isfinite(run.input_gradient[3]).any()
    assert not torch.isfinite(wgrad[5]).any()
    assert not torch.isfinite(bias[5])
    rows, outputs = torch.arange(64) != 3, torch.arange(96) != 5
    assert_untouched(run.input_gradient[rows], (g @ weight)[rows])
    assert_untouched(wgrad[outputs], (g.t() @ X)[outputs])
    assert_untouched(bias[outputs], g.sum(0)[outputs])


def test_a_bad_incoming_gradient_passes_through_layers_as_in_eager() -> None:
    model, g = two_layers(), G.clone()
    g[3, 5] = float("nan")
    run, hand = step(model, X, g, nvfp4(model)), step(by_hand(model), X, g)
    assert_by_hand(run.output, hand.output)
    for name, want in {**hand.gradients, "input": hand.input_gradient}.items():
        got = run.input_gradient if name == "input" else run.gradients[name]
        assert got is not None and want is not None
        finite = torch.isfinite(want)
        assert 0 < int(finite.sum()) < finite.numel(), name
        assert torch.equal(torch.isfinite(got), finite), name
        assert_by_hand(got[finite], want[finite], name)


# -- many steps --

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_loop_is_its_twins_step_by_step(optimizer: str) -> None:
    model, target = two_layers(), torch.randn(64, 64)
    compiled, twin = nvfp4(model), by_hand(model)
    steps = OPTIMIZERS[optimizer](list(model.parameters()))
    losses = []
    for turn in range(15):
        # The twin starts each step where the model is: a last bit would otherwise grow into another code.
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        steps.zero_grad()
        loss, hand = F.mse_loss(compiled(X), target), F.mse_loss(twin(X), target)
        loss.backward()
        hand.backward()
        assert_by_hand(loss.detach(), hand.detach(), f"loss of step {turn}")
        assert_same_gradients(model, twin, f"step {turn}")
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    with torch.no_grad():
        assert_by_hand(compiled(X), by_hand(model)(X))
        # What was learnt is the model's, not the compiled code's.
        assert F.mse_loss(model(X), target).item() < 0.85 * losses[0]


def test_the_same_seed_gives_the_same_losses() -> None:
    def losses() -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.3), nn.ReLU(), nn.Linear(96, 64)).bfloat16()
        compiled, optimizer = nvfp4(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(6):
            x = torch.randn(64, 64).bfloat16()
            loss = F.mse_loss(compiled(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    first = losses()
    assert len(set(first)) > 3
    assert losses() == first


def test_micro_batches_accumulate() -> None:
    model = two_layers()
    compiled, twin = nvfp4(model, dynamic=True), by_hand(model)
    parts = [(X[:48], G[:48]), (X[48:], G[48:])]
    alone = []
    for x, g in parts:
        alone.append(step(twin, x, g).gradients)
    twin.zero_grad()
    for x, g in parts:
        compiled(x).backward(g)
        twin(x).backward(g)
    assert_same_gradients(model, twin)
    for name, got in parameter_gradients(model).items():
        assert_by_hand(got, alone[0][name] + alone[1][name], name)  # type: ignore[operator]
        # Either part weighs in.
        assert all(error(got, part[name]) > 0.2 for part in alone), name  # type: ignore[arg-type]


class Tied(nn.Module):
    """One layer called twice, and its weight once more the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.layer(torch.relu(self.other(torch.relu(self.layer(x))))))
        return hidden @ self.layer.weight


def test_a_tied_weight_gathers_every_uses_gradient() -> None:
    """Two optimizers share the parameters out, and two steps move them."""
    model = Tied()
    with torch.no_grad():
        # Uses that weigh about the same, so that none of them can be missed.
        model.layer.weight.copy_(nn.init.orthogonal_(torch.empty(64, 64)) * 1.4)
        model.other.weight.copy_(nn.init.orthogonal_(torch.empty(64, 64)) * 1.4)
    compiled = nvfp4(model)
    assert list(forward_plan(model, X).values()) == [NVFP4] * 4
    optimizers = (
        torch.optim.SGD([model.layer.weight], lr=1e-3),
        torch.optim.Adam([model.layer.bias, *model.other.parameters()], lr=1e-3),
    )
    for turn in range(2):
        uses = [model.layer.weight.detach().clone().requires_grad_() for _ in range(3)]
        bias, other = model.layer.bias.detach(), (model.other.weight.detach(), model.other.bias.detach())
        hidden = X
        for weights in ((uses[0], bias), other, (uses[1], bias)):
            hidden = torch.relu(_StraightThrough.apply(hidden, *weights))  # type: ignore[no-untyped-call]
        want = _StraightThrough.apply(hidden, uses[2].t(), None)  # type: ignore[no-untyped-call]
        want.backward(G)
        run = step(model, X, G, compiled)
        assert_by_hand(run.output, want.detach(), f"step {turn}")
        gathered = sum(use.grad for use in uses)  # type: ignore[misc]
        assert_by_hand(run.gradients["layer.weight"], gathered, f"step {turn}")  # type: ignore[arg-type]
        for use in uses:
            assert error(gathered - use.grad, gathered) > 0.2  # type: ignore[operator]
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(uses[0], model.layer.weight)

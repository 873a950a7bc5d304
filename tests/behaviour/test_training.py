"""Training with an NVFP4 forward and a backward that is the model's own: `STRAIGHT_THROUGH`. The full recipe is in
test_recipe.py.

The reference is `by_hand`, an eager twin whose layers run in NVFP4 and whose gradients pass straight through the
quantizers. The models have ReLU between their layers, which is exact, so that the twin meets the same codes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BF16,
    NVFP4,
    ORDER_OF_SUMMATION,
    STRAIGHT_THROUGH,
    TWO_PRODUCTS,
    Quantizations,
    Step,
    _StraightThrough,
    assert_by_hand,
    assert_close,
    assert_quantized,
    assert_untouched,
    by_hand,
    error,
    forward_plan,
    nvfp4,
    nvfp4_linear,
    step,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4_compile
from fp4_compile import Reason
from fp4_compile.plan import Role

X = torch.randn(64, 64, generator=torch.Generator().manual_seed(7))
G = torch.randn(64, 64, generator=torch.Generator().manual_seed(8))


def explain(model: Any, *inputs: Any) -> fp4_compile.explanation.Explanation:
    return fp4_compile.explain(model, *inputs, options=STRAIGHT_THROUGH)


def two_layers(width: int = 64, hidden: int = 96) -> nn.Sequential:
    """Two layers in NVFP4 whose activation rounds nothing."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def assert_same_step(run: Step, hand: Step, what: str = "step") -> None:
    """Output, input gradient and every parameter's gradient are those of the twin."""
    assert_by_hand(run.output, hand.output, f"{what}: output")
    assert_by_hand(run.input_gradient, hand.input_gradient, f"{what}: input gradient")
    assert list(run.gradients) == list(hand.gradients)
    for name, want in hand.gradients.items():
        got = run.gradients[name]
        assert (got is None) == (want is None), f"{what}: {name}"
        if got is not None and want is not None:
            assert_by_hand(got, want, f"{what}: {name}")


def parameter_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model: nn.Module, twin: nn.Module, what: str = "gradients") -> None:
    got, want = parameter_gradients(model), parameter_gradients(twin)
    assert list(got) == list(want) and got, what
    for name in want:
        assert_by_hand(got[name], want[name], f"{what}: {name}")


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


# -- training and inference take turns --


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_training_and_inference_take_turns(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """https://github.com/pytorch/pytorch/issues/108863"""
    model = two_layers()
    compiled, optimizer = nvfp4(model), torch.optim.SGD(model.parameters(), lr=1.0)
    runs = Quantizations()
    before = None
    for turn in range(3):
        with mode():
            want = by_hand(model)(X)
            assert_by_hand(compiled(X), want, f"before step {turn}")
            assert_by_hand(compiled(X), want, f"once more before step {turn}")
            assert before is None or error(before, want) > 0.02, "a step that moves nothing tests nothing"
            before = want
        assert runs.count == turn + 1
        optimizer.zero_grad()
        y = compiled(X)
        assert y.requires_grad
        assert_by_hand(y.detach(), before, f"step {turn}")
        F.mse_loss(y, G).backward()
        optimizer.step()
    details = [{d.detail for d in explained(model, enabled).select(NVFP4)} for enabled in (False, True)]
    assert details == [{"weight once"}, {"weight in each step"}]


def explained(model: nn.Module, enabled: bool) -> fp4_compile.Plan:
    with torch.set_grad_enabled(enabled):
        return explain(model, X).plan


def test_dropout_follows_train_and_eval() -> None:
    """Drawn from eager's generator, so that the twin drops the same elements."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.5), nn.ReLU(), nn.Linear(96, 64))
    twin = by_hand(model)
    compiled = nvfp4(model, options={"inductor": {"fallback_random": True}})

    def both(grad: bool) -> tuple[Tensor, Tensor]:
        outputs = []
        for call in (compiled, twin):
            torch.manual_seed(11)
            with torch.set_grad_enabled(grad):
                outputs.append(call(X))
        return outputs[0], outputs[1]

    kept = []
    for training, grad in [(True, True), (False, False), (True, False), (False, True), (True, True)]:
        model.train(training)
        twin.train(training)
        got, want = both(grad)
        assert got.requires_grad == grad
        assert_by_hand(got.detach(), want.detach(), f"training {training}, gradients {grad}")
        kept.append(got.detach())
        if grad:
            for y, module in ((got, model), (want, twin)):
                module.zero_grad()
                y.backward(G)
            assert_same_gradients(model, twin, f"training {training}")
    assert torch.equal(kept[0], kept[4]) and error(kept[0], kept[1]) > 0.3
    assert error(kept[3], kept[1]) < 2e-6


# -- what people train with --


class Checkpointed(nn.Module):
    """Two blocks, of which the activations are kept or computed again."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.second, self.recompute = two_layers(), two_layers(), recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation_checkpointing_changes_no_number(dtype: torch.dtype) -> None:
    """A block quantized anew in the backward gives what it gave in the forward."""
    plain = Checkpointed(recompute=False).to(dtype)
    model = copy.deepcopy(plain)
    model.recompute = True
    x, g = X.to(dtype), G.to(dtype)
    plans = [explain(m, x.clone().requires_grad_()) for m in (plain, model)]
    assert [len(p.plan.select(NVFP4)) for p in plans] == [4, 4]
    assert [p.graph_break_count for p in plans] == [0, 0]
    stages = [p.graphs[0].stages["verify"] for p in plans]
    assert ["!recompute" in text for text in stages] == [False, True]
    run, kept = step(model, x, g, nvfp4(model, fullgraph=True)), step(plain, x, g, nvfp4(plain))
    assert_same_step(run, kept)
    hand = step(by_hand(plain), x, g)
    assert_by_hand(run.output, hand.output)
    # Inductor adds up the gradients of the residual stream in another order than autograd, four layers deep.
    for name, want in {**hand.gradients, "input": hand.input_gradient}.items():
        got = run.input_gradient if name == "input" else run.gradients[name]
        assert got is not None and want is not None
        assert error(got, want) < 3 * ORDER_OF_SUMMATION[dtype], name


def test_autocast_trains_an_fp32_model() -> None:
    """The layers see BF16, the parameters and their gradients stay FP32."""
    model, target = two_layers(), torch.randn(64, 64)
    compiled, optimizer = nvfp4(model), torch.optim.AdamW(model.parameters(), lr=3e-3)
    with torch.autocast("cpu", torch.bfloat16):
        plan = explain(model, X).plan
    assert {(d.site.dtype, d.precision) for d in plan if d.site.role is Role.FPROP} == {("bf16", NVFP4)}
    losses = []
    for turn in range(15):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(X)
        loss = F.mse_loss(y.float(), target)
        loss.backward()
        twin = by_hand(copy.deepcopy(model).bfloat16())
        hand = twin(X.bfloat16())
        twin.zero_grad()
        F.mse_loss(hand.float(), target).backward()
        assert y.dtype is torch.bfloat16
        assert_by_hand(y.detach(), hand.detach(), f"step {turn}")
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and p.grad.dtype is p.dtype is torch.float32
            assert_by_hand(p.grad.bfloat16(), q.grad, f"step {turn}: {name}")
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


class Adapted(nn.Module):
    """A frozen layer and its low-rank update."""

    def __init__(self, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(64, 96).requires_grad_(False)
        self.down, self.up = nn.Linear(64, rank, bias=False), nn.Linear(rank, 96, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_low_rank_adapters_train_over_a_frozen_base() -> None:
    """Nothing moves the base until the adapter is merged into it, and then the next call sees it."""
    model, target = Adapted(), torch.randn(64, 96)
    assert forward_plan(model, X) == {"base": NVFP4, "down": BF16, "up": BF16}
    frozen = copy.deepcopy(model.base.state_dict())
    compiled = nvfp4(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)

    def hand() -> Tensor:
        return nvfp4_linear(X, model.base.weight, model.base.bias) + model.up(model.down(X))

    with torch.no_grad():
        start = compiled(X)
        assert_by_hand(start, hand())
    losses = []
    for turn in range(8):
        optimizer.zero_grad()
        y = compiled(X)
        loss = F.mse_loss(y, target)
        loss.backward()
        want = torch.autograd.grad(F.mse_loss(hand(), target), (model.down.weight, model.up.weight))
        assert_by_hand(y.detach(), hand().detach(), f"step {turn}")
        for got, exact in zip((model.down.weight.grad, model.up.weight.grad), want, strict=True):
            assert got is not None
            assert error(got, exact) < 1e-5, f"step {turn}"
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.base.weight.grad is None and model.base.bias.grad is None
    assert all(torch.equal(value, frozen[name]) for name, value in model.base.state_dict().items())

    with torch.no_grad():
        adapted = compiled(X)
        assert error(adapted, start) > 0.05
        assert_by_hand(adapted, hand())
        model.base.weight += model.up.weight @ model.down.weight
        model.up.weight.zero_()
        merged = compiled(X)
        assert_by_hand(merged, nvfp4_linear(X, model.base.weight, model.base.bias))
        assert_quantized(merged, model(X))
        assert error(merged, start) > 0.05

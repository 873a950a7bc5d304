"""Training as people do it: between inference, with dropout, checkpoints, autocast, adapters. The twin is that of
test_training.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BF16,
    NVFP4,
    ORDER_OF_SUMMATION,
    Quantizations,
    assert_by_hand,
    assert_quantized,
    assert_same_gradients,
    assert_same_step,
    by_hand,
    error,
    forward_plan,
    nvfp4,
    nvfp4_linear,
    step,
    two_layers,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4_compile
from behaviour.test_training import G, X, explain
from fp4_compile.plan import Role

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

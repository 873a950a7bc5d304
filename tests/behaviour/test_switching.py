"""Changing the precision of a model in training, in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import step
from torch import nn

import fp4_compile
from fp4_compile.errors import OptionError

ops = torch.ops.fp4
SWITCHES = [{"forward": "bf16"}, {"backward": "bf16"}, {"forward": "bf16", "backward": "bf16"}]
ALL = {"training": {"bf16_share": 0}}


def grads(module: Any, model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    run = step(model, x, g, module)
    gradients = [gradient for gradient in run.gradients.values() if gradient is not None]
    return [run.output, run.input_gradient, *gradients]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(torch.bfloat16)


@pytest.mark.parametrize(
    "changes", [{"forward": "bf16"}, {"backward": "bf16"}, {"forward": "bf16", "backward": "bf16"}]
)
def test_a_switched_model_is_one_compiled_so(changes: dict[str, Any]) -> None:
    model, x, g = layers(), torch.randn(64, 64).to(torch.bfloat16), torch.randn(64, 64).to(torch.bfloat16)
    other = copy.deepcopy(model)
    switched = torch.compile(model, backend="nvfp4", options=ALL)
    before = grads(switched, model, x, g)
    fp4_compile.switch_precision(switched, **changes)
    after = grads(switched, model, x, g)
    asked = torch.compile(other, backend="nvfp4", options={"training": {"bf16_share": 0, **changes}})
    for mine, theirs in zip(after, grads(asked, other, x, g), strict=True):
        assert torch.equal(mine, theirs)
    assert not all(map(torch.equal, before, after))
    fp4_compile.switch_precision(switched, forward="nvfp4", backward="nvfp4")
    assert all(map(torch.equal, before, grads(switched, model, x, g)))


def test_every_way_to_compile_a_part() -> None:
    inner = nn.Linear(64, 64).to(torch.bfloat16)
    inner.compile(backend="nvfp4", options=ALL, dynamic=False)
    plain = nn.Linear(64, 64).to(torch.bfloat16)
    mode = torch.compile(plain, backend="nvfp4", mode="max-autotune-no-cudagraphs")
    model, x = nn.ModuleList((inner, nn.Tanh(), mode)), torch.randn(32, 64).to(torch.bfloat16)
    expected = [nn.functional.linear(x, layer.weight, layer.bias) for layer in (inner, plain)]
    assert all((model[i](x) - y).abs().max() > 0.02 for i, y in zip((0, 2), expected, strict=True))
    fp4_compile.switch_precision(model, forward="bf16", backward="bf16")
    assert all(torch.allclose(model[i](x), y, atol=0.01) for i, y in zip((0, 2), expected, strict=True))


def test_the_optimizer_goes_on() -> None:
    model, x = layers(), torch.randn(64, 64).to(torch.bfloat16)
    compiled = torch.compile(model, backend="nvfp4")
    optimizer = torch.optim.AdamW(model.parameters())
    for forward in ("nvfp4", "bf16"):
        fp4_compile.switch_precision(compiled, forward=forward)
        compiled(x).square().mean().backward()
        optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (nn.Linear(8, 8), {"forward": "bf16"}, "nothing in this Linear was compiled with backend='nvfp4'"),
        (torch.compile(nn.Linear(8, 8), backend="eager"), {"forward": "bf16"}, "nothing in this OptimizedModule"),
        (
            torch.compile(nn.Linear(8, 8), backend="nvfp4"),
            {"forward": "fp8"},
            "'training' is 'fp8'",
        ),
        (torch.compile(nn.Linear(8, 8), backend="nvfp4"), {}, "was given neither"),
    ],
)
def test_mistakes(model: nn.Module, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        fp4_compile.switch_precision(model, **changes)

"""What the behaviour tests share: bounds, comparisons, and the numbers a compiled model is compared with.

Two kinds of comparison are made.

With the model as it is written, in high precision: `assert_quantized` and `assert_close`. A Gaussian operand in
NVFP4 has a relative Frobenius error of 0.096, and the errors of a product's two operands are independent, so a
W4A4 product has sqrt(2) * 0.096 = 0.134. A product whose error is below `LEAST_ERROR` was not computed in NVFP4
at all: that is how a layer that silently stayed in high precision is caught.

With NVFP4 by hand, `nvfp4_linear`, which quantizes both operands and multiplies them with the ``fp4`` operators
in eager mode. Compiled code has the same codes and scales and differs only in the order of summation, so
`assert_by_hand` asks for the last bits.

`slope` is the regression slope of a result on its reference. Rounding noise moves it by less than 2 %, a
misplaced or doubled scale by far more, even where the error bound has to be wide.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fp4_compile
import fp4_compile.ops  # defines torch.ops.fp4
from fp4_compile import Plan, Precision
from fp4_compile.plan import Role
from fp4_compile.weights import WeightStore, _stores

NVFP4, BF16 = Precision.NVFP4, Precision.BF16

LEAST_ERROR = 0.05
"""Less than a W4A4 product can have on data of no special form: a third of what one has."""
ONE_PRODUCT = 0.16
"""0.134 for one W4A4 product of a few thousand outputs, which scatter by 0.01."""
FEW_VALUES = 0.22
"""The same where the outputs are few or the contraction is short: the error scatters by 0.04."""
TWO_PRODUCTS = 0.25
"""Two W4A4 layers in a row, sqrt(2) * 0.134 = 0.19 and the scatter of the first one's outliers."""
GRADIENT = 0.25
"""A high-precision gradient through one or two quantized layers: only the point where it is taken moved."""

ORDER_OF_SUMMATION = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 2e-3}
"""How far apart two orders of summation may come out: some roundings of the output dtype."""


STRAIGHT_THROUGH = {"training": {"backward": "bf16", "weight_block": "1x16", "bf16_share": 0}}
"""Training in which the forward is that of inference and gradients pass through it: what `by_hand` computes. The
recipe that training has by default is compared with one of its own, in behaviour/test_recipe.py."""


def nvfp4(model: Any, options: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
    """The model as a user compiles it, gradients straight through."""
    if "mode" in keywords:  # torch.compile takes one or the other
        return torch.compile(model, backend="nvfp4", **keywords)
    return torch.compile(model, backend="nvfp4", options={**STRAIGHT_THROUGH, **(options or {})}, **keywords)


# -- comparisons --


def error(result: Tensor, reference: Tensor) -> float:
    """Relative Frobenius error."""
    got, want = result.detach().double(), reference.detach().double()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()


def slope(result: Tensor, reference: Tensor) -> float:
    """Regression slope of the result on the reference: 1 where nothing is scaled wrongly."""
    got, want = result.detach().double(), reference.detach().double()
    return ((got * want).sum() / want.square().sum().clamp_min(1e-300)).item()


def assert_close(
    result: Tensor,
    reference: Tensor,
    bound: float,
    *,
    least: float = 0.0,
    slope_within: float = 0.06,
    what: str = "result",
) -> None:
    """Shape, finiteness, relative error between ``least`` and ``bound``, and slope."""
    assert result.shape == reference.shape, f"{what}: shape {tuple(result.shape)}"
    broken = int((~torch.isfinite(result)).sum())
    assert broken == 0, f"{what}: {broken} of {result.numel()} values are not finite"
    distance = error(result, reference)
    assert distance <= bound, f"{what}: relative error {distance:.2g} is above {bound}"
    assert distance >= least, f"{what}: relative error {distance:.2g} is below {least}: not computed in NVFP4"
    steepness = slope(result, reference)
    assert abs(steepness - 1) <= slope_within, f"{what}: slope {steepness:.3f}"


def assert_quantized(
    result: Tensor,
    reference: Tensor,
    bound: float = ONE_PRODUCT,
    *,
    slope_within: float = 0.06,
    what: str = "result",
) -> None:
    """The result has the error of NVFP4: no more, and no less."""
    assert_close(result, reference, bound, least=LEAST_ERROR, slope_within=slope_within, what=what)


def assert_by_hand(result: Tensor, by_hand: Tensor, what: str = "result") -> None:
    """The result is a computation done by hand, up to the order of summation."""
    assert result.dtype == by_hand.dtype, f"{what}: {result.dtype}"
    assert result.shape == by_hand.shape, f"{what}: shape {tuple(result.shape)}"
    bound = ORDER_OF_SUMMATION[result.dtype]
    distance = error(result, by_hand)
    assert distance <= bound, f"{what}: {distance:.2g} away from the computation by hand, {bound} allowed"


def assert_untouched(result: Tensor, reference: Tensor, what: str = "result") -> None:
    """The result is the model's own, computed in its own dtype: NVFP4 had no part in it."""
    assert_by_hand(result, reference, what)


# -- NVFP4 by hand --


def nvfp4_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One linear layer in NVFP4, composed in eager mode: quantize both operands along K, multiply."""
    ops = torch.ops.fp4
    x_amax, weight_amax = ops.amax(x), ops.amax(weight)
    return ops.scaled_mm(
        *ops.quantize(x, x_amax), x_amax, *ops.quantize(weight, weight_amax), weight_amax, bias, x.dtype
    )


class _StraightThrough(torch.autograd.Function):
    """Forward in NVFP4; the gradient is that of the product in high precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return nvfp4_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        bias = rows.sum(0) if ctx.has_bias else None
        return gradient @ weight, rows.t() @ x.flatten(0, -2), bias


def by_hand(model: nn.Module) -> nn.Module:
    """An eager copy of the model in which every `nn.Linear` is `nvfp4_linear`, its gradient straight through."""
    twin = copy.deepcopy(model)
    for layer in twin.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = functools.partial(_forward_by_hand, layer)  # type: ignore[method-assign]
    return twin


def _forward_by_hand(layer: nn.Linear, x: Tensor) -> Tensor:
    return _StraightThrough.apply(x, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]


# -- plans --


def straight_through_plan(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None, **keywords: Any) -> Plan:
    """What `nvfp4` would do."""
    return fp4_compile.explain(model, *inputs, options={**STRAIGHT_THROUGH, **(options or {})}, **keywords).plan


def forward_plan(model: Any, *inputs: Any, **keywords: Any) -> dict[str, Precision]:
    """Precision of each forward site, by module path, or by key where a module has several."""
    sites = [d for d in straight_through_plan(model, *inputs, **keywords) if d.site.role is Role.FPROP]
    paths = [d.site.module for d in sites]
    return {d.site.module if paths.count(d.site.module) == 1 else d.site.key: d.precision for d in sites}


def only_site(model: Any, *inputs: Any, **keywords: Any) -> fp4_compile.plan.Decision:
    """The decision for the one forward site of a model."""
    sites = [d for d in straight_through_plan(model, *inputs, **keywords) if d.site.role is Role.FPROP]
    assert len(sites) == 1, [d.site.key for d in sites]
    return sites[0]


def everything_in_nvfp4(model: Any, *inputs: Any) -> Plan:
    """The model's own plan with every forward site turned to NVFP4, to be given back as an option."""
    plan = straight_through_plan(model, *inputs)
    return Plan(tuple(dataclasses.replace(d, precision=NVFP4) if d.site.role is Role.FPROP else d for d in plan))


# -- running --


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward and backward: the output, and the gradients (None for a parameter that got none)."""

    output: Tensor
    input_gradient: Tensor
    gradients: Mapping[str, Tensor | None]


def step(model: nn.Module, x: Tensor, gradient: Tensor, call: Callable[..., Tensor] | None = None) -> Step:
    """Run ``call`` (by default the model itself) forward and backward, from gradients of None."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = (model if call is None else call)(x)
    output.backward(gradient)
    assert x.grad is not None
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Step(output.detach(), x.grad, gradients)


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


def two_layers(width: int = 64, hidden: int = 96) -> nn.Sequential:
    """Two layers in NVFP4 whose activation rounds nothing."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def mlp(width: int = 64, hidden: int = 96) -> nn.Sequential:
    """Two layers that the default policy runs in NVFP4."""
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


class Quantizations:
    """Counts how often compiled graphs quantized their weights since this was made."""

    def __init__(self) -> None:
        self._before: dict[WeightStore, int] = {store: store.runs for store in _stores}

    @property
    def count(self) -> int:
        """Runs since then, of every compiled graph alive."""
        return sum(store.runs - self._before.get(store, 0) for store in list(_stores))


def graph_count() -> int:
    """How many graphs Dynamo compiled since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]

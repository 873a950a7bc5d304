"""Models of every make: what surrounds a rewritten matmul stays as it was, and what must not be rewritten is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NVFP4,
    TWO_PRODUCTS,
    assert_by_hand,
    assert_close,
    assert_quantized,
    assert_untouched,
    by_hand,
    error,
    forward_plan,
    mlp,
    nvfp4,
    nvfp4_linear,
    only_site,
    step,
)
from torch import Tensor, nn

import fp4_compile
from behaviour.test_what_stays_out import sdpa

# -- other users, views, edits --


def test_other_users_of_a_rewritten_matmul_and_of_its_operands() -> None:
    """https://github.com/pytorch/pytorch/pull/129689, https://github.com/pytorch/pytorch/issues/153208"""

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        transposed = w.t()
        y = x @ transposed
        return y, y.relu(), transposed * 2, w @ transposed, y + 0.01 * ((y @ w) @ transposed), y

    x, w = torch.randn(64, 96), torch.randn(80, 96)
    y, relu, doubled, gram, chained, again = nvfp4(model)(x, w)
    assert set(forward_plan(model, x, w).values()) == {NVFP4}
    assert_by_hand(y, nvfp4_linear(x, w))
    assert torch.equal(relu, y.relu())
    assert torch.equal(doubled, w.t() * 2)
    assert_by_hand(gram, nvfp4_linear(w, w))
    assert_by_hand(chained, y + 0.01 * nvfp4_linear(nvfp4_linear(y, w.t()), w))
    assert again is y


def test_an_activation_read_by_several_layers_is_quantized_once() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 48) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.q(x), self.k(x), self.v(x)

    model, x = Projections(), torch.randn(2, 32, 64)
    nn.init.normal_(model.v.weight, std=50.0)  # its scales are its own
    with torch.no_grad():
        stages = fp4_compile.explain(model, x).graphs[0].stages
        assert stages["rewrite"].count("fp4.quantize") == 6
        assert stages["cleanup"].count("fp4.quantize") == 4
        for y, layer in zip(nvfp4(model)(x), (model.q, model.k, model.v), strict=True):
            assert_by_hand(y, nvfp4_linear(x, layer.weight, layer.bias))


def test_edits_in_place_around_a_matmul() -> None:
    def model(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        x.mul_(2.0)
        y = x @ w
        x[0] = 5.0
        out.copy_(y)
        y.add_(1.0)
        return y

    x, w, out = torch.randn(64, 64), torch.randn(64, 96), torch.zeros(64, 96)
    doubled = 2 * x
    y = nvfp4(model)(x, w, out)
    want = nvfp4_linear(doubled, w.t())
    assert_by_hand(out, want)
    assert_by_hand(y, want + 1.0)
    doubled[0] = 5.0
    assert torch.equal(x, doubled)


def test_an_output_buffer_is_filled() -> None:
    def model(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, w, out=out)

    x, w, out = torch.randn(64, 64), torch.randn(64, 96), torch.zeros(64, 96)
    y = nvfp4(model)(x, w, out)
    assert_by_hand(out, nvfp4_linear(x, w.t()))
    assert y.data_ptr() == out.data_ptr()


def test_outputs_alias_what_they_alias_in_eager() -> None:
    """https://github.com/pytorch/pytorch/issues/198095, https://github.com/pytorch/pytorch/issues/97117"""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(96, 64))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = F.linear(x, self.weight)
            return y, x.view(-1), self.weight, y.t(), x[1:3]

    model, x = Model(), torch.randn(40, 64)
    with torch.no_grad():
        y, flat, weight, transposed, rows = nvfp4(model)(x)
        assert_by_hand(y, nvfp4_linear(x, model.weight))
    assert torch.equal(transposed, y.t())
    assert weight is model.weight or weight.data_ptr() == model.weight.data_ptr()
    flat[0], flat[64] = 123.0, 321.0
    assert x[0, 0] == 123.0 and rows[0, 0] == 321.0
    transposed[0, 0] = 77.0
    assert y[0, 0] == 77.0


# -- every way to write a product --


def test_scaled_and_biased_products() -> None:
    def products(x: Tensor, w: Tensor, row: Tensor, matrix: Tensor) -> dict[str, Tensor]:
        column = matrix[:, :1]
        return {
            "row": torch.addmm(row, x, w),
            "matrix": torch.addmm(matrix, x, w),
            "column": torch.addmm(column, x, w),
            "one value": torch.addmm(row[0], x, w),
            "scaled": torch.addmm(row, x, w, beta=0.5, alpha=2.0),
            "subtracted": torch.addmm(matrix, x, w, beta=-1, alpha=-1),
            "no bias, though it is NaN": torch.addmm(row * math.nan, x, w, beta=0, alpha=3),
            "nothing but the bias": torch.addmm(matrix, x, w, alpha=0),
            "wide": F.linear(x, w.t(), row),
        }

    x, w, row, matrix = torch.randn(48, 64), torch.randn(64, 96), torch.randn(96), torch.randn(48, 96)
    plan = forward_plan(products, x, w, row, matrix)
    assert len(plan) == 9 and set(plan.values()) == {NVFP4}
    got, want = nvfp4(products)(x, w, row, matrix), products(x, w, row, matrix)
    y = nvfp4_linear(x, w.t())
    for name, exact in {
        "row": y + row,
        "matrix": y + matrix,
        "column": y + matrix[:, :1],
        "one value": y + row[0],
        "scaled": 0.5 * row + 2 * y,
        "subtracted": -matrix - y,
        "no bias, though it is NaN": 3 * y,
        "nothing but the bias": matrix,
        "wide": y + row,
    }.items():
        assert_by_hand(got[name], exact, name)
        assert_close(got[name], want[name], 0.16, what=name)


def test_products_written_otherwise() -> None:
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "einsum": lambda x, w: torch.einsum("bik,kn->bin", x, w),
        "einsum, transposed": lambda x, w: torch.einsum("bik,kn->nib", x, w).permute(2, 1, 0),
        "tensordot": lambda x, w: torch.tensordot(x, w, dims=1),
        "matmul": lambda x, w: torch.matmul(x, w),
        "operator": lambda x, w: x @ w,
        "inner": lambda x, w: torch.inner(x, w.t()),
        "chunks of the weight": lambda x, w: torch.cat([x @ part for part in w.chunk(2, 1)], -1),
    }

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 96))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [product(x, self.weight) for product in products.values()]

    model, x = Model(), torch.randn(2, 24, 64)
    with torch.no_grad():
        assert set(forward_plan(model, x).values()) == {NVFP4}
        for name, y in zip(products, nvfp4(model)(x), strict=True):
            assert_quantized(y, x @ model.weight, what=name)
            if "chunks" not in name:  # each of them is a tensor with an amax of its own
                assert_by_hand(y, nvfp4_linear(x, model.weight.t()), name)


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(channels_last: bool) -> None:
    """Memory format, channels that 16 does not divide: https://github.com/pytorch/ao/pull/3352,
    https://github.com/pytorch/ao/pull/3309
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 3, padding=1)
            self.pointwise = nn.Conv2d(32, 48, 1)
            self.grouped = nn.Conv2d(48, 48, 3, groups=4, padding=1)
            self.strided = nn.Conv2d(48, 64, 1, stride=2)
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.grouped(F.gelu(self.pointwise(F.gelu(self.stem(x)))))
            return self.linear(self.strided(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model, x = Net(), torch.randn(2, 3, 12, 12)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    compiled = nvfp4(model)
    with torch.no_grad():
        plan = forward_plan(model, x)
        assert {"pointwise", "linear"} == {name for name, precision in plan.items() if precision is NVFP4}
        y, want = compiled(x), model(x)
        assert_quantized(y, want, 0.3, slope_within=0.12)
        assert y.stride() == want.stride()
    run, eager = step(model, x, torch.ones_like(want), compiled), step(model, x, torch.ones_like(want))
    assert run.input_gradient.stride() == eager.input_gradient.stride()
    assert_close(run.input_gradient, eager.input_gradient, 0.3, slope_within=0.12)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_pointwise_convolutions_are_linear_layers(dimensions: int) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](64, 96, 1)
    x = torch.randn(2, 64, *[4] * dimensions)
    assert only_site(layer, x).precision is NVFP4
    with torch.no_grad():
        y = nvfp4(layer)(x)
        want = nvfp4_linear(x.movedim(1, -1).contiguous(), layer.weight.flatten(1), layer.bias).movedim(-1, 1)
        assert_by_hand(y, want)
        assert y.stride() == layer(x).stride()


# -- hooks --


def test_hooks_run() -> None:
    """https://github.com/pytorch/pytorch/issues/117758, https://github.com/pytorch/pytorch/issues/91665"""
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    x = torch.randn(64, 64)
    compiled = nvfp4(model)
    with torch.no_grad():
        want = by_hand(model)(x)
        seen.clear()
        for _ in range(2):
            assert error(compiled(x), want) < 0.02  # the two tanh differ, and so may a code
    assert seen == [(64, 96)] * 2


def test_backward_hooks_run() -> None:
    layer = nn.Linear(64, 96)
    layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    x, g = torch.randn(64, 64), torch.randn(64, 96)
    run = step(layer, x, g, nvfp4(layer))
    assert_untouched(run.input_gradient, 3 * (g @ layer.weight.detach()))


# -- whole blocks --


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_a(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(sdpa(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_b(x))))


def test_a_transformer_block_is_one_graph() -> None:
    """Quantizers that break the graph: https://github.com/axolotl-ai-cloud/axolotl/pull/3721"""
    model, x = Block(), torch.randn(2, 24, 64)
    found = fp4_compile.explain(model, x)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    assert {d.site.module for d in found.plan.select(NVFP4)} == {"qkv", "out", "up", "down"}
    compiled = nvfp4(model, fullgraph=True)
    g = torch.randn(2, 24, 64)
    reference, eager = by_hand(model), step(model, x, g)
    run, hand = step(model, x, g, compiled), step(reference, x, g)
    # Half of what the eager model adds to the residual stream is what may be wrong, so this is no wide bound.
    assert_close(run.output, eager.output, 0.1)
    assert error(run.output - x, eager.output - x) > 0.1
    for got, want, what in (
        (run.output - x, hand.output - x, "output"),
        (run.input_gradient, hand.input_gradient, "input gradient"),
        *((run.gradients[name], want, name) for name, want in hand.gradients.items()),
    ):
        assert error(got, want) < 0.03, what  # type: ignore[arg-type]
    with torch.no_grad():
        assert error(compiled(x) - x, hand.output - x) < 0.03


def test_a_graph_break_inside_a_model() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Broken(), torch.randn(32, 64)
    with torch.no_grad():
        found = fp4_compile.explain(model, x)
        assert (found.graph_count, found.graph_break_count) == (2, 1)
        assert {d.site.module for d in found.plan.select(NVFP4)} == {"first", "second"}
        assert_by_hand(nvfp4(model)(x), by_hand(model)(x))
        assert_quantized(nvfp4(model)(x), model(x), TWO_PRODUCTS)


def test_control_flow_that_picks_a_layer() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor, which: Any) -> Tensor:
            return self.layers[which](x)

    model, x = Picks(), torch.randn(32, 64)
    compiled = nvfp4(model)
    with torch.no_grad():
        for which in (0, 2, 1, 0):
            layer = model.layers[which]
            assert isinstance(layer, nn.Linear)
            assert_by_hand(compiled(x, which), nvfp4_linear(x, layer.weight, layer.bias), f"layer {which}")


def test_branches_inside_a_graph() -> None:
    """`torch.cond` holds its branches as graphs of their own."""
    yes, no = nn.Linear(64, 64), nn.Linear(64, 64)

    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: yes(x), lambda x: no(x), (x,))

    compiled = nvfp4(model)
    with torch.no_grad():
        for x in (torch.rand(32, 64), -torch.rand(32, 64)):
            layer = yes if x.sum() > 0 else no
            y = compiled(x)
            assert min(error(y, layer(x)), error(y, nvfp4_linear(x, layer.weight, layer.bias))) < 2e-6

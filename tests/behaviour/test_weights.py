"""Inference weights: quantized once, and never stale.

Every test runs a compiled model, changes its weights in one way, and runs it again. `expect` compares with NVFP4
by hand on the weights as they are now: a stale weight is wrong by far more than it allows.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    NVFP4,
    TWO_PRODUCTS,
    Quantizations,
    assert_by_hand,
    assert_quantized,
    by_hand,
    error,
    forward_plan,
    graph_count,
    mlp,
    nvfp4,
    nvfp4_linear,
    only_site,
)
from torch import Tensor, nn

import fp4_compile
from fp4_compile.weights import _stores

X = torch.randn(64, 64, generator=torch.Generator().manual_seed(7))


def expect(compiled: nn.Module, layer: nn.Linear, x: Tensor = X) -> None:
    """The compiled layer computes with the layer's weights of this moment."""
    with torch.no_grad():
        assert_by_hand(compiled(x), nvfp4_linear(x, layer.weight, layer.bias))


def a_compiled_layer() -> tuple[nn.Linear, nn.Module]:
    """A layer whose weights have been quantized."""
    layer = nn.Linear(64, 96)
    with torch.no_grad():
        assert only_site(layer, X).precision is NVFP4
    compiled = nvfp4(layer)
    expect(compiled, layer)
    return layer, compiled


# -- every way a weight can change --


def one_unseen_element(weight: Tensor) -> None:
    """Far from the elements a sampled fingerprint looks at, which are spread evenly from the first on."""
    element = weight.view(-1)[1]
    element.copy_(torch.where(element == 40.0, -40.0, 40.0))


def merge_adapter(layer: nn.Linear) -> None:
    layer.weight.data += 0.1 * torch.randn(96, 4) @ torch.randn(4, 64)


def take_a_step(layer: nn.Linear, optimizer: type[torch.optim.Optimizer], **settings: Any) -> None:
    loss = layer(X).square().mean()
    loss.backward()
    optimizer(layer.parameters(), lr=0.5, **settings).step()  # type: ignore[call-arg]


def load(layer: nn.Linear, assign: bool) -> None:
    layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()}, assign=assign)


def quietly(change: Callable[[nn.Linear], object]) -> Callable[[nn.Linear], object]:
    return torch.no_grad()(change)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    # https://github.com/pytorch/pytorch/issues/129362
    "load_state_dict, copying": lambda m: load(m, assign=False),
    "load_state_dict, assigning": lambda m: load(m, assign=True),
    # https://github.com/pytorch/pytorch/issues/108863
    "step of SGD": lambda m: take_a_step(m, torch.optim.SGD),
    "step of fused AdamW": lambda m: take_a_step(m, torch.optim.AdamW, fused=True),
    "step of foreach AdamW": lambda m: take_a_step(m, torch.optim.AdamW, foreach=True),
    "in place": quietly(lambda m: m.weight.mul_(-1.5)),
    "in place, sign alone": quietly(lambda m: m.weight.neg_()),
    "in place, one element": quietly(lambda m: one_unseen_element(m.weight)),
    "in place, one element of a view": quietly(lambda m: one_unseen_element(m.weight[:2])),
    "in place, through detach": lambda m: one_unseen_element(m.weight.detach()),
    "initialized again": lambda m: nn.init.xavier_uniform_(m.weight),
    "copied into from another dtype": quietly(lambda m: m.weight.copy_(torch.randn(96, 64, dtype=torch.float64))),
    # https://github.com/huggingface/trl/issues/7085
    "whole, through .data": lambda m: m.weight.data.mul_(-1.5),
    "sign alone, through .data": lambda m: m.weight.data.neg_(),
    "rolled by one row, through .data": lambda m: m.weight.data.copy_(m.weight.data.roll(1, 0)),
    "adapter merged, through .data": merge_adapter,
    "whole, through NumPy": lambda m: m.weight.detach().numpy().__imul__(-1.5),
    ".data swapped": lambda m: setattr(m.weight, "data", torch.randn(96, 64)),
    "parameter swapped": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(96, 64))),
    "parameter swapped for a view": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(64, 96).t())),
    "parameter swapped for a frozen one": lambda m: setattr(m, "weight", nn.Parameter(m.weight.data * 2, False)),
    "storage swapped": lambda m: m.weight.untyped_storage().copy_(torch.randn(96, 64).untyped_storage()),
    "bias alone": quietly(lambda m: m.bias.add_(1.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_call(change: str) -> None:
    layer, compiled = a_compiled_layer()
    for _ in range(2):
        before = nvfp4_linear(X, layer.weight.detach(), layer.bias.detach())
        CHANGES[change](layer)
        assert error(nvfp4_linear(X, layer.weight.detach(), layer.bias.detach()), before) > 0.01, "no change"
        expect(compiled, layer)


def test_an_element_changed_through_data_needs_invalidate() -> None:
    layer, compiled = a_compiled_layer()
    for model in (layer, compiled, nn.Sequential(layer)):  # the layer, what was compiled, and what holds it
        one_unseen_element(layer.weight.data.neg_())
        expect(compiled, layer)
        layer.weight.data.view(-1)[1] = -40.0
        fp4_compile.invalidate(model)
        expect(compiled, layer)


def test_invalidate_leaves_other_models_alone() -> None:
    layer, compiled = a_compiled_layer()
    other = nn.Linear(64, 96)
    expect(nvfp4(other), other)
    runs = Quantizations()
    fp4_compile.invalidate(other)
    expect(compiled, layer)
    assert runs.count == 0
    fp4_compile.invalidate(layer)
    expect(compiled, layer)
    assert runs.count == 1


def test_data_swapped_twice_between_calls() -> None:
    """The second one may lie where the weight lay that was quantized."""
    layer, compiled = a_compiled_layer()
    for _ in range(20):
        layer.weight.data = torch.randn(96, 64)
        layer.weight.data = torch.randn(96, 64)
        expect(compiled, layer)


def test_a_flat_buffer_under_the_parameters() -> None:
    """Parameters that are views of one tensor, as sharding libraries and fused optimizers make them."""
    flat = torch.randn(2 * 96 * 64) * 0.1
    first, second = nn.Linear(64, 96), nn.Linear(64, 96)
    first.weight, second.weight = (nn.Parameter(part.view(96, 64)) for part in flat.chunk(2))
    compiled = nvfp4(lambda x: (first(x), second(x)))
    with torch.no_grad():
        for _ in range(3):
            for layer, y in zip((first, second), compiled(X), strict=True):
                assert_by_hand(y, nvfp4_linear(X, layer.weight, layer.bias))
            flat[1], flat[-2] = flat[1] - 40.0, flat[-2] + 40.0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_eval_step_eval(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """https://github.com/pytorch/pytorch/issues/108863, https://github.com/pytorch/pytorch/issues/103990"""
    model = mlp()
    compiled = nvfp4(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    for _ in range(3):
        model.eval()
        with mode():
            assert_quantized(compiled(X), model(X), TWO_PRODUCTS)
        model.train()
        compiled(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with mode():
        assert_quantized(compiled(X), model(X), TWO_PRODUCTS)


# -- parameters made under inference_mode --


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(-2.0),
        lambda w: w.neg_(),
        lambda w: w.copy_(w.abs()),
        lambda w: one_unseen_element(w),
        lambda w: w.copy_(w.roll(1, 0)),
        lambda w: w.copy_(w.flip(1)),
        lambda w: w[:2, :2].copy_(w[:2, :2].flip(0)),
    ],
    ids=["whole", "sign alone", "sign of some", "one element", "rows rolled", "columns flipped", "four elements"],
)
def test_a_change_of_an_inference_parameter_is_seen(change: Callable[[Tensor], object]) -> None:
    """They have no version counter, and reading one raises: https://github.com/pytorch/pytorch/issues/148983"""
    with torch.inference_mode():
        layer = nn.Linear(64, 96, bias=False)
        # Rows and columns of equal elements, in a checkerboard of two values: exchanging them changes no sum.
        layer.weight[:2, :2] = torch.tensor([[40.0, 30.0], [30.0, 40.0]])
        compiled = nvfp4(layer)
        expect(compiled, layer)
        runs = Quantizations()
        expect(compiled, layer)
        assert runs.count == 0
        before = layer.weight.clone()
        change(layer.weight)
        assert not torch.equal(layer.weight, before)
        assert_by_hand(compiled(X), nvfp4_linear(X, layer.weight))


# -- quantized once --


def test_quantized_once_over_many_calls() -> None:
    """And the same bits each time: https://github.com/NVIDIA/TransformerEngine/issues/1047"""
    model = mlp()
    compiled = nvfp4(model)
    runs = Quantizations()
    with torch.no_grad():
        assert set(forward_plan(model, X).values()) == {NVFP4}
        first = compiled(X)
        for _ in range(5):
            assert torch.equal(compiled(X), first)
        for rows in (3, 64, 17):
            compiled(X[:rows])
    assert graph_count() <= 3
    assert runs.count <= graph_count()
    model[0].weight.data.add_(1.0)
    done = runs.count
    with torch.no_grad():
        for _ in range(3):
            compiled(X)
    assert runs.count == done + 1


def test_the_same_bits_in_every_mode() -> None:
    layer, compiled = a_compiled_layer()
    with torch.no_grad():
        want = compiled(X)
    for _ in range(3):
        assert torch.equal(compiled(X).detach(), want)
        with torch.inference_mode():
            assert torch.equal(compiled(X), want)
        layer.train(not layer.training)


def test_tied_weights_are_quantized_once_and_change_together() -> None:
    a, b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    b.weight = a.weight
    model = nn.Sequential(a, nn.Tanh(), b)
    compiled = nvfp4(model)
    runs = Quantizations()
    with torch.no_grad():
        stages = fp4_compile.explain(model, X).graphs[0].stages
        assert stages["cleanup"].count("fp4.quantize") == 3  # the input, the hidden values, the one weight
        for turn in range(3):
            assert_by_hand(compiled(X), by_hand(model)(X))
            assert runs.count == turn + 1
            a.weight.mul_(1.5)
        b.weight = nn.Parameter(torch.randn(64, 64))  # untied
        assert_by_hand(compiled(X), by_hand(model)(X))


def test_two_instances_of_one_class_take_turns() -> None:
    """Dynamo compiles a class once, so both call one graph, each with its own weights."""
    one, two = nn.Linear(64, 96), nn.Linear(64, 96)
    compiled = nvfp4(one), nvfp4(two)
    runs = Quantizations()
    for _ in range(4):
        expect(compiled[0], one)
        expect(compiled[1], two)
    assert graph_count() == 1
    assert runs.count == 2
    two.weight.data.mul_(-2.0)
    for _ in range(2):
        expect(compiled[0], one)
        expect(compiled[1], two)
    assert runs.count == 3


def test_one_function_called_with_many_modules() -> None:
    layers = [nn.Linear(64, 96) for _ in range(3)]
    compiled = nvfp4(lambda layer, x: layer(x))
    runs = Quantizations()
    with torch.no_grad():
        for _ in range(3):
            for layer in layers:
                assert_by_hand(compiled(layer, X), nvfp4_linear(X, layer.weight, layer.bias))
    assert graph_count() == 1
    assert runs.count == len(layers)


def test_deepcopy() -> None:
    layer, compiled = a_compiled_layer()
    twin = copy.deepcopy(layer)
    compiled_twin = nvfp4(twin)
    whole = copy.deepcopy(compiled)
    for turn in range(2):
        expect(compiled_twin, twin)
        expect(compiled, layer)
        expect(whole, whole._orig_mod)  # type: ignore[arg-type]
        (layer if turn else twin).weight.data.mul_(-2.0)
    expect(compiled_twin, twin)
    expect(compiled, layer)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float16, torch.float32)], ids=["bf16, fp16, fp32"])
def test_cast_after_compile(dtypes: tuple[torch.dtype, ...]) -> None:
    """https://github.com/huggingface/diffusers/pull/9453"""
    layer, compiled = a_compiled_layer()
    for dtype in dtypes:
        layer.to(dtype)
        expect(compiled, layer, X.to(dtype))
        nn.init.normal_(layer.weight)
        expect(compiled, layer, X.to(dtype))


# -- short lives --


def test_a_weight_that_takes_a_dead_ones_place() -> None:
    """Addresses are reused, at the same version: https://github.com/pytorch/pytorch/issues/130776"""
    memory = bytearray(4 * 96 * 64)
    for _ in range(4):
        layer = nn.Linear(64, 96, bias=False)
        values = layer.weight.detach().clone()
        layer.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(96, 64))
        layer.weight.data.copy_(values)
        place = layer.weight.data_ptr(), layer.weight._version
        expect(nvfp4(layer), layer)
        assert place == (layer.weight.data_ptr(), layer.weight._version)
        del layer
        gc.collect()
    assert graph_count() == 1


def test_parameters_replaced_at_each_call_pile_up_nowhere() -> None:
    layer, compiled = a_compiled_layer()
    stores = list(_stores)
    kept = sum(len(store._entries) for store in stores)
    for _ in range(5):
        layer.weight = nn.Parameter(torch.randn(96, 64))
        expect(compiled, layer)
    gc.collect()
    assert list(_stores) == stores, "compiled anew"
    assert sum(len(store._entries) for store in stores) == kept


def test_nothing_keeps_a_deleted_models_weights() -> None:
    """https://github.com/pytorch/pytorch/issues/122969"""
    layer, compiled = a_compiled_layer()
    compiled(X).sum().backward()
    parameters = [weakref.ref(p) for p in layer.parameters()]
    storages = [p.untyped_storage()._weak_ref() for p in layer.parameters()]
    del layer, compiled
    torch._dynamo.reset()
    gc.collect()
    assert all(parameter() is None for parameter in parameters)
    assert all(torch.UntypedStorage._expired(storage) for storage in storages)
    for storage in storages:
        torch.UntypedStorage._free_weak_ref(storage)


def test_a_deleted_weight_goes_while_its_graph_stays() -> None:
    """The graph lives on for other instances of the class; the dead one's weight, and its codes, do not."""
    layer, compiled = a_compiled_layer()
    other = nn.Linear(64, 96)
    expect(nvfp4(other), other)
    codes = _quantized_weights(layer.weight)
    gone = weakref.ref(layer.weight)
    del layer, compiled
    gc.collect()
    assert gone() is None
    assert all(code() is None for code in codes)
    expect(nvfp4(other), other)


def _quantized_weights(weight: Tensor) -> list[weakref.ref[Tensor]]:
    entries = [e for store in _stores for key, e in store._entries.items() if id(weight) in key]
    assert entries
    return [weakref.ref(value) for entry in entries for value in entry.values]

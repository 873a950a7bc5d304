"""Weights that are no plain parameters, and modules that stay as they were."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NVFP4,
    TWO_PRODUCTS,
    Quantizations,
    assert_by_hand,
    assert_quantized,
    error,
    mlp,
    nvfp4,
    nvfp4_linear,
    only_site,
)
from torch import Tensor, nn

from behaviour.test_weights import X, a_compiled_layer, expect, one_unseen_element

# -- the user's module stays the user's --


def test_the_module_is_as_it_was() -> None:
    """state_dict, save, load, copy: https://github.com/pytorch/ao/issues/2478, https://github.com/pytorch/ao/issues/456"""
    model = mlp().bfloat16()
    x = X.bfloat16()
    output, state = model(x).detach(), {k: v.clone() for k, v in model.state_dict().items()}
    compiled = nvfp4(model)
    compiled(x).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        assert_quantized(compiled(x), output, TWO_PRODUCTS)
    now = model.state_dict()
    assert list(now) == list(state)
    for key, value in state.items():
        assert type(now[key]) is type(value) and now[key].dtype is value.dtype and torch.equal(now[key], value)
    assert torch.equal(model(x), output), "the eager model is not quantized"

    file = io.BytesIO()
    torch.save(now, file)
    file.seek(0)
    loaded = mlp().bfloat16()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(x), output)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickled):
        assert torch.equal(other(x), output)
        with torch.no_grad():
            assert torch.equal(nvfp4(other)(x), compiled(x))


# -- weights that are no plain parameters --


def test_a_weight_computed_from_parameters() -> None:
    """Weight norm, DoRA: https://github.com/pytorch/pytorch/issues/121304"""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 96))
    size, direction = (getattr(layer.parametrizations.weight, f"original{i}") for i in range(2))
    compiled = nvfp4(layer)
    runs = Quantizations()
    with torch.no_grad():
        expect(compiled, layer)
        expect(compiled, layer)
        assert runs.count == 1, "what parameters alone decide is computed once"
        size.mul_(-3.0)
        expect(compiled, layer)
        direction.copy_(torch.randn(96, 64))
        expect(compiled, layer)
        assert runs.count == 3
    gradients = torch.autograd.grad(compiled(X).square().sum(), (size, direction))
    wanted = torch.autograd.grad(layer(X).square().sum(), (size, direction))
    for got, want in zip(gradients, wanted, strict=True):
        assert error(got, want) < 0.3


def test_a_random_weight_is_drawn_anew_at_each_call() -> None:
    """It depends on nothing but a parameter, and yet must not be kept."""

    class DropConnect(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, F.dropout(self.weight, 0.5))

    layer = DropConnect(64, 96)
    compiled = nvfp4(layer)
    with torch.no_grad():
        assert only_site(layer, X).precision is NVFP4
        draws = [compiled(X) for _ in range(3)]
        assert all(error(y, z) > 0.5 for y, z in itertools.pairwise(draws))


def test_a_weight_that_the_model_edits_itself() -> None:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(96, 64))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(-0.5)
            return F.linear(x, self.weight)

    model = Decays()
    reference = copy.deepcopy(model)
    compiled = nvfp4(model)
    with torch.no_grad():
        for _ in range(4):
            y = compiled(X)
            reference(X)
            assert torch.equal(model.weight, reference.weight)
            assert_by_hand(y, nvfp4_linear(X, reference.weight))


def test_a_weight_that_the_model_edits_after_use() -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(96, 64))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            self.weight.add_(1.0)
            return y

    model = Drifts()
    compiled = nvfp4(model)
    with torch.no_grad():
        for turn in range(4):
            want = nvfp4_linear(X, model.weight)
            assert_by_hand(compiled(X), want, f"call {turn}")


def test_spectral_norm_in_training_mode() -> None:
    """Its power iteration moves two buffers in each call."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 96))
    twin = copy.deepcopy(layer)
    compiled = nvfp4(layer)
    with torch.no_grad():
        for _ in range(3):
            y = compiled(X)
            weight = twin.weight  # reading it takes the same step
            assert error(y, nvfp4_linear(X, weight, twin.bias)) < 1e-4


def test_plain_tensors_the_model_reaches_for() -> None:
    weight = torch.randn(96, 64)
    compiled = nvfp4(lambda x: F.linear(x, weight))
    for change in (lambda: None, lambda: weight.neg_(), lambda: one_unseen_element(weight)):
        change()
        assert_by_hand(compiled(X), nvfp4_linear(X, weight))


def test_a_weight_given_as_an_argument() -> None:
    compiled = nvfp4(F.linear)
    weight = torch.randn(96, 64)
    for change in (lambda: None, lambda: weight.neg_(), lambda: one_unseen_element(weight.data)):
        change()
        assert_by_hand(compiled(X, weight), nvfp4_linear(X, weight))


def test_functional_call_with_other_parameters() -> None:
    layer = nn.Linear(64, 96)
    compiled = nvfp4(lambda parameters, x: torch.func.functional_call(layer, parameters, (x,)))
    with torch.no_grad():
        for turn in range(3):
            parameters = {"weight": torch.randn(96, 64), "bias": torch.randn(96)}
            want = nvfp4_linear(X, parameters["weight"], parameters["bias"])
            assert_by_hand(compiled(parameters, X), want, f"call {turn}")


def test_autocast_weights() -> None:
    """The cast of the weight is hoisted with its quantizer."""
    layer, _ = a_compiled_layer()
    compiled = nvfp4(layer)
    runs = Quantizations()
    with torch.no_grad():
        for turn in range(2):
            want = nvfp4_linear(X.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    y = compiled(X)
                assert_by_hand(y, want)
            assert runs.count == turn + 1
            layer.weight.mul_(-2.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_fully_sharded_parameters() -> None:
    """Shards gathered into fresh memory at each call: https://github.com/pytorch/ao/issues/3982,
    https://github.com/pytorch/ao/pull/590
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 90), nn.Linear(90, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            reference = nn.Sequential(Block(), Block())
            model = nn.Sequential(*(fully_shard(nvfp4(block), mesh=mesh) for block in copy.deepcopy(reference)))
            fully_shard(model, mesh=mesh)
            gradient = torch.randn(64, 64)
            for turn in range(3):
                reference.zero_grad()
                model.zero_grad()
                want, y = reference(X), model(X)
                # The residual path is exact and makes up half of the output.
                assert_quantized(y, want, TWO_PRODUCTS, what=f"output, step {turn}")
                want.backward(gradient)
                y.backward(gradient)
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    assert error(p.grad.full_tensor(), q.grad) < 0.3  # type: ignore[arg-type,union-attr]
                with torch.no_grad():
                    for p in (*model.parameters(), *reference.parameters()):
                        p.mul_(-1.2)
                    assert_quantized(model(X), reference(X), TWO_PRODUCTS, what=f"after update {turn}")
        finally:
            dist.destroy_process_group()

"""Products that stay out of NVFP4, and what becomes of dtypes around a matmul."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BF16,
    Quantizations,
    assert_by_hand,
    assert_untouched,
    error,
    forward_plan,
    nvfp4,
    nvfp4_linear,
    only_site,
    step,
)
from torch import Tensor, nn

import fp4_compile
from fp4_compile import Reason

# -- what stays out --


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.full((q.shape[-2], k.shape[-2]), -math.inf).triu(1)
    return (scores + mask).softmax(-1) @ v


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products of matrices, as a model with neither batch nor heads has them."""
    return causal_attention(q[0, 0], k[0, 0], v[0, 0])


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("attention", [causal_attention, one_head, sdpa])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_attention_products_stay_out(attention: Callable[..., Tensor], offset: float) -> None:
    """Outlying channels of K, probabilities below any block scale: https://github.com/flashinfer-ai/flashinfer/issues/3809"""
    q, k, v = (torch.randn(2, 2, 64, 64) for _ in range(3))
    k[..., ::8] += offset
    plan = fp4_compile.explain(attention, q, k, v).plan
    assert {d.reason for d in plan} <= {Reason.ATTENTION, Reason.TWO_ACTIVATIONS}
    assert error(nvfp4(attention)(q, k, v), attention(q, k, v)) < 2e-6


OTHER_DTYPES = [
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_other_dtypes_stay_out(dtype: torch.dtype) -> None:
    """https://github.com/pytorch/pytorch/issues/125718, https://github.com/pytorch/pytorch/issues/159023"""
    if dtype.is_floating_point or dtype.is_complex:
        x, w = torch.randn(64, 96, dtype=dtype), torch.randn(96, 80, dtype=dtype)
    else:
        x, w = (torch.randint(0, 9, shape, dtype=dtype) for shape in ((64, 96), (96, 80)))
    decision = only_site(torch.matmul, x, w)
    assert (decision.precision, decision.reason) == (BF16, Reason.DTYPE)
    y, want = nvfp4(torch.matmul)(x, w), x @ w
    assert y.dtype is dtype
    relative = 1e-5 if dtype is torch.complex64 else 1e-12
    torch.testing.assert_close(y, want, rtol=relative, atol=10 * relative)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_models_of_other_dtypes_stay_out(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(dtype)
    x, g = torch.randn(8, 64, dtype=dtype), torch.randn(8, 64, dtype=dtype)
    assert {d.reason for d in fp4_compile.explain(model, x).plan} == {Reason.DTYPE}
    compiled = nvfp4(model)
    run, eager = step(model, x, g, compiled), step(model, x, g)
    for got, want in ((run.output, eager.output), (run.input_gradient, eager.input_gradient)):
        assert got.dtype is dtype
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager.output)


def test_a_model_of_several_dtypes() -> None:
    """The FP64 part stays as it is, the rest does not suffer from it."""

    def model(x: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w, (x.double() @ w.double()) @ w2

    x, w, w2 = torch.randn(64, 64), torch.randn(64, 96), torch.randn(96, 48, dtype=torch.float64)
    y, z = nvfp4(model)(x, w, w2)
    assert sorted(p.value for p in forward_plan(model, x, w, w2).values()) == ["bf16", "bf16", "nvfp4"]
    assert_by_hand(y, nvfp4_linear(x, w.t()))
    torch.testing.assert_close(z, (x.double() @ w.double()) @ w2, rtol=1e-12, atol=1e-12)


def test_a_graph_without_a_matmul() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm(x)) * x

    model, x = Model(), torch.randn(8, 64)
    found = fp4_compile.explain(model, x)
    assert len(found.plan) == 0 and found.plan.fp4_share() is None
    assert "0 of 0 matmuls in NVFP4" in str(found)
    runs = Quantizations()
    compiled = nvfp4(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert runs.count == 0
    run, eager = step(model, x, torch.ones(8, 64), compiled), step(model, x, torch.ones(8, 64))
    torch.testing.assert_close(run.input_gradient, eager.input_gradient)


def test_a_model_without_inputs() -> None:
    layer = nn.Linear(64, 96)
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert_by_hand(nvfp4(lambda: layer(x))(), nvfp4_linear(x, layer.weight, layer.bias))
        product = nvfp4(lambda: layer.weight @ layer.weight.t())
        assert_by_hand(product(), nvfp4_linear(layer.weight, layer.weight))
        layer.weight.mul_(-2.0)
        assert_by_hand(product(), nvfp4_linear(layer.weight, layer.weight))


# -- dtypes around a matmul --


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_dtypes_follow_the_model(dtype: torch.dtype, bias: bool) -> None:
    """An output dtype fixed to BF16: https://github.com/vllm-project/vllm/pull/32357"""
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    x, g = torch.randn(48, 64).to(dtype), torch.randn(48, 96).to(dtype)
    run = step(layer, x, g, nvfp4(layer))
    assert run.output.dtype is run.input_gradient.dtype is dtype
    assert all(gradient is not None and gradient.dtype is dtype for gradient in run.gradients.values())
    with torch.no_grad():
        assert_by_hand(run.output, nvfp4_linear(x, layer.weight, layer.bias))
        assert_untouched(run.input_gradient, g @ layer.weight)


def test_a_cast_after_a_matmul_rounds() -> None:
    """Fusion drops it: https://github.com/pytorch/pytorch/issues/181568, https://github.com/pytorch/pytorch/issues/176565"""

    def model(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).to(torch.bfloat16)
        return y + b, y, y.float() @ w.t()

    x, w = torch.randn(64, 96), torch.randn(96, 64)
    summed, y, product = nvfp4(model)(x, w, torch.zeros(64))
    assert summed.dtype is torch.float32 and y.dtype is torch.bfloat16
    assert torch.equal(summed, y.float())
    assert_by_hand(y, nvfp4_linear(x, w.t()).bfloat16())
    assert_by_hand(product, nvfp4_linear(y.float(), w))  # the codes are those of the rounded values


def test_an_fp32_bias_on_a_bf16_product() -> None:
    """https://github.com/pytorch/ao/pull/3525, https://github.com/pytorch/pytorch/issues/159492"""
    x, w, bias = torch.randn(64, 96).bfloat16(), torch.randn(64, 96).bfloat16(), torch.randn(64)
    compiled = nvfp4(lambda x, w, b: F.linear(x, w) + b)
    y = compiled(x, w, bias)
    assert y.dtype is torch.float32
    assert_by_hand(y, nvfp4_linear(x, w).float() + bias)
    # A step that BF16 could not hold.
    torch.testing.assert_close(compiled(x, w, bias + 1e-4) - y, torch.full_like(y, 1e-4), rtol=0.0, atol=1e-5)


MISTAKES: dict[str, tuple[Tensor, Tensor]] = {
    "half and float": (torch.ones(8, 64).half(), torch.ones(96, 64)),
    "float and double": (torch.ones(8, 64), torch.ones(96, 64).double()),
    "bfloat16 and float": (torch.ones(8, 64).bfloat16(), torch.ones(96, 64)),
    "contractions of two sizes": (torch.ones(8, 64), torch.ones(96, 48)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_eager_refuses_is_refused(mistake: str) -> None:
    """https://github.com/pytorch/pytorch/issues/150993"""
    x, w = MISTAKES[mistake]
    with pytest.raises(RuntimeError):
        F.linear(x, w)
    with pytest.raises(RuntimeError):
        nvfp4(F.linear)(x, w)

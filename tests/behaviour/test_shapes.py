"""Sizes, ranks, strides and offsets: whatever eager takes, the compiled model takes, with the same numbers.

Most layers here are compiled together, as independent layers of one graph, and judged one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BF16,
    FEW_VALUES,
    LEAST_ERROR,
    NVFP4,
    assert_by_hand,
    assert_close,
    assert_quantized,
    assert_untouched,
    error,
    everything_in_nvfp4,
    forward_plan,
    nvfp4,
    nvfp4_linear,
    only_site,
)
from torch import Tensor, nn

from fp4_compile import Precision, Reason


class Layers(nn.Module):
    """Layers that have nothing to do with each other, each with an input of its own."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


@dataclasses.dataclass(frozen=True)
class Run:
    """All layers forward and backward: outputs, the gradients given to them, and those that came back."""

    layers: list[nn.Linear]
    inputs: list[Tensor]
    outputs: list[Tensor]
    output_gradients: list[Tensor]
    input_gradients: list[Tensor]
    weight_gradients: list[Tensor]


def train_once(model: Layers, inputs: list[Tensor], call: Callable[..., list[Tensor]]) -> Run:
    model.zero_grad(set_to_none=True)
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    outputs = call(*leaves)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(y.shape, generator=generator) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    layers = [layer for layer in model.layers if isinstance(layer, nn.Linear)]
    backward = [x.grad for x in leaves], [layer.weight.grad for layer in layers]
    return Run(layers, inputs, [y.detach() for y in outputs], gradients, *backward)  # type: ignore[arg-type]


# -- sizes --

SIZES: dict[str, tuple[tuple[int, int, int], Precision]] = {
    # K that 16 does not divide: https://github.com/pytorch/ao/issues/3233
    "short contraction": ((64, 5, 96), BF16),
    "contraction of a block and one": ((64, 17, 96), BF16),
    "contraction a sixth of it padding": ((64, 40, 96), BF16),
    "contraction a tenth of it padding": ((64, 100, 96), NVFP4),
    # few outputs: https://github.com/hpcaitech/ColossalAI/pull/6393
    "one output": ((96, 256, 1), BF16),
    "two outputs": ((96, 256, 2), BF16),
    "ten outputs": ((96, 256, 10), BF16),
    # one row: https://github.com/NVIDIA/TransformerEngine/issues/1571
    "one row": ((1, 256, 512), NVFP4),
    # a wgrad over as many tokens as no block has: https://github.com/NVIDIA/TransformerEngine/issues/2966
    "13 tokens": ((13, 64, 80), NVFP4),
    "47 tokens": ((47, 64, 80), NVFP4),
    # long contraction, few rows: https://github.com/pytorch/ao/issues/4582
    "long contraction, 3 rows": ((3, 4608, 96), NVFP4),
    "long contraction, 127 rows": ((127, 4608, 96), NVFP4),
    # block counts and rows that fill no tile of a kernel: https://github.com/unslothai/unsloth/pull/10730
    "one block, one row": ((1, 16, 48), BF16),
    "3 blocks": ((3, 48, 40), NVFP4),
    "5 blocks": ((5, 80, 72), NVFP4),
    "7 blocks": ((7, 112, 56), NVFP4),
    "5 blocks, 130 rows": ((130, 80, 136), NVFP4),
    "13 blocks, 33 outputs": ((129, 208, 33), NVFP4),
}


def sized_layers() -> tuple[Layers, list[Tensor]]:
    layers, inputs = [], []
    for i, ((m, k, n), _) in enumerate(SIZES.values()):
        layers.append(nn.Linear(k, n, bias=i % 4 == 1))
        inputs.append(torch.randn(m, k))
    return Layers(layers), inputs


@pytest.fixture(scope="module")
def trained() -> Run:
    """Every size forward and backward, by a plan that puts every forward into NVFP4."""
    torch.manual_seed(0)
    model, inputs = sized_layers()
    options = {"plan": everything_in_nvfp4(model, *inputs)}
    return train_once(model, inputs, nvfp4(model, options=options))


@pytest.mark.parametrize("size", SIZES)
def test_any_size_trains_in_nvfp4(trained: Run, size: str) -> None:
    i = list(SIZES).index(size)
    layer, x, y, g = trained.layers[i], trained.inputs[i], trained.outputs[i], trained.output_gradients[i]
    with torch.no_grad():
        assert_by_hand(y, nvfp4_linear(x, layer.weight, layer.bias))
        # What is padded to three times its size has few values, and they scatter more.
        assert_close(y, layer(x), FEW_VALUES, least=LEAST_ERROR, slope_within=0.12)
        assert_untouched(trained.input_gradients[i], g @ layer.weight, "input gradient")
        assert_untouched(trained.weight_gradients[i], g.t() @ x, "weight gradient")


def test_which_sizes_the_default_policy_takes() -> None:
    model, inputs = sized_layers()
    assert list(forward_plan(model, *inputs).values()) == [precision for _, precision in SIZES.values()]


# -- nothing to multiply --


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    """https://github.com/neuralmagic/AutoFP8/pull/9, https://github.com/pytorch/ao/issues/3982"""
    layer = nn.Linear(64, 48)
    compiled = nvfp4(layer)
    x = torch.empty(shape, requires_grad=True)
    assert only_site(layer, x).precision is NVFP4
    y = compiled(x)
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    assert layer.weight.grad is not None and layer.bias.grad is not None
    assert not layer.weight.grad.any() and not layer.bias.grad.any()
    with torch.no_grad():
        assert compiled(x).shape == y.shape


def test_no_rows_after_some_and_before_some() -> None:
    layer = nn.Linear(64, 48)
    compiled = nvfp4(layer, dynamic=True)
    with torch.no_grad():
        for rows in (5, 0, 9, 1, 0):
            x = torch.randn(rows, 64)
            y = compiled(x)
            assert y.shape == (rows, 48)
            assert_by_hand(y, nvfp4_linear(x, layer.weight, layer.bias), f"{rows} rows")


@pytest.mark.parametrize("asked", [False, True], ids=["default plan", "plan asks for nvfp4"])
def test_empty_contraction_and_no_outputs(asked: bool) -> None:
    def products(x: Tensor, w: Tensor, b: Tensor, x2: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w, b), F.linear(x, w), x2 @ w2.t()

    operands = torch.randn(4, 0), torch.randn(40, 0), torch.randn(40), torch.randn(4, 64), torch.randn(0, 64)
    leaves = [t.requires_grad_() for t in operands]
    plan = everything_in_nvfp4(products, *leaves) if asked else None
    if not asked:
        assert set(forward_plan(products, *leaves).values()) == {BF16}
    compiled = nvfp4(products, options={"plan": plan})
    with torch.no_grad():
        biased, plain, none = compiled(*leaves)
    assert torch.equal(biased, leaves[2].expand(4, 40))
    assert torch.equal(plain, torch.zeros(4, 40))
    assert none.shape == (4, 0)
    sum(y.sum() for y in compiled(*leaves)).backward()
    assert [t.grad.shape for t in leaves if t.grad is not None] == [t.shape for t in leaves]
    assert torch.equal(leaves[2].grad, torch.full((40,), 4.0))  # type: ignore[arg-type]
    assert not leaves[3].grad.any()  # type: ignore[union-attr]


# -- ranks --


def test_linear_takes_any_rank() -> None:
    """https://github.com/pytorch/ao/issues/3783, https://github.com/NVIDIA/TransformerEngine/issues/1571"""
    layer = nn.Linear(64, 96)

    def on_all(*inputs: Tensor) -> list[Tensor]:
        return [layer(x) for x in inputs]

    shapes = [(64,), (1, 64), (1, 1, 64), (2, 3, 64), (2, 3, 5, 64)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    assert set(forward_plan(on_all, *inputs).values()) == {NVFP4}
    outputs = nvfp4(on_all)(*inputs)
    gradients = [torch.randn(y.shape) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    with torch.no_grad():
        for x, y, g in zip(inputs, outputs, gradients, strict=True):
            what = f"input of shape {tuple(x.shape)}"
            want = nvfp4_linear(torch.atleast_2d(x), layer.weight, layer.bias).view(y.shape)
            assert_by_hand(y.detach(), want, what)
            assert x.grad is not None
            assert_untouched(x.grad, g @ layer.weight, f"gradient, {what}")


def positive(*shape: int) -> Tensor:
    """Products of these have no cancellation, so that even one value has a small error."""
    return torch.rand(shape) + 0.5


RANKS: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [
    ((64,), (64,), False),
    ((64,), (64, 40), True),
    ((40, 64), (64,), False),
    ((40, 64), (64, 48), True),
    ((3, 40, 64), (64, 48), True),
    ((40, 64), (3, 64, 48), False),
    ((3, 40, 64), (64,), False),
    ((2, 1, 40, 64), (3, 64, 48), False),
    ((1, 64), (64, 1), False),
]
"""Left, right, and whether the default policy takes the product: one with a shared right operand."""


def test_matmul_takes_any_pair_of_ranks() -> None:
    """https://github.com/pytorch/FBGEMM/pull/2845"""
    operands = [positive(*shape) for left, right, _ in RANKS for shape in (left, right)]

    def products(*operands: Tensor) -> list[Tensor]:
        return [torch.matmul(a, b) for a, b in zip(operands[::2], operands[1::2], strict=True)]

    with torch.no_grad():
        results = nvfp4(products)(*operands)
    for (left, right, taken), a, b, y in zip(RANKS, operands[::2], operands[1::2], results, strict=True):
        what = f"{left} @ {right}"
        if taken:
            assert_by_hand(y, nvfp4_linear(torch.atleast_2d(a), b.t()).view(y.shape), what)
            assert error(y, a @ b) < 0.06, what
        else:
            assert_untouched(y, a @ b, what)


def test_batched_weights() -> None:
    """https://github.com/meta-pytorch/MSLK/pull/358: every batch entry has its own right operand."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 64, 48))

        def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
            return torch.bmm(x, self.weight), torch.baddbmm(shift, x, self.weight, beta=0.5, alpha=2.0)

    model, x, shift = Experts(), torch.randn(3, 40, 64), torch.randn(3, 1, 48)
    assert set(forward_plan(model, x, shift).values()) == {NVFP4}
    compiled = nvfp4(model)
    with torch.no_grad():
        for _ in range(2):
            plain, shifted = compiled(x, shift)
            assert_quantized(plain, x @ model.weight)
            # All three weights share one amax, as one tensor.
            assert_by_hand(plain, nvfp4_linear(x, model.weight.mT))
            assert_by_hand(shifted, 0.5 * shift + 2.0 * plain)
            model.weight.mul_(-3.0)


# -- strides and offsets --


def poisoned(rows: int, columns: int) -> Tensor:
    """A view whose neighbours in memory would ruin an amax that met them."""
    big = torch.randn(rows, columns + 136)
    big[:, :3], big[:, columns + 3 :] = 1e6, float("nan")
    return big[:, 3 : columns + 3]


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(64, 96).t(),
    "every other column": lambda: torch.randn(96, 128)[:, ::2],
    "every other row": lambda: torch.randn(192, 64)[::2],
    "odd storage offset": lambda: torch.randn(1 + 96 * 64)[1:].view(96, 64),
    "one row repeated": lambda: torch.randn(1, 64).expand(96, 64),
    "one column repeated": lambda: torch.randn(96, 1).expand(96, 64),
    "overlapping rows": lambda: torch.randn(64 + 95).as_strided((96, 64), (1, 1)),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(64, 48).t(),
    "every other column": lambda: torch.randn(48, 128)[:, ::2],
    "poisoned neighbours": lambda: poisoned(48, 64),
    "one row repeated": lambda: torch.randn(1, 64).expand(48, 64),
    "tokens first": lambda: torch.randn(24, 2, 64).transpose(0, 1),
    "channels second": lambda: torch.randn(2, 64, 24).transpose(1, 2),
    "contiguous": lambda: torch.randn(2, 24, 64),
}


def strided_layers() -> tuple[Layers, list[Tensor]]:
    layers = []
    for weight in WEIGHTS.values():
        layer = nn.Linear(64, 96, bias=False)
        layer.weight = nn.Parameter(weight())
        layers.append(layer)
    return Layers(layers), [make() for make in INPUTS.values()]


def test_inference_with_any_layout() -> None:
    """Weights that are views: https://github.com/pytorch/ao/issues/3232,
    https://github.com/pytorch/pytorch/issues/141749
    """
    model, inputs = strided_layers()
    inputs = [inputs[0]] * len(inputs)
    compiled = nvfp4(model)
    with torch.no_grad():
        assert set(forward_plan(model, *inputs).values()) == {NVFP4}
        for turn in range(2):
            for name, layer, x, y in zip(WEIGHTS, model.layers, inputs, compiled(*inputs), strict=True):
                assert isinstance(layer, nn.Linear)
                what = f"weight {name}, turn {turn}"
                assert_by_hand(y, nvfp4_linear(x, layer.weight, layer.bias), what)
                assert y.stride() == layer(x).stride(), what
                # Behind the views: an edit of the memory they look at is an edit of the weight.
                base = torch.empty(0).set_(layer.weight.untyped_storage())
                base.mul_(-1.7)


def test_training_with_any_layout() -> None:
    """Numbers, and the strides eager gives: https://github.com/pytorch/pytorch/issues/198364"""
    model, inputs = strided_layers()
    eager = train_once(model, inputs, model)
    run = train_once(model, inputs, nvfp4(model))
    for i, (weight, x) in enumerate(zip(WEIGHTS, INPUTS, strict=True)):
        what = f"weight {weight}, input {x}"
        layer = run.layers[i]
        with torch.no_grad():
            assert_by_hand(run.outputs[i], nvfp4_linear(run.inputs[i], layer.weight, layer.bias), what)
        for name in ("outputs", "input_gradients", "weight_gradients"):
            got, want = getattr(run, name)[i], getattr(eager, name)[i]
            assert got.stride() == want.stride(), f"{name}, {what}"
        assert_untouched(run.input_gradients[i], eager.input_gradients[i], f"input gradient, {what}")
        assert_untouched(run.weight_gradients[i], eager.weight_gradients[i], f"weight gradient, {what}")


@pytest.mark.parametrize("side", ["input", "weight"])
def test_every_block_has_its_own_scale(side: str) -> None:
    """Scales read in another order than written: https://github.com/vllm-project/vllm/issues/50084

    Block number g holds the value g+1 throughout, and the other operand picks one block for each output, so
    an output names the block whose scale it got. 48 blocks and 160 rows are more than one swizzled tile.
    """
    blocks, rows = 48, 160
    numbers = torch.arange(1.0, blocks + 1)
    growth = 2.0 ** (torch.arange(rows) // 16 % 4)[:, None]  # constant over a tile of 16x16
    values = numbers.repeat_interleave(16) * growth
    pick = torch.eye(blocks).repeat_interleave(16, 1)
    want = 16 * numbers * growth
    with torch.no_grad():
        y = nvfp4(F.linear)(values, pick) if side == "input" else nvfp4(F.linear)(pick, values).t()
    # The value is its block's amax, so it has the scale's error alone: E4M3 has three bits behind the point.
    assert ((y - want).abs() / want).max() <= 2.0**-4
    assert error(y, want) > 1e-3


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ((64, 17, 96), Reason.SHORT_CONTRACTION),
        ((64, 40, 96), Reason.PADDING),
        ((64, 64, 31), Reason.FEW_OUTPUTS),
        ((64, 64, 32), Reason.QUANTIZED),
        ((64, 32, 32), Reason.QUANTIZED),
    ],
    ids=str,
)
def test_a_size_left_out_says_why(size: tuple[int, int, int], reason: Reason) -> None:
    m, k, n = size
    decision = only_site(nn.Linear(k, n), torch.randn(m, k))
    assert decision.reason is reason
    assert decision.detail

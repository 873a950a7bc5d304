"""Training by the recipe: forward, dgrad and wgrad in FP4, compared with the same computation by hand."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, NVFP4, assert_by_hand, assert_close, error, slope, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4_compile
from fp4_compile import Precision, Reason
from fp4_compile.errors import OptionError
from fp4_compile.options import Options
from fp4_compile.plan import Role

ops = torch.ops.fp4
EAGER_DRAWS = {"fallback_random": True}
"""Inductor draws as eager mode does, so that a seed drawn by hand is the graph's."""


def nvfp4(model: Any, **recipe: Any) -> Any:
    options = {"training": {"bf16_share": 0, **recipe}, "inductor": EAGER_DRAWS}
    return torch.compile(model, backend="nvfp4", options=options)


def seed(number: int) -> Tensor:
    """What a graph draws after ``torch.manual_seed(number)``."""
    torch.manual_seed(number)
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64)


def product(a: Any, a_amax: Tensor, b: Any, b_amax: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.scaled_mm(*a, a_amax, *b, b_amax, None, dtype)


def wgrad_by_hand(x: Tensor, g: Tensor, drawn: Tensor | None, stream: int, size: int = 16) -> Tensor:
    """[N, K]: both operands along the tokens, transformed, the gradient rounded stochastically."""
    left, right = g.t().contiguous(), x.t().contiguous()
    if size:
        left, right = ops.hadamard(left, size), ops.hadamard(right, size)
    return product(
        gradient(left, drawn, stream), ops.amax(left), ops.quantize(right, ops.amax(right)), ops.amax(right), x.dtype
    )


def dgrad_by_hand(g: Tensor, weight: Tensor, drawn: Tensor | None, stream: int, block: str = "16x16") -> Tensor:
    """[T, K]: the weight's own tiles, turned round."""
    turned = weight.t().contiguous()
    quantized = ops.quantize(turned, ops.amax(turned), block)
    return product(gradient(g, drawn, stream), ops.amax(g), quantized, ops.amax(weight), g.dtype)


def gradient(g: Tensor, drawn: Tensor | None, stream: int) -> Any:
    if drawn is None:
        return ops.quantize(g, ops.amax(g))
    return ops.quantize_stochastic(g, ops.amax(g), drawn, stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [64, 41])
def test_a_step_is_the_recipe_by_hand(dtype: torch.dtype, tokens: int) -> None:
    layer = nn.Linear(64, 96).to(dtype)
    x, g = torch.randn(tokens, 64).to(dtype), torch.randn(tokens, 96).to(dtype)
    drawn = seed(5)
    torch.manual_seed(5)
    run = step(layer, x, g, nvfp4(layer))
    weight = layer.weight.detach()
    amax = ops.amax(weight)
    forward = ops.scaled_mm(
        *ops.quantize(x, ops.amax(x)),
        ops.amax(x),
        *ops.quantize(weight, amax, "16x16"),
        amax,
        layer.bias.detach(),
        dtype,
    )
    assert_by_hand(run.output, forward, "output")
    # With a bias, the graph has dgrad before wgrad, and streams are counted in its order.
    assert_by_hand(run.gradients["weight"], wgrad_by_hand(x, g, drawn, 1), "wgrad")  # type: ignore[arg-type]
    assert_by_hand(run.input_gradient, dgrad_by_hand(g, weight, drawn, 0), "dgrad")
    assert_by_hand(run.gradients["bias"], g.float().sum(0).to(dtype), "bias")  # type: ignore[arg-type]
    assert 0.05 < error(run.input_gradient, g @ weight) < 0.3


PARTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stochastic_rounding": False}, {"drawn": None}),
    ({"hadamard": 0, "stochastic_rounding": False}, {"drawn": None, "size": 0}),
    ({"hadamard": 64}, {"size": 64}),
    ({"weight_block": "1x16"}, {"block": "1x16"}),
]


@pytest.mark.parametrize(("recipe", "by_hand"), PARTS, ids=[str(list(recipe)) for recipe, _ in PARTS])
def test_each_part_can_be_changed(recipe: dict[str, Any], by_hand: dict[str, Any]) -> None:
    layer, x, g = nn.Linear(64, 96, bias=False), torch.randn(48, 64), torch.randn(48, 96)
    drawn = by_hand.get("drawn", seed(5))
    torch.manual_seed(5)
    run = step(layer, x, g, nvfp4(layer, **recipe))
    wgrad = wgrad_by_hand(x, g, drawn, 0, by_hand.get("size", 16))
    assert_by_hand(run.gradients["weight"], wgrad, "wgrad")  # type: ignore[arg-type]
    dgrad = dgrad_by_hand(g, layer.weight.detach(), drawn, 1, by_hand.get("block", "16x16"))
    assert_by_hand(run.input_gradient, dgrad, "dgrad")


@pytest.mark.parametrize("forward", ["nvfp4", "mxfp4", "bf16"])
@pytest.mark.parametrize("backward", ["nvfp4", "mxfp4", "bf16"])
def test_formats_of_both_directions(forward: str, backward: str) -> None:
    layer, x, g = nn.Linear(64, 96), torch.randn(64, 64), torch.randn(64, 96)
    recipe = {"forward": forward, "backward": backward}
    plan = fp4_compile.explain(
        layer, x.clone().requires_grad_(), options={"training": {**recipe, "bf16_share": 0}}
    ).plan
    wanted = {Role.FPROP: forward, Role.DGRAD: backward, Role.WGRAD: backward}
    assert {d.site.role: d.precision.value for d in plan} == wanted
    run, eager = step(layer, x, g, nvfp4(layer, **recipe)), step(layer, x, g)
    pairs = [
        (forward, run.output, eager.output),
        (backward, run.input_gradient, eager.input_gradient),
        (backward, run.gradients["weight"], eager.gradients["weight"]),
    ]
    for name, got, want in pairs:
        assert got is not None and want is not None
        if name == "bf16":
            assert error(got, want) < 1e-6
        else:
            assert_close(got, want, 0.35, least=0.05, slope_within=0.1)


def test_the_last_layers_stay_and_a_plan_overrules() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)))
    x = torch.randn(32, 64, requires_grad=True)
    plan = fp4_compile.explain(model, x).plan
    assert {d.site.module for d in plan if d.precision is BF16} == {"6"}
    assert {d.reason for d in plan if d.site.module == "6"} == {Reason.LAST_LAYERS}
    half = fp4_compile.explain(model, x, options={"training": {"bf16_share": 0.5}}).plan
    assert {d.site.module for d in half if d.precision is BF16} == {"4", "5", "6"}
    turned = {d.site.key: NVFP4 if d.site.module == "6" else d.precision for d in plan} | {"0:mm.wgrad": BF16}
    edited = fp4_compile.Plan(tuple(dataclasses.replace(d, precision=turned[d.site.key]) for d in plan))
    followed = fp4_compile.explain(model, x, options={"plan": edited}).plan
    assert [d.site.key for d in followed if d.precision is BF16] == ["0:mm.wgrad"]
    with torch.no_grad():
        assert not [d for d in fp4_compile.explain(model, x).plan if d.precision is BF16]


def test_pins_keep_a_layer_whole() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    plan = fp4_compile.explain(model, x, options={"pins": {"0": "bf16", "1": "nvfp4"}}).plan
    assert {(d.site.module, d.precision) for d in plan} == {("0", BF16), ("1", NVFP4)}
    assert len(plan) == 6


# -- randomness --


def weight_gradients(compiled: Any, layer: nn.Linear, x: Tensor, times: int) -> list[Tensor]:
    found = []
    for _ in range(times):
        layer.zero_grad()
        compiled(x).square().mean().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    return found


@pytest.mark.parametrize("inductor", [{}, EAGER_DRAWS], ids=["Inductor's draws", "eager draws"])
def test_rounding_follows_the_seed_and_is_fresh_in_each_step(inductor: dict[str, Any]) -> None:
    layer, x = nn.Linear(64, 96), torch.randn(64, 64)
    compiled = torch.compile(layer, backend="nvfp4", options={"inductor": inductor})
    runs = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        runs.append(weight_gradients(compiled, layer, x, 2))
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_a_step_draws_one_number_from_the_users_generator() -> None:
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), torch.randn(32, 64)
    compiled = nvfp4(model)
    compiled(x).sum().backward()
    torch.manual_seed(9)
    compiled(x).sum().backward()
    after = torch.get_rng_state()
    seed(9)
    assert torch.equal(after, torch.get_rng_state())


def test_rows_columns_and_layers_round_apart() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    text = fp4_compile.explain(model, torch.randn(32, 64, requires_grad=True), options={"training": {"bf16_share": 0}})
    lines = [line for line in text.graphs[0].stages["cleanup"].splitlines() if "quantize_stochastic" in line]
    assert len({line.split(", ")[-1] for line in lines}) == len(lines) == 4


def test_ranks_round_apart_and_tensor_parallel_ones_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def seeds(size: int, stride: int) -> list[int]:
        found = []
        for rank in range(8):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            torch.manual_seed(3)
            found.append(int(ops.draw_seed(size, stride, device=torch.device("cpu"))))
        return found

    assert len(set(seeds(1, 1))) == 8
    pairs = seeds(2, 1)  # ranks 0 and 1, 2 and 3, ...
    assert len(set(pairs)) == 4 and pairs[0::2] == pairs[1::2]
    strided = seeds(2, 4)  # ranks 0 and 4, 1 and 5, ...
    assert len(set(strided)) == 4 and strided[:4] == strided[4:]


def test_the_mean_of_many_gradients_is_the_gradient() -> None:
    """Stochastic rounding is right on average; to nearest, the error stays however many are averaged.

    It is right between the largest codes: a block scale that was rounded down in E4M3 clips the block's largest
    elements by up to 1/16, which the reference here does as well.
    """
    layer, g, x = nn.Linear(64, 96, bias=False), torch.randn(64, 96), torch.randn(64, 64)
    weight = layer.weight.detach()
    amax, g_amax = ops.amax(weight), ops.amax(g)
    decoded = ops.dequantize(*ops.quantize(weight, amax, "16x16"), amax, 64, torch.float32)
    largest = torch.full((64, 48), 0x77, dtype=torch.uint8)  # the code of 6, twice a byte
    bound = ops.dequantize(largest, ops.quantize(g, g_amax)[1], g_amax, 96, torch.float32)
    clipped = g.clamp(-bound, bound)
    assert 0 < error(clipped, g) < 0.02
    compiled = nvfp4(layer)
    total, errors = torch.zeros(64, 64), {}
    for count in range(1, 257):
        total += step(layer, x, g, compiled).input_gradient
        if count in (4, 64, 256):
            errors[count] = error(total / count, clipped @ decoded)
    assert errors[64] < errors[4] / 3.2 and errors[256] < errors[4] / 6.5, errors
    assert abs(slope(total / 256, clipped @ decoded) - 1) < 0.003
    nearest = step(layer, x, g, nvfp4(layer, stochastic_rounding=False)).input_gradient
    assert error(nearest, clipped @ decoded) > 6 * errors[256]


class Checkpointed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x))


def test_a_recomputed_activation_is_rounded_as_before() -> None:
    kept = Checkpointed(recompute=False)
    again = copy.deepcopy(kept)
    again.recompute = True
    x, g = torch.randn(64, 64), torch.randn(64, 64)
    runs = []
    for model in (kept, again):
        compiled = nvfp4(model)
        torch.manual_seed(3)
        runs.append(step(model, x, g, compiled))
    assert_by_hand(runs[1].output, runs[0].output)
    for name, want in runs[0].gradients.items():
        assert_by_hand(runs[1].gradients[name], want, name)  # type: ignore[arg-type]


# -- what is kept, what is not finite, what trains --


def saved_bytes(model: nn.Module, x: Tensor, compiled: Any) -> int:
    """Bytes kept for the backward, without parameters and the input itself."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(x)
    del y
    return sum(kept.values())


def test_the_activations_are_kept_as_codes() -> None:
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)).bfloat16()
    x = torch.randn(4096, 256, dtype=torch.bfloat16, requires_grad=True)
    plain = saved_bytes(model, x, torch.compile(model))
    ours = saved_bytes(model, x, nvfp4(model))
    inputs, weights = 4096 * (256 + 512), 2 * 256 * 512
    assert plain == 2 * inputs
    # 4.5 bits an element of the inputs, and of the weights, whose codes dgrad reads.
    assert ours == pytest.approx(4.5 / 8 * (inputs + weights), rel=1e-3)
    assert ours < 0.45 * plain


def test_a_gradient_that_is_not_finite_is_seen() -> None:
    layer, x, g = nn.Linear(64, 96), torch.randn(64, 64), torch.randn(64, 96)
    for bad in (float("nan"), float("inf")):
        broken = g.clone()
        broken[3, 5] = bad
        run = step(layer, x, broken, nvfp4(layer))
        assert not torch.isfinite(run.input_gradient[3]).any()
        assert not torch.isfinite(run.gradients["weight"][5]).any()  # type: ignore[index]
        assert torch.isfinite(run.input_gradient[4]).all()


def test_training_goes_where_high_precision_goes() -> None:
    target_model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    start = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    data = [torch.randn(128, 64) for _ in range(8)]
    losses = []
    for backend in ("eager", "nvfp4"):
        model = copy.deepcopy(start)
        compiled = torch.compile(model, backend=backend) if backend == "eager" else nvfp4(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for turn in range(120):
            x = data[turn % 8]
            loss = F.mse_loss(compiled(x), target_model(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(sum(F.mse_loss(model(x), target_model(x)).item() for x in data) / 8)
    with torch.no_grad():
        first = sum(F.mse_loss(start(x), target_model(x)).item() for x in data) / 8
    assert losses[0] < 0.1 * first and losses[1] < 1.3 * losses[0], (first, losses)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"training": {"hadamar": 16}}, "did you mean 'hadamard'"),
        ({"training": {"hadamard": 24}}, "0, one of \\[16, 32, 64, 128\\]"),
        ({"training": {"backward": "fp8"}}, "one of \\['nvfp4', 'mxfp4', 'bf16'\\]"),
        ({"training": {"bf16_share": 15}}, "a number from 0 to 1"),
        ({"training": {"stochastic_rounding": 1}}, "True or False"),
        ({"training": "nvfp4"}, "it takes a dict"),
    ],
)
def test_a_misspelt_recipe(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Options.parse(given)


def test_every_part_is_in_the_cache_key() -> None:
    changed: list[dict[str, Any]] = [
        {},
        {"forward": "bf16"},
        {"backward": "bf16"},
        {"stochastic_rounding": False},
        {"hadamard": 0},
        {"weight_block": "1x16"},
        {"bf16_share": 0.5},
    ]
    assert len({Options.parse({"training": recipe}).digest() for recipe in changed}) == len(changed)


def test_mxfp4_is_a_precision_of_plans() -> None:
    assert Precision("mxfp4") is Precision.MXFP4

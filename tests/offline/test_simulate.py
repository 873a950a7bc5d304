"""Programs for GPUs, run on this CPU: their results are those of the graphs they were generated from."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_compile_for import gpu_state
from torch import Tensor, nn

import fp4_compile
from fp4_compile import numerics, ops
from fp4_compile.errors import DeviceError, SimulationError
from fp4_compile.offline import machine
from fp4_compile.offline.compile_for import prepared
from fp4_compile.offline.generate import Program
from fp4_compile.offline.trace import Lowered, execute
from fp4_compile.simulation import program as simulation
from fp4_compile.testing import simulate

EVERYTHING: dict[str, Any] = {"target": None}  # small layers do not pay on any device
# Fused kernels round to BF16 where eager PyTorch does: of a difference to the reference there is left the order in
# which FP32 is summed, which now and then moves a BF16 number to its neighbour.
ROUNDED = EVERYTHING | {"inductor": {"emulate_precision_casts": True}}
ALL_ROUNDED = ROUNDED | {"training": {"bf16_share": 0.0}}


class Block(nn.Module):
    """Attention with fewer keys than queries, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(128), nn.RMSNorm(128)
        self.q, self.kv, self.o = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(128, 256), nn.Linear(128, 256, bias=False), nn.Linear(256, 128)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (4, 32)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2).repeat_interleave(2, 1) for t in self.kv(h).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def reference(lowered: Lowered) -> Callable[[list[Any]], Sequence[Any]]:
    """An executor that runs the graph itself, with the CPU's operators."""
    gm, hoisted = copy.deepcopy(lowered.gm), lowered.hoisted
    prologue = copy.deepcopy(hoisted.prologue) if hoisted is not None else None

    def run(inputs: list[Any]) -> Any:
        with torch.no_grad():
            if hoisted is not None:
                inputs = [*inputs, *prologue(*[inputs[i] for i in hoisted.inputs])]
            return gm(*inputs)

    return run


def by_reference(model: Any, inputs: Any, target: str, options: dict[str, Any]) -> Any:
    gpu, chosen, _ = prepared(target, options)
    torch._dynamo.reset()
    return execute(model, inputs, chosen, gpu.sm, reference)[0]


def difference(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def both(training: bool, target: str, options: dict[str, Any], *more: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Output and gradients of the block by the simulator, the reference, and in BF16."""
    results = []
    for run in (simulate, by_reference, lambda model, inputs, *_: model(*inputs)):
        torch.manual_seed(0)
        model = Block().bfloat16()
        x = torch.randn((1, 32, 128) if training else (2, 64, 128)).bfloat16().requires_grad_(training)
        with torch.set_grad_enabled(training):
            y = run(model, (x, *more), target, options)
        if training:
            y.float().square().mean().backward()
        results.append([y.detach()] + [p.grad for p in (x, *model.parameters()) if p.grad is not None])
    assert len(results[0]) == (12 if training else 1)
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_inference(target: str) -> None:
    [(got, want, bf16)] = both(False, target, ROUNDED)
    assert difference(got, bf16) > 0.015  # it is really quantized
    assert difference(got, want) < 0.002


def test_what_a_fused_kernel_does_not_round() -> None:
    """Then an FP4 number is another now and then."""
    [(got, want, _)] = both(False, "sm_100", EVERYTHING)
    assert difference(got, want) < 0.012


class Gelu(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 96, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x)) * torch.tanh(x[..., :1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_an_epilogue_rounds_between_operations_if_inductor_is_told_to(target: str, bias: bool) -> None:
    torch.manual_seed(7)
    model, x = Gelu(bias).bfloat16(), torch.randn(40, 64).bfloat16()
    with torch.no_grad():
        got, want = (run(model, x, target, ROUNDED) for run in (simulate, by_reference))
    assert torch.equal(got, want)


class Pictures(nn.Module):
    """A convolution, a recurrence that starts at zero, and layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.think = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Linear(512, 128)
        self.keep, self.say = nn.GRUCell(128, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.think(torch.relu(self.see(x)).flatten(1)))
        return self.say(self.keep(h, self.keep(h)))


def test_library_results_are_laid_out_as_on_the_gpu() -> None:
    """And a constant, the first state, is quantized."""
    torch.manual_seed(3)
    model, x = Pictures().bfloat16(), torch.randn(16, 3, 8, 8).bfloat16()
    with torch.no_grad():
        got, want = (run(model, x, "sm_100", ROUNDED) for run in (simulate, by_reference))
        bf16 = model(x)
    assert difference(got, want) < 0.002
    assert difference(got, bf16) > 0.03


def test_a_mask_takes_the_other_attention_operator() -> None:
    mask = torch.rand(2, 1, 64, 64).bfloat16()
    [(got, want, _)] = both(False, "sm_100", ROUNDED, mask)
    assert difference(got, want) < 0.002


def test_a_mask_in_training() -> None:
    """Its backward reads the forward's logarithms of sums, whose rows a GPU pads: 40 here."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask, gradients = torch.rand(1, 1, 40, 40).bfloat16(), []
    for run in (simulate, by_reference):
        torch.manual_seed(4)
        inputs = [torch.randn(1, 2, 40, 32).bfloat16().requires_grad_() for _ in range(3)]
        run(attend, (*inputs, mask), "sm_100", EVERYTHING).float().square().sum().backward()
        gradients.append([x.grad for x in inputs])
    for got, want in zip(*gradients, strict=True):
        assert difference(got, want) < 0.012


@pytest.mark.slow
def test_training() -> None:
    for got, want, bf16 in both(True, "sm_100", ALL_ROUNDED):
        assert difference(got, want) < max(0.002, 0.02 * difference(bf16, want))


class Odd(nn.Module):
    """Widths and numbers of tokens that are no multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(88, 200), nn.Linear(88, 200), nn.Linear(200, 88, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("options", [{}, {"four_over_six": "all"}, {"weight_block": "16x16"}], ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_widths_that_are_no_multiple_of_32(target: str, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    model, x = Odd().bfloat16(), torch.randn(41, 88).bfloat16()
    with torch.no_grad():
        got, want = (run(model, x, target, ROUNDED | options) for run in (simulate, by_reference))
        bf16 = model(x)
    assert difference(got, want) < 0.002
    assert difference(got, bf16) > 0.015


class Kept(nn.Module):
    """The first layer's result is kept for the backward, 13 times 96 numbers apart: Inductor pads that on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(96, 96), nn.Linear(93, 96)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x[..., 3:]) * torch.sigmoid(x)


def test_what_is_kept_for_the_backward_may_be_padded() -> None:
    results = []
    for run in (simulate, by_reference):
        torch.manual_seed(5)
        model, x = Kept().bfloat16(), torch.randn(3, 13, 96).bfloat16().requires_grad_()
        run(model, x, "sm_100", ALL_ROUNDED).sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        assert difference(got, want) < 0.002


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_no_tokens(target: str) -> None:
    """An expert that no token is sent to, say."""
    model, x = Odd().bfloat16(), torch.randn(0, 88).bfloat16().requires_grad_()
    simulate(model, x, target, EVERYTHING | {"training": {"bf16_share": 0}}).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_training_on_41_tokens(target: str) -> None:
    """Each product contracts over another number: 88, 200, and for wgrad the tokens."""
    factors, results = torch.randn(41, 88).bfloat16(), []
    for run in (simulate, by_reference, lambda model, inputs, *_: model(inputs)):
        torch.manual_seed(5)
        model, x = Odd().bfloat16(), torch.randn(41, 88).bfloat16().requires_grad_()
        y = run(model, x, target, ALL_ROUNDED)
        (y * factors).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for got, want, bf16 in zip(*results, strict=True):
        assert difference(got, want) < max(0.002, 0.02 * difference(bf16, want))


@pytest.mark.slow
def test_random_rounding_is_right_on_average() -> None:
    layer, x = nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(128, 64).bfloat16()
    torch.manual_seed(1)
    target, total = torch.randn(128, 64).bfloat16(), torch.zeros(64, 64)
    for _ in range(8):
        layer.weight.grad = None
        (simulate(layer, x, "sm_100", {**EVERYTHING, "training": {"bf16_share": 0.0}}) * target).sum().backward()
        total += layer.weight.grad.float() / 8
    one, mean = (difference(g, target.float().T @ x.float()) for g in (layer.weight.grad, total))
    assert 0.08 < one < 0.25
    assert mean < 0.75 * one  # 1 / sqrt(8) of the gradient's part; that of x is rounded to nearest


def test_codes_are_the_references_with_the_producer_inside() -> None:
    def quantized(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return ops.quantize_rows(torch.relu(x) * y, True)

    x, y = (torch.randn(70, 96).bfloat16() for _ in range(2))
    with torch.no_grad():
        codes, scales, amax = simulate(quantized, (x, y), "sm_100")
    product = (torch.relu(x).float() * y.float()).bfloat16()
    want_codes, want_scales, want_amax = numerics.quantize_1x16(product, numerics.row_amax(product))
    assert torch.equal(codes, want_codes) and torch.equal(amax, want_amax)
    assert torch.equal(scales.view(torch.uint8), numerics.swizzle_scales(want_scales).view(torch.uint8))


def test_an_amax_found_in_the_producers_kernel_is_that_of_the_rounded_numbers() -> None:
    """In registers the producer's result is in FP32."""

    def cast_weight(w: Tensor) -> tuple[Tensor, ...]:
        rounded = w.bfloat16()
        amax = ops.amax(rounded)
        return amax, *ops.quantize_tiles(rounded, amax)

    def gradient(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        amax = ops.row_amax(x * y)
        return amax, *ops.quantize_both_ways(x * y, amax, 16)

    torch.manual_seed(5)
    pair = tuple(torch.randn(70, 96).bfloat16() for _ in range(2))
    for function, inputs in ((cast_weight, (torch.randn(96, 64),)), (gradient, pair)):
        with torch.no_grad():
            got, want = simulate(function, inputs, "sm_100"), function(*inputs)
        for mine, reference in zip(got, want, strict=True):
            assert torch.equal(mine.reshape(-1).view(torch.uint8), reference.reshape(-1).view(torch.uint8))


class Epilogue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 96)

    def forward(self, x: Tensor, rest: Tensor) -> Tensor:
        return rest + F.gelu(self.layer(x))


def test_a_token_at_a_time() -> None:
    """K is split, and the kernel that adds the parts has the epilogue."""
    torch.manual_seed(6)
    layer, x = nn.Linear(2048, 256).bfloat16(), torch.randn(3, 2048).bfloat16()

    def model(x: Tensor) -> Tensor:
        return F.gelu(layer(x))

    with torch.no_grad():
        program = fp4_compile.compile_for(model, x, "sm_100", options=EVERYTHING)
        [launch] = [each for p in program.programs for each in p.launches if each.gemm]
        assert launch.split > 1
        assert len(program.summary.each_call.kernels) == 3  # quantizer, product, sum
        got, want = (run(model, x, "sm_100", EVERYTHING) for run in (simulate, by_reference))
    assert difference(got, want) < 0.004


def decoded(x: Tensor) -> Tensor:
    return numerics.dequantize(*numerics.quantize_1x16(x, numerics.row_amax(x)), x.shape[-1]).double()


def epilogue_error(target: str) -> float:
    torch.manual_seed(2)
    model, x, rest = Epilogue().bfloat16(), torch.randn(150, 64).bfloat16(), torch.randn(150, 96).bfloat16()
    with torch.no_grad():
        got = simulate(model, (x, rest), target, EVERYTHING).double()
        sums = decoded(x) @ decoded(model.layer.weight).T + model.layer.bias.double()
        want = rest.double() + F.gelu(sums.bfloat16().double())
    return float(((got - want).abs() / want.abs().clamp_min(0.5)).max())


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_epilogues(target: str) -> None:
    assert epilogue_error(target) < 2**-6  # roundings to BF16 of the sum, of GELU's result, and of the residual sum


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("nibbles swapped", "e2m1x2.f32 a, $2, $1", "e2m1x2.f32 a, $1, $2"),
        ("scale column shifted", "k * REP_K, 0, 0]", "k * REP_K + 1, 0, 0]"),
        ("half of alpha dropped", "amax_a * amax_b *", "amax_a *"),
        ("swizzle wrong", "row % 128 // 32 * 4", "(row % 128 // 32 ^ 1) * 4"),
    ],
)
def test_mutations_are_seen(what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, found = simulation.generate, []

    def changed(*args: Any) -> Program:
        program = generate(*args)
        if program.part != "inference":  # nibbles swapped in both operands are the same product
            return program
        found.append(old in program.source)
        kernels = {name: text.replace(old, new) for name, text in program.kernels.items()}
        return dataclasses.replace(program, kernels=kernels)

    monkeypatch.setattr(simulation, "generate", changed)
    assert not epilogue_error("sm_100") < 2**-4
    assert any(found)


def test_what_is_not_simulated_is_refused() -> None:
    source = "def call(args):\n    torch.cuda.current_stream()  # cuda\n"
    with pytest.raises(SimulationError, match=r"inference: not simulated: torch.cuda.current_stream\(\)"):
        simulation.SimulatedProgram(Program("inference", source, {}, ()), machine.find_target("sm_100"))
    source = "call = async_compile.cpp_pybinding"
    with pytest.raises(SimulationError, match="another language than Triton"):
        simulation.SimulatedProgram(Program("inference", source, {}, ()), machine.find_target("sm_100"))
    with pytest.raises(DeviceError, match="did you mean 'sm_100'"):
        simulate(nn.Linear(64, 64), torch.randn(4, 64), "sm100")


def test_the_process_is_as_before() -> None:
    before = gpu_state()
    with torch.no_grad():
        simulate(nn.Linear(64, 64).bfloat16(), torch.randn(4, 64).bfloat16(), "sm_120", EVERYTHING)
    assert gpu_state() == before


@pytest.mark.slow
def test_kernels_compile_after_a_simulation() -> None:
    """In a process of its own, where the simulator is the first to import Triton."""
    script = """
import torch, fp4_compile
from fp4_compile.testing import simulate
model, x, options = torch.nn.Linear(64, 64).bfloat16(), torch.randn(4, 64).bfloat16(), {"target": None}
with torch.no_grad():
    simulate(model, x, "sm_100", options)
    summary = fp4_compile.compile_for(model, x, "sm_100", options=options).summary
assert not summary.failed, summary.failed
assert "fp4 gemm" in {kernel.role for kernel in summary.kernels}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The graph after the passes, as text."""

from __future__ import annotations

import expecttest
import torch
import torch.nn.functional as F
from torch import nn

import fp4_compile
from fp4_compile import Precision


def stages(model, *inputs, **options):
    """The stages of a model's only graph, as text by name."""
    (graph,) = fp4_compile.explain(model, *inputs, options=options).graphs
    return graph.stages


class Attention(nn.Module):
    """q, k and v of one input, and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return self.o((q @ k.transpose(-1, -2)).softmax(-1) @ x)


class Goldens(expecttest.TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def test_inference_linear(self):
        model = nn.Linear(64, 96)
        with torch.no_grad():
            text = stages(model, torch.randn(4, 64))["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = param: f32[96, 64]
%1 = param: f32[96]
%2 = input: f32[4, 64]
%3 = fp4.amax(%2): f32[]
%4 = fp4.quantize(%2, %3, 1x16, False)
%5 = %4.0: u8[4, 32]
%6 = %4.1: e4m3[4, 4]
%7 = fp4.amax(%0): f32[]
%8 = fp4.quantize(%0, %7, 1x16, False)
%9 = %8.0: u8[96, 32]
%10 = %8.1: e4m3[96, 4]
%11 = fp4.scaled_mm(%5, %6, %3, %9, %10, %7, %1, f32): f32[4, 96]
return (%11)
""",
        )

    def test_training_keeps_the_backward_in_high_precision(self):
        model = nn.Linear(64, 96, bias=False)
        straight_through = {"backward": "bf16", "weight_block": "1x16"}
        text = stages(model, torch.randn(32, 64, requires_grad=True), training=straight_through)["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = param: f32[96, 64]
%1 = input: f32[32, 64]
%2 = tangent: f32[32, 96]
%3 = permute(%0, [1, 0]): f32[64, 96]{1, 64}
%4 = fp4.amax(%1): f32[]
%5 = fp4.quantize(%1, %4, 1x16, False)
%6 = %5.0: u8[32, 32]
%7 = %5.1: e4m3[32, 4]
%8 = fp4.amax(%0): f32[]
%9 = fp4.quantize(%0, %8, 1x16, False)
%10 = %9.0: u8[96, 32]
%11 = %9.1: e4m3[96, 4]
%12 = fp4.scaled_mm(%6, %7, %4, %10, %11, %8, None, f32): f32[32, 96]
%13 = permute(%2, [1, 0]): f32[96, 32]{1, 96} !bwd
%14 = mm(%13, %1): f32[96, 64] !bwd
%15 = permute(%14, [1, 0]): f32[64, 96]{1, 64} !bwd
%16 = permute(%3, [1, 0]): f32[96, 64] !bwd
%17 = mm(%2, %16): f32[32, 64] !bwd
%18 = permute(%15, [1, 0]): f32[96, 64] !bwd
return [%12, %18, %17]
""",
        )

    def test_the_training_recipe(self):
        model = nn.Linear(64, 96, bias=False)
        text = stages(model, torch.randn(40, 64, requires_grad=True))["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = param: f32[96, 64]
%1 = input: f32[40, 64]
%2 = tangent: f32[40, 96]
%3 = permute(%1, [1, 0]): f32[64, 40]{1, 64}
%4 = fp4.hadamard(%3, 16): bf16[64, 48]
%5 = fp4.amax(%4): f32[]
%6 = fp4.quantize(%4, %5, 1x16, False)
%7 = %6.0: u8[64, 24]
%8 = %6.1: e4m3[64, 3]
%9 = fp4.draw_seed(1, 1, device=device): i64[]
%10 = fp4.amax(%1): f32[]
%11 = fp4.quantize(%1, %10, 1x16, False)
%12 = %11.0: u8[40, 32]
%13 = %11.1: e4m3[40, 4]
%14 = fp4.amax(%0): f32[]
%15 = fp4.quantize(%0, %14, 16x16, False)
%16 = %15.0: u8[96, 32]
%17 = %15.1: e4m3[96, 4]
%18 = fp4.scaled_mm(%12, %13, %10, %16, %17, %14, None, f32): f32[40, 96]
%19 = permute(%2, [1, 0]): f32[96, 40]{1, 96} !bwd
%20 = fp4.hadamard(%19, 16): bf16[96, 48] !bwd
%21 = fp4.amax(%20): f32[] !bwd
%22 = fp4.quantize_stochastic(%20, %21, %9, 0) !bwd
%23 = %22.0: u8[96, 24] !bwd
%24 = %22.1: e4m3[96, 3] !bwd
%25 = fp4.scaled_mm(%23, %24, %21, %7, %8, %5, None, f32): f32[96, 64] !bwd
%26 = permute(%25, [1, 0]): f32[64, 96]{1, 64} !bwd
%27 = fp4.amax(%2): f32[] !bwd
%28 = fp4.quantize_stochastic(%2, %27, %9, 1) !bwd
%29 = %28.0: u8[40, 48] !bwd
%30 = %28.1: e4m3[40, 6] !bwd
%31 = fp4.transpose(%16, %17, 64) !bwd
%32 = %31.0: u8[64, 48] !bwd
%33 = %31.1: e4m3[64, 6] !bwd
%34 = fp4.scaled_mm(%29, %30, %27, %32, %33, %14, None, f32): f32[40, 64] !bwd
%35 = permute(%26, [1, 0]): f32[96, 64] !bwd
return [%18, %35, %34]
""",
        )

    def test_training_in_mxfp4_without_randomness(self):
        model = nn.Linear(64, 96, bias=False)
        recipe = {"forward": "mxfp4", "backward": "mxfp4", "stochastic_rounding": False, "hadamard": 0}
        text = stages(model, torch.randn(32, 64, requires_grad=True), training=recipe)["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = param: f32[96, 64]
%1 = input: f32[32, 64]
%2 = tangent: f32[32, 96]
%3 = permute(%1, [1, 0]): f32[64, 32]{1, 64}
%4 = fp4.mx_quantize(%3, None, 0)
%5 = %4.0: u8[64, 16]
%6 = %4.1: float8_e8m0fnu[64, 1]
%7 = permute(%0, [1, 0]): f32[64, 96]{1, 64}
%8 = fp4.mx_quantize(%1, None, 0)
%9 = %8.0: u8[32, 32]
%10 = %8.1: float8_e8m0fnu[32, 2]
%11 = fp4.mx_quantize(%0, None, 0)
%12 = %11.0: u8[96, 32]
%13 = %11.1: float8_e8m0fnu[96, 2]
%14 = fp4.mx_scaled_mm(%9, %10, %12, %13, None, f32): f32[32, 96]
%15 = permute(%2, [1, 0]): f32[96, 32]{1, 96} !bwd
%16 = fp4.mx_quantize(%15, None, 0) !bwd
%17 = %16.0: u8[96, 16] !bwd
%18 = %16.1: float8_e8m0fnu[96, 1] !bwd
%19 = fp4.mx_scaled_mm(%17, %18, %5, %6, None, f32): f32[96, 64] !bwd
%20 = permute(%19, [1, 0]): f32[64, 96]{1, 64} !bwd
%21 = fp4.mx_quantize(%2, None, 0) !bwd
%22 = %21.0: u8[32, 48] !bwd
%23 = %21.1: float8_e8m0fnu[32, 3] !bwd
%24 = fp4.mx_quantize(%7, None, 0) !bwd
%25 = %24.0: u8[64, 48] !bwd
%26 = %24.1: float8_e8m0fnu[64, 3] !bwd
%27 = fp4.mx_scaled_mm(%22, %23, %25, %26, None, f32): f32[32, 64] !bwd
%28 = permute(%20, [1, 0]): f32[96, 64] !bwd
return [%14, %28, %27]
""",
        )

    def test_symbolic_batch_and_other_options(self):
        model = nn.Linear(40, 96, bias=False).bfloat16()
        x = torch.randn(6, 40, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        plan = fp4_compile.Plan(
            tuple(type(d)(d.site, Precision.NVFP4, d.reason, d.detail) for d in fp4_compile.explain(model, x).plan)
        )
        with torch.no_grad():
            text = stages(model, x, plan=plan, weight_block="16x16", four_over_six="activations")["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = param: bf16[96, 40]
%1 = symint: s0
%2 = input: bf16[s0, 40]
%3 = fp4.amax(%2): f32[]
%4 = fp4.quantize(%2, %3, 1x16, True)
%5 = %4.0: u8[s0, 24]
%6 = %4.1: e4m3[s0, 3]
%7 = mul.Tensor(%3, 1.75): f32[]
%8 = fp4.amax(%0): f32[]
%9 = fp4.quantize(%0, %8, 16x16, False)
%10 = %9.0: u8[96, 24]
%11 = %9.1: e4m3[96, 3]
%12 = fp4.scaled_mm(%5, %6, %7, %10, %11, %8, None, bf16): bf16[s0, 96]
return (%12)
""",
        )

    def test_convolution(self):
        model = nn.Conv2d(32, 48, 1)
        with torch.no_grad():
            text = stages(model, torch.randn(2, 32, 5, 5))["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = param: f32[48, 32, 1, 1]
%1 = param: f32[48]
%2 = input: f32[2, 32, 5, 5]
%3 = permute(%2, [0, 2, 3, 1]): f32[2, 5, 5, 32]{800, 5, 1, 25}
%4 = squeeze.dims(%0, [2, 3]): f32[48, 32]
%5 = fp4.amax(%3): f32[]
%6 = fp4.quantize(%3, %5, 1x16, False)
%7 = %6.0: u8[2, 5, 5, 16]
%8 = %6.1: e4m3[2, 5, 5, 2]
%9 = fp4.amax(%4): f32[]
%10 = fp4.quantize(%4, %9, 1x16, False)
%11 = %10.0: u8[48, 16]
%12 = %10.1: e4m3[48, 2]
%13 = fp4.scaled_mm(%7, %8, %5, %11, %12, %9, %1, f32): f32[2, 5, 5, 48]
%14 = permute(%13, [0, 3, 1, 2]): f32[2, 48, 5, 5]{1200, 1, 240, 48}
%15 = clone(%14, memory_format=contiguous_format): f32[2, 48, 5, 5]
return (%15)
""",
        )

    def test_scaled_matrix_bias(self):
        def function(b, x, w):
            return torch.addmm(b, x, w, beta=0.5, alpha=2.0)

        with torch.no_grad():
            text = stages(function, torch.randn(4, 96), torch.randn(4, 64), torch.randn(64, 96))["cleanup"]
        self.assertExpectedInline(
            text,
            """\
%0 = input: f32[4, 96]
%1 = input: f32[4, 64]
%2 = input: f32[64, 96]
%3 = permute(%2, [1, 0]): f32[96, 64]{1, 96}
%4 = fp4.amax(%1): f32[]
%5 = fp4.quantize(%1, %4, 1x16, False)
%6 = %5.0: u8[4, 32]
%7 = %5.1: e4m3[4, 4]
%8 = fp4.amax(%3): f32[]
%9 = fp4.quantize(%3, %8, 1x16, False)
%10 = %9.0: u8[96, 32]
%11 = %9.1: e4m3[96, 4]
%12 = fp4.scaled_mm(%6, %7, %4, %10, %11, %8, None, f32): f32[4, 96]
%13 = mul.Tensor(%12, 2): f32[4, 96]
%14 = add.Tensor(%13, %0, alpha=0.5): f32[4, 96]
return (%14)
""",
        )

    def test_plan_of_an_attention_block(self):
        x = torch.randn(2, 8, 64)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.no_grad():
            text = str(fp4_compile.explain(Attention(), x))
        self.assertExpectedInline(
            text,
            """\
site             MxNxK       precision  reason
q:mm.fprop       2*s0x64x64  nvfp4      quantized: weight once
k:mm.fprop       2*s0x64x64  nvfp4      quantized: weight once
top:bmm.fprop    2*s0xs0x64  fp32       attention product: feeds an attention softmax
top:bmm.fprop#1  2*s0x64xs0  fp32       attention product: multiplies softmax weights
o:mm.fprop       2*s0x64x64  nvfp4      quantized: weight once
3 of 5 matmuls in NVFP4, 8.6% of the matmul FLOPs
1 graph, 0 graph breaks""",
        )


def test_what_feeds_q_and_k_is_quantized_once_and_weights_keep_their_own_scales():
    with torch.no_grad():
        text = stages(Attention(), torch.randn(2, 8, 64))
    before, after = (text[name].count("fp4.quantize") for name in ("rewrite", "share"))
    assert (before, after) == (6, 5)  # q, k, o: three weights, and two activations
    assert text["share"].count("fp4.amax") == 5


def test_checkpointed_regions_do_not_share_quantizers():
    def block(x, w, v):
        return torch.utils.checkpoint.checkpoint(
            lambda x: torch.sin(F.linear(x, w)) + torch.cos(F.linear(x, v)), x, use_reentrant=False
        )

    x, w, v = (torch.randn(64, 64, requires_grad=True) for _ in range(3))
    text = stages(lambda x, w, v: block(x, w, v) + F.linear(x, w), x, w, v)["share"]
    recomputed = [line for line in text.splitlines() if "fp4.quantize" in line and "!recompute" in line]
    kept = [line for line in text.splitlines() if "fp4.quantize" in line and "!recompute" not in line]
    assert len([line for line in recomputed if "1x16" in line]) == 2  # x along K, and along the tokens for wgrad
    assert len([line for line in recomputed if "16x16" in line]) == 2  # w, v
    assert len([line for line in kept if "16x16" in line]) == 1  # w again, outside the region

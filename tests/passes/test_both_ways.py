"""What is quantized along its rows and along its columns is read once, where the rows' amax costs nothing."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_compile import ops
from fp4_compile.options import Options
from fp4_compile.passes import Context
from fp4_compile.passes.both_ways import both_ways
from fp4_compile.testing import canonical_graph

SEED = torch.tensor(77)


def quantized_twice(x, seed=None, turned_seed=None):
    rows = ops.quantize_rows(x, True, 0, seed, 3)
    columns = ops.quantize_rows(x.permute(1, 0), True, 16, seed if turned_seed is None else turned_seed, 4)
    return *rows, *columns


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def merged(function, *inputs):
    """The graph after the pass, and whether it merged anything."""
    gm = traced(function, *inputs)
    both_ways(gm.graph, Context(Options(), sm=100))
    gm.graph.lint()
    gm.recompile()
    return gm, bool(gm.graph.find_nodes(op="call_function", target=ops.quantize_both_ways))


class Golden(expecttest.TestCase):
    def test_a_gradient(self):
        gm, _ = merged(lambda g, w, seed: quantized_twice(g * w, seed), torch.randn(64, 48), torch.randn(64, 48), SEED)
        self.assertExpectedInline(
            canonical_graph(gm),
            """\
%0 = input: f32[64, 48]
%1 = input: f32[64, 48]
%2 = input: i64[]
%3 = mul.Tensor(%0, %1): f32[64, 48]
%4 = fp4.row_amax(%3): f32[64, 1]
%5 = fp4.quantize_both_ways(%3, %4, 16, %2, 3, 4)
%6 = %5.0: u8[64, 32]
%7 = %5.1: e4m3[128, 4]
%8 = %5.2: u8[48, 32]
%9 = %5.3: e4m3[128, 4]
%10 = %5.4: f32[48, 1]
%11 = permute(%3, [1, 0]): f32[48, 64]{1, 48}
return (%6, %7, %4, %8, %9, %10)
""",
        )


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_results_are_the_same(stochastic):
    def function(g, w, seed):
        return quantized_twice(g * w, seed if stochastic else None)

    inputs = (torch.randn(64, 48), torch.randn(64, 48), SEED)
    gm, found = merged(function, *inputs)
    assert found
    for got, want in zip(gm(*inputs), function(*inputs), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_where_the_amax_would_cost_a_pass_there_are_two_quantizers():
    g, w, seed = torch.randn(64, 64), torch.randn(64, 64), SEED

    def product():
        codes, scales, amax = ops.quantize_rows(torch.zeros(64, 64), True)
        return ops.scaled_mm(codes, scales, amax, codes, scales, amax, None, torch.float32, True)

    assert merged(lambda g, w: quantized_twice(g * w), g, w)[1]
    assert merged(lambda g, w: quantized_twice(torch.cat([g * w, g + w], 1)), g, w)[1]
    assert merged(lambda g, w: quantized_twice((g * w).view(4, 16, 64).view(64, 64)), g, w)[1]
    assert not merged(lambda g: quantized_twice(g), g)[1]  # made outside
    assert not merged(lambda g, w: quantized_twice(g @ w), g, w)[1]  # a library's
    assert not merged(lambda g, w: quantized_twice((g * w).permute(1, 0).clone()), g, w)[1]  # a copy
    assert not merged(lambda g: quantized_twice(product().relu() * g), g)[1]  # a GEMM's epilogue
    assert merged(lambda g: quantized_twice(product().relu().cumsum(1) * g), g)[1]  # no longer that
    assert not merged(lambda g, w, a, b: quantized_twice(g * w, a, b), g, w, seed, seed + 1)[1]

"""The amaxes of a graph's weights in one launch, of those that are its inputs."""

from __future__ import annotations

import expecttest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_compile import ops
from fp4_compile.options import Options
from fp4_compile.passes import Context
from fp4_compile.passes.group_amaxes import MOST, group_amaxes
from fp4_compile.testing import canonical_graph


def tiles(w):
    amax = ops.amax(w)
    codes, scales, turned, turned_scales, _ = ops.quantize_tiles(w, amax)
    return codes, scales, turned, turned_scales, amax


def grouped(function, *inputs, marks=()):
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    found = gm.graph.find_nodes(op="call_function", target=ops.quantize_tiles, sort=True)
    for node, mark in zip(found, marks, strict=False):
        node.meta["ac_graph_id"] = mark
    group_amaxes(gm.graph, Context(Options(), sm=100))
    gm.graph.lint()
    gm.recompile()
    return gm


def count(gm, op):
    return len(gm.graph.find_nodes(op="call_function", target=op))


class Golden(expecttest.TestCase):
    def test_two_weights(self):
        gm = grouped(lambda a, b: (*tiles(a), *tiles(b)), torch.randn(32, 48), torch.randn(16, 32))
        self.assertExpectedInline(
            canonical_graph(gm),
            """\
%0 = input: f32[32, 48]
%1 = input: f32[16, 32]
%2 = fp4.amax_parts([%0, %1]): f32[2, 256]
%3 = select.int(%2, 0, 0): f32[256]
%4 = fp4.quantize_tiles(%0, %3)
%5 = %4.4: f32[]
%6 = %4.0: u8[32, 32]
%7 = %4.1: e4m3[128, 4]
%8 = %4.2: u8[48, 16]
%9 = %4.3: e4m3[128, 4]
%10 = %4.4: f32[]
%11 = select.int(%2, 0, 1): f32[256]
%12 = fp4.quantize_tiles(%1, %11)
%13 = %12.4: f32[]
%14 = %12.0: u8[16, 16]
%15 = %12.1: e4m3[128, 4]
%16 = %12.2: u8[32, 16]
%17 = %12.3: e4m3[128, 4]
%18 = %12.4: f32[]
return (%6, %7, %8, %9, %5, %14, %15, %16, %17, %13)
""",
        )


def test_the_results_are_the_same():
    def function(a, b):
        return *tiles(a), *tiles(b.permute(1, 0))

    a, b = torch.randn(32, 48), torch.zeros(16, 32)
    a[3, 4], a[5, 6] = torch.inf, 77.0
    gm = grouped(function, a, b)
    assert count(gm, ops.amax_parts) == 1 and not count(gm, ops.amax)
    for got, want in zip(gm(a, b), function(a, b), strict=True):
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def test_what_is_computed_keeps_its_own():
    gm = grouped(
        lambda a, b: (*tiles(a), *tiles(b.bfloat16()), *tiles(b[:16])), torch.randn(32, 16), torch.randn(32, 16)
    )
    assert (count(gm, ops.amax_parts), count(gm, ops.amax)) == (1, 2)


def test_no_group_spans_what_a_checkpoint_computes_again():
    weights = [torch.randn(16, 16) for _ in range(4)]
    gm = grouped(lambda *w: [x for each in w for x in tiles(each)], *weights, marks=(1, 1, 2, 2))
    assert count(gm, ops.amax_parts) == 2


def test_a_launch_has_so_many_at_most():
    gm = grouped(lambda *w: [x for each in w for x in tiles(each)], *(torch.randn(16, 16) for _ in range(MOST + 2)))
    assert [len(n.args[0]) for n in gm.graph.nodes if n.target is ops.amax_parts] == [MOST, 2]

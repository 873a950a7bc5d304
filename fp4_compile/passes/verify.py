"""Check what every pass must leave true; raise at the pass that broke it, not three stages later.

The graph is not changed.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fp4_compile import observations, ops
from fp4_compile.errors import VerificationError
from fp4_compile.numerics import swizzled_shape
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import value
from fp4_compile.plan import Precision

_QUANTIZERS = (
    ops.quantize,
    ops.quantize_rows,
    ops.quantize_both_ways,
    ops.quantize_stochastic,
    ops.quantize_tiles,
    ops.transpose,
    ops.for_tensor_cores,
    torch.ops.aten.reshape.default,
)


def verify(graph: fx.Graph, context: Context) -> None:
    """Check the fp4 operations of a graph and that the plan's decisions were carried out.

    Raises:
        VerificationError: an invariant does not hold; a fault of fp4_compile.
    """
    for node in graph.nodes:
        if str(node.target).startswith("fp4.") and "val" not in node.meta:
            raise VerificationError(f"{node.name} ({node.target}) has no fake value")
        if node.target is ops.scaled_mm:
            _check_scaled_mm(node)
    left = {m.site.key for m in context.matmuls if m.node in graph.nodes}
    for matmul in context.matmuls:
        decided = context.decisions[matmul.site.key].precision
        if (matmul.site.key in left) == (decided is not Precision.BF16):
            raise VerificationError(f"{matmul.site.key} was decided {decided.value}, and the graph says otherwise")


def _check_scaled_mm(node: fx.Node) -> None:
    for codes, scales, amax in (node.args[0:3], node.args[3:6]):
        kinds = [value(n).dtype for n in (codes, scales, amax)]  # type: ignore[arg-type]
        if kinds != [torch.uint8, torch.float8_e4m3fn, torch.float32]:
            raise VerificationError(f"{node.name}: operand dtypes are {kinds}")
        rows, packed = value(codes).shape[-2:]  # type: ignore[arg-type]
        expected = (rows, packed * 2 // ops.BLOCK)
        if len(node.args) > 8 and node.args[8]:
            expected = swizzled_shape(*expected)
            if packed != ops.row_bytes(packed * 2):
                raise VerificationError(f"{node.name}: rows of {packed} bytes of codes, which TMA cannot read")
        if tuple(value(scales).shape[-2:]) != expected:  # type: ignore[arg-type]
            raise VerificationError(f"{node.name}: {packed} bytes of codes do not match {value(scales).shape} scales")  # type: ignore[arg-type]
        if isinstance(codes, fx.Node) and codes.target is observations.observe:
            codes = codes.args[1]
        source = codes.args[0] if isinstance(codes, fx.Node) and codes.target is operator.getitem else codes
        if isinstance(source, fx.Node) and source.op != "placeholder" and source.target not in _QUANTIZERS:
            raise VerificationError(f"{node.name}: codes come from {source.target}, not from a quantizer")

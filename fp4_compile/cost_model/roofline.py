"""Seconds of one GEMM ``[batch, M, K] @ [batch, K, N]`` and of its quantizers, as sympy expressions.

A GEMM takes a launch and the larger of two times. Compute: output tiles go to the SMs in waves, a started wave
costs a full one, and K is padded to blocks of 16 in NVFP4. Memory: both operands are read and the BF16 output
is written once, at 2 bytes an element in BF16 and 0.5625 in NVFP4 (4 bits and an 8-bit scale for 16 elements).
Sizes are integers, sympy symbols or sympy expressions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
from sympy.printing.pycode import PythonCodePrinter

from fp4_compile.cost_model.devices import Device
from fp4_compile.cost_model.gemm import BLOCK

BF16_BYTES = 2
NVFP4_BYTES = sympy.Rational(9, 16)
"""Bytes of an element: half of one for the code, 1/16 of one for the scale."""
ALPHA_BYTES = 4
"""The FP32 factor of both tensor scales that the epilogue multiplies with."""

BATCH, M, N, K = sympy.symbols("batch M N K", integer=True, positive=True)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one matmul: sympy expressions from `times`, floats from `evaluate`."""

    bf16: Any
    """The GEMM in BF16."""
    gemm: Any
    """The GEMM in NVFP4, without quantizers."""
    quantizer: Any
    """This GEMM's share of the quantizer of its activation."""
    weight_quantizer: Any
    """The quantizer of its weight, for both directions; 0 in inference, where it is hoisted out of the graph."""

    @property
    def nvfp4(self) -> Any:
        """All that NVFP4 costs."""
        return self.gemm + self.quantizer + self.weight_quantizer


def bf16_seconds(device: Device, batch: Any, m: Any, n: Any, k: Any, *, bias: bool = False) -> sympy.Expr:
    """Seconds of the GEMM in BF16."""
    rate = device.bf16_flops * device.bf16_fraction
    traffic = BF16_BYTES * (batch * (m * k + n * k + m * n) + (n if bias else 0))
    compute = _waves(device, device.bf16_tile, rate, batch, m, n) * k
    return _roofline(device, compute, traffic, device.bf16_memory_fraction)


def nvfp4_seconds(device: Device, batch: Any, m: Any, n: Any, k: Any, *, bias: bool = False) -> sympy.Expr:
    """Seconds of the GEMM of quantized operands, with alpha and bias in its epilogue.

    Without FP4 tensor cores the weight is decoded on the way in and multiplied with the BF16 activation at the BF16
    rate, so that only the weight's traffic shrinks.
    """
    padded = BLOCK * sympy.ceiling(sympy.sympify(k) / BLOCK)
    if device.nvfp4_flops is None or device.nvfp4_fraction is None:
        rate, tile = device.bf16_flops * device.bf16_fraction, device.bf16_tile
        activation = BF16_BYTES * sympy.sympify(k)
    else:
        rate, tile = device.nvfp4_flops * device.nvfp4_fraction, device.nvfp4_tile
        activation = NVFP4_BYTES * padded
    traffic = batch * (activation * m + NVFP4_BYTES * padded * n + BF16_BYTES * m * n) + ALPHA_BYTES
    traffic += BF16_BYTES * n if bias else 0
    compute = _waves(device, tile, rate, batch, m, n) * padded
    return _roofline(device, compute, traffic, device.nvfp4_memory_fraction)


def quantizer_seconds(device: Device, rows: Any, k: Any, *, fused: bool = False) -> sympy.Expr:
    """Seconds to quantize a BF16 tensor ``[rows, K]``.

    In two passes (`Device.quantizer_passes`) one finds the amax and another quantizes. ``fused``: the producer's
    kernel leaves the amax behind, and only the second is left. The amax pass is charged at the quantizer's
    bandwidth: what torchao gains from a static scale (torchao's README, relu->linear, dynamic against static) is no
    less than that.
    """
    return _quantizer(device, rows, k, 1 if fused else device.quantizer_passes, 1)


def weight_quantizer_seconds(device: Device, n: Any, k: Any) -> sympy.Expr:
    """Seconds to quantize a weight ``[N, K]`` in a training step: its amax, then tiles of 16x16 for both directions."""
    return _quantizer(device, n, k, 2, 2)


def _quantizer(device: Device, rows: Any, k: Any, passes: int, written: int) -> sympy.Expr:
    elements = rows * BLOCK * sympy.ceiling(sympy.sympify(k) / BLOCK)
    traffic = passes * BF16_BYTES + written * NVFP4_BYTES
    bandwidth = device.memory * device.quantizer_fraction
    return passes * _coefficient(device.launch) + _coefficient(float(traffic) / bandwidth) * elements


def times(
    device: Device,
    batch: Any = BATCH,
    m: Any = M,
    n: Any = N,
    k: Any = K,
    *,
    consumers: int = 1,
    fused: bool = False,
    training: bool = False,
    bias: bool = False,
) -> Times:
    """Seconds of a matmul in both precisions, as sympy expressions.

    ``consumers``: GEMMs that share the quantized activation, each of which is charged an equal share.
    ``fused``: as in `quantizer_seconds`; without FP4 tensor cores no activation is quantized. ``training``: the
    weight is quantized in each step too.
    """
    weight = weight_quantizer_seconds(device, batch * n, k) if training else sympy.Integer(0)
    activation = quantizer_seconds(device, batch * m, k, fused=fused) if device.nvfp4_flops else sympy.Integer(0)
    return Times(
        bf16=bf16_seconds(device, batch, m, n, k, bias=bias),
        gemm=nvfp4_seconds(device, batch, m, n, k, bias=bias),
        quantizer=activation / consumers,
        weight_quantizer=weight,
    )


def evaluate(
    device: Device,
    batch: int,
    m: int,
    n: int,
    k: int,
    *,
    consumers: int = 1,
    fused: bool = False,
    training: bool = False,
    bias: bool = False,
) -> Times:
    """`times` of integer sizes, as floats: the same expressions, compiled once for a device."""
    values = compiled(device, consumers, fused, training, bias)(batch, m, n, k)
    return Times(*map(float, values))


@functools.lru_cache(maxsize=256)
def compiled(
    device: Device, consumers: int, fused: bool, training: bool, bias: bool, tensors: bool = False
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """The fields of `times` as one Python function of (batch, M, N, K); with ``tensors``, M is a float64 tensor."""
    symbolic = times(device, consumers=consumers, fused=fused, training=training, bias=bias)
    expressions = (symbolic.bf16, symbolic.gemm, symbolic.quantizer, symbolic.weight_quantizer)
    names = {"ceil_div": _tensor_ceil_div, "maximum": _tensor_maximum} if tensors else _SCALAR
    function: Callable[..., tuple[Any, Any, Any, Any]] = sympy.lambdify(
        (BATCH, M, N, K), expressions, modules=[names], printer=_Printer(), cse=True
    )
    return function


class _Printer(PythonCodePrinter):  # type: ignore[misc]
    """Prints a ceiling as a division of integers: a product with a rounded 1/148 may end above the integer."""

    def __init__(self) -> None:
        super().__init__({"fully_qualified_modules": False, "inline": True, "allow_unknown_functions": True})

    def _print_ceiling(self, expr: sympy.Expr) -> str:
        over, under = expr.args[0].as_numer_denom()
        return f"ceil_div({self._print(over)}, {self._print(under)})"

    def _print_Max(self, expr: sympy.Expr) -> str:
        return f"maximum({', '.join(map(self._print, expr.args))})"


_SCALAR = {"ceil_div": lambda over, under: -(-over // under), "maximum": max}


def _tensor_ceil_div(over: Any, under: int) -> Any:
    import torch

    return torch.ceil(over / under) if isinstance(over, torch.Tensor) else math.ceil(over / under)


def _tensor_maximum(*values: Any) -> Any:
    import torch

    return functools.reduce(torch.maximum, (torch.as_tensor(value, dtype=torch.float64) for value in values))


def _waves(device: Device, tile: tuple[int, int], rate: float, batch: Any, m: Any, n: Any) -> sympy.Expr:
    """Seconds per element of K: waves times what all SMs take for a tile each."""
    rows, columns = tile
    tiles = batch * sympy.ceiling(sympy.sympify(m) / rows) * sympy.ceiling(sympy.sympify(n) / columns)
    return sympy.ceiling(tiles / device.sms) * _coefficient(2 * rows * columns * device.sms / rate)


def _roofline(device: Device, compute: sympy.Expr, traffic: Any, fraction: float) -> sympy.Expr:
    memory = _coefficient(1 / (device.memory * fraction)) * traffic
    return _coefficient(device.launch) + sympy.Max(compute, memory)


def _coefficient(value: float) -> sympy.Float:
    """Six digits are more than any figure of a device has, and print legibly."""
    return sympy.Float(float(f"{value:.6g}"))

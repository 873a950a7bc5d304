"""Seconds of the two products of a layer's backward, of which NVFP4 has to pay for each by itself.

For ``y[M, N] = x[M, K] @ w[N, K].T``: dgrad is ``[M, N] @ [N, K]``, wgrad is ``[N, M] @ [M, K]``. The gradient is
quantized for each, along the dimension that is contracted; the weight's codes for dgrad come from the forward's
quantizer, and wgrad's activation is quantized along the tokens, once for all layers that read it.
"""

from __future__ import annotations

import functools

from fp4_compile.cost_model.devices import Device
from fp4_compile.cost_model.roofline import evaluate, quantizer_seconds


@functools.lru_cache(maxsize=4096)
def dgrad_seconds(device: Device, m: int, n: int, k: int) -> tuple[float, float]:
    """The gradient of the layer's input, in BF16 and in NVFP4 with its quantizer."""
    found = evaluate(device, 1, m, k, n)
    return found.bf16, found.gemm + found.quantizer


@functools.lru_cache(maxsize=4096)
def wgrad_seconds(device: Device, m: int, n: int, k: int, consumers: int = 1) -> tuple[float, float]:
    """The gradient of the layer's weight; ``consumers`` layers share the quantizer of the activation."""
    found = evaluate(device, 1, n, k, m)
    activation = float(quantizer_seconds(device, k, m)) / consumers
    return found.bf16, found.gemm + found.quantizer + activation

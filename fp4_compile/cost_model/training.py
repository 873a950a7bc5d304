"""Seconds of the two products of a layer's backward, of which NVFP4 has to pay for each by itself.

For ``y[M, N] = x[M, K] @ w[N, K].T``: dgrad is ``[M, N] @ [N, K]``, wgrad is ``[N, M] @ [M, K]``. The gradient is
quantized for each, along the dimension that is contracted; the weight's codes for dgrad come from the forward's
quantizer, and wgrad's activation is quantized along its rows, once for all layers that read it.
"""

from __future__ import annotations

import dataclasses
import functools

from fp4_compile.cost_model.devices import Device
from fp4_compile.cost_model.roofline import evaluate, quantizer_seconds


@dataclasses.dataclass(frozen=True)
class BackwardTimes:
    """Seconds of a dgrad or wgrad product."""

    bf16: float
    nvfp4: float
    """With its quantizers."""

    @property
    def pays(self) -> bool:
        """Whether NVFP4 is faster."""
        return self.nvfp4 < self.bf16


@functools.lru_cache(maxsize=4096)
def dgrad_seconds(device: Device, m: int, n: int, k: int) -> BackwardTimes:
    """The gradient of the layer's input."""
    found = evaluate(device, 1, m, k, n)
    return BackwardTimes(found.bf16, found.gemm + found.quantizer)


@functools.lru_cache(maxsize=4096)
def wgrad_seconds(device: Device, m: int, n: int, k: int, consumers: int = 1) -> BackwardTimes:
    """The gradient of the layer's weight; ``consumers`` layers share the activation and its quantizer."""
    found = evaluate(device, 1, n, k, m)
    activation = float(quantizer_seconds(device, k, m)) / consumers
    return BackwardTimes(found.bf16, found.gemm + found.quantizer + activation)

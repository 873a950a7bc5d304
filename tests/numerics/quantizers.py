"""NVFP4's quantizers, all alike, for the tests of what they share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fp4_compile.numerics import (
    E4M3_MAX,
    FOUR_OVER_SIX_BOUND,
    quantize_1x16,
    quantize_16x16,
)

FP32_MAX = torch.finfo(torch.float32).max
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3_BYTES = torch.arange(127, dtype=torch.uint8)
Quantizer = Callable[..., tuple[Tensor, Tensor, Tensor]]
F32 = np.float32


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_like(x: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, x.shape, generator=generator).to(torch.uint8)


def four_over_six(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_1x16(x, amax, four_over_six=True)


def four_over_six_tiles(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_16x16(x, amax, four_over_six=True)


def stochastic(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_1x16(x, amax, random_like(x))


QUANTIZERS: dict[str, Quantizer] = {
    "1x16": quantize_1x16,
    "stochastic": stochastic,
    "16x16": quantize_16x16,
    "1x16-four-over-six": four_over_six,
    "16x16-four-over-six": four_over_six_tiles,
}
every_quantizer = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def bound_of(quantize: Quantizer) -> float:
    return FOUR_OVER_SIX_BOUND if quantize in (four_over_six, four_over_six_tiles) else E4M3_MAX


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        one_byte = a.itemsize == 1  # float8 tensors cannot be compared themselves
        assert torch.equal(a.view(torch.uint8) if one_byte else a, b.view(torch.uint8) if one_byte else b)

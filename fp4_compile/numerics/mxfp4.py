"""MXFP4: E2M1 elements, a power-of-two scale, E8M0, for every 32 of them (OCP MX v1.0, section 5)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp4_compile.numerics.blocks import block_amax, split_blocks
from fp4_compile.numerics.checks import REAL_DTYPES, require_dims, require_dtype
from fp4_compile.numerics.e2m1 import E2M1_MAX, decode_e2m1, pack, round_e2m1, round_e2m1_stochastic, unpack

MXFP4_BLOCK = 32
"""Elements that share one E8M0 scale."""

Rounding = Literal["floor", "rceil"]

_E2M1_EXPONENT_MAX = 2  # the exponent of E2M1's largest value, 6 = 1.5 * 2**2
_MANTISSA_MASK = 0x7FFFFF
_BITS_OF_2_TO_MINUS_127 = 0x00400000  # a float32 subnormal
_E8M0_NAN = 255


def quantize_mxfp4(
    x: Tensor, rounding: Rounding = "floor", random_bytes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize along the last dimension in blocks of 32.

    ``x``: float32, bfloat16 or float16, ``[..., K]``; Kp is K rounded up to 32, and the tail counts as zeros.
    ``rounding``: how a block's amax becomes a power of two. "floor" is the rule of OCP MX v1.0, section 6.3,
    ``floor(log2(amax)) - 2``: an amax between 6 and 8 times the scale saturates. "rceil" is NVIDIA's
    ``cvt.rp.ue8m0``, ``ceil(log2(amax / 6))``: nothing saturates.
    ``random_bytes``: uniform uint8 of x's shape, asks for stochastic rounding of the elements.

    Returns codes (uint8, two a byte, ``[..., Kp / 2]``) and scales (float8_e8m0fnu, ``[..., Kp / 32]``). A
    block of zeros has the smallest scale, 2**-127; a block that holds a NaN or an Inf has the scale NaN (byte
    0xFF).
    """
    require_dtype("x", x, *REAL_DTYPES)
    require_dims("x", x, 1)
    blocks = split_blocks(x, MXFP4_BLOCK)
    amax = block_amax(blocks)
    if rounding == "floor":
        exponent = _biased_exponent(amax) - _E2M1_EXPONENT_MAX
    elif rounding == "rceil":
        exponent = _biased_exponent_up(amax * (1.0 / E2M1_MAX))
    else:
        raise ValueError(f"rounding is {rounding!r}; use 'floor' or 'rceil'")
    exponent = torch.where(amax.isnan(), _E8M0_NAN, exponent.clamp_min(0))
    scaled = blocks.to(torch.float32) / _decode_e8m0(exponent).unsqueeze(-1)
    if random_bytes is None:
        codes = round_e2m1(scaled)
    else:
        codes = round_e2m1_stochastic(scaled, split_blocks(random_bytes, MXFP4_BLOCK))
    return pack(codes).flatten(-2), exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantize_mxfp4(codes: Tensor, scales: Tensor, k: int) -> Tensor:
    """Return the values of a quantized tensor: float32 ``[..., k]``, padding dropped.

    ``codes``: uint8 ``[..., Kp / 2]``; ``scales``: float8_e8m0fnu ``[..., Kp / 32]``.
    """
    require_dtype("scales", scales, torch.float8_e8m0fnu)
    values = decode_e2m1(unpack(codes)).reshape(*scales.shape, MXFP4_BLOCK)
    multiplier = _decode_e8m0(scales.view(torch.uint8).to(torch.int32))
    return (values * multiplier.unsqueeze(-1)).flatten(-2)[..., :k]


def _biased_exponent(amax: Tensor) -> Tensor:
    """Return ``floor(log2(amax)) + 127`` of a non-negative float32 as int32; 0 below 2**-126."""
    return amax.view(torch.int32) >> 23


def _biased_exponent_up(amax: Tensor) -> Tensor:
    """Return ``ceil(log2(amax)) + 127`` of a non-negative float32 as int32; 0 up to 2**-127."""
    exponent, mantissa = _biased_exponent(amax), amax.view(torch.int32) & _MANTISSA_MASK
    # Below 2**-126 a float32 has no hidden bit: there E8M0's 2**-127 is the mantissa's highest bit alone.
    power_of_two = torch.where(exponent == 0, _BITS_OF_2_TO_MINUS_127, 0)
    return exponent + (mantissa > power_of_two).to(torch.int32)


def _decode_e8m0(exponent: Tensor) -> Tensor:
    """Return ``2**(exponent - 127)`` in float32 for an int32 exponent of 0..254, NaN for 255."""
    bits = torch.where(exponent == 0, _BITS_OF_2_TO_MINUS_127, exponent << 23)
    return torch.where(exponent == _E8M0_NAN, torch.nan, bits.view(torch.float32))

"""E2M1, the 4-bit element of NVFP4 and MXFP4 (OCP MX v1.0, section 5.3.3).

A code is ``sign << 3 | magnitude``; the eight magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. There is no Inf
and no NaN. Conversions follow NVIDIA's ``cvt.rn.satfinite.e2m1x2.f32``: whatever exceeds 6 becomes 6, the
sign of a zero is kept, and NaN becomes +6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.checks import require_dtype

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each of the sixteen codes, in code order."""

_FP32_EXPONENT_MASK = 0x7F800000
_BITS_OF_ONE = 0x3F800000


def round_e2m1(y: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even code, saturating at +-6.

    ``y``: float32, any shape, already divided by its scales. Returns uint8 codes 0..15 of the same shape. -0
    gives code 8, +-Inf gives 7 and 15, every NaN gives 7.
    """
    require_dtype("y", y, torch.float32)
    y = y.nan_to_num(nan=E2M1_MAX)
    magnitude = y.abs().clamp_max(E2M1_MAX)
    binade = _binade(magnitude)
    # E2M1 values lie half a binade apart, and so do float32 values from 2**22 times the binade on: the sum
    # rounds the magnitude, once and to nearest even, and its lowest bits count half binades.
    shifted = torch.add(magnitude, binade, alpha=2.0**22)
    half_binades = shifted.view(torch.int32).to(torch.int8)
    return _compose(half_binades, binade, y)


def round_e2m1_stochastic(y: Tensor, random_bytes: Tensor) -> Tensor:
    """Round to one of the two E2M1 neighbours, upwards with probability ``floor(256 * distance) / 256``.

    The rule of ``cvt.rs.satfinite.e2m1x4.f32`` with eight random bits an element, as used for gradients in
    arXiv:2509.25149, section 4.4: add ``random_byte / 256`` of the local step to the magnitude, then
    truncate.

    ``y``: float32, any shape; ``random_bytes``: uint8, uniform, broadcastable to ``y``. Returns uint8 codes
    of y's shape; zeros, infinities and NaN as in `round_e2m1`.
    """
    require_dtype("y", y, torch.float32)
    require_dtype("random_bytes", random_bytes, torch.uint8)
    y = y.nan_to_num(nan=E2M1_MAX)
    magnitude = y.abs().clamp_max(E2M1_MAX)
    binade = _binade(magnitude)
    dithered = magnitude + random_bytes.to(torch.float32) * (binade * 2.0**-9)
    # Dithering adds less than a step, so the count ends at the next binade's first value at the latest.
    half_binades = (dithered / binade * 2.0).to(torch.int8)
    return _compose(half_binades, binade, y)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the float32 values of E2M1 codes. ``codes``: uint8 0..15, any shape; code 8 gives -0."""
    require_dtype("codes", codes, torch.uint8)
    magnitude = codes & 7
    exponent = (magnitude >> 1).clamp_min(1) - 1
    half_steps = (magnitude - 2 * exponent) << exponent
    signed_half = 0.5 - 0.125 * (codes & 8).to(torch.float32)
    return half_steps.to(torch.float32) * signed_half


def pack(codes: Tensor) -> Tensor:
    """Pack codes two a byte along the last dimension, the even element in the low nibble (PTX ``e2m1x2``).

    ``codes``: uint8 0..15, ``[..., K]`` with K even. Returns uint8 ``[..., K / 2]``.
    """
    require_dtype("codes", codes, torch.uint8)
    if codes.shape[-1] % 2 != 0:
        raise ValueError(f"pack: codes has an odd last dimension, {codes.shape[-1]}; pad it to an even length")
    return torch.add(codes[..., 0::2], codes[..., 1::2], alpha=16)


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`. ``packed``: uint8 ``[..., K / 2]``. Returns uint8 codes ``[..., K]``."""
    require_dtype("packed", packed, torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _binade(magnitude: Tensor) -> Tensor:
    """Return the power of two 1, 2 or 4 whose half is the E2M1 step at a magnitude in [0, 6]."""
    bits = magnitude.view(torch.int32).clamp_min(_BITS_OF_ONE) & _FP32_EXPONENT_MASK
    return bits.view(torch.float32)


def _compose(half_binades: Tensor, binade: Tensor, y: Tensor) -> Tensor:
    """Return codes for magnitudes, given as int8 ``half_binades`` of their ``binade``, with the signs of y."""
    # Codes run on across binades: from 2 on they are two more than the count, from 4 on four more.
    offset = binade.to(torch.int8) & 6
    sign = (y.view(torch.int32) >> 28).to(torch.uint8) & 8
    return (half_binades + offset).view(torch.uint8) | sign

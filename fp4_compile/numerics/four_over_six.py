"""Four over six: map each block's amax to 6 or to 4, whichever loses less (arXiv:2512.02010).

Between 4 and 6 E2M1 has no value. A scale 1.5 times as large puts the block's amax on 4 and spreads the
others over the evenly spaced codes below. Nothing changes for a decoder, except that the tensor scale leaves
room for the factor 1.5: it aims at the E4M3 value 256 instead of 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.blocks import spread_tiles, tile_rows
from fp4_compile.numerics.e2m1 import E2M1_MAX, decode_e2m1, round_e2m1
from fp4_compile.numerics.scaling import FOUR_OVER_SIX_BOUND, divide_by_scales, encode_scale, to_e4m3


def quantize_blocks_four_over_six(
    blocks: Tensor, block_amax: Tensor, amax: Tensor, tiled: bool
) -> tuple[Tensor, Tensor]:
    """Quantize blocks whose amaxes are given, choosing the smaller sum of absolute errors; ties map to 6.

    ``blocks``: float32, bfloat16 or float16 ``[..., 16]``; ``block_amax``: float32 ``[...]``; ``amax``:
    float32, broadcastable to ``block_amax``; ``tiled``: 16 consecutive rows (the dimension before the
    blocks') choose together. Returns codes (uint8 0..15, ``[..., 16]``) and scales (float8_e4m3fn ``[...]``).
    """
    encode = encode_scale(amax, FOUR_OVER_SIX_BOUND)
    base = block_amax / torch.full_like(block_amax, E2M1_MAX) * encode
    codes_6, scales_6, error_6 = _candidate(blocks, to_e4m3(base), encode, amax)
    codes_4, scales_4, error_4 = _candidate(blocks, to_e4m3(base * 1.5), encode, amax)
    if tiled:
        rows = error_6.shape[-2]
        error_6, error_4 = (spread_tiles(_sum_rows(tile_rows(error)), rows) for error in (error_6, error_4))
    take_4 = error_4 < error_6
    # Bytes, since not every backend can select between float8 tensors.
    scales = torch.where(take_4, scales_4.view(torch.uint8), scales_6.view(torch.uint8))
    return torch.where(take_4.unsqueeze(-1), codes_4, codes_6), scales.view(torch.float8_e4m3fn)


def _candidate(blocks: Tensor, scales: Tensor, encode: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes under the given scales, the scales, and each block's sum of absolute errors."""
    codes = round_e2m1(divide_by_scales(blocks, scales, encode))
    value = decode_e2m1(codes) * scales.to(torch.float32).unsqueeze(-1) * amax.unsqueeze(-1)
    error = (value / torch.full_like(value, E2M1_MAX * FOUR_OVER_SIX_BOUND) - blocks.to(torch.float32)).abs()
    # In sequence, because the rounding of the sum decides between candidates that are equally good.
    first, *others = error.unbind(-1)
    for other in others:
        first = first + other
    return codes, scales, first


def _sum_rows(error: Tensor) -> Tensor:
    """Sum the 16 rows of tiles, ``[..., 16, blocks]``, by halves, as a warp reduction does."""
    for half in (8, 4, 2, 1):
        error = error[..., :half, :] + error[..., half:, :]
    return error.squeeze(-2)

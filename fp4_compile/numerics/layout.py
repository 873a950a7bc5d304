"""The order in which Blackwell's tensor cores read block scales.

cuBLAS, "1D block scaling factors layout" (torch's ``SWIZZLE_32_4_4``): scales are stored in tiles of 128 rows
by 4 columns, 512 bytes each, tile after tile along a row of tiles. Within a tile, row ``r`` and column ``c``
lie at byte ``r % 32 * 16 + r // 32 * 4 + c``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.blocks import pad_last, tile_rows
from fp4_compile.numerics.checks import require_dims

_TILE_ROWS = 128
_TILE_COLS = 4


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the rows and columns of scales that the layout stores: both rounded up to whole tiles."""
    return rows + -rows % _TILE_ROWS, cols + -cols % _TILE_COLS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return scales in the tensor cores' order, padded with zeros.

    ``scales``: float8_e4m3fn, float8_e8m0fnu or uint8, ``[..., rows, cols]``. Returns the same dtype,
    contiguous, ``[..., *swizzled_shape(rows, cols)]``; the order of its bytes is what counts, its indices
    have no meaning.
    """
    _check("scales", scales)
    padded = tile_rows(pad_last(scales.view(torch.uint8), _TILE_COLS), _TILE_ROWS).flatten(-3, -2)
    # Seen as (tile row, rows 32 apart, row, tile column, column), the layout swaps the second and the fourth.
    tiles = _split(padded, 4, padded.shape[-1] // _TILE_COLS)
    return tiles.transpose(-4, -2).reshape(padded.shape).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Undo `swizzle_scales`: return the scales ``[..., rows, cols]``, padding dropped."""
    _check("swizzled", swizzled)
    if tuple(swizzled.shape[-2:]) != swizzled_shape(rows, cols):
        raise ValueError(
            f"swizzled ends in {tuple(swizzled.shape[-2:])}; {rows}x{cols} scales fill {swizzled_shape(rows, cols)}"
        )
    tiles = _split(swizzled.view(torch.uint8), swizzled.shape[-1] // _TILE_COLS, 4)
    return tiles.transpose(-4, -2).reshape(swizzled.shape)[..., :rows, :cols].view(swizzled.dtype)


def _split(x: Tensor, second: int, fourth: int) -> Tensor:
    """View ``[..., R, C]`` as ``[..., R / 128, second, 32, fourth, 4]``."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // _TILE_ROWS, second, 32, fourth, _TILE_COLS)


def _check(name: str, scales: Tensor) -> None:
    require_dims(name, scales, 2)
    if scales.itemsize != 1:
        raise TypeError(f"{name} has dtype {scales.dtype}; use float8_e4m3fn, float8_e8m0fnu or uint8")

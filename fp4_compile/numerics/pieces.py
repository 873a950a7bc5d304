"""The quantizers for eager CPU execution: the same bits, computed for some rows at a time.

An eager quantizer makes a dozen passes over temporaries as large as its input. In pieces that fit the cache
it runs about twice as fast. To trace, use `quantize_1x16` and `quantize_16x16`: these loops would unroll.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4_compile.numerics.nvfp4 import quantize_1x16, quantize_16x16
from fp4_compile.numerics.scaling import tensor_amax

PIECE_ELEMENTS = 1 << 18
"""Elements quantized at a time: a float32 temporary of a piece is 1 MiB."""


def quantize_1x16_in_pieces(
    x: Tensor, amax: Tensor | None = None, random_bytes: Tensor | None = None, four_over_six: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `quantize_1x16` does, with the same arguments and results."""
    if x.numel() <= PIECE_ELEMENTS:
        return quantize_1x16(x, amax, random_bytes, four_over_six)
    if amax is None:
        amax = tensor_amax(x)
    shape, columns = x.shape[:-1], x.shape[-1]
    height = _piece_height(columns)
    rows = torch.split(x.reshape(-1, columns), height)
    amaxes = torch.split(amax.expand(*shape, 1).reshape(-1, 1), height)
    randoms: Sequence[Tensor | None] = [None] * len(rows)
    if random_bytes is not None:
        randoms = torch.split(random_bytes.reshape(-1, columns), height)
    pieces = [quantize_1x16(*arguments, four_over_six) for arguments in zip(rows, amaxes, randoms, strict=True)]
    return *_join(pieces, shape), amax


def quantize_16x16_in_pieces(
    w: Tensor, amax: Tensor | None = None, four_over_six: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `quantize_16x16` does, with the same arguments and results."""
    if w.numel() <= PIECE_ELEMENTS or w.shape[-2] % 16 != 0:
        return quantize_16x16(w, amax, four_over_six)
    if amax is None:
        amax = tensor_amax(w)
    rows = torch.split(w.reshape(-1, w.shape[-1]), _piece_height(w.shape[-1]))
    return *_join([quantize_16x16(row, amax, four_over_six) for row in rows], w.shape[:-1]), amax


def _piece_height(columns: int) -> int:
    """Return how many rows make a piece: a multiple of the 16 rows of a tile."""
    return max(PIECE_ELEMENTS // columns // 16, 1) * 16


def _join(pieces: list[tuple[Tensor, Tensor, Tensor]], shape: torch.Size) -> tuple[Tensor, Tensor]:
    codes = torch.cat([codes for codes, _, _ in pieces])
    scales = torch.cat([scales.view(torch.uint8) for _, scales, _ in pieces]).view(torch.float8_e4m3fn)
    return codes.reshape(*shape, codes.shape[-1]), scales.reshape(*shape, scales.shape[-1])

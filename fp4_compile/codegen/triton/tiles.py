"""The quantizer of weights in tiles of 16x16 (arXiv:2509.25149, section 4.3), and of their transposes, in one kernel.

A weight is read once; codes and swizzled scales are written for both directions of training. Bytes equal those of
`fp4_compile.numerics.quantize_16x16` and `transpose_16x16`.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate
from fp4_compile.codegen.triton.ptx import TILE_HELPERS

SIDE = 64
"""Rows and columns of a program."""

_SOURCE = """\
{{def_kernel("X", "AMAX", "SCALES", "TURNED", "TURNED_SCALES", "LARGEST")}}
    M = {{size("X", 0)}}
    K = {{size("X", 1)}}
    ROW_BLOCKS = (M + 15) // 16
    BLOCKS = (K + 15) // 16
    tiles = (K + 127) // 128 * 2
    top = (tl.program_id(0) // tiles * 64).to(INDEX_DTYPE)
    left = (tl.program_id(0) % tiles * 64).to(INDEX_DTYPE)
    idx_m = (top + tl.arange(0, 64))[:, None]
    idx_n = (left + tl.arange(0, 64))[None, :]
    inside = (idx_m < M) & (idx_n < K)
    {{load_input("X", "x", ("idx_m", "idx_n"), mask="inside", indent_width=4, index_shape=("64", "64"))}}
    x = x.to(tl.float32)
    amax = tl.max(tl.load(AMAX + tl.arange(0, PARTS)), 0)
    amax = tl.where(amax == 0.0, 0.0, tl.maximum(amax, 7.899322037525772e-36))
    tl.store(LARGEST, amax, mask=tl.program_id(0) == 0)
    factor, decode, keep = _encode_scales(amax)
    columns = tl.reduce(tl.abs(x).reshape(4, 16, 64), 1, _maximum)
    most = tl.reduce(columns.reshape(4, 4, 16), 2, _maximum)
    most = tl.where(most < float("inf"), most, float("nan"))  # an Inf would become the largest scale, and be gone
    pair, scale, _ = _to_e4m3(most * factor, most * factor)
    inverse = _inverse_scale(scale, decode, keep)
    spread = tl.broadcast_to(inverse.reshape(4, 1, 4, 1), (4, 16, 4, 16)).reshape(64, 64)
    nibbles = tl.where(idx_m < M, _nibble(x * spread), 0)  # rows behind the last are no numbers, even in a NaN's tile
    low, high = nibbles.reshape(64, 32, 2).split()
    codes = (low | (high << 4)).to(tl.uint8)
    idx_b = (left // 2 + tl.arange(0, 32))[None, :]
    whole = (idx_m < M) & (idx_b < (BLOCKS + 1) // 2 * 16)
    {{store_output(("idx_m", "idx_b"), "codes", "whole", indent_width=4, val_shape=("64", "32"))}}
    low, high = tl.trans(nibbles).reshape(64, 32, 2).split()
    turned = (low | (high << 4)).to(tl.uint8)
    turned_m = (left + tl.arange(0, 64))[:, None]
    turned_b = (top // 2 + tl.arange(0, 32))[None, :]
    pitch = (ROW_BLOCKS + 1) // 2 * 16  # TMA wants rows that begin every 16 bytes
    tl.store(TURNED + turned_m * pitch + turned_b, turned, mask=(turned_m < K) & (turned_b < pitch))

    # The padding's scale is zero even where amax is NaN.
    row_block = (top // 16 + tl.arange(0, 4))[:, None]
    block = (left // 16 + tl.arange(0, 4))[None, :]
    scales = tl.where((row_block < ROW_BLOCKS) & (block < BLOCKS), pair & 0xFF, 0)
    _store_scales(SCALES, scales, top, block, BLOCKS, M)
    _store_scales(TURNED_SCALES, tl.trans(scales), left, tl.trans(row_block), ROW_BLOCKS, K)


@triton.jit
def _store_scales(to, scales, first, block, BLOCKS, ROWS):
    # A tile's scale for each of its 16 rows, swizzled; rows behind the last are padding.
    row = (first + tl.arange(0, 64))[:, None]
    rows = tl.broadcast_to(scales.reshape(4, 1, 4), (4, 16, 4)).reshape(64, 4)
    rows = tl.where(row < ROWS, rows, 0)
    tile_cols = (BLOCKS + 3) // 4
    place = (row // 128 * tile_cols + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    byte_ptr = to.to(tl.pointer_type(tl.int8)) + place
    tl.store(byte_ptr, rows.to(tl.int8), mask=(row < (ROWS + 127) // 128 * 128) & (block < tile_cols * 4))
"""


def _grid(m: Any, packed: Any, _: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    return (cdiv(m, 128) * 2 * (cdiv(packed * 2, 128) * 2), 1, 1)


QUANTIZE_TILES = KernelTemplate("fp4_quantize_tiles", _SOURCE + TILE_HELPERS, _grid)
"""Inputs X ``[M, K]``, AMAX ``[PARTS]``, the largest of which counts, and written: SCALES, TURNED u8
``[K, ceil(M/32) * 16]``, TURNED_SCALES, LARGEST (0-d). Output: codes ``[M, ceil(K/32) * 16]``. Constants: ``PARTS`` and
those of `ptx`."""

"""NVFP4: E2M1 elements, an E4M3 scale for every 16 of them, a float32 scale for the whole tensor.

The format and the recipes are those of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149):

    value = e2m1 * e4m3 * (amax / (6 * 448))

A tensor's own scale is kept as ``amax``, its largest finite magnitude. A four-over-six tensor has the bound
256 in place of 448, for its encoder and its decoders alike.

NaN and Inf: a block that holds one gets the scale NaN (byte 0x7F), so that every product it enters is NaN, as
it would be in a wider format; all other blocks are quantized as if the element were not there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.blocks import block_amax, pad_last, split_blocks, spread_tiles, tile_rows
from fp4_compile.numerics.checks import REAL_DTYPES, require_dims, require_dtype
from fp4_compile.numerics.e2m1 import E2M1_MAX, decode_e2m1, pack, round_e2m1, round_e2m1_stochastic, unpack
from fp4_compile.numerics.four_over_six import quantize_blocks_four_over_six
from fp4_compile.numerics.scaling import (
    E4M3_MAX,
    NVFP4_BLOCK,
    block_scales,
    divide_by_scales,
    encode_scale,
    tensor_amax,
)


def quantize_1x16(
    x: Tensor, amax: Tensor | None = None, random_bytes: Tensor | None = None, four_over_six: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize along the last dimension in blocks of 16 (activations, gradients).

    ``x``: float32, bfloat16 or float16, ``[..., K]``; Kp is K rounded up to 16, and the tail counts as zeros.
    ``amax``: float32; 0-d, the tensor's amax if it is known, else it is `tensor_amax`; or ``[..., 1]``, one a
    row. ``random_bytes``: uniform uint8 of x's shape, asks for stochastic rounding. ``four_over_six``: decide
    for every block whether its amax maps to 6 or to 4 (arXiv:2512.02010); decode with the bound
    `FOUR_OVER_SIX_BOUND`.

    Returns codes (uint8, two a byte, ``[..., Kp / 2]``), scales (float8_e4m3fn, ``[..., Kp / 16]``) and amax.
    """
    if random_bytes is not None and four_over_six:
        raise ValueError("four_over_six compares errors of nearest rounding: drop random_bytes or four_over_six")
    if random_bytes is not None and random_bytes.shape != x.shape:
        raise ValueError(f"random_bytes has shape {tuple(random_bytes.shape)}; give it that of x, {tuple(x.shape)}")
    blocks, amax = _prepare("x", x, 1, amax)
    amaxes = block_amax(blocks)
    if four_over_six:
        codes, scales = quantize_blocks_four_over_six(blocks, amaxes, amax, tiled=False)
    else:
        random_blocks = None if random_bytes is None else split_blocks(random_bytes, NVFP4_BLOCK)
        codes, scales = quantize_blocks(blocks, amaxes, amax, random_blocks)
    return pack(codes).flatten(-2), scales, amax


def quantize_16x16(w: Tensor, amax: Tensor | None = None, four_over_six: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize in tiles of 16x16 over the last two dimensions (weights; arXiv:2509.25149, section 4.3).

    The transpose of ``w`` quantizes to the same values, so forward and backward GEMMs see one weight. ``w``:
    float32, bfloat16 or float16, ``[..., R, K]``; tiles at the edges are filled up with zeros. ``amax`` (0-d)
    and ``four_over_six`` are as in `quantize_1x16`, and so is the result, each tile's scale repeated for its
    rows: codes ``[..., R, Kp / 2]``, scales ``[..., R, Kp / 16]``, amax.
    """
    blocks, amax = _prepare("w", w, 2, amax)
    rows = w.shape[-2]
    amaxes = spread_tiles(tile_rows(block_amax(blocks)).amax(dim=-2), rows)
    if four_over_six:
        codes, scales = quantize_blocks_four_over_six(blocks, amaxes, amax, tiled=True)
    else:
        codes, scales = quantize_blocks(blocks, amaxes, amax)
    return pack(codes).flatten(-2), scales, amax


def transpose_16x16(codes: Tensor, scales: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the encoding of the transpose of a matrix from the matrix's own: codes and scales, nothing rounded.

    ``codes``: uint8 ``[R, Kp / 2]`` and ``scales``: float8_e4m3fn ``[R, Kp / 16]`` as `quantize_16x16` gives them for
    ``[R, k]``. Returns codes ``[k, Rp / 2]`` and scales ``[k, Rp / 16]``: what it gives for the transpose.
    """
    rows = codes.shape[-2]
    turned = pack(pad_last(unpack(codes)[..., :k].mT, NVFP4_BLOCK).contiguous())
    tiles = scales.view(torch.uint8)[..., ::NVFP4_BLOCK, :].mT
    spread = spread_tiles(tiles, k) if rows > 0 else tiles.new_empty((*codes.shape[:-2], k, 0))
    return turned, spread.contiguous().view(torch.float8_e4m3fn)


def quantize_blocks(
    blocks: Tensor, block_amax: Tensor, amax: Tensor, random_bytes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize blocks whose amaxes are given, as the hardware does and with no policy of its own.

    ``blocks``: float32, bfloat16 or float16 ``[..., 16]``; ``block_amax``: float32 ``[...]``, whose Inf
    saturates the scale and whose NaN makes it NaN; ``amax``: float32, broadcastable to ``block_amax``;
    ``random_bytes``: uint8 ``[..., 16]``. Returns codes (uint8 0..15, ``[..., 16]``) and scales
    (float8_e4m3fn ``[...]``).
    """
    encode = encode_scale(amax)
    scales = block_scales(block_amax, encode)
    scaled = divide_by_scales(blocks, scales, encode)
    codes = round_e2m1(scaled) if random_bytes is None else round_e2m1_stochastic(scaled, random_bytes)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, amax: Tensor, k: int, bound: float = E4M3_MAX) -> Tensor:
    """Return the values of a quantized tensor: float32 ``[..., k]``, padding dropped.

    ``codes``, ``scales``, ``amax``: as returned by a quantizer; ``bound``: `FOUR_OVER_SIX_BOUND` if it was
    called with four_over_six. Each value is ``e2m1 * (e4m3 * (amax * (1 / (6 * bound))))``. Multiplying amax
    by the constant first keeps tensors near the largest float32 from overflowing on the way.
    """
    multiplier = scales.to(torch.float32) * (amax * (1.0 / (E2M1_MAX * bound)))
    return _decode(codes, multiplier)[..., :k]


def decode_unscaled(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``e2m1 * e4m3`` without the tensor's scale, ``[..., Kp]`` in ``dtype``.

    ``codes``: uint8 ``[..., Kp / 2]``; ``scales``: float8_e4m3fn ``[..., Kp / 16]``; ``dtype``: float32,
    bfloat16 or float16. A product has at most six significant bits and lies within 2**-10..2688, so it is
    exact in each: a GEMM over these operands, accumulated in float32 and multiplied by `gemm_alpha`, differs
    from the FP4 tensor core's in nothing but the order of summation.
    """
    if dtype not in REAL_DTYPES:
        raise TypeError(f"dtype is {dtype}; use torch.float32, torch.bfloat16 or torch.float16")
    return _decode(codes, scales.to(torch.float32)).to(dtype)


def gemm_alpha(amax_a: Tensor, amax_b: Tensor, bound_a: float = E4M3_MAX, bound_b: float = E4M3_MAX) -> Tensor:
    """Return the factor that scales the product of two operands decoded by `decode_unscaled`: float32.

    ``amax_a``, ``amax_b``: float32, 0-d, or shaped to broadcast over rows and columns of the output;
    ``bound_a``, ``bound_b``: each operand's E4M3 bound. The factor is ``amax_a * amax_b * (1 / (6 * bound_a *
    6 * bound_b))``, from left to right (arXiv:2509.25149, appendix B).
    """
    return amax_a * amax_b * (1.0 / (E2M1_MAX * bound_a * E2M1_MAX * bound_b))


def _prepare(name: str, x: Tensor, least_dims: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check a quantizer's arguments; return blocks ``[..., Kp / 16, 16]`` in x's dtype, and amax."""
    require_dtype(name, x, *REAL_DTYPES)
    require_dims(name, x, least_dims)
    if amax is None:
        amax = tensor_amax(x)
    require_dtype("amax", amax, torch.float32)
    return split_blocks(x, NVFP4_BLOCK), amax


def _decode(codes: Tensor, multiplier: Tensor) -> Tensor:
    """Return float32 ``[..., K]``: packed codes times one float32 multiplier a block, ``[..., K / 16]``."""
    require_dtype("codes", codes, torch.uint8)
    # One look-up a byte: both its values at once, moved as a single 64-bit element.
    every_byte = torch.arange(256, dtype=torch.uint8, device=codes.device)
    pairs = decode_e2m1(unpack(every_byte.unsqueeze(-1))).view(torch.int64).squeeze(-1)
    values = pairs.index_select(0, codes.flatten().to(torch.int32)).view(torch.float32)
    return (values.reshape(*multiplier.shape, NVFP4_BLOCK) * multiplier.unsqueeze(-1)).flatten(-2)

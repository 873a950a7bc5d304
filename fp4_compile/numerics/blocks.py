"""Cutting tensors into blocks along the last dimension, and the largest magnitude of each block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_blocks(x: Tensor, block: int) -> Tensor:
    """Return ``[..., K]`` as contiguous ``[..., ceil(K / block), block]``, zeros appended."""
    x = pad_last(x, block).contiguous()
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def pad_last(x: Tensor, multiple: int) -> Tensor:
    """Append zeros to the last dimension up to the next multiple."""
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing != 0 else x


def tile_rows(x: Tensor, height: int = 16) -> Tensor:
    """Return ``[..., R, C]`` as ``[..., ceil(R / height), height, C]``, rows of zeros appended."""
    missing = -x.shape[-2] % height
    x = F.pad(x, (0, 0, 0, missing)) if missing != 0 else x
    return x.reshape(*x.shape[:-2], x.shape[-2] // height, height, x.shape[-1])


def spread_tiles(x: Tensor, rows: int, height: int = 16) -> Tensor:
    """Repeat each row of ``[..., ceil(rows / height), C]`` ``height`` times; return the first ``rows``."""
    return x.repeat_interleave(height, dim=-2)[..., :rows, :]


def block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension in float32, NaN where an element is NaN or Inf.

    ``blocks``: float32, bfloat16 or float16, ``[..., block]``. Returns ``[...]``. Making Inf a NaN here is
    what carries a non-finite element through quantization: no block scale can hold an infinity.
    """
    # Without their sign, floats order as their bits do, NaN last. An integer maximum is several times faster
    # here than a float one, which has to look for NaN.
    integer, mask = (torch.int32, 0x7FFFFFFF) if blocks.dtype == torch.float32 else (torch.int16, 0x7FFF)
    amax = (blocks.view(integer) & mask).amax(dim=-1).view(blocks.dtype).to(torch.float32)
    return torch.where(amax < torch.inf, amax, torch.nan)

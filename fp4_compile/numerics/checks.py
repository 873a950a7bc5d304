"""Argument checks shared by the number formats."""

from __future__ import annotations

import torch
from torch import Tensor

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes a quantizer accepts."""


def require_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise TypeError unless ``tensor``, the argument called ``name``, has one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; convert it to {names}")


def require_dims(name: str, tensor: Tensor, least: int) -> None:
    """Raise ValueError unless ``tensor``, the argument called ``name``, has at least ``least`` dimensions."""
    if tensor.dim() < least:
        raise ValueError(f"{name} has {tensor.dim()} dimensions; give it at least {least}, e.g. with unsqueeze(0)")

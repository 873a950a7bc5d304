"""cuBLASLt's NVFP4 product, by torch: what autotuning compares our templates with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4_compile import numerics


def scaled_mm_by_library(
    a: Tensor, a_scales: Tensor, a_amax: Tensor, b: Tensor, b_scales: Tensor, b_amax: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``alpha * decode(a) @ decode(b)^T``, summed in FP32 and rounded once.

    ``a`` u8 ``[M, K/2]``, ``b`` u8 ``[N, K/2]``; N is a multiple of 16, K of 32. Scales are swizzled; amaxes f32, one
    for the tensor or one a row, ``[M, 1]``. cuBLASLt multiplies by one alpha; those of rows take a pass of their own,
    over the product in FP32.

    Raises:
        NotImplementedError: torch, or the device, has no such product.
    """
    recipes = [F.ScalingType.BlockWise1x16]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4]
    scales = [[a_scales], [b_scales]]
    per_row = a_amax.dim() > 0 or b_amax.dim() > 0
    if not per_row:
        bound = numerics.E2M1_MAX * numerics.E4M3_MAX
        scales = [[a_scales, a_amax / bound], [b_scales, b_amax / bound]]
        recipes, swizzles = [*recipes, F.ScalingType.TensorWise], [*swizzles, F.SwizzleType.NO_SWIZZLE]
    try:
        product = F.scaled_mm(
            a.view(torch.float4_e2m1fn_x2),
            b.view(torch.float4_e2m1fn_x2).t(),
            scales[0],
            recipes,
            scales[1],
            recipes,
            swizzles,
            swizzles,
            output_dtype=torch.float32 if per_row else out_dtype,
        )
    except (RuntimeError, ValueError) as error:  # autotuning drops a choice that is not implemented, and that alone
        raise NotImplementedError(f"torch's NVFP4 product: {error}") from error
    if not per_row:
        return product
    if a_amax.dim() > 0 and b_amax.dim() > 0:
        product.mul_(numerics.gemm_alpha(a_amax, torch.ones_like(a_amax[0])))
        alpha = b_amax.reshape(1, -1)
    else:
        alpha = numerics.gemm_alpha(a_amax, b_amax.reshape(1, -1))
    return torch.mul(product, alpha, out=product.new_empty(product.shape, dtype=out_dtype))

"""The numbers of NVFP4 and MXFP4: what every kernel of this package computes, defined once, in plain torch.

All functions are pure and made of traceable torch operations: no value is read on the host, no branch depends
on one, and shapes may be symbolic.
"""

from __future__ import annotations

from fp4_compile.numerics.e2m1 import (
    E2M1_MAX,
    E2M1_VALUES,
    decode_e2m1,
    pack,
    round_e2m1,
    round_e2m1_stochastic,
    unpack,
)
from fp4_compile.numerics.hadamard import (
    HADAMARD_SIZE,
    HADAMARD_SIZES,
    hadamard_matrix,
    hadamard_signs,
    random_hadamard,
)
from fp4_compile.numerics.layout import swizzle_scales, swizzled_shape, unswizzle_scales
from fp4_compile.numerics.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4, quantize_mxfp4
from fp4_compile.numerics.nvfp4 import (
    decode_unscaled,
    dequantize,
    gemm_alpha,
    quantize_1x16,
    quantize_16x16,
    quantize_blocks,
    transpose_16x16,
)
from fp4_compile.numerics.random_bits import philox_bytes
from fp4_compile.numerics.scaling import (
    E4M3_MAX,
    FOUR_OVER_SIX_BOUND,
    LEAST_AMAX,
    NVFP4_BLOCK,
    block_scales,
    encode_scale,
    row_amax,
    tensor_amax,
)

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "FOUR_OVER_SIX_BOUND",
    "HADAMARD_SIZE",
    "HADAMARD_SIZES",
    "LEAST_AMAX",
    "MXFP4_BLOCK",
    "NVFP4_BLOCK",
    "block_scales",
    "decode_e2m1",
    "decode_unscaled",
    "dequantize",
    "dequantize_mxfp4",
    "encode_scale",
    "gemm_alpha",
    "hadamard_matrix",
    "hadamard_signs",
    "pack",
    "philox_bytes",
    "quantize_1x16",
    "quantize_16x16",
    "quantize_blocks",
    "quantize_mxfp4",
    "random_hadamard",
    "round_e2m1",
    "round_e2m1_stochastic",
    "row_amax",
    "swizzle_scales",
    "swizzled_shape",
    "tensor_amax",
    "transpose_16x16",
    "unpack",
    "unswizzle_scales",
]

"""Weight-only products for GPUs without FP4 tensor cores: 4-bit weights become BF16 in registers, then a BF16 MMA.

Reading 4.5 bits a weight instead of 16 is what such a GPU gains, as long as few enough rows share a weight. Weights
are the MMA's first operand, which may come from registers (Hopper's wgmma included), so the accumulator is the
transpose of the output tile.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate

# Four bytes of codes to the BF16 of their low nibbles ($0, $1) and of their high ones ($2, $3), times 2**-126: a code's
# three bits are BF16's lowest two exponent bits and highest mantissa bit, and its zero exponent is subnormal likewise.
DECODE = (
    "{ .reg .b32 t, u, v; prmt.b32 t, $4, 0, 0x4140; "
    "shl.b32 u, t, 6; and.b32 u, u, 0x01C001C0; shl.b32 v, t, 12; and.b32 v, v, 0x80008000; or.b32 $0, u, v; "
    "shl.b32 u, t, 2; and.b32 u, u, 0x01C001C0; shl.b32 v, t, 8; and.b32 v, v, 0x80008000; or.b32 $2, u, v; "
    "prmt.b32 t, $4, 0, 0x4342; "
    "shl.b32 u, t, 6; and.b32 u, u, 0x01C001C0; shl.b32 v, t, 12; and.b32 v, v, 0x80008000; or.b32 $1, u, v; "
    "shl.b32 u, t, 2; and.b32 u, u, 0x01C001C0; shl.b32 v, t, 8; and.b32 v, v, 0x80008000; or.b32 $3, u, v; }"
)

_SOURCE = """\
{{def_kernel("X", "B", "SB", "AMAX_B")}}
    M = {{size("X", 0)}}
    K = {{size("X", 1)}}
    N = {{size("B", 0)}}
    KP = {{size("B", 1)}}
    grid_n = tl.cdiv(N, BLOCK_N)
    tile_n = tl.program_id(0) % grid_n
    tile_m = tl.program_id(0) // grid_n
    rows = tile_m.to(INDEX_DTYPE) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(INDEX_DTYPE) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = rows % M
    col = cols % N
    {% if TMA %}
    b_desc = tl.make_tensor_descriptor(B, [N, KP], [KP, 1], [BLOCK_N, BLOCK_K // 2])
    {% endif %}
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        {% if TMA %}
        codes = b_desc.load([tile_n * BLOCK_N, k * (BLOCK_K // 2)])
        {% else %}
        byte = k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        codes = tl.load(B + col[:, None] * KP + byte[None, :], mask=byte[None, :] < KP, other=0)
        {% endif %}
        block = k * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)
        scale_ptr = SB.to(tl.pointer_type(tl.uint8)) + col[:, None] * (KP // 8) + block[None, :]
        scales = tl.load(scale_ptr, mask=block[None, :] < KP // 8, other=0)
        idx_k = k * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(X + row[None, :] * {{stride("X", 0)}} + idx_k[:, None], mask=idx_k[:, None] < K, other=0.0)
        # Even and odd elements are multiplied apart, as a byte holds one of each.
        even, odd = x.reshape(BLOCK_K // 2, 2, BLOCK_M).permute(0, 2, 1).split()
        low, high = _decode(codes, scales)
        acc = tl.dot(low, even, acc)
        acc = tl.dot(high, odd, acc)
    factor = tl.load(AMAX_B + col)[:, None] if B_ROWS else tl.load(AMAX_B)
    # _decode leaves out 2**8.
    out = acc * 256.0 * (factor * 0.00037202380952380956)
    idx_m = rows[None, :]
    idx_n = cols[:, None]
    inside = (idx_m < M) & (idx_n < N)
    {{store_output(("idx_m", "idx_n"), "out", "inside", indent_width=4, val_shape=("BLOCK_N", "BLOCK_M"))}}


@triton.jit
def _decode(codes, scales):
    # [N, K/2] codes and [N, K/16] scales to the even and the odd elements, BF16 [N, K/2], times 2**-8: exact.
    low, high = tl.inline_asm_elementwise(
        "<DECODE>", "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    # E4M3's seven bits are FP32's lowest exponent bits and highest mantissa bits: 2**-120 of the scale, and 2**118
    # of it together with 2**-126 of a code stay within BF16.
    scale = (scales.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36 * 3.3230699894622893e35
    scale = tl.where(scales == 127, float("nan"), scale).to(tl.bfloat16)
    scale = scale[:, :, None].broadcast_to(scale.shape[0], scale.shape[1], 8).reshape(codes.shape)
    return low * scale, high * scale
""".replace("<DECODE>", DECODE)


def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)


WEIGHT_MM = KernelTemplate("fp4_weight_mm", _SOURCE, _grid)
"""``X @ decode(B)^T``, FP32: X BF16 ``[M, K]``, B u8 codes ``[N, Kp/2]``, SB E4M3 ``[N, Kp/16]``, AMAX_B f32, one or
(``B_ROWS``) one a row. Constants: ``BLOCK_M``, ``BLOCK_N``, ``BLOCK_K``, ``STAGES``, ``TMA`` (sm_90)."""

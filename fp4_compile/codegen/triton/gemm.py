"""NVFP4 matrix products on tensor cores: ``alpha * decode(A) @ decode(B)^T``, FP32, for Inductor's epilogues.

A ``[M, Kp/2]`` and B ``[N, Kp/2]`` are u8 codes, SA and SB their E4M3 block scales in the order of
`fp4_compile.numerics.swizzle_scales`, AMAX_A and AMAX_B f32, one for the tensor or (``A_ROWS``, ``B_ROWS``) one a row.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate

# Scales travel in blocks of [1, rows/128, K/64, 2, 256] bytes: from these Triton makes tcgen05.cp and an asynchronous
# MMA. Loaded by pointer they would go through registers, with an MMA that waits.
_TMA = """\
{{def_kernel("A", "SA", "AMAX_A", "B", "SB", "AMAX_B")}}
    M = {{size("A", 0)}}
    N = {{size("B", 0)}}
    KP = {{size("A", 1)}}
    REP_M: tl.constexpr = BLOCK_M // 128
    REP_N: tl.constexpr = BLOCK_N // 128
    REP_K: tl.constexpr = BLOCK_K // 64
    grid_m = tl.cdiv(M, BLOCK_M)
    grid_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(M, 128)
    tiles_n = tl.cdiv(N, 128)
    tiles_k = tl.cdiv(KP, 32)
    a_desc = tl.make_tensor_descriptor(A, [M, KP], [KP, 1], [BLOCK_M, BLOCK_K // 2])
    b_desc = tl.make_tensor_descriptor(B, [N, KP], [KP, 1], [BLOCK_N, BLOCK_K // 2])
    sa_desc = tl.make_tensor_descriptor(
        SA, [1, tiles_m, tiles_k, 2, 256], [tiles_m * tiles_k * 512, tiles_k * 512, 512, 256, 1],
        [1, REP_M, REP_K, 2, 256])
    sb_desc = tl.make_tensor_descriptor(
        SB, [1, tiles_n, tiles_k, 2, 256], [tiles_n * tiles_k * 512, tiles_k * 512, 512, 256, 1],
        [1, REP_N, REP_K, 2, 256])
{% if SPLIT_K > 1 %}
    steps = tl.cdiv(tl.cdiv(KP, BLOCK_K // 2), SPLIT_K)
    for work in tl.range(tl.program_id(0), grid_m * grid_n * SPLIT_K, PROGRAMS, warp_specialize=WARP_SPECIALIZE):
        # Each of SPLIT_K programs sums a part of K, and what reads the parts adds them.
        split = work // (grid_m * grid_n)
        tile = work % (grid_m * grid_n)
{% else %}
    for tile in tl.range(tl.program_id(0), grid_m * grid_n, PROGRAMS, warp_specialize=WARP_SPECIALIZE):
{% endif %}
        # Tiles of GROUP_M rows are walked column by column, so that B is read from L2.
        group = tile // (GROUP_M * grid_n)
        group_m = min(grid_m - group * GROUP_M, GROUP_M)
        tile_m = group * GROUP_M + tile % (GROUP_M * grid_n) % group_m
        tile_n = tile % (GROUP_M * grid_n) // group_m
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
{% if SPLIT_K > 1 %}
        for step in tl.range(0, steps, num_stages=STAGES):
            k = split * steps + step  # behind the end of K there are zeros
{% else %}
        for k in tl.range(0, tl.cdiv(KP, BLOCK_K // 2), num_stages=STAGES):
{% endif %}
            a = a_desc.load([tile_m * BLOCK_M, k * (BLOCK_K // 2)])
            b = b_desc.load([tile_n * BLOCK_N, k * (BLOCK_K // 2)])
            sa = sa_desc.load([0, tile_m * REP_M, k * REP_K, 0, 0])
            sb = sb_desc.load([0, tile_n * REP_N, k * REP_K, 0, 0])
            sa = sa.reshape(REP_M, REP_K, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BLOCK_M, BLOCK_K // 16)
            sb = sb.reshape(REP_N, REP_K, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BLOCK_N, BLOCK_K // 16)
            acc = tl.dot_scaled(a, sa, "e2m1", b.T, sb, "e2m1", acc)
"""

_EPILOGUE = """\
        parts = _split_columns(acc, SUBTILES)
        for part in tl.static_range(SUBTILES):
            rows = tile_m.to(INDEX_DTYPE) * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile_n.to(INDEX_DTYPE) * BLOCK_N + part * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
            {% if A_ROWS %}
            amax_a = tl.load(AMAX_A + rows, mask=rows < M, other=0.0)[:, None]
            {% else %}
            amax_a = tl.load(AMAX_A)
            {% endif %}
            {% if B_ROWS %}
            amax_b = tl.load(AMAX_B + cols, mask=cols < N, other=0.0)[None, :]
            {% else %}
            amax_b = tl.load(AMAX_B)
            {% endif %}
            out = parts[part] * (amax_a * amax_b * 1.3840171675383317e-07)
{% if SPLIT_K > 1 %}
            idx_m = (split.to(INDEX_DTYPE) * M + rows)[:, None]
            idx_n = cols[None, :]
            inside = (rows < M)[:, None] & (idx_n < N)
{% else %}
            idx_m = rows[:, None]
            idx_n = cols[None, :]
            inside = (idx_m < M) & (idx_n < N)
{% endif %}
            {{store_output(("idx_m", "idx_n"), "out", "inside", indent_width=12,
                           val_shape=("BLOCK_M", "BLOCK_N // SUBTILES"))}}
"""

_SPLIT = """

@triton.jit
def _split_columns(acc, PARTS: tl.constexpr):
    # An epilogue works on a few columns at a time: its operands' registers come on top of the accumulator's.
    if PARTS == 1:
        return (acc,)
    else:
        halves = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1)
        left, right = halves.split()
        return _split_columns(left, PARTS // 2) + _split_columns(right, PARTS // 2)
"""


def _persistent_grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, Any, Any]:
    splits = meta["SPLIT_K"]
    tiles = cdiv(m if splits == 1 else m // splits, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"])
    return (min(meta["PROGRAMS"], tiles * splits), 1, 1)


SCALED_MM = KernelTemplate("fp4_scaled_mm", _TMA + _EPILOGUE + _SPLIT, _persistent_grid)
"""Persistent, operands by TMA. Constants: ``BLOCK_M``, ``BLOCK_N`` (multiples of 128), ``BLOCK_K``, ``STAGES``,
``GROUP_M``, ``SUBTILES``, ``PROGRAMS`` (the device's SMs), ``WARP_SPECIALIZE``, ``A_ROWS``, ``B_ROWS``, ``SPLIT_K``.

With ``SPLIT_K`` above 1 the output ``[SPLIT_K * M, N]`` has the sums over so many parts of K, for its reader to add."""

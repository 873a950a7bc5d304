"""Quantizers: a tensor, or the expression that makes it, to E2M1 codes and E4M3 scales in one kernel.

A thread owns pieces of 32 elements of a row, four loads of 16 bytes: two blocks, whose maxima and codes need no other
thread, and 16 bytes of codes. Scales go where the GEMM wants them: row-major ``[M, ceil(K/16)]``, or (``SWIZZLED``) in
the order of `fp4_compile.numerics.swizzle_scales`, padding zeroed. Bytes equal those of
`fp4_compile.numerics.quantize_1x16`.

X ``[M, K]`` is read through ``load_input``: what Inductor fuses there is computed in registers and rounded to X's
dtype, as if it had been stored. ``store_output`` writes the codes, u8 ``[M, ceil(K/16) * 8]``, or (``SWIZZLED``)
``[M, ceil(K/32) * 16]``, with zeros at the end: TMA wants rows that begin every 16 bytes.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate
from fp4_compile.codegen.triton.ptx import HELPERS, TRAINING_HELPERS

_SIZES = """\
    M = {{size("X", 0)}}
    K = {{size("X", 1)}}
    BLOCKS = (K + 15) // 16
    PIECES: tl.constexpr = COLS // 32
    local = tl.arange(0, ROWS)
    pieces = tl.arange(0, PIECES)[None, :] * 32
"""

# The rows of one program: neighbours, or rows 32 apart, whose scales are neighbours in the swizzled layout.
_ROWS = """\
{% if SWIZZLED %}
    slot = tl.program_id(0) % (128 // ROWS)
    row = tl.program_id(0) // (128 // ROWS) * 128
    if ROWS < 4:
        row += slot % 32 + (slot // 32 * ROWS + local) * 32
    else:
        row += slot * (ROWS // 4) + local // 4 + local % 4 * 32
{% else %}
    row = tl.program_id(0) * ROWS + local
{% endif %}
    row = row.to(INDEX_DTYPE)[:, None]
    idx_m = row[:, :, None]
"""

# A thread's piece comes in quarters of 8 elements, 16 bytes.
_QUARTERS = """\
for quarter in tl.static_range(4):
    idx_n = col[:, :, None] + (quarter * 8 + tl.arange(0, 8))[None, None, :]
"""

_LOAD = """\
    inside = (idx_m < M) & (idx_n < K)
    {{load_input("X", "x", ("idx_m", "idx_n"), mask="inside", indent_width=LOAD_INDENT,
                 index_shape=("ROWS", "PIECES", "8"))}}
"""

_NORMALIZE = """\
    x = x.to(tl.float32) * rstd
{% if CAST_BEFORE_WEIGHT %}
    x = x.to(X.dtype.element_ty).to(tl.float32)
{% endif %}
{% if HAS_WEIGHT %}
    weight_ptr = tl.broadcast_to(WEIGHT + idx_n, (ROWS, PIECES, 8))
    x *= tl.load(weight_ptr, mask=tl.broadcast_to(idx_n < K, (ROWS, PIECES, 8)), other=0.0).to(tl.float32)
{% endif %}
    halves = halves + (_round8(_split8(x), X.dtype.element_ty),)
"""

_SPLIT = """\
    halves = halves + (_split8(x.to(tl.float32)),)
"""

TRANSFORM = """\
{% if HADAMARD %}
halves = _hadamard16(halves[0], halves[1]) + _hadamard16(halves[2], halves[3])
{% endif %}
"""

RANDOM_WORDS = """
{% if STOCHASTIC %}
@triton.jit
def _random_words(seed, counter, STREAM: tl.constexpr):
    # The four words of a block of 16 elements, as `fp4_compile.numerics.philox_bytes` has them.
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, tl.full(low.shape, STREAM, tl.uint32), tl.zeros_like(low))
{% endif %}
"""

AMAX = """\
amax_0 = _maximum(_amax8(halves[0]), _amax8(halves[1]))
amax_1 = _maximum(_amax8(halves[2]), _amax8(halves[3]))
"""

STORE = """\
pair, scale_0, scale_1 = _to_e4m3(amax_0 * factor, amax_1 * factor)
inverse_0 = _inverse_scale(scale_0, decode, keep)
inverse_1 = _inverse_scale(scale_1, decode, keep)
block = col // 16
{% if SWIZZLED %}
if BLOCKS % 4 != 0:
    # The padding's scale is zero even where amax is NaN.
    pair = tl.where(block < BLOCKS, tl.where(block + 1 < BLOCKS, pair, pair & 0xFF), 0)
tile_cols = (BLOCKS + 3) // 4
place = (row // 128 * tile_cols + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
tl.store(SCALES.to(tl.pointer_type(tl.int16)) + place // 2, pair.to(tl.int16), mask=block < tile_cols * 4)
{% else %}
place = row * BLOCKS + block
if BLOCKS % 2 == 0:
    pair_ptr = SCALES.to(tl.pointer_type(tl.int16)) + place // 2
    tl.store(pair_ptr, pair.to(tl.int16), mask=(row < M) & (block < BLOCKS))
else:
    byte_ptr = SCALES.to(tl.pointer_type(tl.int8)) + place
    tl.store(byte_ptr, pair.to(tl.int8), mask=(row < M) & (block < BLOCKS))
    tl.store(byte_ptr + 1, (pair >> 8).to(tl.int8), mask=(row < M) & (block + 1 < BLOCKS))
{% endif %}
{% if STOCHASTIC %}
counter = (row * BLOCKS + block).to(tl.int64)
random_0 = _random_words(seed, counter, STREAM)
random_1 = _random_words(seed, counter + 1, STREAM)
first = tl.join(_to_e2m1_stochastic(halves[0], inverse_0, random_0[0], random_0[1]),
                _to_e2m1_stochastic(halves[2], inverse_1, random_1[0], random_1[1]))
second = tl.join(_to_e2m1_stochastic(halves[1], inverse_0, random_0[2], random_0[3]),
                 _to_e2m1_stochastic(halves[3], inverse_1, random_1[2], random_1[3]))
{% else %}
first = tl.join(_to_e2m1(halves[0], inverse_0), _to_e2m1(halves[2], inverse_1))
second = tl.join(_to_e2m1(halves[1], inverse_0), _to_e2m1(halves[3], inverse_1))
{% endif %}
words = tl.join(first, second)
low = tl.join((words & 0xFF).to(tl.uint8), (words >> 16 & 0xFF).to(tl.uint8))
high = tl.join((words >> 8 & 0xFF).to(tl.uint8), (words >> 24 & 0xFF).to(tl.uint8))
codes = tl.join(low, high).reshape(ROWS, PIECES, 16)
idx_b = (col // 2)[:, :, None] + tl.arange(0, 16)[None, None, :]
{% if SWIZZLED %}
if BLOCKS % 2 != 0:
    codes = tl.where(idx_b < BLOCKS * 8, codes, 0)
whole = (idx_m < M) & (idx_b < (BLOCKS + 1) // 2 * 16)
{% else %}
whole = (idx_m < M) & (idx_b < BLOCKS * 8)
{% endif %}
{{store_output(("idx_m", "idx_b"), "codes", "whole", indent_width=STORE_INDENT, val_shape=("ROWS", "PIECES", "16"))}}
"""


def indent(text: str, width: int) -> str:
    """Put a template's part ``width`` columns to the right; Jinja's lines stay."""
    pad = " " * width
    text = text.replace("LOAD_INDENT", str(width + 4)).replace("STORE_INDENT", str(width))
    lines = (line if not line or line.startswith("{%") else pad + line for line in text.split("\n"))
    return "\n".join(lines)


FINISH_AMAX = """\
amax = tl.where(amax < float("inf"), amax, float("nan"))
amax = tl.where(amax == 0.0, 0.0, tl.maximum(amax, 7.899322037525772e-36, propagate_nan=tl.PropagateNan.ALL))
tl.store(AMAX + row, amax[:, None], mask=row < M)
factor, decode, keep = _encode_scales(amax[:, None])
"""

_RSTD = """\
rstd = libdevice.rsqrt(tl.sum(squares, 1) / K + EPS)[:, None, None]
"""

_ONE_PASS = (
    """\
    tiles = ()
    for part in tl.static_range(PARTS):
        col = pieces + part * COLS
        halves = ()
"""
    + indent(_QUARTERS + _LOAD + _SPLIT + TRANSFORM + AMAX, 8)
    + """\
        most = _maximum(most, _maximum(amax_0, amax_1))
        tiles = tiles + ((halves, amax_0, amax_1),)
"""
)

_ONE_PASS_NORM = (
    """\
    loaded = ()
    for part in tl.static_range(PARTS):
        col = pieces + part * COLS
"""
    + indent(_QUARTERS + _LOAD, 8)
    + """\
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 2)
            loaded = loaded + (x,)
"""
    + indent(_RSTD, 4)
    + """\
    tiles = ()
    for part in tl.static_range(PARTS):
        col = pieces + part * COLS
        halves = ()
"""
    + indent(_QUARTERS + "    x = loaded[part * 4 + quarter]\n" + _NORMALIZE + AMAX, 8)
    + """\
        most = _maximum(most, _maximum(amax_0, amax_1))
        tiles = tiles + ((halves, amax_0, amax_1),)
"""
)

_AFTER_ONE_PASS = (
    """\
    amax = tl.reduce(most, 1, _maximum)
"""
    + indent(FINISH_AMAX, 4)
    + """\
    for part in tl.static_range(PARTS):
        col = pieces + part * COLS
        halves, amax_0, amax_1 = tiles[part]
"""
    + indent(STORE, 8)
)


def _passes(norm: bool) -> str:
    # The row does not fit into registers: what it needs as a whole first, then, from the cache, the row again.
    return (
        """\
    factor, decode, keep = most, most, most
"""
        + ("    rstd = most[:, :, None]\n" if norm else "")
        + f"    for phase in tl.static_range({3 if norm else 2}):\n"
        + """\
        for step in range((K + COLS - 1) // COLS):
            col = pieces + step * COLS
            halves = ()
"""
        + indent(_QUARTERS + _LOAD, 12)
        + (
            """\
                if phase == 0:
                    squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 2)
                else:
"""
            + indent(_NORMALIZE, 16)
            if norm
            else ""
        )
        + ("" if norm else indent(_SPLIT + TRANSFORM, 12))
        + f"            if phase == {int(norm)}:\n"
        + indent(AMAX + "most = _maximum(most, _maximum(amax_0, amax_1))\n", 16)
        + f"            if phase == {int(norm) + 1}:\n"
        + indent(AMAX + STORE, 16)
        + ("        if phase == 0:\n" + indent(_RSTD, 12) if norm else "")
        + f"        if phase == {int(norm)}:\n"
        + """\
            amax = tl.reduce(most, 1, _maximum)
"""
        + indent(FINISH_AMAX, 12)
    )


KERNEL = """\
{% if STOCHASTIC %}
{{def_kernel("X", "SEED", "SCALES", "AMAX")}}
    seed = tl.load(SEED)
{% else %}
{{def_kernel("X", "SCALES", "AMAX")}}
{% endif %}
"""

_NORM_KERNEL = '{{def_kernel("X", "WEIGHT", "SCALES", "AMAX")}}\n'


def _row_source(norm: bool) -> str:
    return (
        (_NORM_KERNEL if norm else KERNEL)
        + _SIZES
        + _ROWS
        + "    most = tl.zeros((ROWS, PIECES), tl.float32)\n"
        + ("    squares = most\n" if norm else "")
        + "{% if PARTS %}\n"
        + (_ONE_PASS_NORM if norm else _ONE_PASS)
        + _AFTER_ONE_PASS
        + "{% else %}\n"
        + _passes(norm)
        + "{% endif %}\n"
        + HELPERS
        + ("" if norm else TRAINING_HELPERS + RANDOM_WORDS)
    )


def _row_grid(m: Any, _: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    return (_row_programs(m, meta, cdiv), 1, 1)


def _row_programs(m: Any, meta: dict[str, Any], cdiv: Any) -> Any:
    if meta["SWIZZLED"]:
        return cdiv(m, 128) * (128 // meta["ROWS"])
    return cdiv(m, meta["ROWS"])


QUANTIZE_ROWS = KernelTemplate("fp4_quantize_rows", _row_source(norm=False), _row_grid)
"""One amax a row, found here. Inputs X, SCALES (written), AMAX (written; f32 ``[M]``, NaN for a row that holds a NaN
or an Inf). Constants: ``ROWS`` rows a program, in ``PARTS`` tiles of ``COLS`` columns that stay in registers (0: as
many as it takes, read twice); ``SWIZZLED``; ``HADAMARD`` (16: transformed before, 0: not); ``STOCHASTIC``, and then
``STREAM`` and behind X the input SEED, int64; and those of `ptx`."""

QUANTIZE_RMS_NORM = KernelTemplate("fp4_quantize_rms_norm", _row_source(norm=True), _row_grid)
"""RMSNorm, then `QUANTIZE_ROWS`: inputs X, WEIGHT ``[K]``, SCALES, AMAX. More constants: ``EPS``; ``HAS_WEIGHT``;
``CAST_BEFORE_WEIGHT``, round to X's dtype before the weight's product too."""

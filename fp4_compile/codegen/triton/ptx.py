"""Inline PTX of the quantizers, and its exact twin in integer arithmetic for GPUs without the instructions.

All of it is Triton text: `HELPERS` follows a kernel's body in its template. Jinja constants choose:
``HARDWARE_E2M1`` (sm_100, 103, 120, 121), ``HARDWARE_E4M3`` (sm_89 on), ``HARDWARE_RS`` (stochastic rounding: sm_100,
103), ``STOCHASTIC``, ``HADAMARD``.
"""

from __future__ import annotations

import torch

from fp4_compile.numerics import hadamard_signs

# rcp.approx is within 1 ulp (PTX ISA), and from there one Newton step in FMAs gives the correctly rounded
# reciprocal of every normal float but those whose mantissa is all ones: they may miss the last bit, which is then
# set (all 2**23 mantissas were tried with every start that lies within 1 ulp). $2 is the tensor's decode scale and
# $3 a power of two that keeps the product normal. A zero scale makes the Newton step NaN, which min turns into the
# largest float; the last FMA brings the NaN of a NaN scale back.
INVERSE_SCALE = (
    "{ .reg .f32 d, r, e, n; .reg .b32 m, b; .reg .pred p; "
    "mul.rn.f32 d, $1, $2; mul.rn.f32 d, d, $3; rcp.approx.ftz.f32 r, d; neg.f32 n, d; "
    "fma.rn.f32 e, n, r, 0f3F800000; fma.rn.f32 r, e, r, r; "
    "mov.b32 m, d; or.b32 m, m, 0xFF800000; setp.eq.u32 p, m, 0xFFFFFFFF; mov.b32 b, r; @p or.b32 b, b, 1; "
    "mov.b32 r, b; mul.rn.f32 r, r, $3; min.f32 r, r, 0f7F7FFFFF; fma.rn.f32 $0, $1, 0f00000000, r; }"
)

# Two block scales at once: E4M3 bytes in the low half of $0, their values in $1 and $2.
TO_E4M3 = (
    "{ .reg .b16 p, a, b; .reg .b32 h; cvt.rn.satfinite.e4m3x2.f32 p, $4, $3; cvt.u32.u16 $0, p; "
    "cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {a, b}, h; cvt.f32.f16 $1, a; cvt.f32.f16 $2, b; }"
)

# Eight elements to eight codes, the first in the lowest nibble: the first source of cvt goes to the high one.
TO_E2M1 = (
    "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b, $4, $3; "
    "cvt.rn.satfinite.e2m1x2.f32 c, $6, $5; cvt.rn.satfinite.e2m1x2.f32 d, $8, $7; mov.b32 $0, {a, b, c, d}; }"
)

# The same with stochastic rounding: $9 and $10 hold a random byte for each of the elements.
TO_E2M1_STOCHASTIC = (
    "{ .reg .b16 a, b; cvt.rs.satfinite.e2m1x4.f32 a, {$4, $3, $2, $1}, $9; "
    "cvt.rs.satfinite.e2m1x4.f32 b, {$8, $7, $6, $5}, $10; mov.b32 $0, {a, b}; }"
)

# Three sources a maximum, which sm_100 has. A NaN wins, so that it cannot hide in a block.
AMAX8 = (
    "{ .reg .f32 a, b, c; max.NaN.abs.f32 a, $1, $2, $3; max.NaN.abs.f32 b, $4, $5, $6; "
    "max.NaN.abs.f32 c, $7, $8, a; max.NaN.f32 $0, b, c; }"
)

# Two at once: a conversion alone takes as long.
ROUND_BF16 = (
    "{ .reg .b32 p, a, b; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 a, p, 16; and.b32 b, p, 0xFFFF0000; "
    "mov.b32 $0, a; mov.b32 $1, b; }"
)

_COMMON = """
@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _split8(x):
    # [..., 8] to eight tensors [...]: with a thread owning the eight, this moves nothing.
    x = x.reshape(x.shape[0], x.shape[1], 2, 2, 2)
    even, odd = x.split()
    x04, x26 = even.split()
    x15, x37 = odd.split()
    x0, x4 = x04.split()
    x1, x5 = x15.split()
    x2, x6 = x26.split()
    x3, x7 = x37.split()
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _round8(x, DTYPE: tl.constexpr):
    # What storing x and loading it again would leave of it.
    if DTYPE == tl.bfloat16:
        x0, x1 = _round_bf16(x[0], x[1])
        x2, x3 = _round_bf16(x[2], x[3])
        x4, x5 = _round_bf16(x[4], x[5])
        x6, x7 = _round_bf16(x[6], x[7])
        return x0, x1, x2, x3, x4, x5, x6, x7
    else:
        return (x[0].to(DTYPE).to(tl.float32), x[1].to(DTYPE).to(tl.float32), x[2].to(DTYPE).to(tl.float32),
                x[3].to(DTYPE).to(tl.float32), x[4].to(DTYPE).to(tl.float32), x[5].to(DTYPE).to(tl.float32),
                x[6].to(DTYPE).to(tl.float32), x[7].to(DTYPE).to(tl.float32))


@triton.jit
def _round_bf16(a, b):
    return tl.inline_asm_elementwise(
        "<ROUND_BF16>", "=f,=f,f,f", [a, b], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)


@triton.jit
def _encode_scales(amax):
    # What takes amax to 6 * 448, its inverse, and a power of two that keeps inverse * block scale normal.
    encode = tl.div_rn(2688.0, amax)
    encode = tl.minimum(encode, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    encode = tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    keep = tl.where(decode < 7.70371977754894e-34, 1.8446744073709552e19, 1.0)
    return encode * 0.1666666716337204, decode, keep


@triton.jit
def _inverse_scale(scale, decode, keep):
    return tl.inline_asm_elementwise(
        "<INVERSE_SCALE>", "=f,f,f,f", [scale, decode, keep], dtype=tl.float32, is_pure=True, pack=1)
"""

_AMAX8_HARDWARE = """
@triton.jit
def _amax8(x):
    return tl.inline_asm_elementwise(
        "<AMAX8>", "=f,f,f,f,f,f,f,f,f", [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
        dtype=tl.float32, is_pure=True, pack=1)
"""

_AMAX8_SOFTWARE = """
@triton.jit
def _amax8(x):
    x01 = _maximum(tl.abs(x[0]), tl.abs(x[1]))
    x23 = _maximum(tl.abs(x[2]), tl.abs(x[3]))
    x45 = _maximum(tl.abs(x[4]), tl.abs(x[5]))
    x67 = _maximum(tl.abs(x[6]), tl.abs(x[7]))
    return _maximum(_maximum(x01, x23), _maximum(x45, x67))
"""

_TO_E4M3_HARDWARE = """
@triton.jit
def _to_e4m3(a, b):
    return tl.inline_asm_elementwise(
        "<TO_E4M3>", "=r,=f,=f,f,f", [a, b], dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1)
"""

_TO_E4M3_SOFTWARE = """
@triton.jit
def _to_e4m3(a, b):
    code_a, value_a = _to_e4m3_one(a)
    code_b, value_b = _to_e4m3_one(b)
    return code_a | (code_b << 8), value_a, value_b


@triton.jit
def _to_e4m3_one(a):
    # Above 2**-6 the rounding adds half of the last kept bit; below, E4M3 is fixed point with step 2**-9.
    bounded = tl.minimum(a, 448.0)
    bits = bounded.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    fixed = (bounded + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(bounded < 0.015625, fixed, normal)
    half = (code << 7).to(tl.int16).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0
    finite = a == a
    return tl.where(finite, code, 127), tl.where(finite, value, float("nan"))
"""

_TO_E2M1_HARDWARE = """
@triton.jit
def _to_e2m1(x, inverse):
    return tl.inline_asm_elementwise(
        "<TO_E2M1>", "=r,f,f,f,f,f,f,f,f",
        [x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse,
         x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse],
        dtype=tl.int32, is_pure=True, pack=1)
"""

_TO_E2M1_STOCHASTIC_HARDWARE = """
@triton.jit
def _to_e2m1_stochastic(x, inverse, random_0, random_1):
    return tl.inline_asm_elementwise(
        "<TO_E2M1_STOCHASTIC>", "=r,f,f,f,f,f,f,f,f,r,r",
        [x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse,
         x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse, random_0, random_1],
        dtype=tl.int32, is_pure=True, pack=1)
"""

_TO_E2M1_STOCHASTIC_SOFTWARE = """
@triton.jit
def _to_e2m1_stochastic(x, inverse, random_0, random_1):
    low = _dithered(x[0] * inverse, random_0) | (_dithered(x[1] * inverse, random_0 >> 8) << 4)
    low |= (_dithered(x[2] * inverse, random_0 >> 16) << 8) | (_dithered(x[3] * inverse, random_0 >> 24) << 12)
    high = _dithered(x[4] * inverse, random_1) | (_dithered(x[5] * inverse, random_1 >> 8) << 4)
    high |= (_dithered(x[6] * inverse, random_1 >> 16) << 8) | (_dithered(x[7] * inverse, random_1 >> 24) << 12)
    return low | (high << 16)


@triton.jit
def _dithered(y, random):
    # A random byte's share of the step is added, and what lies beyond a half of the binade cut off.
    magnitude = tl.where(y == y, tl.minimum(tl.abs(y), 6.0), 6.0)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True), 0x3F800000) & 0x7F800000
    step = binade.to(tl.float32, bitcast=True) * 0.001953125
    dithered = magnitude + (random & 255).to(tl.int32).to(tl.float32) * step
    count = (dithered * (0x7F800000 - binade).to(tl.float32, bitcast=True)).to(tl.int32)
    sign = tl.where(y == y, (y.to(tl.int32, bitcast=True) >> 28) & 8, 0)
    return (count + ((binade >> 22) - 254)) | sign
"""

_HADAMARD = """
@triton.jit
def _hadamard16(a, b):
    # Signs, then neighbours, pairs of pairs, and so on, as `fp4_compile.numerics.random_hadamard` adds.
    <SIGNED>
    <BUTTERFLIES>
    a = (<FIRST>)
    b = (<SECOND>)
    return _round8(a, tl.bfloat16), _round8(b, tl.bfloat16)
"""

_TO_E2M1_SOFTWARE = """
@triton.jit
def _to_e2m1(x, inverse):
    low = _nibble(x[0] * inverse) | (_nibble(x[1] * inverse) << 4)
    low |= (_nibble(x[2] * inverse) << 8) | (_nibble(x[3] * inverse) << 12)
    high = _nibble(x[4] * inverse) | (_nibble(x[5] * inverse) << 4)
    high |= (_nibble(x[6] * inverse) << 8) | (_nibble(x[7] * inverse) << 12)
    return low | (high << 16)
"""

NIBBLE = """
@triton.jit
def _nibble(y):
    # E2M1 values lie half a binade apart, and so do floats from 2**22 times the binade on: the sum rounds once.
    magnitude = tl.minimum(tl.abs(y), 6.0)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True), 0x3F800000) & 0x7F800000
    count = (magnitude + binade.to(tl.float32, bitcast=True) * 4194304.0).to(tl.int32, bitcast=True) & 15
    sign = tl.where(y == y, (y.to(tl.int32, bitcast=True) >> 28) & 8, 0)
    return (count + ((binade >> 22) - 254)) | sign
"""


def _hadamard() -> str:
    """The transform of 16 elements in registers, a statement an addition."""
    values = [f"{half}[{i}]" for half in "ab" for i in range(8)]
    negative = hadamard_signs(16, torch.device("cpu")) < 0
    signed = [f"v{i} = {'-' if negative[i] else ''}{value}" for i, value in enumerate(values)]
    pairs = [(i, i + half) for half in (1, 2, 4, 8) for i in range(16) if not i & half]
    steps = [f"v{low}, v{high} = v{low} + v{high}, v{low} - v{high}" for low, high in pairs]
    halves = [", ".join(f"v{i} * 0.25" for i in range(start, start + 8)) for start in (0, 8)]
    text = _HADAMARD.replace("<SIGNED>", "\n    ".join(signed)).replace("<BUTTERFLIES>", "\n    ".join(steps))
    return text.replace("<FIRST>", halves[0]).replace("<SECOND>", halves[1])


def _fill(text: str) -> str:
    return (
        text.replace("<INVERSE_SCALE>", INVERSE_SCALE)
        .replace("<AMAX8>", AMAX8)
        .replace("<ROUND_BF16>", ROUND_BF16)
        .replace("<TO_E4M3>", TO_E4M3)
        .replace("<TO_E2M1>", TO_E2M1)
        .replace("<TO_E2M1_STOCHASTIC>", TO_E2M1_STOCHASTIC)
    )


_SCALES = "{% if HARDWARE_E4M3 %}" + _TO_E4M3_HARDWARE + "{% else %}" + _TO_E4M3_SOFTWARE + "{% endif %}"

HELPERS = _fill(
    _COMMON
    + _SCALES
    + "{% if HARDWARE_E2M1 %}"
    + _AMAX8_HARDWARE
    + _TO_E2M1_HARDWARE
    + "{% else %}"
    + _AMAX8_SOFTWARE
    + _TO_E2M1_SOFTWARE
    + NIBBLE
    + "{% endif %}"
)
"""Of the quantizers of rows."""

TRAINING_HELPERS = _fill(
    "{% if HADAMARD %}"
    + _hadamard()
    + "{% endif %}{% if STOCHASTIC %}{% if HARDWARE_RS %}"
    + _TO_E2M1_STOCHASTIC_HARDWARE
    + "{% else %}"
    + _TO_E2M1_STOCHASTIC_SOFTWARE
    + "{% endif %}{% endif %}"
)
"""What those add in training."""

TILE_HELPERS = _fill(_COMMON + _SCALES + NIBBLE)
"""Of the quantizer of tiles."""

"""The quantizer of a transposed tensor, which wgrad contracts over tokens: columns of what lies in memory by rows.

X ``[K, M]`` is read as it lies, 16 bytes at a time, turned in shared memory, and quantized along its columns: codes
``[M, ceil(K/32) * 16]``, swizzled scales, one amax a column. A program has all of its columns and reads them twice, the
second time from the cache. Bytes equal those of `fp4_compile.numerics.quantize_1x16` of the transpose.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate
from fp4_compile.codegen.triton.ptx import HELPERS, TRAINING_HELPERS
from fp4_compile.codegen.triton.quantize import AMAX, FINISH_AMAX, KERNEL, RANDOM_WORDS, STORE, TRANSFORM, indent

COLUMNS = """\
    M = {{size("X", 1)}}
    K = {{size("X", 0)}}
    BLOCKS = (K + 15) // 16
    PIECES: tl.constexpr = TALL // 32
    pieces = tl.arange(0, PIECES)[None, :] * 32
    column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(INDEX_DTYPE)
    row = column[:, None]
    idx_m = row[:, :, None]
    idx_n = column[None, :]
    most = tl.zeros((ROWS, PIECES), tl.float32)
    factor, decode, keep = most, most, most
    for phase in tl.static_range(2):
        for step in range((K + TALL - 1) // TALL):
            col = pieces + step * TALL
            idx_k = (step * TALL + tl.arange(0, TALL)).to(INDEX_DTYPE)[:, None]
            inside = (idx_k < K) & (idx_n < M)
            {{load_input("X", "x", ("idx_k", "idx_n"), mask="inside", indent_width=12, index_shape=("TALL", "ROWS"))}}
"""

_TURNED = """
@triton.jit
def _turned(x):
    # [TALL, ROWS] to the columns' pieces of 32 elements in four times eight tensors [ROWS, PIECES].
    x = tl.trans(x).reshape(x.shape[1], x.shape[0] // 32, 2, 2, 8).permute(0, 1, 4, 2, 3)
    even, odd = x.split()
    first, third = even.split()
    second, fourth = odd.split()
    return (_split8(first.to(tl.float32)), _split8(second.to(tl.float32)),
            _split8(third.to(tl.float32)), _split8(fourth.to(tl.float32)))
"""

QUANTIZE_TURNED = (
    "            halves = _turned(x)\n"
    + indent(TRANSFORM, 12)
    + "            if phase == 0:\n"
    + indent(AMAX + "most = _maximum(most, _maximum(amax_0, amax_1))\n", 16)
    + "            if phase == 1:\n"
    + indent(AMAX + STORE, 16)
    + "        if phase == 0:\n"
    + "            amax = tl.reduce(most, 1, _maximum)\n"
    + indent(FINISH_AMAX, 12)
    + HELPERS
    + TRAINING_HELPERS
    + RANDOM_WORDS
    + _TURNED
)
"""What is done with a tile of `COLUMNS`, and the helpers."""


def column_grid(m: Any, _: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    """Programs for ``m`` columns, padded to the 128 that swizzled scales come in."""
    return (cdiv(m, 128) * (128 // meta["ROWS"]), 1, 1)


QUANTIZE_COLUMNS = KernelTemplate("fp4_quantize_columns", KERNEL + COLUMNS + QUANTIZE_TURNED, column_grid)
"""Inputs as those of `QUANTIZE_ROWS`, X transposed. Constants: a program has ``ROWS`` rows of the result, and takes
``TALL`` rows of X at a time; both are at least 32; ``SWIZZLED``, which must be true; the others as there."""

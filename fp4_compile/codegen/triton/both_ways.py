"""The quantizer of a tensor that one product contracts over its columns and another over its rows: read once for both.

`QUANTIZE_COLUMNS`, and from the same loads the codes and scales of the tensor as it lies. Those need the amax of whole
rows, of which a program sees 32 columns: it is an input, which the tensor's producer leaves behind. Bytes equal those
of the two quantizers it stands for.
"""

from __future__ import annotations

import re

from fp4_compile.codegen.triton.columns import COLUMNS, QUANTIZE_TURNED, column_grid
from fp4_compile.codegen.triton.kernel_template import KernelTemplate
from fp4_compile.codegen.triton.quantize import AMAX, STORE, indent

_KERNEL = """\
{% if STOCHASTIC %}
{{def_kernel("X", "ROW_AMAX", "SEED", "ROW_CODES", "ROW_SCALES", "SCALES", "AMAX")}}
    seed = tl.load(SEED)
{% else %}
{{def_kernel("X", "ROW_AMAX", "ROW_CODES", "ROW_SCALES", "SCALES", "AMAX")}}
{% endif %}
"""

_ALONG_ROWS = """\
token = idx_k
ahead = (tl.program_id(0) * ROWS + tl.arange(0, ROWS // 32) * 32).to(INDEX_DTYPE)[None, :]
idx_t = token[:, :, None]
row_amax = tl.load(ROW_AMAX + token, mask=token < K, other=0.0)
row_factor, row_decode, row_keep = _encode_scales(row_amax)
halves = _pieces(x)
"""

_PIECES = """
@triton.jit
def _pieces(x):
    # [TALL, ROWS] to the rows' pieces of 32 elements in four times eight tensors [TALL, ROWS // 32].
    x = x.reshape(x.shape[0], x.shape[1] // 32, 2, 2, 8).permute(0, 1, 4, 2, 3)
    even, odd = x.split()
    first, third = even.split()
    second, fourth = odd.split()
    return (_split8(first.to(tl.float32)), _split8(second.to(tl.float32)),
            _split8(third.to(tl.float32)), _split8(fourth.to(tl.float32)))
"""

# The same code for the rows of X, which are K, in blocks along its columns, which are M.
_NAMES = {
    "M": "K",
    "BLOCKS": "ROW_BLOCKS",
    "SCALES": "ROW_SCALES",
    "STREAM": "ROW_STREAM",
    "ROWS": "TALL",
    "PIECES": "ROWS // 32",
    "row": "token",
    "col": "ahead",
    "idx_m": "idx_t",
    "factor": "row_factor",
    "decode": "row_decode",
    "keep": "row_keep",
}


def _for_rows(store: str) -> str:
    head, _, _ = store.partition("{{store_output")
    head = re.sub(r"\b(\w+)\b", lambda word: _NAMES.get(word[0], word[0]), head)
    # Steps of TALL may end behind the padded rows, which those of a grid do not.
    head = head.replace("mask=block < tile_cols * 4", "mask=(block < tile_cols * 4) & (token < (K + 127) // 128 * 128)")
    return head + "tl.store(ROW_CODES + idx_t * ((ROW_BLOCKS + 1) // 2 * 16) + idx_b, codes, mask=whole)\n"


_SOURCE = (
    _KERNEL
    + COLUMNS.replace("    PIECES: tl", "    ROW_BLOCKS = (M + 15) // 16\n    PIECES: tl")
    + "            if phase == 1:\n"
    + indent(_ALONG_ROWS + AMAX + _for_rows(STORE), 16)
    + QUANTIZE_TURNED
    + _PIECES
)

QUANTIZE_BOTH_WAYS = KernelTemplate("fp4_quantize_both_ways", _SOURCE, column_grid)
"""X ``[K, M]``. Inputs X, ROW_AMAX (f32 ``[K, 1]``), and written: ROW_CODES u8 ``[K, ceil(M/32) * 16]``, ROW_SCALES
(swizzled), and as `QUANTIZE_COLUMNS` SCALES and AMAX; output and constants are its too, with ``TALL`` at least 128, and
``ROW_STREAM``. The Hadamard transform is the columns' alone."""

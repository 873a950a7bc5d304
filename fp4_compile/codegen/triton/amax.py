"""The amaxes of many tensors in one launch, each in `PARTS` parts; whoever reads them takes the largest part.

A training step quantizes each weight anew, and a launch a weight would cost more than reading small ones does.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate
from fp4_compile.ops import AMAX_PARTS

_SOURCE = """\
{% set names = [] %}
{% for i in range(COUNT) %}
{% set _ = names.append("X" ~ i) %}
{% endfor %}
{{def_kernel(*names)}}
    part = tl.program_id(0) % PARTS
    which = tl.program_id(0) // PARTS
    most = tl.zeros((BLOCK,), tl.float32)
{% for name in names %}
    if which == {{loop.index0}}:
        most = _part({{name}}, {{size(name, 0)}} * {{size(name, 1)}}, part, most, PARTS, BLOCK, INDEX_DTYPE)
{% endfor %}
    found = tl.max(most, 0) + tl.zeros((1, 1), tl.float32)
    idx_m = which + tl.zeros((1, 1), tl.int32)
    idx_n = part + tl.zeros((1, 1), tl.int32)
    whole = idx_n < PARTS
    {{store_output(("idx_m", "idx_n"), "found", "whole", indent_width=4, val_shape=("1", "1"))}}


@triton.jit
def _part(x_ptr, elements, part, most, PARTS: tl.constexpr, BLOCK: tl.constexpr, INDEX_DTYPE: tl.constexpr):
    # Every PARTS-th block of the tensor; what is not finite does not count.
    for step in range(part, (elements + BLOCK - 1) // BLOCK, PARTS):
        at = tl.cast(step, INDEX_DTYPE) * BLOCK + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32))
        most = tl.maximum(most, tl.where(x < float("inf"), x, 0.0))
    return most
"""


def _grid(count: Any, parts: Any, _: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    return (count * parts, 1, 1)


AMAX = KernelTemplate("fp4_amax", _SOURCE, _grid)
"""Inputs X0, X1, ... ``[M, K]``, contiguous. Output f32 ``[COUNT, PARTS]``. Constants: those, and ``BLOCK`` elements at
a time."""

CONFIG = {"PARTS": AMAX_PARTS, "BLOCK": 8192, "num_warps": 8, "num_stages": 1}
"""Sixteen bytes a load, four loads of BF16 a thread in flight."""

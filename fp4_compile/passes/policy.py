"""The default policy: which matmuls may run in NVFP4, from structure alone.

It keeps out of FP4 what the NVFP4 recipe keeps out (arXiv:2509.25149 section 4.1: attention products, output
head) and what cannot gain from it. It takes no data and names nothing.
"""

from __future__ import annotations

import sympy
from torch import fx

from fp4_compile.cost_model.gemm import BLOCK, padding_share
from fp4_compile.passes.context import Matmul
from fp4_compile.passes.graph import base, value
from fp4_compile.passes.structure import Fate, Structure
from fp4_compile.plan import Decision, Precision, Reason, Role, Site

MIN_OUTPUTS = 32
"""Fewer outputs than this do not fill a tensor-core tile, and each then carries a large share of the result."""
MIN_CONTRACTION = 2 * BLOCK
"""Below two blocks the quantizers cost more than the multiplication they shorten."""
MAX_PADDING = 0.125
"""Largest share of a contraction that may be padding."""
VOCABULARY = 8192
"""A projection this wide that leaves the graph unmultiplied scores a vocabulary."""
DTYPES = ("fp32", "bf16", "fp16")


def decide(matmul: Matmul, structure: Structure, parameters: set[fx.Node]) -> Decision:
    """The default policy: structure alone, deterministic. A backward site is decided after its layer, by the recipe."""
    if matmul.site.role is not Role.FPROP:
        return Decision(matmul.site, Precision.BF16, Reason.BACKWARD, "decided after its forward")
    refused = unsupported(matmul) or _precious(matmul, structure, parameters) or uneven(matmul) or small(matmul.site)
    if refused is not None:
        reason, detail = refused
        return Decision(matmul.site, Precision.BF16, reason, detail)
    if matmul.rhs not in parameters:
        detail = "both operands in each call"
    else:
        detail = "weight in each step" if structure.has_backward else "weight once"
    return Decision(matmul.site, Precision.NVFP4, Reason.QUANTIZED, detail)


def unsupported(matmul: Matmul) -> tuple[Reason, str] | None:
    """What no plan can put into NVFP4, whatever its size."""
    site = matmul.site
    if site.dtype not in DTYPES:
        return Reason.DTYPE, f"{site.dtype} operands"
    if value(matmul.lhs).dtype != value(matmul.rhs).dtype:
        return Reason.DTYPE, "operands of two dtypes, which torch refuses"
    return None


def _precious(matmul: Matmul, structure: Structure, parameters: set[fx.Node]) -> tuple[Reason, str] | None:
    """What the model's quality hangs on, read from what the matmul is for."""
    site, fate = matmul.site, structure.fate(matmul.node)
    if any(structure.is_softmax_weight(operand) for operand in (matmul.lhs, matmul.rhs)):
        return Reason.ATTENTION, "multiplies softmax weights"
    if Fate.ATTENTION in fate:
        return Reason.ATTENTION, "feeds an attention softmax"
    if site.op == "bmm" and not {matmul.lhs, matmul.rhs} & parameters:
        return Reason.TWO_ACTIVATIONS, "batched, and neither operand is a weight"
    if Fate.ROUTING in fate:
        return Reason.ROUTER, "a top-k or sort follows"
    if base(matmul.rhs) in structure.embedded:
        return Reason.VOCABULARY, "weight tied to an embedding"
    if Fate.SCORES in fate:
        return Reason.VOCABULARY, "a final softmax, argmax or loss follows"
    if site.n.is_Integer and site.n >= VOCABULARY and Fate.OUTPUT in fate and Fate.MATMUL not in fate:
        return Reason.VOCABULARY, f"N={site.n} leaves the graph as it is"
    return None


def uneven(matmul: Matmul) -> tuple[Reason, str] | None:
    """Contractions that have no blocks, or none that are known."""
    k = matmul.site.k
    if not isinstance(k, sympy.Integer):
        return Reason.DYNAMIC_CONTRACTION, f"K={k} is dynamic"
    if k == 0:
        return Reason.SHORT_CONTRACTION, "K=0"
    return None


def small(site: Site) -> tuple[Reason, str] | None:
    """Sizes that gain nothing, for a contraction that is known."""
    n, k = site.n, int(site.k)
    if isinstance(n, sympy.Integer) and n < MIN_OUTPUTS:
        return Reason.FEW_OUTPUTS, f"N={n} < {MIN_OUTPUTS}"
    if k < MIN_CONTRACTION:
        return Reason.SHORT_CONTRACTION, f"K={k} < {MIN_CONTRACTION}"
    share = padding_share(k)
    if share > MAX_PADDING:
        return Reason.PADDING, f"K={k} pads to {-(-k // BLOCK) * BLOCK}: {100 * share:.0f}% of it padding"
    return None

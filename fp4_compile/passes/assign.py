"""Decide for every matmul that `find_matmuls` found: NVFP4 or BF16, and why. The graph is not changed.

This is the seam for richer policies: sensitivity and cost model decide here, on the same sites and with the
same `Decision`. The default policy below is structural and takes no data. It keeps out of FP4 what the NVFP4
recipe keeps out (arXiv:2509.25149 section 4.1: attention products, output head) and what cannot gain from it.
"""

from __future__ import annotations

import logging

import sympy
from torch import fx

from fp4_compile.cost_model.gemm import BLOCK, padding_share
from fp4_compile.errors import PlanError
from fp4_compile.passes.context import Context, Matmul
from fp4_compile.passes.graph import base, parameter_nodes, value
from fp4_compile.passes.structure import Fate, Structure
from fp4_compile.plan import Decision, Plan, Precision, Reason, Role, Site

log = logging.getLogger(__name__)

MIN_OUTPUTS = 32
"""Fewer outputs than this do not fill a tensor-core tile, and each then carries a large share of the result."""
MIN_CONTRACTION = 2 * BLOCK
"""Below two blocks the quantizers cost more than the multiplication they shorten."""
MAX_PADDING = 0.125
"""Largest share of a contraction that may be padding."""
VOCABULARY = 8192
"""A projection this wide that leaves the graph unmultiplied scores a vocabulary."""
DTYPES = ("fp32", "bf16", "fp16")


def assign(graph: fx.Graph, context: Context) -> None:
    """Add a decision for each of ``context.matmuls`` to ``context.decisions``.

    Raises:
        PlanError: the given plan names none of the graph's sites.
    """
    structure = Structure(graph, context.matmuls)
    parameters = parameter_nodes(graph, context.static_inputs)
    given = context.options.plan
    if given is not None:
        _check_plan(given, context)
    for matmul in context.matmuls:
        default = decide(matmul, structure, parameters)
        decision = default if given is None else _follow(given, matmul, default)
        context.decisions[matmul.site.key] = decision


def decide(matmul: Matmul, structure: Structure, parameters: set[fx.Node]) -> Decision:
    """The default policy: structure alone, deterministic."""
    refused = (
        _unsupported(matmul) or _precious(matmul, structure, parameters) or _uneven(matmul) or _small(matmul.site)
    )
    if refused is not None:
        reason, detail = refused
        return Decision(matmul.site, Precision.BF16, reason, detail)
    if matmul.rhs not in parameters:
        detail = "both operands in each call"
    else:
        detail = "weight in each step" if structure.has_backward else "weight once"
    return Decision(matmul.site, Precision.NVFP4, Reason.QUANTIZED, detail)


def _unsupported(matmul: Matmul) -> tuple[Reason, str] | None:
    """What no plan can put into NVFP4, whatever its size."""
    site = matmul.site
    if site.dtype not in DTYPES:
        return Reason.DTYPE, f"{site.dtype} operands"
    if value(matmul.lhs).dtype != value(matmul.rhs).dtype:
        return Reason.DTYPE, "operands of two dtypes, which torch refuses"
    if site.role is not Role.FPROP:
        return Reason.BACKWARD, "forward-only NVFP4"
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


def _uneven(matmul: Matmul) -> tuple[Reason, str] | None:
    """Contractions that have no blocks, or none that are known."""
    k = matmul.site.k
    if not isinstance(k, sympy.Integer):
        return Reason.DYNAMIC_CONTRACTION, f"K={k} is dynamic"
    if k == 0:
        return Reason.SHORT_CONTRACTION, "K=0"
    return None


def _small(site: Site) -> tuple[Reason, str] | None:
    """Sizes that gain nothing."""
    n, k = site.n, int(site.k)
    if isinstance(n, sympy.Integer) and n < MIN_OUTPUTS:
        return Reason.FEW_OUTPUTS, f"N={n} < {MIN_OUTPUTS}"
    if k < MIN_CONTRACTION:
        return Reason.SHORT_CONTRACTION, f"K={k} < {MIN_CONTRACTION}"
    share = padding_share(k)
    if share > MAX_PADDING:
        return Reason.PADDING, f"K={k} pads to {-(-k // BLOCK) * BLOCK}: {100 * share:.0f}% of it padding"
    return None


def _follow(given: Plan, matmul: Matmul, default: Decision) -> Decision:
    key = matmul.site.key
    if key not in given:
        return default
    wanted = given[key].precision
    if wanted is default.precision:
        return default
    refused = _unsupported(matmul) or _uneven(matmul)
    if wanted is Precision.NVFP4 and refused is not None:
        log.warning("the given plan wants %s in nvfp4, but %s: left in %s", key, refused[1], matmul.site.dtype)
        return Decision(matmul.site, Precision.BF16, *refused)
    detail = f"default would be {default.precision.value}: {default.reason.value}"
    return Decision(matmul.site, wanted, Reason.PLAN, detail)


def _check_plan(given: Plan, context: Context) -> None:
    keys = [matmul.site.key for matmul in context.matmuls]
    unknown = [key for key in keys if key not in given]
    if keys and len(unknown) == len(keys):
        raise PlanError(
            f"the given plan names none of this graph's {len(keys)} matmuls (the first is {keys[0]!r}, the plan's "
            f"first is {given.decisions[0].site.key if given.decisions else 'nothing'!r}): it was made for "
            "another model; make one with fp4_compile.explain(model, ...).plan"
        )
    if unknown:
        log.info("%d of %d matmuls are not in the given plan and follow the default policy", len(unknown), len(keys))

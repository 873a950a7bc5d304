"""What the training recipe makes of the forward's decisions: which layers' dgrad and wgrad follow them, and how.

A layer is a forward matmul with the backward ones that compute its gradients. A layer the policy or the planner
keeps out of FP4 stays out as a whole; so do the last layers (`fp4_compile.recipe.Training.bf16_share`). For the
others the recipe says what the forward and what the backward run in. A given plan still overrules each site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sympy
from torch import fx

from fp4_compile.passes.context import Matmul
from fp4_compile.passes.graph import is_backward
from fp4_compile.passes.policy import DTYPES, MIN_CONTRACTION, small, uneven
from fp4_compile.plan import Decision, Plan, Precision, Reason, Role
from fp4_compile.recipe import Training


def gradient_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on an incoming gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                found.add(node)
        elif found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def keep_last_layers(
    matmuls: Sequence[Matmul], decisions: Sequence[Decision], parameters: set[fx.Node], share: float
) -> list[Decision]:
    """Turn the last share of the layers that would be quantized to BF16; pinned ones stay as they are."""
    layers = [
        i
        for i, (m, d) in enumerate(zip(matmuls, decisions, strict=True))
        if m.site.role is Role.FPROP and d.precision is not Precision.BF16 and m.rhs in parameters
    ]
    count = int(share * len(layers) + 1e-9)
    kept = list(decisions)
    for i in layers[len(layers) - count :]:
        if kept[i].reason is not Reason.PINNED:
            detail = f"among the last {count} of {len(layers)} linear layers"
            kept[i] = Decision(matmuls[i].site, Precision.BF16, Reason.LAST_LAYERS, detail)
    return kept


def forward_as_asked(decision: Decision, recipe: Training) -> Decision:
    """A layer's decision in the forward's format."""
    if decision.precision is Precision.BF16 or recipe.forward == decision.precision.value:
        return decision
    wanted = Precision(recipe.forward)
    if wanted is Precision.BF16:
        return Decision(decision.site, wanted, Reason.RECIPE, "forward in high precision")
    return dataclasses.replace(decision, precision=wanted)


def decide_backward(
    matmul: Matmul,
    layer: Decision | None,
    recipe: Training,
    gradients: set[fx.Node],
    given: Plan | None,
    seconds: tuple[float, float] | None = None,
) -> Decision:
    """What a dgrad or wgrad GEMM runs in by default.

    Args:
        matmul: the site.
        layer: what was decided for its layer before `forward_as_asked`; None if no forward matmul was found.
        recipe: the training recipe.
        gradients: the nodes that depend on incoming gradients.
        given: a plan the user gave. One that names the forward site alone decides the whole layer.
        seconds: on the target device, in BF16 and in NVFP4 with its quantizers. It must pay by itself; only a pinned
            layer is quantized whatever it costs.
    """
    site = matmul.site
    if layer is None:
        return Decision(site, Precision.BF16, Reason.BACKWARD, "no forward matmul it belongs to")
    follows = layer
    if given is not None and layer.site.key in given and site.key not in given:
        follows = given[layer.site.key]
    if follows.precision is Precision.BF16:
        reason = follows.reason if follows is layer else Reason.PLAN
        return Decision(site, Precision.BF16, reason, "as its forward")
    refused = impossible(matmul, gradients) or unwise(matmul)
    if refused is not None:
        return Decision(site, Precision.BF16, *refused)
    wanted = Precision(recipe.backward)
    if wanted is Precision.BF16:
        return Decision(site, wanted, Reason.RECIPE, "backward in high precision")
    if seconds is not None and seconds[1] >= seconds[0] and follows.reason is not Reason.PINNED and follows is layer:
        detail = "{:.3g} -> {:.3g} us".format(*(1e6 * each for each in seconds))
        return Decision(site, Precision.BF16, Reason.SLOWER, detail, seconds=seconds)
    return Decision(site, wanted, Reason.QUANTIZED, _how(site.role, recipe, wanted), seconds=seconds)


def impossible(matmul: Matmul, gradients: set[fx.Node]) -> tuple[Reason, str] | None:
    """What no plan can put into FP4."""
    site = matmul.site
    if site.dtype not in DTYPES:
        return Reason.DTYPE, f"{site.dtype} operands"
    if site.op == "conv" or not is_backward(matmul.node):
        return Reason.BACKWARD, "not a matmul of the backward"
    if sum(operand in gradients for operand in (matmul.lhs, matmul.rhs)) != 1:
        return Reason.BACKWARD, "not a product of a gradient and a value of the forward"
    return uneven(matmul) if site.role is Role.DGRAD else None


def unwise(matmul: Matmul) -> tuple[Reason, str] | None:
    """What gains nothing from FP4 in the backward, whatever the device."""
    site = matmul.site
    if site.role is Role.DGRAD:
        return small(site)
    if isinstance(site.k, sympy.Integer) and site.k < MIN_CONTRACTION:
        return Reason.FEW_TOKENS, f"{site.k} tokens < {MIN_CONTRACTION}"
    return None


def _how(role: Role, recipe: Training, precision: Precision) -> str:
    rounding = "gradient rounded stochastically" if recipe.stochastic_rounding else "gradient rounded to nearest"
    size = recipe.hadamard_size(precision.value)
    return f"{rounding}, Hadamard {size}" if role is Role.WGRAD and size else rounding

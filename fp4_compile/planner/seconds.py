"""Seconds of a layer on a device: its forward product and, in training, the products of its backward."""

from __future__ import annotations

from fp4_compile.cost_model import Device, dgrad_seconds, evaluate, quantizer_seconds, wgrad_seconds
from fp4_compile.plan import Role, Site
from fp4_compile.planner.survey import Entry, number


def own_seconds(entry: Entry, device: Device) -> tuple[float, float]:
    """Seconds of the forward product in BF16, and in NVFP4 without the activation's quantizer."""
    batch = int(entry.site.batch) if entry.site.batch.is_Integer else 1
    rows = max(entry.rows // max(batch, 1), 1)
    k, n = int(entry.site.k), max(1, entry.elements // max(1, batch * int(entry.site.k)))
    trained = entry.weight is not None and entry.backward is not None
    found = evaluate(device, batch, rows, n, k, training=trained)
    other = 0.0 if entry.weight is not None else float(quantizer_seconds(device, batch * n, k))
    return found.bf16, found.gemm + found.weight_quantizer + other


def layer_seconds(entry: Entry, device: Device, consumers: int) -> tuple[float, float]:
    """As `own_seconds`, with the backward: each product of it in the precision that is faster.

    ``consumers``: layers that read the same activation and would share its quantizers.
    """
    bf16, nvfp4 = own_seconds(entry, device)
    for role in entry.backward or ():
        high, low = backward_seconds(entry.site, role, consumers, device)
        bf16 += high
        nvfp4 += min(high, low)
    return bf16, nvfp4


def activation_seconds(entry: Entry, device: Device) -> float:
    """Seconds of the quantizer of the activation; none where FP4 is decoded for BF16 tensor cores."""
    return float(quantizer_seconds(device, entry.rows, int(entry.site.k))) if device.nvfp4_flops else 0.0


def backward_seconds(layer: Site, role: Role, consumers: int, device: Device) -> tuple[float, float]:
    """Seconds of a layer's dgrad or wgrad in BF16, and in NVFP4 with its quantizers.

    Dynamic sizes count as in `Entry.rows`.
    """
    m, n, k = (max(1, int(number(size))) for size in (layer.batch * layer.m, layer.n, layer.k))
    return dgrad_seconds(device, m, n, k) if role is Role.DGRAD else wgrad_seconds(device, m, n, k, max(1, consumers))

"""From how many rows on NVFP4 is faster than BF16."""

from __future__ import annotations

import functools

from fp4_compile.cost_model.devices import Device
from fp4_compile.cost_model.roofline import compiled, evaluate

LIMIT = 2**20
"""Rows up to which NVFP4 has to stay faster."""
_CHUNK = 2**15


def break_even_rows(
    device: Device, n: int, k: int, *, consumers: int = 1, fused: bool = False, training: bool = False
) -> int | None:
    """Least M from which NVFP4 is faster and stays so up to `LIMIT`; None if there is none.

    The NVFP4 GEMM is charged with its quantizers; ``consumers``, ``fused`` and ``training`` are those of `times`.
    """
    last_loss = _last_rows(device, n, k, consumers, fused, training, faster=False)
    return last_loss + 1 if last_loss < LIMIT else None


def describe(device: Device, n: int, k: int, *, consumers: int = 1, fused: bool = False, training: bool = False) -> str:
    """``NVFP4 pays from M >= 384``, or ``NVFP4 never pays here: `` and why."""
    rows = break_even_rows(device, n, k, consumers=consumers, fused=fused, training=training)
    if rows is not None:
        return f"NVFP4 pays from M >= {rows}"
    if device.nvfp4_flops is None:
        why = f"{device.name} has no FP4 tensor cores"
    elif device.nvfp4_flops * (device.nvfp4_fraction or 0.0) <= device.bf16_flops * device.bf16_fraction:
        why = f"{device.name} multiplies in NVFP4 no faster than in BF16"
    else:
        t = evaluate(device, 1, LIMIT, n, k, consumers=consumers, fused=fused, training=training)
        saved, spent = (1e9 * seconds / LIMIT for seconds in (t.bf16 - t.gemm, t.quantizer))
        why = f"with N={n} the GEMM gets {saved:.2g} ns a row shorter, and quantizing the row takes {spent:.2g} ns"
    last_gain = _last_rows(device, n, k, consumers, fused, training, faster=True)
    if last_gain:
        why += f", and beyond M = {last_gain} it is no longer the weight's bandwidth that bounds the GEMM"
    return f"NVFP4 never pays here: {why}"


def power_of_two_threshold(rows: int) -> int:
    """``rows`` rounded up to a power of two, so that guards on a dynamic M are few and shared."""
    return 1 << max(rows - 1, 0).bit_length()


@functools.lru_cache(maxsize=4096)
def _last_rows(device: Device, n: int, k: int, consumers: int, fused: bool, training: bool, faster: bool) -> int:
    """Largest M up to `LIMIT` at which NVFP4 is, or is not, ``faster``; 0 if there is none.

    Waves make the difference a saw-tooth in M, so M after M is evaluated, from the top, in chunks that stay in a
    core's cache.
    """
    import torch

    seconds = compiled(device, consumers, fused, training, False, tensors=True)
    for end in range(LIMIT, 0, -_CHUNK):
        m = torch.arange(end - _CHUNK + 1, end + 1, dtype=torch.float64)
        bf16, gemm, quantizer, weight_quantizer = seconds(1, m, n, k)
        found = ((gemm + quantizer + weight_quantizer < bf16) == faster).nonzero()
        if found.numel():
            return int(m[found[-1]])
    return 0

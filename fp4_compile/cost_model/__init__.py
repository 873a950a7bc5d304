"""What a matmul costs in BF16 and in NVFP4 on a given device, and from how many rows on NVFP4 pays.

`device` looks a device up and `measure` measures this machine; `times` gives seconds as sympy expressions of
batch, M, N and K, `evaluate` the same as floats, and `break_even_rows` the least M that pays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "DEVICES",
    "Device",
    "Times",
    "bf16_seconds",
    "break_even_rows",
    "describe",
    "device",
    "dgrad_seconds",
    "evaluate",
    "gemm_flops",
    "load",
    "measure",
    "nvfp4_seconds",
    "padding_share",
    "power_of_two_threshold",
    "quantizer_seconds",
    "times",
    "weight_quantizer_seconds",
    "wgrad_seconds",
]

if TYPE_CHECKING:
    from fp4_compile.cost_model.break_even import break_even_rows, describe, power_of_two_threshold
    from fp4_compile.cost_model.device_table import DEVICES, device
    from fp4_compile.cost_model.devices import Device
    from fp4_compile.cost_model.gemm import gemm_flops, padding_share
    from fp4_compile.cost_model.measurement import load, measure
    from fp4_compile.cost_model.roofline import (
        Times,
        bf16_seconds,
        evaluate,
        nvfp4_seconds,
        quantizer_seconds,
        times,
        weight_quantizer_seconds,
    )
    from fp4_compile.cost_model.training import dgrad_seconds, wgrad_seconds

_HOMES = {
    "break_even": ("break_even_rows", "describe", "power_of_two_threshold"),
    "device_table": ("DEVICES", "device"),
    "devices": ("Device",),
    "gemm": ("gemm_flops", "padding_share"),
    "measurement": ("load", "measure"),
    "roofline": (
        "Times",
        "bf16_seconds",
        "evaluate",
        "nvfp4_seconds",
        "quantizer_seconds",
        "times",
        "weight_quantizer_seconds",
    ),
    "training": ("dgrad_seconds", "wgrad_seconds"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fp4_compile.cost_model.{module}"), name)
    raise AttributeError(f"module 'fp4_compile.cost_model' has no attribute {name!r}")

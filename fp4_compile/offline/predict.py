"""Predicted time of a launch, by the cost model, and how near the roofline that is.

The roofline is the device at its peak: all arithmetic at the tensor cores' full rate, or all bytes at the memory's,
whichever takes longer. What a launch is predicted to take is what published kernels reach of it, in whole waves,
and the time of a launch itself.
"""

from __future__ import annotations

import dataclasses

from fp4_compile.cost_model import Device, bf16_seconds, nvfp4_seconds
from fp4_compile.offline.generate import Launch


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one launch."""

    seconds: float
    roofline: float
    """Seconds at the device's peaks."""
    bound: str
    """What it waits for: ``compute``, ``memory``, or ``launch`` where starting it takes longer than its work."""

    @property
    def share(self) -> float:
        """Of the roofline that it reaches."""
        return self.roofline / self.seconds


def predict(launch: Launch, device: Device) -> Prediction:
    """What a launch takes on a device."""
    memory = launch.bytes / (device.memory * _memory_fraction(launch, device))
    compute = _compute(launch, device)
    work = max(memory, compute)
    bound = "launch" if work < device.launch else "compute" if compute > memory else "memory"
    peak = sum(flops / _peak(precision, device) for precision, flops in launch.flops.items())
    return Prediction(device.launch + work, max(launch.bytes / device.memory, peak), bound)


def _compute(launch: Launch, device: Device) -> float:
    """Seconds of the tensor cores, without those of starting the launch."""
    if launch.gemm is not None:
        return float(nvfp4_seconds(device, 1, *launch.gemm)) - device.launch
    if launch.product is not None:
        return float(bf16_seconds(device, *launch.product)) - device.launch
    return sum(launch.flops.values()) / (device.bf16_flops * device.bf16_fraction)


def _memory_fraction(launch: Launch, device: Device) -> float:
    if launch.quantizes is not None:
        return device.quantizer_fraction
    return device.nvfp4_memory_fraction if launch.gemm is not None else device.bf16_memory_fraction


def _peak(precision: str, device: Device) -> float:
    return device.nvfp4_flops if precision == "nvfp4" and device.nvfp4_flops is not None else device.bf16_flops

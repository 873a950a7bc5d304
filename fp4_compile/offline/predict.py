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
    why: str
    """What keeps it from the roofline, in figures."""

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
    roofline = max(launch.bytes / device.memory, _at_peak(launch, device))
    why = _why(launch, device, bound, work)
    return Prediction(device.launch + work, roofline, bound, why)


def _at_peak(launch: Launch, device: Device) -> float:
    return sum(flops / _peak(precision, device) for precision, flops in launch.flops.items())


def _why(launch: Launch, device: Device, bound: str, work: float) -> str:
    if bound == "launch":
        return f"starting it takes {1e6 * device.launch:.2g} us, its work {1e6 * work:.2g} us"
    if bound == "memory":
        share = _memory_fraction(launch, device)
        return f"{launch.bytes / 1e6:.4g} MB at {share:.0%} of the memory's peak, what published kernels reach"
    fp4 = launch.gemm is not None and device.nvfp4_flops is not None
    share = (device.nvfp4_fraction if fp4 else None) or device.bf16_fraction
    sizes = (launch.split, *launch.gemm) if launch.gemm is not None else launch.product
    rate = f"{share:.0%} of the peak rate, what published kernels reach"
    if sizes is None:
        return rate
    batch, m, n, _ = sizes
    rows, columns = device.nvfp4_tile if fp4 else device.bf16_tile
    tiles = batch * -(-m // rows) * -(-n // columns)
    waves = -(-tiles // device.sms)
    busy = tiles / (waves * device.sms)
    return f"{tiles} tiles of {rows}x{columns} keep {busy:.0%} of {device.sms} SMs busy (waves: {waves}), at {rate}"


def _compute(launch: Launch, device: Device) -> float:
    """Seconds of the tensor cores, without those of starting the launch."""
    if launch.gemm is not None:
        m, n, k = launch.gemm
        return float(nvfp4_seconds(device, launch.split, m, n, -(-k // launch.split))) - device.launch
    if launch.product is not None:
        return float(bf16_seconds(device, *launch.product)) - device.launch
    return sum(launch.flops.values()) / (device.bf16_flops * device.bf16_fraction)


def _memory_fraction(launch: Launch, device: Device) -> float:
    if launch.quantizes is not None:
        return device.quantizer_fraction
    return device.nvfp4_memory_fraction if launch.gemm is not None else device.bf16_memory_fraction


def _peak(precision: str, device: Device) -> float:
    return device.nvfp4_flops if precision == "nvfp4" and device.nvfp4_flops is not None else device.bf16_flops

"""What the cost model knows of a device: a handful of rates, each with where it comes from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fp4_compile.errors import DeviceError


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as the cost model sees it. Immutable and hashable; `digest` is for cache keys.

    Raises:
        DeviceError: a figure is out of its range, or has no source.
    """

    name: str
    """``sm_100``, ``cpu``, ``measured-cpu-1a2b3c4d``."""
    title: str
    """What people call it: ``B200``."""
    sms: int
    """Streaming multiprocessors, or CPU threads: output tiles that are worked on at a time."""
    bf16_flops: float
    """Dense peak, FLOP/s, accumulated in FP32."""
    bf16_fraction: float
    """Share of that peak which a large GEMM achieves."""
    bf16_memory_fraction: float
    """Share of ``memory`` at which a BF16 GEMM of few rows streams its weight."""
    bf16_tile: tuple[int, int]
    """Granularity (M, N) in which work is handed to the SMs. Below the tile a kernel computes, where libraries
    choose among tile sizes and split K."""
    nvfp4_flops: float | None
    """Dense peak, FLOP/s; None where FP4 is decoded and multiplied at the BF16 rate."""
    nvfp4_fraction: float | None
    """Share of that peak which a large GEMM achieves; None with ``nvfp4_flops``."""
    nvfp4_memory_fraction: float
    """Share of ``memory`` at which a GEMM of few rows streams its 4-bit weight and scales."""
    nvfp4_tile: tuple[int, int]
    """As ``bf16_tile``."""
    memory: float
    """Peak bandwidth of the device's memory, bytes/s."""
    launch: float
    """Least time a kernel takes on the device, seconds; the host's part is hidden by a CUDA graph."""
    quantizer_fraction: float
    """Share of ``memory`` that a pass of an activation quantizer achieves."""
    quantizer_passes: int
    """Times that quantizing reads its tensor: 2 where one amax is found for all of it first, 1 where each row has its
    own."""
    sources: Mapping[str, str] = dataclasses.field(hash=False)
    """For each field that holds a figure, the public source or the assumption it rests on."""

    def __post_init__(self) -> None:
        for field in FIGURES:
            value = getattr(self, field)
            if not _in_range(field, value) or (value is None) != (self.nvfp4_flops is None and field in _OPTIONAL):
                raise DeviceError(f"device {self.name!r}: {field} is {value!r}")
            if not self.sources.get(field):
                raise DeviceError(f"device {self.name!r}: {field} has no source")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """Read what `to_dict` gave.

        Raises:
            DeviceError: a field is missing, unknown, of the wrong type or out of its range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if data.keys() != names:
            raise DeviceError(f"not a device: fields {sorted(data.keys() ^ names)} are missing or unknown")
        if not isinstance(data["sources"], Mapping) or not all(isinstance(data[f], str) for f in ("name", "title")):
            raise DeviceError("not a device: the name, the title or the sources are of the wrong type")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**values)

    def digest(self) -> str:
        """Hex digest of every field."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


FIGURES = tuple(f.name for f in dataclasses.fields(Device) if f.name not in ("name", "title", "sources"))
"""The fields that hold figures, all of which need a source."""

_OPTIONAL = ("nvfp4_flops", "nvfp4_fraction")


def _in_range(field: str, value: object) -> bool:
    if value is None:
        return field in _OPTIONAL
    if field.endswith("_tile"):
        return isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if field == "sms":
        return isinstance(value, int) and value > 0
    if field == "quantizer_passes":
        return value in (1, 2)
    return 0 < value <= 1 if field.endswith("_fraction") else 0 < value < float("inf")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value

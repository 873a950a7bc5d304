"""Measure the machine at hand into a `Device`, from a few GEMMs, copies and fp4 operators.

A figure is the median over its shapes of what the formulas of `fp4_compile.cost_model.roofline` would need to give
the measured time. The fp4 operators are timed as they run here: on a machine without kernels for FP4 tensor
cores that is the emulation, and the device says what the emulation costs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fp4_compile.cost_model.devices import FIGURES, Device
from fp4_compile.errors import DeviceError

log = logging.getLogger(__name__)

SCHEMA = 1

_GPU_CALLS = 20
"""Calls of a tiny GEMM between two synchronizations: what the device needs for one when they queue up."""
_CPU_TILE = (16, 16)
_GPU_TILE = (128, 128)

_Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _Suite:
    """What is timed. Shapes are (M, N, K)."""

    large: tuple[_Shape, ...]
    thin: tuple[_Shape, ...]
    tiny: tuple[_Shape, ...]
    quantized: tuple[tuple[int, int], ...]
    copied: int
    seconds: float
    """Least time spent on each; see `_Timer`."""


_FULL = _Suite(
    large=((1024, 1024, 1024), (512, 2048, 1024), (2048, 512, 1536), (768, 1536, 768)),
    thin=((1, 2048, 1024), (2, 1024, 3072), (4, 4096, 2048)),
    tiny=((1, 16, 16), (4, 32, 32), (16, 16, 32)),
    quantized=((1024, 1024), (512, 4096), (2048, 512)),
    copied=256 << 20,
    seconds=0.3,
)
_QUICK = _Suite(
    large=((512, 512, 512), (384, 768, 512)),
    thin=((1, 2048, 1024), (2, 1024, 2048)),
    tiny=((1, 16, 16), (4, 32, 32)),
    quantized=((512, 1024),),
    copied=32 << 20,
    seconds=0.05,
)
_GPU_SCALE = 8
"""A GPU gets these shapes with N and K, and M where it is not small, this many times larger."""


def measure(path: str | os.PathLike[str] | None = None, *, quick: bool = False) -> Device:
    """Measure this machine, its GPU if CUDA is available, else its CPU with torch's current number of threads.

    ``path``: where to save the result for `load`. ``quick``: rougher figures in less time. Shows a progress bar if
    tqdm is installed and standard error is a terminal.

    Raises:
        DeviceError: the file cannot be written.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    figures = _fit(kind, _QUICK if quick else _FULL)
    title, method = _machine(kind)
    unnamed = Device(f"measured-{kind}", title, **figures, sources=dict.fromkeys(FIGURES, method))
    measured = dataclasses.replace(unnamed, name=f"measured-{kind}-{unnamed.digest()[:8]}")
    log.info("measured %s: %s", measured.name, figures)
    if path is not None:
        _save(measured, path)
    return measured


def load(path: str | os.PathLike[str]) -> Device:
    """Read a device that `measure` saved.

    Raises:
        DeviceError: the file cannot be read, is of another version, or is not as it was written.
    """
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DeviceError(f"cannot read the measurements {name!r}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise DeviceError(f"{name!r} has schema {found!r}; this version reads {SCHEMA}: measure again")
    try:
        device = Device.from_dict(data["device"])
    except (AttributeError, KeyError, TypeError) as error:
        raise DeviceError(f"{name!r} holds no measured device: {error!r}") from error
    if device.digest() != data.get("digest"):
        raise DeviceError(f"{name!r} is not as it was written: its digest does not match; measure again")
    return device


def _save(device: Device, path: str | os.PathLike[str]) -> None:
    text = json.dumps({"schema": SCHEMA, "digest": device.digest(), "device": device.to_dict()}, indent=1)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"cannot write the measurements to {os.fspath(path)!r}: {error.strerror}") from error


def _fit(kind: str, suite: _Suite) -> dict[str, Any]:
    """The figures of a `Device`."""
    timer = _Timer(kind, suite.seconds)
    scale = _GPU_SCALE if kind == "cuda" else 1
    large = [(m * scale, n * scale, k * scale) for m, n, k in suite.large]
    thin = [(m, n * scale, k * scale) for m, n, k in suite.thin]
    jobs: list[tuple[str, Callable[[], float]]] = []

    def add(name: str, job: Callable[..., float], *arguments: Any) -> None:
        jobs.append((name, lambda: job(*arguments)))

    for shape in suite.tiny:
        add("launch", timer.gemm, shape, _GPU_CALLS if kind == "cuda" else 1)
    for shape in large:
        add("bf16_rate", lambda shape: _flops(shape) / timer.gemm(shape), shape)
        add("nvfp4_rate", lambda shape: _flops(shape) / timer.scaled_mm(shape), shape)
    for shape in thin:
        add("bf16_stream", lambda shape: 2 * shape[1] * shape[2] / timer.gemm(shape), shape)
        add("nvfp4_stream", lambda shape: 0.5625 * shape[1] * shape[2] / timer.scaled_mm(shape), shape)
    for rows, k in suite.quantized:
        elements = rows * scale * k * scale
        add("quantizer", lambda r, k, e: (2 + 2.5625) * e / timer.quantizer(r, k), rows * scale, k * scale, elements)
    add("copy", timer.copy_bandwidth, suite.copied * scale)

    samples: dict[str, list[float]] = {}
    for name, job in _progress(jobs, "measuring"):
        samples.setdefault(name, []).append(job())
    found = {name: median(values) for name, values in samples.items()}
    return _figures(kind, found)


def _figures(kind: str, found: dict[str, float]) -> dict[str, Any]:
    # A cached weight may stream faster than memory copies, and a fraction is at most 1.
    memory = max(found[name] for name in ("copy", "bf16_stream", "nvfp4_stream", "quantizer"))
    tile = _GPU_TILE if kind == "cuda" else _CPU_TILE
    sms = torch.get_num_threads()
    if kind == "cuda":
        sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "sms": sms,
        "bf16_flops": found["bf16_rate"],
        "bf16_fraction": 1.0,
        "bf16_memory_fraction": found["bf16_stream"] / memory,
        "bf16_tile": tile,
        "nvfp4_flops": found["nvfp4_rate"],
        "nvfp4_fraction": 1.0,
        "nvfp4_memory_fraction": found["nvfp4_stream"] / memory,
        "nvfp4_tile": tile,
        "memory": memory,
        "launch": found["launch"],
        "quantizer_fraction": found["quantizer"] / memory,
        "quantizer_passes": 2,
    }


class _Timer:
    """Seconds of one call: the fastest of five or more, for what else the machine does can only add to them."""

    def __init__(self, kind: str, seconds: float) -> None:
        self._kind = kind
        self._seconds = seconds

    def gemm(self, shape: _Shape, calls: int = 1) -> float:
        m, n, k = shape
        a, b = self._random(m, k), self._random(n, k)
        return self._fastest(lambda: torch.nn.functional.linear(a, b), calls)

    def scaled_mm(self, shape: _Shape) -> float:
        from fp4_compile import ops

        m, n, k = shape
        operands: list[Any] = []
        for x in (self._random(m, k), self._random(n, k)):
            amax = ops.amax(x)
            operands += [*ops.quantize(x, amax), amax]
        return self._fastest(lambda: ops.scaled_mm(*operands, None, torch.bfloat16))

    def quantizer(self, rows: int, k: int) -> float:
        from fp4_compile import ops

        x = self._random(rows, k)
        return self._fastest(lambda: ops.quantize(x, ops.amax(x)))

    def copy_bandwidth(self, size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=self._kind)
        target = torch.empty_like(source)
        return 2 * size / self._fastest(lambda: target.copy_(source))

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        # A generator of its own: measuring must not move the user's random numbers.
        generator = torch.Generator(self._kind).manual_seed(0)
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=self._kind, generator=generator)

    def _fastest(self, call: Callable[[], object], calls: int = 1) -> float:
        samples: list[float] = []
        with torch.no_grad():
            call()
            end = time.perf_counter() + self._seconds
            while len(samples) < 5 or time.perf_counter() < end:
                self._wait()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                self._wait()
                samples.append((time.perf_counter() - start) / calls)
        return min(samples)

    def _wait(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize()


def _flops(shape: _Shape) -> int:
    m, n, k = shape
    return 2 * m * n * k


def _machine(kind: str) -> tuple[str, str]:
    """Title, and how it was measured."""
    if kind == "cuda":
        title, units = torch.cuda.get_device_name(0), ""
    else:
        title, units = platform.machine(), f", {torch.get_num_threads()} threads"
        title += f", {torch.backends.cpu.get_cpu_capability()}"
    return title, f"measured with torch {torch.__version__}{units}"


def _progress(items: Sequence[Any], label: str) -> Iterable[Any]:
    """The items, behind a progress bar if tqdm is there and a person is watching."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return items
    bar: Iterable[Any] = tqdm(items, desc=label, ncols=80, leave=False, file=sys.stderr, disable=None)
    return bar

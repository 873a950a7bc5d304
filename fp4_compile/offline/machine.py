"""A GPU that is not there: what Inductor and Triton ask of a device, answered from a table.

Inside `offline_device` code is generated for the target as if it were device 0. On leaving, every name in torch
and Triton that was replaced holds what it held before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fp4_compile._torch_compat import cuda_interface, device_interfaces, fresh_device_answers
from fp4_compile.cost_model import Device
from fp4_compile.errors import TargetError
from fp4_compile.options import find_device

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to generate code for."""

    device: Device
    """Its rates, for predicted times."""
    sm: int
    """Compute capability as one number: 100 for sm_100."""
    shared_memory: int
    """Most bytes of shared memory that one block may use (CUDA C++ Programming Guide, technical specifications)."""
    threads_per_sm: int
    """Resident threads of a multiprocessor (same source)."""
    l2: int
    """Bytes of the L2 cache (NVIDIA's whitepapers; of sm_100, sm_103 and sm_121 what others quote)."""

    @property
    def has_fp4(self) -> bool:
        """Whether its tensor cores multiply FP4."""
        return self.sm >= 100

    @property
    def name(self) -> str:
        """The device's name in the cost model."""
        return self.device.name


_LIMITS = {
    80: (163 * _KIB, 2048, 40 * _KIB * _KIB),
    89: (99 * _KIB, 1536, 72 * _KIB * _KIB),
    90: (227 * _KIB, 2048, 50 * _KIB * _KIB),
    100: (227 * _KIB, 2048, 126 * _KIB * _KIB),
    103: (227 * _KIB, 2048, 126 * _KIB * _KIB),
    120: (99 * _KIB, 1536, 96 * _KIB * _KIB),
    121: (99 * _KIB, 1536, 24 * _KIB * _KIB),
}


def find_target(name: str) -> Target:
    """The GPU of this name in `fp4_compile.cost_model.DEVICES`, if code can be generated for it here.

    Raises:
        DeviceError: there is no device of this name.
        TargetError: it is no GPU, or this installation cannot compile for it.
    """
    device = find_device(name)
    digits = device.name.removeprefix("sm_").partition("-")[0]
    if not digits.isdigit() or int(digits) not in _LIMITS:
        raise TargetError(
            f"target {name!r} is no GPU that code can be generated for; those are {[f'sm_{sm}' for sm in _LIMITS]}"
        )
    sm = int(digits)
    _require_triton(sm)
    return Target(device, sm, *_LIMITS[sm])


def _require_triton(sm: int) -> None:
    try:
        import triton
        from triton.backends import backends
    except ImportError as error:
        raise TargetError(f"target sm_{sm}: Triton is not installed ({error}); install triton>=3.8") from error
    if "nvidia" not in backends:
        raise TargetError(
            f"target sm_{sm}: this Triton {triton.__version__} has no NVIDIA backend; install triton>=3.8"
        )
    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    if (major, minor) < (3, 8):
        raise TargetError(f"target sm_{sm}: Triton {triton.__version__} is too old; install triton>=3.8")
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        get_ptxas(sm)
    except Exception as error:
        raise TargetError(f"target sm_{sm}: no ptxas for it ({error}); reinstall triton>=3.8") from error


@functools.cache
def device_properties(target: Target) -> Any:
    """What ``torch.cuda.get_device_properties`` says of the target."""
    return _Properties(
        name=target.device.title,
        major=target.sm // 10,
        minor=target.sm % 10,
        multi_processor_count=target.device.sms,
        L2_cache_size=target.l2,
        max_threads_per_multi_processor=target.threads_per_sm,
        shared_memory_per_block_optin=target.shared_memory,
        shared_memory_per_block=48 * _KIB,
        shared_memory_per_multiprocessor=target.shared_memory + _KIB,
    )


@dataclasses.dataclass(frozen=True)
class _Properties:
    name: str
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    max_threads_per_multi_processor: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    total_memory: int = 80 * 2**30
    gcnArchName: None = None


@contextlib.contextmanager
def offline_device(target: Target) -> Iterator[None]:
    """Answer for the target wherever Inductor and Triton ask for the CUDA device; restore all of it afterwards."""
    from triton import knobs
    from triton.backends.nvidia import compiler
    from triton.runtime import driver

    properties = device_properties(target)
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (target.sm // 10, target.sm % 10),
        "get_device_name": lambda device=None: properties.name,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
    }
    interface = _interface(target, properties)
    interfaces = device_interfaces()  # filled before there seems to be a device, or that one would stay in it
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.dict(interfaces, {"cuda": interface, "cuda:0": interface}))
        stack.enter_context(mock.patch.object(driver, "_active", _driver(target)))
        stack.enter_context(fresh_device_answers())
        # Triton's own: Inductor looks for a CUDA toolkit's, and warns where there is none.
        stack.enter_context(knobs.nvidia.scope())
        knobs.nvidia.libdevice_path = str(Path(compiler.__file__).parent / "lib" / "libdevice.10.bc")
        yield


def _driver(target: Target) -> Any:
    """A Triton driver that knows its target and owns no device."""
    from triton.backends.compiler import GPUTarget

    class OfflineDriver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", target.sm, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))

    return OfflineDriver()


def _interface(target: Target, properties: Any) -> type:
    """Dynamo's interface to a device, as the target would answer it."""

    class OfflineCuda(cuda_interface()):  # type: ignore[misc]
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        synchronize = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(lambda device=None: target.sm)
        get_device_properties = staticmethod(lambda device=None: properties)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

        class Worker:
            set_device = staticmethod(lambda device: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: properties)

    return OfflineCuda

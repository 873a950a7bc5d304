"""The devices the cost model knows without measuring, and where each figure comes from.

``owner/repo#n`` is a thread on GitHub; short names: triton = triton-lang/triton, torchao = pytorch/ao,
vllm = vllm-project/vllm, flashinfer = flashinfer-ai/flashinfer, helion = pytorch/helion. "As X" marks an
assumption: nobody published the figure for this device. Achievable fractions are what published kernels reach on
large shapes; the effective BF16 tile of 64x64 is what cuBLAS's times over M = 1..16384 of vllm#20646 look like.
"""

from __future__ import annotations

from typing import Any

from fp4_compile.cost_model.devices import FIGURES, Device
from fp4_compile.errors import DeviceError
from fp4_compile.options import suggest

_LAUNCH = (2e-6, "torchao roofline_utils.py, KERNEL_LAUNCH_OVERHEAD_SEC")
_BF16_TILE = ((64, 64), "effective: fitted to cuBLAS on B200, vllm#20646")
_FP4_TILE = ((128, 128), "tcgen05 block-scaled MMA needs M=128; triton#9697 tiles N by 128 or 256")
_NO_FP4 = (None, "no FP4 tensor cores before Blackwell: NVIDIA Blackwell architecture brief")


def _device(name: str, title: str, base: Device | None = None, /, **figures: tuple[Any, str]) -> Device:
    """A device; what is not given is assumed as on ``base``."""
    if base is not None:
        assumed = {f: (getattr(base, f), f"as {base.name}: {base.sources[f]}") for f in FIGURES if f not in figures}
        figures = {**assumed, **figures}
    values = {field: value for field, (value, _) in figures.items()}
    return Device(name, title, **values, sources={field: source for field, (_, source) in figures.items()})


_B200 = _device(
    "sm_100",
    "B200",
    sms=(148, "chipsandcheese.com, B200 microbenchmarks"),
    bf16_flops=(2.25e15, "torchao roofline_utils.py"),
    bf16_fraction=(0.66, "cuBLAS 1421 TFLOP/s at 8192x6144x4096, 20.8 waves: vllm#20646"),
    bf16_memory_fraction=(0.84, "torchao roofline_utils.py (B300); 5-6 TB/s at M=1: flashinfer#1732"),
    bf16_tile=_BF16_TILE,
    nvfp4_flops=(9e15, "torchao roofline_utils.py"),
    nvfp4_fraction=(0.62, "cuBLAS 5590 TFLOP/s at 8192x8192x8192: triton#9697"),
    nvfp4_memory_fraction=(0.6, "4.6 TB/s of weight at M=128..256, triton python/examples/gluon; 0.71 helion#2417"),
    nvfp4_tile=_FP4_TILE,
    memory=(7.67e12, "device properties: 7680 bit, 3.996 GHz, two transfers; NVIDIA data sheet 7.7 to 8 TB/s"),
    launch=_LAUNCH,
    quantizer_fraction=(0.53, "Inductor, 168 us at 16384x16384: pytorch/pytorch#167098; 0.37 to 0.84 elsewhere"),
    quantizer_passes=(1, "the kernels of this package: a scale for each row"),
)

_B300 = _device(
    "sm_103",
    "B300",
    _B200,
    sms=(148, "sgl-project/sglang#38215"),
    bf16_flops=(2.25e15, "torchao roofline_utils.py"),
    bf16_fraction=(0.82, "torchao roofline_utils.py"),
    bf16_memory_fraction=(0.84, "torchao roofline_utils.py"),
    nvfp4_flops=(1.4e16, "NVIDIA HGX B300 data sheet, half of the sparse figure"),
    nvfp4_fraction=(0.5, "K=64 instructions 0.46, K=96 0.52 to 0.57: triton python/examples/gluon"),
    nvfp4_memory_fraction=(0.58, "4.6 TB/s of weight at M=128..256: triton python/examples/gluon"),
    memory=(8e12, "NVIDIA HGX B300 data sheet"),
)

_5090 = _device(
    "sm_120",
    "GeForce RTX 5090",
    sms=(170, "NVIDIA RTX Blackwell whitepaper"),
    bf16_flops=(2.53e14, "measured at boost clock, FP32 accumulation at quarter rate: Neroued/ninfer#160"),
    bf16_fraction=(0.9, "213 to 235 TFLOP/s at M=4096: vllm#38338"),
    bf16_memory_fraction=(0.91, "1628 GB/s reachable: kekzl/imp#1766"),
    bf16_tile=_BF16_TILE,
    nvfp4_flops=(2.01e15, "4096 FLOP a cycle and SM, measured at 2.87 GHz: Neroued/ninfer#160"),
    nvfp4_fraction=(0.44, "Triton dot_scaled 871 TFLOP/s at M=4096: vllm#38338"),
    nvfp4_memory_fraction=(0.78, "output head at 1393 GB/s: kekzl/imp#1766"),
    nvfp4_tile=((128, 128), "99 KB of shared memory a block: kekzl/imp#606"),
    memory=(1.792e12, "NVIDIA RTX Blackwell whitepaper"),
    launch=_LAUNCH,
    quantizer_fraction=(0.71, "135 us at 8192x8192 on an RTX PRO 6000: vllm#48548"),
    quantizer_passes=(1, "the kernels of this package: a scale for each row"),
)

_PRO_6000 = _device(
    "sm_120-pro6000",
    "RTX PRO 6000 Blackwell",
    _5090,
    sms=(188, "NVIDIA RTX PRO 6000 Blackwell data sheet"),
    bf16_flops=(5.04e14, "full rate with FP32 accumulation: sgl-project/sglang#33711"),
    nvfp4_flops=(2.02e15, "NVIDIA RTX PRO 6000 Blackwell data sheet, half of the sparse figure"),
    nvfp4_fraction=(0.81, "CuTe-DSL 1629 TFLOP/s at 8192x8192x8192: NVIDIA/cutlass#3272"),
)

_GB10 = _device(
    "sm_121",
    "GB10 (DGX Spark)",
    _5090,
    sms=(48, "NVIDIA DGX Spark specifications"),
    bf16_flops=(1.25e14, "a quarter of the FP4 rate, as on sm_100"),
    nvfp4_flops=(5e14, "NVIDIA DGX Spark specifications: 1 PFLOP/s is the sparse figure"),
    nvfp4_fraction=(0.54, "Triton dot_scaled 270 TFLOP/s: triton#10010"),
    memory=(2.73e11, "NVIDIA DGX Spark specifications"),
)

_H200 = _device(
    "sm_90",
    "H200 SXM",
    _B200,
    sms=(132, "NVIDIA H200 data sheet"),
    bf16_flops=(9.89e14, "NVIDIA H200 data sheet"),
    bf16_fraction=(0.78, "torchao roofline_utils.py (H100)"),
    bf16_memory_fraction=(0.92, "torchao roofline_utils.py (H100)"),
    nvfp4_flops=_NO_FP4,
    nvfp4_fraction=_NO_FP4,
    memory=(4.8e12, "NVIDIA H200 data sheet"),
)

_A100 = _device(
    "sm_80",
    "A100 SXM 80 GB",
    _H200,
    sms=(108, "NVIDIA A100 data sheet"),
    bf16_flops=(3.12e14, "NVIDIA A100 data sheet"),
    memory=(2.04e12, "NVIDIA A100 data sheet"),
)

_4090 = _device(
    "sm_89",
    "GeForce RTX 4090",
    _H200,
    sms=(128, "NVIDIA Ada whitepaper"),
    bf16_flops=(1.652e14, "NVIDIA Ada whitepaper, FP32 accumulation, dense"),
    memory=(1.008e12, "NVIDIA Ada whitepaper"),
)

_ZEN5 = "torch 2.13 with oneDNN on two Zen 5 vCPUs, per core"
_XEON = "benchmarks/cpu.py on two cores of a Xeon at 2.6 GHz with AVX-512 VNNI"

_CPU = _device(
    "cpu",
    "a CPU of eight cores with AVX-512 VNNI and no BF16 instructions; cost_model.measure() gives the one at hand",
    sms=(8, "a desktop CPU"),
    bf16_flops=(2.2e11, f"torch's linear, 27 GFLOP/s a core at M=512 and 2048: {_XEON}"),
    bf16_fraction=(1.0, "bf16_flops is what a large GEMM achieves"),
    bf16_memory_fraction=(0.6, f"59 and 67 % of what reading memory reaches, at M=1: {_XEON}"),
    bf16_tile=((16, 16), "AVX-512 registers hold 16 columns"),
    nvfp4_flops=(1.2e12, f"exact int8 products, 150 GFLOP/s a core: {_XEON}"),
    nvfp4_fraction=(1.0, "nvfp4_flops is what a large GEMM achieves"),
    nvfp4_memory_fraction=(0.7, f"67 and 75 % of what reading memory reaches, at M=1: {_XEON}"),
    nvfp4_tile=((16, 16), "AVX-512 registers hold 16 columns"),
    memory=(8.36e10, "STREAM, one socket: kvcache-ai/ktransformers#2175"),
    launch=(1e-5, f"a call of an operator of this package, 5 to 12 us: {_XEON}"),
    quantizer_fraction=(0.25, f"2.5 ms for 2048x2048 with its amax, in cache: {_XEON}"),
    quantizer_passes=(2, "the operators of this package: the amax of the whole tensor first"),
)

_CPU_BF16 = _device(
    "cpu-bf16",
    "the same with AVX-512 BF16",
    _CPU,
    bf16_flops=(3.6e12, f"450 GFLOP/s a core: {_ZEN5}"),
    bf16_memory_fraction=(0.5, f"15 GB/s a core at M=1, no more than the socket has: {_ZEN5}"),
)

DEVICES: dict[str, Device] = {
    known.name: known for known in (_A100, _4090, _H200, _B200, _B300, _5090, _PRO_6000, _GB10, _CPU, _CPU_BF16)
}
"""Every known device by its name."""


def device(name: str) -> Device:
    """The device of this name.

    Raises:
        DeviceError: there is none; the message suggests the nearest.
    """
    if name not in DEVICES:
        raise DeviceError(f"unknown device {name!r}{suggest(name, list(DEVICES))}; the devices are {list(DEVICES)}")
    return DEVICES[name]

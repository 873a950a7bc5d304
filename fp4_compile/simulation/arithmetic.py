"""The operations of Triton's interpreter that differ from a GPU's, as a GPU does them.

Triton 3.8's interpreter rounds BF16 half up and computes with its bits as integers, rounds E4M3 half up and wraps
where a GPU saturates, reads every scale of a scaled product as E8M0, rounds an FMA twice, and refuses libdevice and
inline PTX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fp4_compile.errors import SimulationError
from fp4_compile.numerics import decode_e2m1, unpack
from fp4_compile.simulation import libdevice, ptx

Array = np.ndarray[Any, Any]


@functools.cache
def builder_class() -> type:
    """The interpreter's builder of operations, corrected."""
    from triton.runtime import interpreter

    return type("SimulatorBuilder", (interpreter.InterpreterBuilder,), {name: globals()[name] for name in _METHODS})


def _base() -> Any:
    from triton.runtime import interpreter

    return interpreter.InterpreterBuilder


_METHODS = (
    "binary_op",
    "unary_op",
    "cast_impl",
    "create_dot",
    "create_dot_scaled",
    "create_erf",
    "create_extern_elementwise",
    "create_fma",
    "create_fp_to_fp",
    "create_inline_asm",
    "get_bf16",
)


def _handle(data: Any, dtype: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(np.asarray(data), dtype)


def _decode(handle: Any) -> Array:
    """The values of a handle: BF16 and E4M3 as float32, others as they are."""
    name = handle.dtype.scalar.name
    if name == "bf16":
        return np.asarray(ptx.from_bf16(handle.data))
    if name == "fp8e4nv":
        return np.asarray(ptx.from_e4m3(handle.data))
    if name.startswith("fp8"):
        raise SimulationError(f"numbers of type {name} are not simulated")
    return np.asarray(handle.data)


def _encode(values: Array, dtype: Any) -> Any:
    """A handle of a type with the given values, rounded to nearest even."""
    from triton.runtime.interpreter import _get_np_dtype

    scalar = dtype.scalar
    if scalar.name == "bf16":
        return _handle(ptx.to_bf16(values), scalar)
    if scalar.name == "fp8e4nv":
        return _handle(ptx.to_e4m3(values), scalar)
    if scalar.name.startswith("fp8"):
        raise SimulationError(f"numbers of type {scalar.name} are not simulated")
    return _handle(values.astype(_get_np_dtype(scalar)), scalar)


def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
    """Element by element; BF16 through float32, where every result of +, - and * is exact enough to round once."""
    scalar = lhs.dtype.scalar
    if scalar.name != "bf16":
        return _base().binary_op(self, lhs, rhs, op)
    values = op(_decode(lhs), _decode(rhs))
    return _handle(values, scalar) if values.dtype == np.bool_ else _encode(values, scalar)


def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
    """As `binary_op`."""
    if arg.dtype.scalar.name != "bf16":
        return _base().unary_op(self, arg, op)
    return _encode(op(_decode(arg)), arg.dtype)


def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    """Conversions between numbers of any two types."""
    return _encode(_decode(src), dst_type)


def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    """Conversions between floats, to nearest even."""
    from triton._C.libtriton import ir

    if rounding_mode not in (None, ir.ROUNDING_MODE.RTNE):
        raise SimulationError(f"rounding {rounding_mode} is not simulated")
    return _encode(_decode(src), dst_type)


def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """One rounding."""
    if z.dtype.scalar.name != "fp32":
        raise SimulationError(f"an FMA of type {z.dtype.scalar.name} is not simulated")
    return _handle(ptx.fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)


def create_erf(self: Any, arg: Any) -> Any:
    """The error function, by array."""
    return _handle(torch.erf(torch.from_numpy(np.array(arg.data))).numpy(), arg.dtype.scalar)


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Exact products, summed in float32 in NumPy's order; TF32 is not imitated."""
    return _handle(np.matmul(_decode(a), _decode(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


def create_dot_scaled(
    self: Any,
    lhs: Any,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: Any,
    rhs_scale: Any,
    rhs_format: Any,
    fast_math: bool,
    lhs_k_pack: bool,
    rhs_k_pack: bool,
    acc: Any,
) -> Any:
    """A product of FP4 operands with a scale for every block, E4M3 or E8M0 by its type, summed in float32."""
    if not (lhs_k_pack and rhs_k_pack):
        raise SimulationError("FP4 operands packed along M or N are not simulated")
    left = _scaled(lhs.data, lhs_scale, lhs_format)
    right = _scaled(rhs.data.swapaxes(-1, -2), rhs_scale, rhs_format).swapaxes(-1, -2)
    return _handle(np.matmul(left, right) + acc.data, acc.dtype.scalar)


def _scaled(packed: Array, scale: Any, number_format: Any) -> Array:
    from triton._C.libtriton import ir

    if number_format != ir.ScaleDotElemTypeTY.E2M1:
        raise SimulationError(f"scaled products of {number_format} are not simulated")
    values = np.asarray(decode_e2m1(unpack(torch.from_numpy(np.array(packed, np.uint8)))).numpy())
    factors = _decode(scale)
    if scale.dtype.scalar.name == "uint8":
        exponents = torch.from_numpy(np.array(scale.data)).view(torch.float8_e8m0fnu)
        factors = np.asarray(exponents.to(torch.float32).numpy())
    return np.asarray(values * np.repeat(factors, values.shape[-1] // factors.shape[-1], axis=-1))


def create_extern_elementwise(
    self: Any, library: str, path: str, symbol: str, arguments: Sequence[Any], result: Any, is_pure: bool
) -> Any:
    """A function of libdevice."""
    return _encode(np.asarray(libdevice.call(symbol, [_decode(a) for a in arguments])), result)


def create_inline_asm(
    self: Any, assembly: str, constraints: str, values: Sequence[Any], types: Sequence[Any], is_pure: bool, pack: int
) -> Any:
    """Inline PTX: each instance of it gets ``pack`` elements of every operand, in registers of 32 bits."""
    kinds = constraints.replace(" ", "").split(",")
    outputs = [kind for kind in kinds if kind.startswith("=")]
    if not {kind.lstrip("=") for kind in kinds} <= {"r", "f"}:
        raise SimulationError(f"inline PTX: constraints {constraints!r} are not simulated")
    shape = values[0].data.shape
    registers = [register for value in values for register in _registers(value.data, pack)]
    widths = [kind.scalar.primitive_bitwidth for kind in types]
    counts = [max(1, pack * width // 32) for width in widths]
    if len(registers) != len(kinds) - len(outputs) or sum(counts) != len(outputs):
        raise SimulationError(f"inline PTX: constraints {constraints!r} do not fit operands of {pack} elements")
    results = ptx.run(assembly, registers, len(outputs))
    handles = []
    for kind, count in zip(types, counts, strict=True):
        handles.append(_unregister(results[:count], kind, shape, pack))
        results = results[count:]
    return _Results(handles)


def _registers(data: Array, pack: int) -> list[Array]:
    """The elements of one operand, ``pack`` an instance, as 32-bit registers of all instances."""
    width = data.dtype.itemsize
    if width * pack < 4:
        raise SimulationError("inline PTX: operands that do not fill a register are not simulated")
    words = np.ascontiguousarray(data).reshape(-1, pack).view(np.uint32)
    return [words[:, i] for i in range(width * pack // 4)]


def _unregister(registers: Sequence[Array], kind: Any, shape: tuple[int, ...], pack: int) -> Any:
    from triton.runtime.interpreter import _get_np_dtype

    scalar = kind.scalar
    dtype = _get_np_dtype(scalar)
    words = np.stack([np.asarray(r).astype(np.uint32) for r in registers], -1)
    return _handle(np.ascontiguousarray(words).view(dtype)[:, :pack].reshape(shape), scalar)


class _Results:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        """The output tensor at a position."""
        return self._handles[index]


def get_bf16(self: Any, value: float) -> Any:
    """A constant, which Triton's interpreter has for the other floats alone."""
    import triton.language as tl

    return _handle(ptx.to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

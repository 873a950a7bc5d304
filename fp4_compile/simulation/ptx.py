"""Execute inline PTX on arrays: the instructions that FP4 kernels use, each as the PTX ISA defines it.

A register is an array of the bits of all elements at once. The text of the assembly is what runs, so a swapped operand
gives swapped nibbles here as it would on a GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fp4_compile.errors import SimulationError
from fp4_compile.numerics import pack, round_e2m1, round_e2m1_stochastic

Bits = np.ndarray[Any, Any]

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def run(assembly: str, operands: Sequence[Bits], outputs: int) -> list[Bits]:
    """Execute an inline assembly text.

    Args:
        assembly: statements as ``tl.inline_asm_elementwise`` takes them; ``$0`` to ``$outputs - 1`` are written.
        operands: the bits of the inputs, one unsigned array a register, all of one shape.
        outputs: how many output registers there are.

    Returns:
        The output registers' bits.

    Raises:
        SimulationError: an instruction or a form of it is not known here.
    """
    registers: dict[str, Bits] = {f"${outputs + i}": operand for i, operand in enumerate(operands)}
    with np.errstate(all="ignore"):
        for predicate, opcode, arguments in _parse(assembly):
            execute = _INSTRUCTIONS.get(opcode)
            if execute is None:
                raise SimulationError(f"inline PTX: {opcode!r} is not simulated; it is in {assembly!r}")
            destination, *sources = arguments
            values = [_read(registers, source, assembly) for source in sources]
            result = execute(*values)
            if predicate is not None:
                result = np.where(_read(registers, predicate, assembly), result, registers[destination])
            _write(registers, destination, result)
    missing = [f"${i}" for i in range(outputs) if f"${i}" not in registers]
    if missing:
        raise SimulationError(f"inline PTX: {missing} are never written in {assembly!r}")
    return [registers[f"${i}"] for i in range(outputs)]


@functools.cache
def _parse(assembly: str) -> tuple[tuple[str | None, str, tuple[Any, ...]], ...]:
    text = assembly.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    found = []
    for statement in filter(None, (part.strip() for part in text.split(";"))):
        if statement.startswith(".reg"):
            continue
        match = re.fullmatch(r"(?:@(\w+)\s+)?([\w.:]+)\s+(.*)", statement, re.DOTALL)
        if match is None:
            raise SimulationError(f"inline PTX: {statement!r} cannot be read")
        predicate, opcode, rest = match.groups()
        arguments = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        found.append((predicate, opcode, tuple(_operand(a) for a in arguments)))
    return tuple(found)


def _operand(text: str) -> Any:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16))
    if re.fullmatch(r"0x[0-9A-Fa-f]+|\d+", text):
        return np.uint32(int(text, 0))
    return text


def _read(registers: dict[str, Bits], operand: Any, assembly: str) -> Any:
    if isinstance(operand, tuple):
        return tuple(_read(registers, part, assembly) for part in operand)
    if not isinstance(operand, str):
        return operand
    if operand not in registers:
        raise SimulationError(f"inline PTX: {operand} is read before it is written in {assembly!r}")
    return registers[operand]


def _write(registers: dict[str, Bits], destination: Any, value: Any) -> None:
    if isinstance(destination, str):
        registers[destination] = value
        return
    width = value.dtype.itemsize * 8 // len(destination)
    for i, name in enumerate(destination):
        registers[name] = (value >> value.dtype.type(i * width)).astype(_UNSIGNED[width])


def _f32(bits: Any) -> Any:
    return np.asarray(bits, np.uint32).view(np.float32)


def _bits(values: Any) -> Bits:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _move(source: Any) -> Bits:
    """A register, or several into a wider one, the first lowest."""
    if not isinstance(source, tuple):
        return np.asarray(source)
    width = source[0].dtype.itemsize * 8
    wide = _UNSIGNED[width * len(source)]
    parts = [part.astype(wide) << wide(i * width) for i, part in enumerate(source)]
    return np.asarray(functools.reduce(np.bitwise_or, parts))


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32 arrays, rounded once."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    # The sum's error, exactly; then rounding to odd makes the second rounding, to float32, the only one that counts.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact, odd, total).astype(np.float32)


def _reciprocal(a: Any) -> Bits:
    """``rcp.approx.ftz.f32``: within 1 ulp. Here rounded towards zero, for what builds on it must bear that."""
    x = _f32(a)
    x = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
    exact = 1.0 / x.astype(np.float64)
    nearest = exact.astype(np.float32)
    down = np.where(np.abs(nearest.astype(np.float64)) > np.abs(exact), np.nextafter(nearest, np.float32(0)), nearest)
    down = np.where(np.isinf(exact), nearest, down)
    return _bits(np.where(np.abs(down) < np.float32(2.0**-126), np.copysign(np.float32(0), down), down))


def _minimum(a: Any, b: Any) -> Bits:
    return _bits(np.fmin(_f32(a), _f32(b)))


def _maximum(*operands: Any) -> Bits:
    return _bits(functools.reduce(np.maximum, map(_f32, operands)))


def _maximum_of_magnitudes(*operands: Any) -> Bits:
    return _bits(functools.reduce(np.maximum, (np.abs(_f32(x)) for x in operands)))


def _torch(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values))


def _to_e2m1(high: Any, low: Any) -> Bits:
    """``cvt.rn.satfinite.e2m1x2.f32 d, a, b``: a becomes the high nibble."""
    codes = round_e2m1(torch.stack((_torch(_f32(low)), _torch(_f32(high))), -1))
    return pack(codes).squeeze(-1).numpy()


def _to_e2m1_stochastic(sources: tuple[Any, ...], random: Any) -> Bits:
    """``cvt.rs.satfinite.e2m1x4.f32 d, {a, b, e, f}, rbits``: f becomes the lowest nibble, by the lowest byte."""
    values = torch.stack([_torch(_f32(x)) for x in reversed(sources)], -1)
    draws = torch.stack([_torch((random >> np.uint32(8 * i)).astype(np.uint8)) for i in range(4)], -1)
    packed = pack(round_e2m1_stochastic(values, draws)).numpy()
    return _move((packed[..., 0], packed[..., 1]))


def to_e4m3(values: Any) -> Bits:
    """Float32 to E4M3 bytes: nearest even, saturating, NaN kept (``cvt.rn.satfinite.e4m3x2.f32``)."""
    x = _torch(np.asarray(values, np.float32))
    codes = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return np.asarray(torch.where(x.isnan(), 0x7F, codes).to(torch.uint8).numpy())


def from_e4m3(codes: Any) -> Any:
    """E4M3 bytes to float32."""
    return _torch(np.asarray(codes, np.uint8)).view(torch.float8_e4m3fn).to(torch.float32).numpy()


def to_bf16(values: Any) -> Bits:
    """Float32 to the bits of BF16: nearest even, NaN kept."""
    return _torch(np.asarray(values, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


def from_bf16(bits: Any) -> Any:
    """Bits of BF16 to float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_e4m3_pair(high: Any, low: Any) -> Bits:
    return _move((to_e4m3(_f32(low)), to_e4m3(_f32(high))))


def _e4m3_pair_to_half(pair: Any) -> Bits:
    halves = [from_e4m3((pair >> np.uint16(8 * i)).astype(np.uint8)).astype(np.float16).view(np.uint16) for i in (0, 1)]
    return _move(tuple(halves))


def _to_bf16_pair(high: Any, low: Any) -> Bits:
    return _move((to_bf16(_f32(low)), to_bf16(_f32(high))))


def _permute_bytes(a: Any, b: Any, selector: Any) -> Bits:
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    both = [(x >> np.uint32(8 * i)).astype(np.uint8) for x in (a, b) for i in range(4)]
    picks = [int(selector) >> (4 * i) & 15 for i in range(4)]
    if any(pick > 7 for pick in picks):
        raise SimulationError("inline PTX: prmt.b32 with a replicated sign is not simulated")
    return _move(tuple(both[pick] for pick in picks))


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": _move,
    "mul.rn.f32": lambda a, b: _bits(_f32(a) * _f32(b)),
    "fma.rn.f32": lambda a, b, c: _bits(fused_multiply_add(_f32(a), _f32(b), _f32(c))),
    "neg.f32": lambda a: _bits(-_f32(a)),
    "rcp.approx.ftz.f32": _reciprocal,
    "min.f32": _minimum,
    "max.NaN.f32": _maximum,
    "max.NaN.abs.f32": _maximum_of_magnitudes,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shl.b32": lambda a, b: np.asarray(a << np.uint32(b), np.uint32),
    "setp.eq.u32": np.equal,
    "prmt.b32": _permute_bytes,
    "cvt.u32.u16": lambda a: a.astype(np.uint32),
    "cvt.f32.f16": lambda a: _bits(a.view(np.float16).astype(np.float32)),
    "cvt.rn.f16x2.e4m3x2": _e4m3_pair_to_half,
    "cvt.rn.bf16x2.f32": _to_bf16_pair,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3_pair,
    "cvt.rn.satfinite.e2m1x2.f32": _to_e2m1,
    "cvt.rs.satfinite.e2m1x4.f32": _to_e2m1_stochastic,
}

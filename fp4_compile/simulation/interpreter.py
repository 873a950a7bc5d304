"""Triton's interpreter with a GPU's arithmetic.

`interpreted` replaces, for its duration, the methods of Triton's interpreter whose results differ from a GPU's, and
lets functions that were compiled for a GPU be interpreted. Every name it replaced is put back afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from fp4_compile.errors import SimulationError
from fp4_compile.simulation.arithmetic import builder_class


class Kernel:
    """A Triton kernel on CPU tensors."""

    def __init__(self, function: Any) -> None:
        """``function``: what ``triton.jit`` made of it, or the Python function itself."""
        self._function = function

    def __call__(self, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run all programs, one after the other; the tensors among the arguments are read and written.

        ``constants``: the kernel's ``tl.constexpr`` arguments.

        Raises:
            SimulationError: the kernel uses something that is not simulated.
        """
        from triton.runtime import interpreter

        x, y, z = (*grid, 1, 1)[:3]
        with interpreted():
            body = _body(self._function)
            handles = [interpreter._implicit_cvt(a) for a in arguments]
            builder = interpreter.interpreter_builder
            builder.set_grid_dim(x, y, z)
            for i in range(x * y * z):
                builder.set_grid_idx(i % x, i // x % y, i // (x * y))
                _call(functools.partial(body, **constants), handles)


def _call(body: Callable[..., Any], handles: list[Any]) -> None:
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a maximum over NaN alone
            body(*handles)
    except SimulationError:
        raise
    except NotImplementedError as error:
        raise SimulationError(f"Triton's interpreter: {error}") from error


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Interpret Triton functions with a GPU's arithmetic; may be entered again inside."""
    import triton.compiler.code_generator  # noqa: F401  it copies functions of tl when first imported: not replaced ones
    import triton.language as tl
    from triton.language.extra import cuda
    from triton.language.extra import libdevice as generic
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    builder: Any = interpreter.interpreter_builder
    if isinstance(builder, builder_class()):
        yield
        return
    semantic = interpreter.interpreter_semantic
    with contextlib.ExitStack() as stack:
        scope = interpreter._patch_lang(types.FunctionType(_empty.__code__, {"tl": tl, "core": tl.core}))
        stack.callback(scope.restore)
        previous = type(builder)
        builder.__class__ = builder_class()
        stack.callback(setattr, builder, "__class__", previous)
        # What a GPU computes unless it debugs; checking every integer for overflow takes a third of the time.
        unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
        stack.enter_context(mock.patch.object(builder, "options", unchecked))
        stack.enter_context(mock.patch.object(JITFunction, "__call__", _interpret))
        stack.enter_context(mock.patch.object(interpreter.ReduceOps, "generic_reduce", _reduce))
        for name in dir(generic):
            function: Any = getattr(cuda.libdevice, name, None)
            if tl.core.is_builtin(function):
                stack.enter_context(mock.patch.object(generic, name, functools.partial(function, _semantic=semantic)))
        yield


def _empty() -> None:
    pass


def _interpret(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """In the place of a call of one Triton function by another."""
    return _body(function)(*arguments, **keywords)


def _body(function: Any) -> Callable[..., Any]:
    """The function as the interpreter runs it; its text is what ``triton.jit`` read when it was defined."""
    from triton.runtime.jit import JITFunction

    jitted: Any = function if isinstance(function, JITFunction) else JITFunction(function)
    return _rewritten(jitted.fn, jitted._src, jitted.file_name, jitted.def_file_line_number)


@functools.cache
def _rewritten(function: Callable[..., Any], text: str, file: str, line: int) -> Callable[..., Any]:
    """The function with its assignments made tensors, in a copy of its globals."""
    from triton.runtime import interpreter

    private = types.FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, function.__defaults__, function.__closure__
    )
    private.__module__, private.__qualname__ = function.__module__, function.__qualname__
    private.__annotations__ = dict(function.__annotations__)
    rewriter: Any = interpreter.FunctionRewriter(private)
    rewriter.filename, rewriter.def_file_lineno = file, line
    rewritten: Callable[..., Any] = rewriter._compile_and_exec(rewriter._transform_ast(text))
    return rewritten


def _reduce(operation: Any, operands: Any) -> list[Any]:
    """A reduction by any function: slice after slice, in order, where Triton's interpreter goes by element."""
    arrays = [operand.handle.data for operand in operands]
    dtypes = [operand.dtype for operand in operands]
    axis = operation.axis
    if axis is None:
        arrays, axis = [array.reshape(-1) for array in arrays], 0
    slices = [np.moveaxis(array, axis, 0) for array in arrays]
    total = tuple(map(operation.to_tensor, (s[0] for s in slices), dtypes))
    for i in range(1, len(slices[0])):
        item = map(operation.to_tensor, (s[i] for s in slices), dtypes)
        combined = operation.combine_fn(*total, *item)
        total = combined if isinstance(combined, tuple) else (combined,)
    if operation.keep_dims:
        rank = len(operands[0].handle.data.shape)
        total = tuple(_kept(operation, value, dtype, rank) for value, dtype in zip(total, dtypes, strict=True))
    return list(total)


def _kept(operation: Any, value: Any, dtype: Any, rank: int) -> Any:
    data = value.handle.data
    data = data.reshape([1] * rank) if operation.axis is None else np.expand_dims(data, operation.axis)
    return operation.to_tensor(data, dtype)

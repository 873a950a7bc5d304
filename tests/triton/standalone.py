"""Render, compile and launch a template by itself, without a graph around it.

What Inductor's template engine does in a compile, this does for tests: it fills in the hooks, with
a prologue or an epilogue given as Triton text where Inductor would fuse one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fp4_compile.codegen.triton.kernel_template import KernelTemplate

_HEADER = """\
import triton
import triton.language as tl
from torch._inductor.runtime.triton_helpers import libdevice


@triton.jit
"""


@dataclass(frozen=True)
class Operand:
    """A kernel's tensor: its sizes, and its row-major strides if they are not the contiguous ones."""

    size: tuple[int, ...]
    stride: tuple[int, ...] = ()

    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, per dimension."""
        if self.stride:
            return self.stride
        strides = [1]
        for extent in reversed(self.size[1:]):
            strides.insert(0, strides[0] * extent)
        return tuple(strides)


@dataclass(frozen=True)
class Fusion:
    """Triton text where Inductor would put a fused producer or consumer.

    ``text``: statements that use ``value``, the loaded or computed tile, and ``indices``, the names of the tile's
    index tensors, written ``{0}`` and ``{1}``; ``mask`` is in scope. They assign ``value`` anew. ``arguments``:
    pointers that the text reads.
    """

    text: str
    arguments: tuple[str, ...] = ()


@dataclass
class _Hooks:
    inputs: Mapping[str, Operand]
    output: Operand
    constants: Mapping[str, Any]
    prologue: Mapping[str, Fusion] = field(default_factory=dict)
    epilogue: Fusion | None = None
    name: str = "kernel"

    def def_kernel(self, *names: str) -> str:
        fused = [a for f in (*self.prologue.values(), self.epilogue) if f is not None for a in f.arguments]
        header = f"def {self.name}({', '.join([*names, *fused, 'OUT'])}):\n"
        constants = {"INDEX_DTYPE": "tl.int32", **self.constants}
        return header + "".join(f"    {k}: tl.constexpr = {v}\n" for k, v in constants.items())

    def size(self, name: str | None, index: int) -> str:
        return str((self.output if name is None else self.inputs[name]).size[index])

    def stride(self, name: str | None, index: int) -> str:
        return str((self.output if name is None else self.inputs[name]).strides()[index])

    def load_input(
        self,
        input_name: str,
        output_name: str,
        indices: Sequence[str],
        mask: str | None = None,
        other: float = 0.0,
        indent_width: int = 4,
        index_shape: tuple[str, ...] = (),
    ) -> str:
        offset = _offset(self.inputs[input_name], indices)
        guard = f", mask={mask}, other={other}" if mask else ""
        lines = [f"{output_name} = tl.load({input_name} + ({offset}){guard})"]
        fusion = self.prologue.get(input_name)
        if fusion is not None:
            value = f"tl.where({mask}, value, {other})" if mask else "value"
            lines += [f"value = {output_name}", *_statements(fusion, indices)]
            lines += [f"{output_name} = {value}.to({input_name}.dtype.element_ty)"]
        return textwrap.indent("\n".join(lines), " " * indent_width).strip()

    def store_output(
        self,
        indices: Sequence[str],
        val: str,
        mask: str | None = None,
        indent_width: int = 4,
        val_shape: tuple[str, ...] = (),
        block_indexing: bool = False,
    ) -> str:
        lines = []
        if block_indexing:
            masks = []
            for i, (index, extent) in enumerate(zip(indices, val_shape, strict=True)):
                place = "[:, None]" if i == 0 else "[None, :]"
                lines.append(f"idx_{i} = ({index} + tl.arange(0, {extent})){place}")
                masks.append(f"(idx_{i} < {self.output.size[i]})")
            lines.append(f"mask = {' & '.join(masks)}")
            indices, mask = ("idx_0", "idx_1"), "mask"
        lines.append(f"value = {val}")
        if self.epilogue is not None:
            lines += _statements(self.epilogue, indices)
        guard = f", mask={mask}" if mask else ""
        lines.append(f"tl.store(OUT + ({_offset(self.output, indices)}), value{guard})")
        return textwrap.indent("\n".join(lines), " " * indent_width).strip()


def render(
    template: KernelTemplate,
    inputs: Mapping[str, Operand],
    output: Operand,
    constants: Mapping[str, Any],
    prologue: Mapping[str, Fusion] | None = None,
    epilogue: Fusion | None = None,
) -> str:
    """Return a module's text: the kernel, named as the template, and its helpers.

    Its arguments are the template's inputs, those of the prologue and the epilogue, and ``OUT``.
    """
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    hooks = _Hooks(inputs, output, constants, prologue or {}, epilogue, template.name)
    functions = {n: getattr(hooks, n) for n in ("def_kernel", "size", "stride", "load_input", "store_output")}
    return _HEADER + environment.from_string(template.source).render(**functions, **constants) + "\n"


@functools.cache
def load(source: str) -> ModuleType:
    """Import a rendered module; Triton needs it to be a file."""
    name = f"fp4_kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = Path(tempfile.mkdtemp(prefix="fp4_compile_")) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _offset(operand: Operand, indices: Sequence[str]) -> str:
    terms = (i if s == 1 else f"{i} * {s}" for i, s in zip(indices, operand.strides(), strict=True))
    return " + ".join(terms)


def _statements(fusion: Fusion, indices: Sequence[str]) -> list[str]:
    return fusion.text.format(*indices).strip().split("\n")

"""How Inductor turns the ``fp4`` operators into kernels for a GPU.

    fp4.amax            a reduction of Inductor's
    fp4.amax_parts      a template
    fp4.quantize_tiles  a template
    fp4.quantize_rows   a template whose producer (pointwise) Inductor computes inside
    fp4.row_amax        a reduction of Inductor's, which it fuses into the producer
    fp4.quantize_both_ways  a template
    fp4.scaled_mm       a template whose consumers (bias, activation, residual) Inductor computes inside, or cuBLASLt
    fp4.weight_mm       the same, of a high-precision activation and a quantized weight

On a CPU, for empty tensors, and for recipes without a template, the operators are called as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp4_compile import numerics, ops
from fp4_compile._torch_compat import inductor
from fp4_compile.codegen.library import scaled_mm_by_library
from fp4_compile.codegen.triton import KernelTemplate

aten = torch.ops.aten
BLOCK = ops.BLOCK


@functools.cache
def register_lowerings() -> None:
    """Teach Inductor the operators, once a process."""
    for op, lower in (
        (ops.amax, _amax),
        (ops.quantize_rows, _quantize_rows),
        (ops.amax_parts, _amax_parts),
        (ops.row_amax, _row_amax),
        (ops.quantize_both_ways, _quantize_both_ways),
        (ops.quantize_tiles, _quantize_tiles),
        (ops.scaled_mm, _scaled_mm),
        (ops.weight_mm, _weight_mm),
    ):
        _register(op, lower)
    _library_choice()  # programs that come from a cache call it by its name


def _register(op: Any, lower: Callable[..., Any]) -> None:
    lowering = inductor().lowering
    as_it_is = lowering.fallback_handler(op, add_to_fallback_set=False)

    def dispatch(*args: Any) -> Any:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        device = first.get_device()
        result = lower(*args) if device.type == "cuda" and not any(map(_is_empty, args)) else None
        return as_it_is(*args) if result is None else result

    lowering.register_lowering(op, type_promotion_kind=None)(dispatch)


def _is_empty(argument: Any) -> bool:
    return isinstance(argument, inductor().ir.TensorBox) and 0 in argument.get_size()


def _amax(x: Any) -> Any:
    """`fp4_compile.numerics.tensor_amax`."""
    lower = inductor().lowering.lowerings
    magnitude = _magnitude(x)
    finite = lower[aten.where.self](lower[aten.lt.Scalar](magnitude, float("inf")), magnitude, 0.0)
    return _raised(lower[aten.amax.default](finite, list(range(len(x.get_size()))), False))


def _raised(amax: Any) -> Any:
    """To `fp4_compile.numerics.LEAST_AMAX`, if it is not 0."""
    lower = inductor().lowering.lowerings
    raised = lower[aten.clamp_min.default](amax, numerics.LEAST_AMAX)
    return lower[aten.where.self](lower[aten.eq.Scalar](amax, 0.0), 0.0, raised)


def _magnitude(x: Any) -> Any:
    """Of each element in FP32, rounded to x's dtype: in a fused kernel it is at hand as it was before that."""
    lower = inductor().lowering.lowerings
    if x.get_dtype().itemsize > 2:
        return lower[aten.abs.default](inductor().lowering.to_dtype(x, torch.float32))
    bits = lower[aten.bitwise_and.Scalar](lower[aten.view.dtype](x, torch.int16), 0x7FFF)
    return inductor().lowering.to_dtype(lower[aten.view.dtype](bits, x.get_dtype()), torch.float32)


def _quantize_rows(x: Any, swizzled: bool, hadamard: int = 0, seed: Any = None, stream: int = 0) -> Any:
    from fp4_compile.codegen.triton.columns import QUANTIZE_COLUMNS
    from fp4_compile.codegen.triton.configs import column_quantizer_config, row_quantizer_configs
    from fp4_compile.codegen.triton.quantize import QUANTIZE_ROWS

    device, (rows, k) = x.get_device(), x.get_size()
    blocks = (k + BLOCK - 1) // BLOCK
    template = QUANTIZE_COLUMNS if swizzled and _lies_by_columns(x) else QUANTIZE_ROWS
    if template is QUANTIZE_COLUMNS:
        x = inductor().lowering.permute(x, [1, 0])
        config = column_quantizer_config(_hint(k), _sm(device), seed is not None)
    else:
        config, *_ = row_quantizer_configs(_hint(rows), _hint(k), _sm(device), swizzled, seed is not None)
    x = _rows_in_order(x)
    _fuse_producer(x)
    written = [_empty_scales(rows, blocks, device, swizzled), _empty((rows, 1), torch.float32, device)]
    config = {**config, "HADAMARD": hadamard}
    read = [x]
    if seed is not None:
        config["STREAM"] = stream
        read.append(_realized(seed))
    packed = ops.row_bytes(k) if swizzled else blocks * (BLOCK // 2)
    return _quantizer(template, config, read, written, (rows, packed), k)


def _lies_by_columns(x: Any) -> bool:
    """Whether x is the transpose of what lies in memory, or will, row by row."""
    strides = x.maybe_get_stride()
    if strides is None:  # not laid out yet: as its own maker will have it, in order
        return isinstance(x.data, inductor().ir.PermuteView)
    return bool(strides[0] == 1 and strides[1] != 1)


def _amax_parts(tensors: Sequence[Any]) -> Any:
    from fp4_compile.codegen.triton.amax import AMAX, CONFIG

    inputs = [_contiguous(x) for x in tensors]
    layout = inductor().ir.FixedLayout(inputs[0].get_device(), torch.float32, [len(inputs), ops.AMAX_PARTS])
    choices: list[Any] = []
    _append(choices, AMAX, {"COUNT": len(inputs), **CONFIG}, inputs, layout)
    [choice] = choices
    return choice.output_node()


def _row_amax(x: Any) -> Any:
    """`fp4_compile.numerics.row_amax`."""
    lower = inductor().lowering.lowerings
    x.realize()  # its maker stores it for the quantizer, and finds the amax on the way
    largest = lower[aten.amax.default](_magnitude(x), [1], True)
    return _raised(lower[aten.where.self](lower[aten.lt.Scalar](largest, float("inf")), largest, float("nan")))


def _quantize_both_ways(
    x: Any, row_amax: Any, hadamard: int = 0, seed: Any = None, stream: int = 0, turned_stream: int = 0
) -> Any:
    from fp4_compile.codegen.triton.both_ways import QUANTIZE_BOTH_WAYS
    from fp4_compile.codegen.triton.configs import both_ways_quantizer_config

    device, (rows, k) = x.get_device(), x.get_size()
    blocks, row_blocks = ((size + BLOCK - 1) // BLOCK for size in (k, rows))
    written = [
        _empty((rows, ops.row_bytes(k)), torch.uint8, device),
        _empty_scales(rows, blocks, device, True),
        _empty_scales(k, row_blocks, device, True),
        _empty((k, 1), torch.float32, device),
    ]
    config = both_ways_quantizer_config(_hint(rows), _sm(device), seed is not None)
    config |= {"HADAMARD": hadamard, "STREAM": turned_stream, "ROW_STREAM": stream}
    read = [_contiguous(x), _contiguous(row_amax), *([] if seed is None else [_realized(seed)])]
    turned, codes, scales, *more = _quantizer(QUANTIZE_BOTH_WAYS, config, read, written, (k, ops.row_bytes(rows)), rows)
    return codes, scales, turned, *more


def _quantize_tiles(w: Any, amax: Any) -> Any:
    from fp4_compile.codegen.triton.configs import hardware
    from fp4_compile.codegen.triton.tiles import QUANTIZE_TILES

    device, (rows, k) = w.get_device(), w.get_size()
    blocks, row_blocks = ((size + BLOCK - 1) // BLOCK for size in (k, rows))
    w = _rows_in_order(w)
    _fuse_producer(w)
    written = [
        _empty_scales(rows, blocks, device, True),
        _empty((k, ops.row_bytes(rows)), torch.uint8, device),
        _empty_scales(k, row_blocks, device, True),
        _empty((1,), torch.float32, device),
    ]
    parts = amax.get_size()[0] if amax.get_size() else 1
    config = {"PARTS": int(parts), "num_warps": 4, "num_stages": 1, **hardware(_sm(device))}
    *results, largest = _quantizer(QUANTIZE_TILES, config, [w, _realized(amax)], written, (rows, ops.row_bytes(k)), k)
    return (*results, inductor().lowering.view(largest, []))


def _quantizer(
    template: KernelTemplate, config: dict[str, Any], read: list[Any], written: list[Any], size: Any, k: Any
) -> tuple[Any, ...]:
    """Codes of that size, and what the template writes into its arguments."""
    parts = inductor()
    device = read[0].get_device()
    targets = [_realized(tensor) for tensor in written]
    layout = parts.ir.FixedLayout(device, torch.uint8, list(size))
    choices: list[Any] = []
    _append(choices, template, config, [*read, *targets], layout, mutated_inputs=targets)
    [choice] = choices
    codes = _quantizer_buffer()(
        layout=choice.layout,
        inputs=choice.input_nodes,
        make_kernel_render=choice.make_kernel_render,
        mutated_inputs=choice.mutated_inputs,
        allowed_prologue_inps=choice.allowed_prologue_inps,
    )
    codes.annotations["fp4_quantizes"] = (_hint(size[0]), _hint(k))
    return (parts.ir.TensorBox.create(codes), *written)


def _empty_scales(rows: Any, blocks: Any, device: torch.device, swizzled: bool) -> Any:
    shape = numerics.swizzled_shape(rows, blocks) if swizzled else (rows, blocks)
    return _empty(shape, torch.float8_e4m3fn, device)


@functools.cache
def _quantizer_buffer() -> type:
    """Inductor fuses no producer into a kernel that writes into its arguments, since the producer may read them.

    The arguments a quantizer writes to are new, and nothing else has them.
    """
    base: Any = inductor().ir.TritonTemplateBuffer

    class QuantizerBuffer(base):  # type: ignore[misc]
        def has_aliasing_or_mutation_for_prologue_fusion(self, scheduler_node: Any) -> bool:
            return False

    return QuantizerBuffer


def _fuse_producer(x: Any) -> None:
    """Let Inductor compute x in the quantizer even if that reads more than x has: a product of two tensors does.

    It refuses that to a GEMM, which would load a tile's inputs many times; a quantizer loads them once.
    """
    parts = inductor()
    buffer = parts.V.graph.try_get_buffer(x.get_name())
    if not isinstance(buffer, parts.ir.ComputedBuffer) or not isinstance(buffer.data, parts.ir.Pointwise):
        return
    if buffer.get_read_names():
        parts.V.graph.invoke_quant_ops.add(buffer.get_operation_name())
    else:  # a constant: Inductor would hand the template one value, which does not have its tile's rank
        parts.V.graph.no_fuse_buffer_names.add(x.get_name())


def _scaled_mm(
    a: Any,
    a_scales: Any,
    a_amax: Any,
    b: Any,
    b_scales: Any,
    b_amax: Any,
    bias: Any,
    out_dtype: torch.dtype,
    swizzled: bool = False,
) -> Any:
    from fp4_compile.codegen.triton.configs import gemm_choices

    if len(a.get_size()) != 2 or len(b.get_size()) != 2 or _sm(a.get_device()) < 100:
        return None
    (m, packed), (n, _) = a.get_size(), b.get_size()
    k, sm = packed * 2, _sm(a.get_device())
    wanted = gemm_choices(_hint(m), _hint(n), _hint(k), sm, swizzled)
    constants = {"A_ROWS": _per_row(a_amax), "B_ROWS": _per_row(b_amax)}
    inputs = [_contiguous(x) for x in (a, a_scales, a_amax, b, b_scales, b_amax)]
    return _product("fp4_scaled_mm", wanted, constants, inputs, (m, n, k), bias, out_dtype, "nvfp4")


def _weight_mm(x: Any, b: Any, b_scales: Any, b_amax: Any, bias: Any, out_dtype: torch.dtype) -> Any:
    from fp4_compile.codegen.triton.configs import weight_gemm_choices

    parts = inductor()
    *lead, k = x.get_size()
    n = b.get_size()[0]
    if len(lead) != 1:
        m = functools.reduce(lambda rows, size: rows * size, lead, 1)
        flat = parts.lowering.view(x, [m, k])
        result = _weight_mm(flat, b, b_scales, b_amax, bias, out_dtype)
        return parts.lowering.view(result, [*lead, n])
    x = parts.lowering.to_dtype(x, torch.bfloat16)
    wanted = weight_gemm_choices(_hint(lead[0]), _hint(n), _hint(k), _sm(x.get_device()))
    constants = {"B_ROWS": _per_row(b_amax)}
    inputs = [_rows_in_order(x), *map(_contiguous, (b, b_scales, b_amax))]
    return _product("fp4_weight_mm", wanted, constants, inputs, (lead[0], n, k), bias, out_dtype, "bf16")


def _product(
    name: str,
    wanted: Sequence[tuple[KernelTemplate, dict[str, Any]]],
    constants: dict[str, Any],
    inputs: list[Any],
    sizes: tuple[Any, Any, Any],
    bias: Any,
    out_dtype: torch.dtype,
    precision: str,
) -> Any:
    """The template, then bias and rounding as pointwise operations, which Inductor fuses into it."""
    parts = inductor()
    m, n, k = sizes
    device = inputs[0].get_device()
    # A bias is added before the one rounding: the template hands it FP32, which Inductor keeps in registers.
    split = wanted[0][1].get("SPLIT_K", 1)
    rounds = bias is None and split == 1
    layout = parts.ir.FixedLayout(device, out_dtype if rounds else torch.float32, [m * split, n])
    tunes = parts.config.max_autotune or parts.config.max_autotune_gemm
    choices: list[Any] = []
    for template, config in wanted if tunes else wanted[:1]:
        _append(choices, template, {**constants, **config}, inputs, layout)
    if tunes and split == 1 and precision == "nvfp4" and _library_serves(n, k):
        choices.append(_library_choice().bind(inputs, layout, out_dtype=layout.dtype))
    selected = parts.autotune_select_algorithm(name, choices, inputs, layout)
    result = selected[0] if isinstance(selected, tuple) else selected
    flops = 2 * _hint(m) * _hint(n) * _hint(k)
    result.data.data.annotations.update(fp4_flops={precision: flops}, fp4_gemm=(_hint(m), _hint(n), _hint(k)))
    if split > 1:
        result.data.data.annotations["fp4_split"] = split
        result = parts.lowering.lowerings[aten.sum.dim_IntList](parts.lowering.view(result, [split, m, n]), [0])
    if bias is not None:
        result = parts.lowering.add(result, parts.lowering.to_dtype(bias, torch.float32))
    if not rounds:
        # As Inductor lowers a cast: whether what is fused behind sees the rounded number is its user's setting.
        fused = not parts.config.emulate_precision_casts
        result = parts.lowering.to_dtype(result, out_dtype, use_compute_types=fused)
        result.realize()
    return result


def _library_serves(n: Any, k: Any) -> bool:
    """Whether cuBLASLt's alignments hold, whatever the sizes; only Python programs can call it."""
    graph = inductor().V.graph
    multiple = graph.sizevars.statically_known_multiple_of
    return not graph.cpp_wrapper and multiple(n, 16) and multiple(k, 32)


@functools.cache
def _library_choice() -> Any:
    return inductor().ExternKernelChoice(scaled_mm_by_library, name="fp4_scaled_mm_by_library", has_out_variant=False)


def _append(
    choices: list[Any], template: KernelTemplate, config: dict[str, Any], inputs: list[Any], layout: Any, **more: Any
) -> None:
    """Add a choice.

    Raises:
        NotImplementedError: the template cannot be rendered for these inputs.
    """
    refused = _triton_template(template).maybe_append_choice(
        choices, input_nodes=tuple(inputs), layout=layout, **config, **more
    )
    if refused is not None:
        raise refused


@functools.cache
def _triton_template(template: KernelTemplate) -> Any:
    parts = inductor()
    return parts.TritonTemplate(name=template.name, grid=parts.SymbolicGridFn(template.grid), source=template.source)


def _empty(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    return inductor().lowering.empty_strided(list(size), None, dtype=dtype, device=device)


def _realized(x: Any) -> Any:
    return inductor().ir.ExternKernel.realize_input(x)


def _contiguous(x: Any) -> Any:
    extern = inductor().ir.ExternKernel
    return extern.require_contiguous(extern.realize_input(x))


def _rows_in_order(x: Any) -> Any:
    """x with the elements of a row side by side; rows may lie further apart."""
    extern = inductor().ir.ExternKernel
    return extern.require_stride_order(extern.realize_input(x), [1, 0])


def _per_row(amax: Any) -> bool:
    return bool(amax.get_size())


def _hint(size: Any) -> int:
    """A size to choose a configuration by: any configuration is right for any size."""
    return int(inductor().V.graph.sizevars.optimization_hint(size, fallback=4096))


def _sm(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor

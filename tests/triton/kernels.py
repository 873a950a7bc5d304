"""Templates rendered for given tensors, compiled for a target or run in the interpreter."""

from __future__ import annotations

import standalone
import torch

from fp4_compile import numerics, ops
from fp4_compile.codegen.triton import configs
from fp4_compile.codegen.triton.quantize import QUANTIZE_RMS_NORM, QUANTIZE_ROWS
from fp4_compile.offline.kernels import read_kernel
from fp4_compile.offline.machine import find_target, offline_device
from fp4_compile.simulation import Kernel

LAUNCH = ("num_warps", "num_stages")
EPS = 1e-5


def cdiv(a, b):
    return -(-a // b)


def operands(tensors):
    return {name: standalone.Operand(tuple(t.shape)) for name, t in tensors.items()}


def source(template, tensors, out, config, mutate=None, **fused):
    constants = {k: v for k, v in config.items() if k not in LAUNCH}
    text = standalone.render(template, operands(tensors), standalone.Operand(tuple(out.shape)), constants, **fused)
    return text if mutate is None else mutated(text, *mutate)


def mutated(text, old, new):
    assert text.count(old), f"nothing to change: {old}"
    return text.replace(old, new)


def run(template, tensors, out, config, grid, extra=(), **kwargs):
    text = source(template, tensors, out, config, **kwargs)
    Kernel(getattr(standalone.load(text), template.name))(grid, *tensors.values(), *extra, out)
    return out


def quantize_rows(x, sm, swizzled, mutate=None, norm_weight=None):
    """Codes, scales, amax as the kernel for ``sm`` writes them, from buffers full of something else."""
    rows, k = x.shape
    blocks = cdiv(k, 16)
    config = configs.row_quantizer_configs(rows, k, sm, swizzled)[0]
    shape = numerics.swizzled_shape(rows, blocks) if swizzled else (rows, blocks)
    scales = torch.full(shape, 77, dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = ops.row_bytes(k) if swizzled else blocks * 8
    amax, codes = torch.full((rows, 1), -1.0), torch.full((rows, packed), 99, dtype=torch.uint8)
    tensors = {"X": x, "SCALES": scales, "AMAX": amax}
    template = QUANTIZE_ROWS
    if norm_weight is not None:
        template, tensors = QUANTIZE_RMS_NORM, {"X": x, "WEIGHT": norm_weight, "SCALES": scales, "AMAX": amax}
        config = {**config, "EPS": EPS, "HAS_WEIGHT": True, "CAST_BEFORE_WEIGHT": False}
    grid = template.grid(rows, packed, config, cdiv=cdiv)
    run(template, tensors, codes, config, grid, mutate=mutate)
    return codes, scales.view(torch.uint8), amax


def reference_rows(x, swizzled):
    codes, scales, amax = numerics.quantize_1x16(x, numerics.row_amax(x))
    codes, scales = ops.for_tensor_cores(codes, scales) if swizzled else (codes, scales)
    return codes, scales.view(torch.uint8), amax


def same_bytes(got, want):
    return all(torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) for a, b in zip(got, want, strict=True))


def scaled_mm(m, n, k, sm, rows=True, mutate=None, epilogue=None, extra=(), dtype=torch.float32, split=1):
    """The kernel's product of random operands, and the product of their decoded values in float64."""
    a, b = torch.randn(m, k).bfloat16(), (torch.randn(n, k) * (0.1 + torch.rand(n, 1))).bfloat16()
    tensors, decoded = {}, []
    for name, x in (("A", a), ("B", b)):
        codes, scales, amax = numerics.quantize_1x16(x, numerics.row_amax(x) if rows else None)
        decoded.append(numerics.decode_unscaled(codes, scales, torch.float32).double() * amax.double() / (6 * 448))
        codes, scales = ops.for_tensor_cores(codes, scales)
        tensors |= {name: codes, f"S{name}": scales, f"AMAX_{name}": amax}
    template, config = configs.gemm_choices(m, n, tensors["A"].shape[1] * 2, sm, True)[0]
    config = {**config, "A_ROWS": rows, "B_ROWS": rows, "SPLIT_K": split}
    grid = template.grid(m * split, n, config, cdiv=cdiv, min=min)
    out = torch.full((m * split, n), 7.0, dtype=dtype)
    run(template, tensors, out, config, grid, extra, mutate=mutate, epilogue=epilogue)
    return out.view(split, m, n).sum(0), decoded[0] @ decoded[1].T


def weight_mm(m, n, k, sm, mutate=None):
    """As `scaled_mm`, of a BF16 activation and a packed weight."""
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    codes, scales, amax = numerics.quantize_1x16(w, numerics.row_amax(w))
    template, config = configs.weight_gemm_choices(m, n, k, sm)[0]
    config = {**config, "B_ROWS": True}
    tensors = {"X": x, "B": codes, "SB": scales, "AMAX_B": amax}
    out = run(template, tensors, torch.full((m, n), 7.0), config, template.grid(m, n, config, cdiv=cdiv), mutate=mutate)
    return out, x.double() @ numerics.dequantize(codes, scales, amax, k).double().T


def error(got, want):
    return float((got.double() - want).abs().max() / want.abs().max())


_TRITON_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compiled(template, tensors, out, config, sm, **fused):
    """PTX and cubin for a target; only shapes and dtypes of the tensors matter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = source(template, tensors, out, config, **fused)
    target = find_target(f"sm_{sm}")
    signature = {name: _TRITON_TYPES[t.dtype] for name, t in {**tensors, "OUT": out}.items()}
    if sm < 89:  # such a GPU has no E4M3; a pointer is reinterpreted anyway
        signature = {name: "*u8" if kind == "*fp8e4nv" else kind for name, kind in signature.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    with offline_device(target):
        binary = triton.compile(
            ASTSource(getattr(standalone.load(text), template.name), signature, {}, aligned),
            target=GPUTarget("cuda", sm, 32),
            options={key: config[key] for key in LAUNCH},
        )
    return read_kernel(template.name, config, text, binary)

"""Quantizers of training: Hadamard transforms, stochastic rounding, tiles of 16x16; byte for byte."""

from __future__ import annotations

import pytest
import torch
from kernels import cdiv, compiled, run, same_bytes

from fp4_compile import numerics, ops
from fp4_compile.codegen.cpu_training import random_bytes
from fp4_compile.codegen.triton import configs
from fp4_compile.codegen.triton.amax import AMAX, CONFIG
from fp4_compile.codegen.triton.both_ways import QUANTIZE_BOTH_WAYS
from fp4_compile.codegen.triton.columns import QUANTIZE_COLUMNS
from fp4_compile.codegen.triton.quantize import QUANTIZE_ROWS
from fp4_compile.codegen.triton.tiles import QUANTIZE_TILES

SEED = torch.tensor(-0x123456789ABCDEF, dtype=torch.int64)
STREAM = 5


def quantized(x, sm, hadamard, stochastic, mutate=None, turned=False):
    """``turned``: by the kernel that reads the transpose of x."""
    rows, k = x.shape
    blocks = cdiv(k, 16)
    template, config = QUANTIZE_ROWS, configs.row_quantizer_configs(rows, k, sm, True, stochastic)[0]
    if turned:
        template, config = QUANTIZE_COLUMNS, configs.column_quantizer_config(k, sm, stochastic)
        x = x.T.contiguous()
    config = {**config, "HADAMARD": hadamard}
    scales = torch.full(numerics.swizzled_shape(rows, blocks), 77, dtype=torch.uint8).view(torch.float8_e4m3fn)
    amax, codes = torch.full((rows, 1), -1.0), torch.full((rows, ops.row_bytes(k)), 99, dtype=torch.uint8)
    tensors = {"X": x, "SCALES": scales, "AMAX": amax}
    if stochastic:
        config["STREAM"] = STREAM
        tensors = {"X": x, "SEED": SEED, "SCALES": scales, "AMAX": amax}
    run(template, tensors, codes, config, template.grid(rows, codes.shape[1], config, cdiv=cdiv), mutate=mutate)
    return codes, scales.view(torch.uint8), amax


def reference(x, hadamard, stochastic):
    if hadamard:
        x = numerics.random_hadamard(x, -1, hadamard)
    drawn = random_bytes(x, SEED, STREAM, 16) if stochastic else None
    codes, scales, amax = numerics.quantize_1x16(x, numerics.row_amax(x), drawn)
    codes, scales = ops.for_tensor_cores(codes, scales)
    return codes, scales.view(torch.uint8), amax


@pytest.mark.parametrize("sm", [100, 120])
@pytest.mark.parametrize(("hadamard", "stochastic"), [(0, False), (16, False), (0, True), (16, True)])
@pytest.mark.parametrize(
    ("turned", "rows", "k", "dtype"),
    [
        (False, 130, 96, torch.bfloat16),
        (False, 5, 200, torch.float32),
        (False, 3, 9, torch.bfloat16),
        (True, 130, 600, torch.bfloat16),
        (True, 40, 200, torch.float32),
        (True, 3, 9, torch.bfloat16),
    ],
)
def test_rows_and_columns_are_the_reference_byte_for_byte(sm, hadamard, stochastic, turned, rows, k, dtype):
    x = (torch.randn(rows, k) * torch.exp(2 * torch.randn(rows, 1))).to(dtype)
    x[0, 0] = torch.nan
    x[1] = 0
    assert same_bytes(quantized(x, sm, hadamard, stochastic, turned=turned), reference(x, hadamard, stochastic))


def two_directions(rows, k):
    """Codes and scales of a matrix and of its transpose, full of something else."""
    found = []
    for m, n in ((rows, k), (k, rows)):
        found.append(torch.full((m, ops.row_bytes(n)), 99, dtype=torch.uint8))
        shape = numerics.swizzled_shape(m, cdiv(n, 16))
        found.append(torch.full(shape, 77, dtype=torch.uint8).view(torch.float8_e4m3fn))
    return found


def both_ways(x, sm, stochastic, mutate=None):
    """Codes and scales of x, then codes, scales and amax of its transpose."""
    rows, k = x.shape
    codes, scales, turned, turned_scales = two_directions(rows, k)
    amax = torch.full((k, 1), -1.0)
    tensors = {"X": x, "ROW_AMAX": numerics.row_amax(x), **({"SEED": SEED} if stochastic else {})}
    tensors |= {"ROW_CODES": codes, "ROW_SCALES": scales, "SCALES": turned_scales, "AMAX": amax}
    config = configs.both_ways_quantizer_config(rows, sm, stochastic)
    config |= {"HADAMARD": 16, "STREAM": STREAM, "ROW_STREAM": STREAM + 1}
    grid = QUANTIZE_BOTH_WAYS.grid(k, turned.shape[1], config, cdiv=cdiv)
    run(QUANTIZE_BOTH_WAYS, tensors, turned, config, grid, mutate=mutate)
    return codes, scales.view(torch.uint8), turned, turned_scales.view(torch.uint8), amax


def both_ways_by_reference(x, stochastic):
    seed = SEED if stochastic else None
    found = ops.quantize_both_ways(x, numerics.row_amax(x), 16, seed, STREAM + 1, STREAM)
    rows, columns = ops.quantize_rows(x, True, 0, seed, STREAM + 1), ops.quantize_rows(x.T, True, 16, seed, STREAM)
    found, rows, columns = (
        [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in each] for each in (found, rows, columns)
    )
    assert same_bytes(found[:2], rows[:2]) and same_bytes(found[2:], columns)
    return found


@pytest.mark.parametrize("sm", [100, 120])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(
    ("rows", "k", "dtype"), [(600, 130, torch.bfloat16), (200, 40, torch.float32), (9, 3, torch.bfloat16)]
)
def test_both_ways_at_once_are_the_reference_byte_for_byte(sm, stochastic, rows, k, dtype):
    x = (torch.randn(rows, k) * torch.exp(2 * torch.randn(rows, 1))).to(dtype)
    x[0, 0] = torch.nan
    x[1] = 0
    assert same_bytes(both_ways(x, sm, stochastic), both_ways_by_reference(x, stochastic))


@pytest.mark.parametrize(
    "fault",
    [
        ("_encode_scales(row_amax)", "_encode_scales(row_amax * 2)"),
        ("halves = _pieces(x)", "halves = _pieces(-x)"),
        (
            "ROW_SCALES.to(tl.pointer_type(tl.int16)) + place // 2",
            "ROW_SCALES.to(tl.pointer_type(tl.int16)) + place // 4",
        ),
    ],
)
def test_faults_of_the_rows_beside_the_columns_are_caught(fault):
    x = torch.randn(256, 64).bfloat16()
    assert same_bytes(both_ways(x, 100, False), both_ways_by_reference(x, False))
    assert not same_bytes(both_ways(x, 100, False, fault), both_ways_by_reference(x, False))


@pytest.mark.parametrize(
    "fault", [("permute(0, 1, 4, 2, 3)", "permute(0, 1, 4, 3, 2)"), ("_split8(second", "_split8(third")]
)
def test_faults_of_the_columns_are_caught(fault):
    x = torch.randn(40, 600).bfloat16()
    assert not same_bytes(quantized(x, 100, 16, False, fault, turned=True), reference(x, 16, False))


@pytest.mark.parametrize(
    "fault", [("counter + 1, STREAM", "counter, STREAM"), ("random_0[2], random_0[3]", "random_0[3], random_0[2]")]
)
def test_faults_of_the_random_bits_are_caught(fault):
    x = torch.randn(64, 128).bfloat16()
    assert not same_bytes(quantized(x, 100, 0, True, mutate=fault), reference(x, 0, True))


def tiles(w, sm, mutate=None, parts=1):
    rows, k = w.shape
    amax, largest = numerics.tensor_amax(w) * torch.rand(parts), torch.tensor(-1.0)
    amax[parts // 2] = numerics.tensor_amax(w)
    codes, scales, turned, turned_scales = two_directions(rows, k)
    tensors = {
        "X": w,
        "AMAX": amax,
        "SCALES": scales,
        "TURNED": turned,
        "TURNED_SCALES": turned_scales,
        "LARGEST": largest,
    }
    config = {"PARTS": amax.numel(), "num_warps": 4, "num_stages": 1, **configs.hardware(sm)}
    grid = QUANTIZE_TILES.grid(rows, codes.shape[1], config, cdiv=cdiv)
    run(QUANTIZE_TILES, tensors, codes, config, grid, mutate=mutate)
    return codes, scales.view(torch.uint8), turned, turned_scales.view(torch.uint8), largest


def tiles_by_reference(w):
    codes, scales, turned, turned_scales, largest = ops.quantize_tiles(w, numerics.tensor_amax(w))
    return codes, scales.view(torch.uint8), turned, turned_scales.view(torch.uint8), largest


@pytest.mark.parametrize(
    "fault", [None, ("BLOCK - 1) // BLOCK", "BLOCK - 1) // BLOCK - 1"), ('float("inf"), x, 0.0', "0.1, x, 0.0")]
)
def test_amaxes_of_many_tensors(fault):
    tensors = [torch.randn(3, 5), torch.randn(200, 300).bfloat16(), torch.zeros(64, 64), torch.randn(1, 8192).half()]
    tensors[0][1, 1], tensors[1][7, 9], tensors[1][0, 0] = torch.inf, torch.nan, 50.0
    config, found = {"COUNT": len(tensors), **CONFIG}, torch.full((len(tensors), ops.AMAX_PARTS), -1.0)
    named = {f"X{i}": x for i, x in enumerate(tensors)}
    run(AMAX, named, found, config, AMAX.grid(len(tensors), ops.AMAX_PARTS, config, cdiv=cdiv), mutate=fault)
    assert torch.equal(found.amax(1), ops.amax_parts(tensors).amax(1)) == (fault is None)
    assert torch.equal(ops.amax_parts(tensors).amax(1), torch.stack([numerics.tensor_amax(x) for x in tensors]))


@pytest.mark.parametrize("sm", [100, 120])
@pytest.mark.parametrize(
    ("rows", "k", "dtype"), [(96, 130, torch.bfloat16), (200, 64, torch.float32), (5, 9, torch.bfloat16)]
)
def test_tiles_and_their_transposes_are_the_reference_byte_for_byte(sm, rows, k, dtype):
    w = (torch.randn(rows, k) * torch.exp(2 * torch.randn(rows, 1))).to(dtype)
    w[0, 0] = torch.nan
    w[: rows // 3, k // 2 :] = 0
    assert same_bytes(tiles(w, sm), tiles_by_reference(w))
    assert same_bytes(tiles(w, sm, parts=256), tiles_by_reference(w))
    w[-1, -1] = torch.inf  # is no part of the amax, and must not be lost for it
    assert same_bytes(tiles(w, sm), tiles_by_reference(w))
    assert tiles(w, sm)[1].eq(0x7F).any()


@pytest.mark.parametrize(
    "fault",
    [("tl.trans(scales), left", "scales, left"), ("low, high = tl.trans(nibbles)", "high, low = tl.trans(nibbles)")],
)
def test_faults_of_the_transpose_are_caught(fault):
    w = torch.randn(96, 64).bfloat16()
    assert same_bytes(tiles(w, 100), tiles_by_reference(w))
    assert not same_bytes(tiles(w, 100, mutate=fault), tiles_by_reference(w))


@pytest.mark.parametrize("sm", [100, 103, 120, 121])
def test_what_they_are_compiled_to(sm):
    """Sixteen bytes at a time, no spills; stochastic rounding by the target's own instruction where it has one."""
    x, scales, amax = (
        torch.empty(1024, 4096).bfloat16(),
        torch.empty(1024, 256).to(torch.float8_e4m3fn),
        torch.empty(1024, 1),
    )
    codes = torch.empty(1024, 2048, dtype=torch.uint8)
    config = {**configs.row_quantizer_configs(1024, 4096, sm, True)[0], "HADAMARD": 16}
    nearest = compiled(QUANTIZE_ROWS, {"X": x, "SCALES": scales, "AMAX": amax}, codes, config, sm)
    config = {**configs.row_quantizer_configs(1024, 4096, sm, True, True)[0], "HADAMARD": 16, "STREAM": 3}
    tensors = {"X": x, "SEED": SEED, "SCALES": scales, "AMAX": amax}
    random = compiled(QUANTIZE_ROWS, tensors, codes, config, sm)
    assert bool(random.count(r"cvt\.rs\.satfinite\.e2m1x4")) == (sm < 120)
    config = {"COUNT": 2, **CONFIG}
    amaxes = compiled(AMAX, {"X0": x, "X1": x.T.contiguous()}, torch.empty(2, 256), config, sm)
    tile_config = {"PARTS": 256, "num_warps": 4, "num_stages": 1, **configs.hardware(sm)}
    tensors = {"X": x, "AMAX": amax, "SCALES": scales, "TURNED": codes, "TURNED_SCALES": scales, "LARGEST": amax}
    turned = []
    for stochastic in (False, True):
        config = {**configs.column_quantizer_config(4096, sm, stochastic), "HADAMARD": 16, "STREAM": 3}
        seed = {"SEED": SEED} if stochastic else {}
        inputs = {"X": torch.empty(4096, 1024).bfloat16(), **seed, "SCALES": scales, "AMAX": amax}
        turned.append(compiled(QUANTIZE_COLUMNS, inputs, codes, config, sm))
        config = {
            **configs.both_ways_quantizer_config(4096, sm, stochastic),
            "HADAMARD": 16,
            "STREAM": 3,
            "ROW_STREAM": 4,
        }
        inputs |= {"ROW_AMAX": amax, "ROW_CODES": codes, "ROW_SCALES": scales}
        order = ("X", "ROW_AMAX", *seed, "ROW_CODES", "ROW_SCALES", "SCALES", "AMAX")
        turned.append(compiled(QUANTIZE_BOTH_WAYS, {name: inputs[name] for name in order}, codes, config, sm))
        assert turned[-1].count(r"st\.global[.\w]*\.v4\.b32") == 2 * turned[-2].count(r"st\.global[.\w]*\.v4\.b32")
        assert turned[-2].count(r"st\.global[.\w]*\.v4\.b32") and not turned[-2].count(r"st\.global[.\w]*\.b8")
        assert turned[-1].count(r"st\.global[.\w]*\.v4\.b32") and not turned[-1].count(r"st\.global[.\w]*\.b8")
    for kernel in (nearest, random, amaxes, *turned, compiled(QUANTIZE_TILES, tensors, codes, tile_config, sm)):
        assert kernel.spills == kernel.stack == 0, kernel.name
        assert kernel.count(r"ld\.global[.\w]*\.v4\.b32"), kernel.name
        assert not kernel.count(r"ld\.global[.\w]*\.b16"), kernel.name

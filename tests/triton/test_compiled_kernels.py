"""Every template compiles for every target, to the instructions that make it fast there."""

from __future__ import annotations

import pytest
import torch
from kernels import compiled

from fp4_compile.codegen.triton import configs
from fp4_compile.codegen.triton.quantize import QUANTIZE_RMS_NORM, QUANTIZE_ROWS
from fp4_compile.numerics import swizzled_shape
from fp4_compile.offline.generate import Launch
from fp4_compile.offline.inspect import faults, instructions, load_widths
from fp4_compile.offline.machine import find_target


def empty(*size, dtype):
    return torch.empty(*size, dtype=dtype, device="meta")


def scales(rows, k, swizzled):
    blocks = -(-k // 16)
    return empty(*(swizzled_shape(rows, blocks) if swizzled else (rows, blocks)), dtype=torch.float8_e4m3fn)


def quantizer(sm, rows=4096, k=4096, index=0, norm=False):
    config = configs.row_quantizer_configs(rows, k, sm, sm >= 100)[index]
    x, amax = empty(rows, k, dtype=torch.bfloat16), empty(rows, 1, dtype=torch.float32)
    tensors = {"X": x, "SCALES": scales(rows, k, sm >= 100), "AMAX": amax}
    if norm:
        weight = empty(k, dtype=torch.bfloat16)
        tensors = {"X": x, "WEIGHT": weight, "SCALES": tensors["SCALES"], "AMAX": amax}
        config = {**config, "EPS": 1e-5, "HAS_WEIGHT": True, "CAST_BEFORE_WEIGHT": False}
    kernel = compiled(
        QUANTIZE_RMS_NORM if norm else QUANTIZE_ROWS, tensors, empty(rows, k // 2, dtype=torch.uint8), config, sm
    )
    assert faults(kernel, Launch("", True, 0, {}, quantizes=(rows, k)), find_target(f"sm_{sm}")) == ()
    assert set(load_widths(kernel)) <= {16}  # every load of the activation and of the weight
    elements = config["ROWS"] * config["COLS"] * max(config["PARTS"], 1)
    return kernel, sum(n for op, n in kernel.instructions.items() if op != "NOP") * kernel.threads / elements


@pytest.mark.parametrize("sm", [80, 90, 100, 103, 120, 121])
def test_quantizers_read_16_bytes_at_a_time_and_spill_nothing(sm):
    kernel, per_element = quantizer(sm, k=4096 if sm >= 100 else 512)
    assert ("cvt e2m1" in instructions(kernel)) is (sm >= 100)
    assert per_element <= (8 if sm >= 100 else 40)


@pytest.mark.parametrize(("rows", "k"), [(1, 4096), (4096, 14336), (4096, 28672)])
def test_short_and_long_rows_keep_to_the_same_bounds(rows, k):
    quantizer(100, rows, k)


def test_all_candidates_of_the_quantizer_load_wide_and_spill_nothing():
    for index in range(1, len(configs.row_quantizer_configs(4096, 4096, 100, True))):
        quantizer(100, index=index)


def test_rms_norm_costs_few_instructions_more():
    assert quantizer(100, norm=True)[1] <= 16


def gemm(sm, m, n, k, choice):
    template, config = choice
    tensors = {}
    for name, size in (("A", m), ("B", n)):
        tensors |= {
            name: empty(size, k // 2, dtype=torch.uint8),
            f"S{name}": scales(size, k, True),
            f"AMAX_{name}": empty(size, 1, dtype=torch.float32),
        }
    kernel = compiled(
        template,
        tensors,
        empty(m * config["SPLIT_K"], n, dtype=torch.float32),
        {**config, "A_ROWS": True, "B_ROWS": True},
        sm,
    )
    launch = Launch("", True, 0, {"nvfp4": 2 * m * n * k}, gemm=(m, n, k))
    assert faults(kernel, launch, find_target(f"sm_{sm}")) == ()
    return instructions(kernel)


@pytest.mark.parametrize("sm", [100, 103])
def test_products_feed_tcgen05(sm):
    for choice in configs.gemm_choices(4096, 4096, 4096, sm, True):
        found = gemm(sm, 4096, 4096, 4096, choice)
        assert found["tcgen05.mma mxf4nvf4"] and found["tcgen05.cp"] and found["TMA load"] and "mma.sync" not in found


@pytest.mark.parametrize("sm", [120, 121])
def test_products_feed_mma_sync_with_fp4(sm):
    for choice in configs.gemm_choices(4096, 4096, 4096, sm, True):
        found = gemm(sm, 4096, 4096, 4096, choice)
        assert found["mma.sync mxf4nvf4"] and "mma.sync" not in found


@pytest.mark.parametrize("sm", [100, 103, 120, 121])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1024, 4096), (384, 384, 4096)])
def test_few_tiles_share_the_contraction(sm, m, n, k):
    """A token at a time, and a narrow layer's weight gradient: each candidate splits K, and is otherwise the same."""
    for template, config in configs.gemm_choices(m, n, k, sm, True):
        assert config["SPLIT_K"] > 1
        found = gemm(sm, m, n, k, (template, config))
        assert found["mma.sync mxf4nvf4" if sm >= 120 else "tcgen05.mma mxf4nvf4"]
        assert sm >= 120 or found["tcgen05.cp"]


def test_many_tiles_do_not():
    for sm in (100, 103, 120, 121):
        assert {c["SPLIT_K"] for _, c in configs.gemm_choices(4096, 4096, 4096, sm, True)} == {1}


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("m", [1, 4096])
def test_weight_only_products_read_packed_weights(sm, m):
    n = k = 4096
    template, config = configs.weight_gemm_choices(m, n, k, sm)[0]
    tensors = {
        "X": empty(m, k, dtype=torch.bfloat16),
        "B": empty(n, k // 2, dtype=torch.uint8),
        "SB": scales(n, k, False),
        "AMAX_B": empty(n, 1, dtype=torch.float32),
    }
    kernel = compiled(template, tensors, empty(m, n, dtype=torch.float32), {**config, "B_ROWS": True}, sm)
    launch = Launch("", True, 0, {"bf16": 2 * m * n * k}, gemm=(m, n, k))
    assert faults(kernel, launch, find_target(f"sm_{sm}")) == ()
    assert instructions(kernel)["wgmma" if sm == 90 else "mma.sync"]

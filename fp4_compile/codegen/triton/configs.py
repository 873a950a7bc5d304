"""Tiles, stages and warps of the kernels for a target: the candidates of autotuning, the default first.

A target is given as a number, 100 for sm_100. Defaults come from the cost model's device table; all candidates fit the
target's shared and tensor memory and compile without spills (tests/triton).
"""

from __future__ import annotations

from typing import Any

from fp4_compile.codegen.triton.gemm import SCALED_MM
from fp4_compile.codegen.triton.kernel_template import KernelTemplate
from fp4_compile.codegen.triton.weight_only import WEIGHT_MM
from fp4_compile.cost_model.device_table import device

Config = dict[str, Any]

_REGISTER_ELEMENTS = 128
_WIDEST_TILE = 8192


def hardware(sm: int) -> Config:
    """Return the constants that say which conversions a target has (PTX ISA, ``cvt``)."""
    return {"HARDWARE_E2M1": sm >= 100, "HARDWARE_E4M3": sm >= 89, "HARDWARE_RS": sm in (100, 103)}


def row_quantizer_configs(rows: int, k: int, sm: int, swizzled: bool, stochastic: bool = False) -> list[Config]:
    """Return candidates for `QUANTIZE_ROWS` and `QUANTIZE_RMS_NORM`, for ``rows`` (a hint) by ``k``."""
    candidates = []
    for parts in (2, 1) if stochastic else (4, 2, 1):  # random bits need registers
        # A swizzled tile has the scales of 64 columns, padding included.
        cols = max(64 if swizzled else 32, _power_of_two(-(-k // parts)))
        used = -(-k // cols)
        if cols > _WIDEST_TILE:
            continue
        threads = cols // 32
        # Few rows: as many threads as a row has pieces. Many: a program of about four warps, rows in groups of four,
        # whose swizzled scales are neighbours; eight warps at most, or registers run out.
        least = 4 if threads <= 64 else 2 if threads <= 128 else 1
        height = max(1 if rows * k < 1 << 20 else least, 128 // threads)
        height = min(height, 128, 1024 // threads)
        candidates.append({"ROWS": height, "COLS": cols, "PARTS": used, "num_warps": max(1, height * threads // 32)})
    if not candidates:
        candidates = [{"ROWS": 1, "COLS": cols, "PARTS": 0, "num_warps": cols // 1024} for cols in (8192, 4096)]
    if rows * k < 1 << 20:
        candidates.reverse()
    constants = {"SWIZZLED": swizzled, "HADAMARD": 0, "STOCHASTIC": stochastic, "num_stages": 1, **hardware(sm)}
    return [{**candidate, **constants} for candidate in candidates]


def column_quantizer_config(k: int, sm: int, stochastic: bool = False) -> Config:
    """Return the configuration of `QUANTIZE_COLUMNS` for columns of ``k`` elements (a hint).

    A program has 32 columns, 64 bytes of a row, so that a matrix of 4096 columns keeps all of a GPU's multiprocessors
    busy, and many rows at a time, since no other program on its multiprocessor hides the loads' latency.
    """
    tall = min(512, max(64, _power_of_two(k)))
    constants = {"SWIZZLED": True, "HADAMARD": 0, "STOCHASTIC": stochastic, **hardware(sm)}
    return {"ROWS": 32, "TALL": tall, "num_warps": tall // 32, "num_stages": 1, **constants}


def both_ways_quantizer_config(k: int, sm: int, stochastic: bool = False) -> Config:
    """Return the configuration of `QUANTIZE_BOTH_WAYS` for columns of ``k`` elements (a hint).

    As that of the columns, but whole groups of 128 rows, among which their scales are swizzled.
    """
    return column_quantizer_config(max(k, 128), sm, stochastic)


def gemm_choices(m: int, n: int, k: int, sm: int, swizzled: bool) -> list[tuple[KernelTemplate, Config]]:
    """Return candidates for ``[m, k] x [n, k]`` with FP4 tensor cores; ``m`` is a hint, ``k`` the packed length.

    The caller adds ``A_ROWS`` and ``B_ROWS``. All have one ``SPLIT_K``: few rows, or a weight's gradient in a narrow
    layer, make so few tiles that most multiprocessors would have nothing to do and little of the memory's bandwidth
    be used.
    """
    tiles = _TILES_100 if sm in (100, 103, 110) else _TILES_120
    sms = device(f"sm_{sm}").sms
    candidates = [{**dict(zip(_FIELDS, tile, strict=True)), "GROUP_M": 8, "PROGRAMS": sms} for tile in tiles]
    splits = [s for s in (1, 2, 4, 8, 16) if s == 1 or k >= s * _LEAST_PART]
    seconds = {s: min(gemm_time(m, n, k, sm, c, s) for c in candidates) for s in splits}
    split = min(splits, key=seconds.__getitem__)
    if seconds[split] > _CLEAR_GAIN * seconds[1]:
        split = 1
    candidates.sort(key=lambda c: gemm_time(m, n, k, sm, c, split))
    return [(SCALED_MM, {**candidate, "SPLIT_K": split}) for candidate in candidates]


def weight_gemm_choices(m: int, n: int, k: int, sm: int) -> list[tuple[KernelTemplate, Config]]:
    """Return candidates for a BF16 ``[m, k]`` by a packed weight ``[n, k]``, decoded for a BF16 MMA."""
    rows = min(64, max(16, _power_of_two(m)))
    sizes = [(128, 128, 4, 4), (64, 128, 4, 4), (64, 256, 3, 4)]
    if rows == 64:
        sizes = [(128, 128, 3, 8), *sizes[:2]]
    names = ("BLOCK_N", "BLOCK_K", "STAGES", "num_warps")
    candidates = [{"BLOCK_M": rows, **dict(zip(names, size, strict=True))} for size in sizes]
    for candidate in candidates:
        candidate |= {"num_stages": candidate["STAGES"], "TMA": sm >= 90 and k % 32 == 0}
    return [(WEIGHT_MM, candidate) for candidate in candidates]


def gemm_time(m: int, n: int, k: int, sm: int, config: Config, split: int = 1) -> float:
    """Predict seconds of a `SCALED_MM`: waves of output tiles at the MMA's rate, or the operands' way from memory.

    If K is ``split``, also those of the kernel that adds the parts.
    """
    target = device(f"sm_{sm}")
    if split > 1:
        traffic = m * n * (2 * 4 * split + 2)
        adding = target.launch + traffic / (target.memory * target.bf16_memory_fraction)
        return gemm_time(m, n * split, k // split, sm, config) + adding
    tiles = -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    waves = -(-tiles // target.sms)
    peak = (target.nvfp4_flops or target.bf16_flops) * (target.nvfp4_fraction or target.bf16_fraction)
    compute = 2.0 * config["BLOCK_M"] * config["BLOCK_N"] * k * waves * target.sms / peak
    if sm < 120 and not config["WARP_SPECIALIZE"]:
        compute *= _NO_OVERLAP
    share = min(tiles, target.sms) / target.sms
    return float(max(compute, 0.5625 * k * (m + n) / (target.memory * target.nvfp4_memory_fraction * share)))


_CLEAR_GAIN = 0.7
"""K is split for no less: a multiprocessor among idle ones reads more than its share of the bandwidth."""
_LEAST_PART = 512
"""Elements of K below which a part has too few steps for its loads to overlap."""

# 4847 TFLOP/s with the epilogue behind the next tile's MMAs, 3842 without: Triton's Gluon tutorial 11, 8192x8192x8192.
_NO_OVERLAP = 1.26

_FIELDS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "SUBTILES", "WARP_SPECIALIZE", "num_warps", "num_stages")

# Two accumulators of 128x128, or one of 128x256, and their scales fill tensor memory's 512 columns. In two parts, not
# four, an epilogue with GELU that stores its argument too, or GELU's derivative, spills.
_TILES_100 = [
    (128, 128, 256, 3, 4, True, 4, 3),
    (128, 256, 256, 3, 4, False, 8, 3),
    (128, 128, 256, 4, 4, False, 4, 4),
]

# 99 KB of shared memory a block.
_TILES_120 = [
    (128, 128, 128, 3, 1, False, 8, 3),
    (128, 128, 256, 2, 1, False, 8, 2),
]


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

"""The expressions: by hand on a simple device, symbolic against numeric, and what must hold on every device."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import sympy

from fp4_compile.cost_model import (
    DEVICES,
    bf16_seconds,
    device,
    dgrad_seconds,
    evaluate,
    nvfp4_seconds,
    quantizer_seconds,
    times,
    wgrad_seconds,
)
from fp4_compile.cost_model.roofline import BATCH, K, M, N

SIMPLE = dataclasses.replace(
    device("sm_100"),
    name="simple",
    sms=4,
    bf16_flops=1e12,
    bf16_fraction=0.5,
    bf16_memory_fraction=0.5,
    bf16_tile=(64, 64),
    nvfp4_flops=4e12,
    nvfp4_fraction=0.5,
    nvfp4_memory_fraction=0.25,
    nvfp4_tile=(128, 64),
    memory=1e9,
    launch=1e-6,
    quantizer_fraction=0.5,
    quantizer_passes=2,
)
NO_FP4 = dataclasses.replace(SIMPLE, nvfp4_flops=None, nvfp4_fraction=None)
SIZES = list(itertools.product((1, 2), (1, 16, 100, 129, 4096), (64, 1000), (16, 40, 4096)))


def test_compute_by_hand():
    fast = dataclasses.replace(SIMPLE, memory=1e18)
    # 65 x 130 is 2 x 3 tiles of 64 x 64: two waves of 4.
    assert float(bf16_seconds(fast, 1, 65, 130, 40)) == pytest.approx(1e-6 + 2 * 4 * (2 * 64 * 64 * 40) / 0.5e12)
    # 1 x 3 tiles of 128 x 64: one wave; K = 40 is padded to 48.
    assert float(nvfp4_seconds(fast, 1, 65, 130, 40)) == pytest.approx(1e-6 + 1 * 4 * (2 * 128 * 64 * 48) / 2e12)
    # A batch of two of them fills two waves.
    assert float(nvfp4_seconds(fast, 2, 65, 130, 40)) == pytest.approx(1e-6 + 2 * 4 * (2 * 128 * 64 * 48) / 2e12)


def test_memory_by_hand():
    slow = dataclasses.replace(SIMPLE, memory=1e3)
    traffic = 2 * (3 * 40 + 70 * 40 + 3 * 70)
    assert float(bf16_seconds(slow, 1, 3, 70, 40)) == pytest.approx(1e-6 + traffic / 500, rel=1e-5)
    assert float(bf16_seconds(slow, 1, 3, 70, 40, bias=True)) == pytest.approx(1e-6 + (traffic + 140) / 500, rel=1e-5)
    traffic = 0.5625 * 48 * (3 + 70) + 2 * 3 * 70 + 4
    assert float(nvfp4_seconds(slow, 1, 3, 70, 40)) == pytest.approx(1e-6 + traffic / 250, rel=1e-5)
    assert float(nvfp4_seconds(slow, 1, 3, 70, 40, bias=True)) == pytest.approx(1e-6 + (traffic + 140) / 250, rel=1e-5)


def test_quantizers_by_hand():
    assert float(quantizer_seconds(SIMPLE, 100, 40)) == pytest.approx(2e-6 + 4.5625 * 100 * 48 / 5e8)
    assert float(quantizer_seconds(SIMPLE, 100, 40, fused=True)) == pytest.approx(1e-6 + 2.5625 * 100 * 48 / 5e8)
    alone, shared = times(SIMPLE, 2, 50, 70, 40), times(SIMPLE, 2, 50, 70, 40, consumers=3)
    assert float(alone.quantizer) == pytest.approx(float(quantizer_seconds(SIMPLE, 100, 40)))
    assert float(shared.quantizer) == pytest.approx(float(alone.quantizer) / 3)
    assert alone.weight_quantizer == 0
    rows = dataclasses.replace(SIMPLE, quantizer_passes=1)
    assert quantizer_seconds(rows, 100, 40) == quantizer_seconds(SIMPLE, 100, 40, fused=True)
    training = times(SIMPLE, 2, 50, 70, 40, training=True)
    # Its amax, then codes and scales for both directions.
    assert float(training.weight_quantizer) == pytest.approx(2e-6 + 5.125 * 140 * 48 / 5e8)
    assert training.nvfp4 == training.gemm + training.quantizer + training.weight_quantizer


def test_without_fp4_tensor_cores_only_the_traffic_shrinks():
    thin = dataclasses.replace(NO_FP4, memory=1e6)
    assert nvfp4_seconds(thin, 1, 1, 4096, 4096) < bf16_seconds(thin, 1, 1, 4096, 4096)
    fast = dataclasses.replace(NO_FP4, memory=1e18)
    assert nvfp4_seconds(fast, 1, 4096, 4096, 4096) == bf16_seconds(fast, 1, 4096, 4096, 4096)


def test_expressions_are_symbolic_and_legible():
    assert str(quantizer_seconds(SIMPLE, M, 32)) == "2.92e-7*M + 2.0e-6"
    gemm = nvfp4_seconds(SIMPLE, 1, M, 64, 32)
    assert gemm.has(sympy.Max, sympy.ceiling)
    assert len(str(gemm)) < 120


def test_symbols_stay_until_they_are_given():
    tokens = sympy.Symbol("s0", integer=True, nonnegative=True)
    t = times(device("sm_100"), 1, 2 * tokens + 1, 4096, 4096)
    assert t.bf16.free_symbols == t.gemm.free_symbols == t.quantizer.free_symbols == {tokens}
    assert float(t.nvfp4.subs(tokens, 64)) == pytest.approx(evaluate(device("sm_100"), 1, 129, 4096, 4096).nvfp4)
    assert times(device("sm_100")).nvfp4.free_symbols == {BATCH, M, N, K}


@pytest.mark.parametrize("name", ["sm_90", "sm_100", "cpu"])
@pytest.mark.parametrize("options", [{}, {"consumers": 3, "fused": True, "training": True, "bias": True}], ids=str)
def test_numbers_agree_with_symbols(name, options):
    symbolic = times(device(name), **options)
    for sizes in SIZES[::4]:
        at = dict(zip((BATCH, M, N, K), sizes, strict=True))
        numeric = evaluate(device(name), *sizes, **options)
        for field in dataclasses.fields(numeric):
            expected = float(getattr(symbolic, field.name).subs(at))
            assert getattr(numeric, field.name) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sms", [7, 49, 103, 148])
def test_full_waves_cost_no_more(sms):
    odd = dataclasses.replace(SIMPLE, sms=sms, memory=1e18)
    waves = [(evaluate(odd, 1, 64 * sms * w, 64, 64).bf16 - odd.launch) / (w * sms) for w in range(1, 60)]
    assert max(waves) == pytest.approx(min(waves))


@pytest.mark.parametrize("name", list(DEVICES))
def test_more_work_never_takes_less(name):
    steps = (1, 15, 16, 17, 64, 127, 128, 129, 1000, 4096, 65536)
    for position in range(1, 4):
        sizes = [[1, 256, 256, 256] for _ in steps]
        for size, step in zip(sizes, steps, strict=True):
            size[position] = step
        seconds = [evaluate(device(name), *size, training=True) for size in sizes]
        for field in ("bf16", "gemm", "quantizer", "nvfp4"):
            values = [getattr(s, field) for s in seconds]
            assert values == sorted(values)
            decoded = field == "quantizer" and device(name).nvfp4_flops is None
            assert all(v == 0 if decoded else 0 < v < math.inf for v in values)


@pytest.mark.parametrize("consumers", [1, 3])
def test_the_backward_by_hand(consumers):
    m, n, k = 512, 256, 1024
    (dgrad_bf16, dgrad_nvfp4), (wgrad_bf16, wgrad_nvfp4) = (
        dgrad_seconds(SIMPLE, m, n, k),
        wgrad_seconds(SIMPLE, m, n, k, consumers),
    )
    assert dgrad_bf16 == pytest.approx(float(bf16_seconds(SIMPLE, 1, m, k, n)))
    assert dgrad_nvfp4 == pytest.approx(float(nvfp4_seconds(SIMPLE, 1, m, k, n) + quantizer_seconds(SIMPLE, m, n)))
    assert wgrad_bf16 == pytest.approx(float(bf16_seconds(SIMPLE, 1, n, k, m)))
    operands = quantizer_seconds(SIMPLE, n, m) + quantizer_seconds(SIMPLE, k, m) / consumers
    assert wgrad_nvfp4 == pytest.approx(float(nvfp4_seconds(SIMPLE, 1, n, k, m) + operands))


def test_contractions_are_padded_to_blocks():
    at = [evaluate(device("sm_100"), 1, 4096, 4096, k).nvfp4 for k in (17, 31, 32, 33)]
    assert at[0] == at[1] == at[2] < at[3]
    assert evaluate(device("sm_100"), 1, 4096, 4096, 31).bf16 < evaluate(device("sm_100"), 1, 4096, 4096, 32).bf16

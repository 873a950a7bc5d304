"""Break-even: exact, kept up to the limit, lower where a quantizer is shared, and refused with a reason."""

from __future__ import annotations

import dataclasses
import time

import pytest

from fp4_compile.cost_model import DEVICES, break_even_rows, describe, device, evaluate, power_of_two_threshold
from fp4_compile.cost_model.break_even import LIMIT

B200 = device("sm_100")


def pays(chip, m, n, k, **options):
    t = evaluate(chip, 1, m, n, k, **options)
    return t.nvfp4 < t.bf16


@pytest.mark.parametrize(
    ("n", "k", "options"),
    [
        (4096, 4096, {}),
        (4096, 4096, {"training": True}),
        (4096, 4096, {"fused": True}),
        (1024, 4096, {"consumers": 3}),
        (1024, 1024, {"consumers": 3}),
        (2048, 8192, {}),
    ],
    ids=str,
)
def test_it_pays_from_there_on_and_not_just_before(n, k, options):
    rows = break_even_rows(B200, n, k, **options)
    assert rows > 1
    assert not pays(B200, rows - 1, n, k, **options)
    beyond = {*range(rows, rows + 300), *(rows + 61 * i for i in range(400)), *(2**e for e in range(21)), LIMIT}
    assert all(pays(B200, m, n, k, **options) for m in beyond if m >= rows)


def test_a_gain_that_does_not_last_is_not_the_break_even():
    rows = break_even_rows(B200, 2048, 4096)
    assert any(pays(B200, m, 2048, 4096) for m in range(1, rows))


@pytest.mark.parametrize("name", ["sm_100", "sm_103", "sm_120", "sm_120-pro6000", "sm_121"])
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (6144, 4096)])
def test_sharing_and_fusing_lower_it(name, n, k):
    alone, shared, fused, training = (
        break_even_rows(device(name), n, k, **options) or LIMIT + 1
        for options in ({}, {"consumers": 3}, {"fused": True}, {"training": True})
    )
    assert shared <= alone <= training
    assert fused <= alone


def test_wide_layers_pay_at_once():
    assert break_even_rows(B200, 28672, 8192) == 1


def test_what_never_pays_says_why():
    assert break_even_rows(B200, 256, 4096) is None
    assert "with N=256 the GEMM gets" in describe(B200, 256, 4096)
    assert "quantizing the row takes" in describe(B200, 256, 4096)
    # The weight's bandwidth bounds few rows only: it pays for those, and then no longer.
    h200 = device("sm_90")
    for target, why in (
        (h200, "sm_90 has no FP4 tensor cores"),
        (device("cpu-bf16"), "cpu-bf16 multiplies in NVFP4 no faster than in BF16"),
    ):
        assert break_even_rows(target, 8192, 8192) is None
        assert f"NVFP4 never pays here: {why}, and beyond M = " in describe(target, 8192, 8192)
        last = int(describe(target, 8192, 8192).partition("M = ")[2].split()[0])
        assert pays(target, last, 8192, 8192)
        assert not pays(target, last + 1, 8192, 8192)
    assert describe(h200, 64, 64) == "NVFP4 never pays here: sm_90 has no FP4 tensor cores"


def test_what_pays_says_from_where():
    assert describe(device("cpu"), 4096, 4096) == "NVFP4 pays from M >= 1"  # without BF16 instructions int8 is faster
    assert describe(B200, 4096, 4096) == f"NVFP4 pays from M >= {break_even_rows(B200, 4096, 4096)}"


@pytest.mark.parametrize("name", [name for name, known in DEVICES.items() if known.nvfp4_flops is None])
def test_no_fp4_tensor_cores_no_break_even(name):
    assert break_even_rows(device(name), 16384, 8192) is None


def test_a_slower_quantizer_raises_it():
    rows = [
        break_even_rows(dataclasses.replace(B200, quantizer_fraction=fraction), 4096, 4096)
        for fraction in (0.9, 0.5, 0.3)
    ]
    assert rows == sorted(rows)
    assert rows[0] < rows[-1]


@pytest.mark.parametrize(("rows", "threshold"), [(1, 1), (2, 2), (3, 4), (384, 512), (512, 512), (513, 1024)])
def test_thresholds_are_powers_of_two(rows, threshold):
    assert power_of_two_threshold(rows) == threshold


def test_thousands_of_sites_take_no_time():
    evaluate(B200, 1, 1, 4096, 4096)
    break_even_rows(B200, 4096, 4096)
    start = time.perf_counter()
    for m in range(1, 2001):
        evaluate(B200, 1, m, 4096, 4096)
        break_even_rows(B200, 4096, 4096)
    assert time.perf_counter() - start < 2

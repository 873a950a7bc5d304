"""What training adds to the numbers: random bytes, transposed tiles, Hadamard transforms; and the kernels of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp4_compile import numerics
from fp4_compile.codegen import cpu_training

SHAPES = [(1, 1), (1, 16), (3, 17), (16, 16), (33, 40), (64, 96), (5, 250), (2, 3, 48)]


def of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    if kind == "outliers":
        x.flatten()[::7] *= 1e4
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "zeros":
        x *= 0.0
    elif kind == "not finite":
        x.flatten()[0] = float("nan")
        x.flatten()[-1] = float("inf")
    return x.to(dtype)


KINDS = ["gaussian", "outliers", "tiny", "zeros", "not finite"]
every_input = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


def test_random_bytes_are_philox() -> None:
    """The generator's authors give these words for a counter and key of zeros."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    want = b"".join(word.to_bytes(4, "little") for word in words)
    assert bytes(numerics.philox_bytes(torch.tensor(0), 0, 1)[0].tolist()) == want


def test_random_bytes_are_uniform_and_depend_on_everything() -> None:
    drawn = numerics.philox_bytes(torch.tensor(-(2**61)), 3, 4096)
    counts = drawn.flatten().long().bincount(minlength=256).double()
    assert counts.sum() == 65536 and ((counts - 256).square() / 256).sum() < 350  # chi square, 255 degrees
    others = [
        numerics.philox_bytes(torch.tensor(s), t, 4096) for s, t in ((-(2**61) + 1, 3), (-(2**61), 4), (2**61, 3))
    ]
    for other in others:
        assert abs((other == drawn).double().mean() - 1 / 256) < 0.002
    assert torch.equal(numerics.philox_bytes(torch.tensor(-(2**61)), 3, 10), drawn[:10])


@every_input
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_the_bytes_of_the_definition(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    x, seed = of(kind, shape, dtype), torch.tensor(-7654321)
    amax = numerics.tensor_amax(x)
    drawn = cpu_training.random_bytes(x, seed, 5, 16)
    assert equal(cpu_training.quantize_stochastic(x, amax, seed, 5), numerics.quantize_1x16(x, amax, drawn)[:2])
    assert equal(cpu_training.quantize_16x16(x, amax), numerics.quantize_16x16(x, amax)[:2])
    mx = numerics.quantize_mxfp4(x, "rceil")
    assert equal(cpu_training.quantize_mxfp4(x, None, 0), mx)
    drawn = cpu_training.random_bytes(x, seed, 5, 32)
    stochastic = cpu_training.quantize_mxfp4(x, seed, 5)
    assert equal(stochastic, numerics.quantize_mxfp4(x, "rceil", drawn))
    for codes, scales in (mx, stochastic):
        want = numerics.dequantize_mxfp4(codes, scales, 2 * codes.shape[-1])
        assert torch.equal(cpu_training.decode_mxfp4(codes, scales).nan_to_num(7e37), want.nan_to_num(7e37))
    for size in numerics.HADAMARD_SIZES:
        got, want = cpu_training.random_hadamard(x, size), numerics.random_hadamard(x, -1, size)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) == 2], ids=str)
def test_transposed_tiles_are_the_tiles_of_the_transpose(shape: tuple[int, int]) -> None:
    w = of("outliers", shape, torch.float32)
    amax = numerics.tensor_amax(w)
    codes, scales, _ = numerics.quantize_16x16(w, amax)
    want = numerics.quantize_16x16(w.t().contiguous(), amax)[:2]
    assert equal(numerics.transpose_16x16(codes, scales, shape[1]), want)
    assert equal(cpu_training.transpose_16x16(codes, scales, shape[1]), want)


@pytest.mark.parametrize("size", numerics.HADAMARD_SIZES)
def test_the_transform_is_its_matrix_and_cancels_in_a_product(size: int) -> None:
    matrix = numerics.hadamard_matrix(torch.device("cpu"), size)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size), atol=1e-6, rtol=0)
    x, y = torch.randn(8, 3 * size), torch.randn(5, 3 * size)
    by_matrix = (x.view(8, 3, size) @ matrix).flatten(1).to(torch.bfloat16)
    torch.testing.assert_close(numerics.random_hadamard(x, -1, size), by_matrix, atol=2e-2, rtol=1e-2)
    odd = (
        numerics.random_hadamard(x[:, :-3], -1, size).float()
        @ numerics.random_hadamard(y[:, :-3], -1, size).float().t()
    )
    want = x[:, :-3] @ y[:, :-3].t()
    assert (odd - want).norm() / want.norm() < 0.006  # rounding to BF16, twice


def test_stochastic_rounding_is_right_on_average() -> None:
    """To within the resolution of a byte: 1/256 of the distance of two codes."""
    x = torch.linspace(-6, 6, 97).repeat(1, 1)
    block = torch.zeros(1, 112)
    block[:, :97] = x
    block[:, ::16] = 6.0  # every block's scale is 1
    amax = torch.tensor(6.0 * 448)
    total = torch.zeros(1, 112)
    for seed in range(4000):
        codes, scales = cpu_training.quantize_stochastic(block, amax, torch.tensor(seed), 0)
        total += numerics.dequantize(codes, scales, amax, 112)
    gap = torch.where(block.abs() < 2, 0.5, torch.where(block.abs() < 4, 1.0, 2.0))
    assert ((total / 4000 - block).abs() <= gap * (1 / 256 + 5 * 0.5 / 4000**0.5)).all()
    assert abs(((total / 4000 - block) / gap).mean()) < 1 / 256


def test_a_size_without_signs_is_refused() -> None:
    with pytest.raises(ValueError, match="size is 24"):
        numerics.random_hadamard(torch.ones(4, 48), -1, 24)

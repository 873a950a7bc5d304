"""E2M1 rounding against a search over its eight magnitudes, exhaustively where the inputs can be listed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp4_compile.numerics import (
    E2M1_MAX,
    E2M1_VALUES,
    decode_e2m1,
    pack,
    round_e2m1,
    round_e2m1_stochastic,
    unpack,
)

MAGNITUDES = torch.tensor(E2M1_VALUES[:8], dtype=torch.float64)
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
ALL_CODES = torch.arange(16, dtype=torch.uint8)


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit float format, NaNs and infinities included, as float32."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).to(torch.float32)


def search(y: Tensor) -> Tensor:
    """The code nearest to each value by distance in float64; of two equally near, the even one; NaN is +6."""
    distance = (y.abs().double().clamp_max(1e6).unsqueeze(-1) - MAGNITUDES).abs()
    nearest = distance == distance.amin(dim=-1, keepdim=True)
    odd_last = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = odd_last[nearest[:, odd_last].to(torch.uint8).argmax(dim=-1)]
    code = torch.where(torch.signbit(y), code + 8, code)
    return torch.where(y.isnan(), 7, code).to(torch.uint8)


def assert_rounds_like_search(y: Tensor) -> None:
    codes = round_e2m1(y)
    assert codes.dtype == torch.uint8
    assert codes.shape == y.shape
    wrong = codes != search(y)
    assert not wrong.any(), (y[wrong][:5], codes[wrong][:5])


def test_values() -> None:
    values = decode_e2m1(ALL_CODES)
    assert values.dtype == torch.float32
    assert values.tolist() == list(E2M1_VALUES)
    assert [math.copysign(1, value) for value in values.tolist()] == [1.0] * 8 + [-1.0] * 8
    assert max(E2M1_VALUES) == E2M1_MAX


def test_every_value_rounds_to_its_own_code() -> None:
    assert torch.equal(round_e2m1(torch.tensor(E2M1_VALUES)), ALL_CODES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float(dtype: torch.dtype) -> None:
    assert_rounds_like_search(all_patterns(dtype))


def test_floats_next_to_every_tie_and_value() -> None:
    centres = torch.tensor([*TIES, *E2M1_VALUES[:8]])
    neighbours = (centres.view(torch.int32).unsqueeze(-1) + torch.arange(-300, 301)).to(torch.int32)
    # Below zero the bits are those of NaNs with their sign set, tested on the way.
    y = neighbours.flatten().view(torch.float32)
    assert_rounds_like_search(torch.cat([y, -y]))


def test_ties_go_to_the_even_code_and_their_neighbours_do_not() -> None:
    ties = torch.tensor(TIES)
    assert round_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert round_e2m1(torch.nextafter(ties, torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert round_e2m1(torch.nextafter(ties, torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_random_floats_over_all_magnitudes() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    assert_rounds_like_search(bits.to(torch.int32).view(torch.float32))
    assert_rounds_like_search(torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * 3)


def test_special_values() -> None:
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1, -0x7FFFFF], dtype=torch.int32)
    assert round_e2m1(nans.view(torch.float32)).tolist() == [7] * 6
    specials = torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45, -1e-45])
    assert round_e2m1(specials).tolist() == [7, 15, 7, 15, 0, 8, 0, 8]
    random_bytes = torch.full((8,), 255, dtype=torch.uint8)
    assert round_e2m1_stochastic(specials, random_bytes).tolist() == [7, 15, 7, 15, 0, 8, 0, 8]
    assert round_e2m1_stochastic(nans.view(torch.float32), random_bytes[:6]).tolist() == [7] * 6


def test_layouts_of_the_input_do_not_matter() -> None:
    y = torch.randn(6, 10, generator=torch.Generator().manual_seed(2)) * 3
    assert torch.equal(round_e2m1(y.t()), round_e2m1(y).t())
    assert torch.equal(round_e2m1(y[:, ::3]), round_e2m1(y)[:, ::3])
    assert round_e2m1(torch.tensor(2.9)).tolist() == 5
    assert round_e2m1(torch.empty(3, 0)).shape == (3, 0)


@pytest.fixture(scope="module")
def dithers() -> tuple[Tensor, Tensor, Tensor]:
    """Magnitudes fine enough for every probability, their codes over the 256 bytes, and their steps."""
    y = torch.arange(0, 6 * 2048, dtype=torch.float32) / 2048  # exact, and so is every dithered sum
    codes = round_e2m1_stochastic(y.unsqueeze(-1), torch.arange(256, dtype=torch.uint8))
    step = torch.where(y >= 4, 2.0, torch.where(y >= 2, 1.0, 0.5))
    return y, codes, step


def test_stochastic_rounding_is_unbiased_to_a_256th_step(dithers: tuple[Tensor, Tensor, Tensor]) -> None:
    y, codes, step = dithers
    bias = y.double() - decode_e2m1(codes).double().mean(dim=-1)
    assert (bias >= 0).all()
    assert (bias < step / 256).all()


def test_stochastic_rounding_only_takes_the_two_neighbours(dithers: tuple[Tensor, Tensor, Tensor]) -> None:
    y, codes, step = dithers
    lower = (y / step).floor() * step
    ups = ((y - lower) / step * 256).floor()
    values = decode_e2m1(codes)
    assert ((values == lower.unsqueeze(-1)) | (values == (lower + step).unsqueeze(-1))).all()
    assert torch.equal((values > lower.unsqueeze(-1)).sum(dim=-1).float(), ups)
    # The bytes that round up are the largest, for a byte is what is added before truncation.
    assert (codes[:, 1:] >= codes[:, :-1]).all()


def test_stochastic_rounding_mirrors_and_keeps_exact_values() -> None:
    random_bytes = torch.arange(256, dtype=torch.uint8)
    y = torch.randn(500, 1, generator=torch.Generator().manual_seed(3)).abs() * 3
    assert torch.equal(round_e2m1_stochastic(-y, random_bytes), round_e2m1_stochastic(y, random_bytes) | 8)
    exact = round_e2m1_stochastic(torch.tensor(E2M1_VALUES).unsqueeze(-1), random_bytes)
    assert torch.equal(exact, ALL_CODES.unsqueeze(-1).expand(16, 256))


def test_pack_puts_the_even_element_in_the_low_nibble() -> None:
    assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_every_byte_unpacks_and_packs_again() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    codes = unpack(packed)
    assert codes.shape == (4, 8, 16)
    assert torch.equal(codes[..., 0::2], packed % 16)
    assert torch.equal(codes[..., 1::2], packed // 16)
    assert torch.equal(pack(codes), packed)
    assert torch.equal(pack(unpack(packed.permute(2, 0, 1))), packed.permute(2, 0, 1))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="y has dtype bfloat16; convert it to float32"):
        round_e2m1(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="random_bytes has dtype int64"):
        round_e2m1_stochastic(torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="codes has dtype int32"):
        decode_e2m1(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="packed has dtype float32"):
        unpack(torch.zeros(2))
    with pytest.raises(ValueError, match="odd last dimension, 3"):
        pack(torch.zeros(3, dtype=torch.uint8))

"""Bytes that must come out of the quantizers: recorded vectors, and hand-checked cases with their reasons."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_compile.numerics import (
    E2M1_VALUES,
    FOUR_OVER_SIX_BOUND,
    decode_e2m1,
    decode_unscaled,
    dequantize,
    dequantize_mxfp4,
    encode_scale,
    gemm_alpha,
    hadamard_matrix,
    pack,
    quantize_1x16,
    quantize_16x16,
    quantize_blocks,
    quantize_mxfp4,
    random_hadamard,
    round_e2m1_stochastic,
    swizzle_scales,
    tensor_amax,
    unpack,
)

CASES = json.loads((Path(__file__).parent / "fp4_vectors.json").read_text())["cases"]
FP32_MAX = torch.finfo(torch.float32).max


def to_hex(x: Tensor) -> str:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist()).hex()


def float_hex(x: Tensor) -> str:
    return struct.pack(">f", x.item()).hex()


def sha(x: Tensor) -> str:
    return hashlib.sha256(bytes.fromhex(to_hex(x))).hexdigest()[:16]


def from_hex(text: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8).view(dtype).reshape(shape)


def fp32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def row(*values: float, length: int = 16) -> Tensor:
    """A float32 row that starts with the given values and goes on with zeros."""
    return torch.cat([fp32(*values), torch.zeros(length - len(values))])


def bf16(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(torch.bfloat16)


def wave(count: int, function: Any = math.sin) -> Tensor:
    return bf16([function(i) for i in range(1, count + 1)])


def hardware_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 16 and their amaxes as CUDA's fmax finds them: Inf counts, NaN is passed over."""
    blocks = x.to(torch.float32).unflatten(-1, (-1, 16))
    return blocks, blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1)


def hardware_quantize(x: Tensor, amax: float) -> tuple[str, str]:
    codes, scales = quantize_blocks(*hardware_blocks(x), fp32(amax)[0])
    return to_hex(scales), to_hex(pack(codes))


# Recorded vectors


def recorded(key: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in CASES if key in case]


def load(case: dict[str, Any]) -> Tensor:
    return from_hex(case["bf16"], torch.bfloat16, case["shape"])


def check_amax(amax: Tensor, expected: float) -> None:
    # The recorded amax is the plain maximum; ours does not go below the least amax that decodes correctly.
    assert amax.item() == (0.0 if expected == 0.0 else max(expected, 2688 * 2.0**-128))


def test_every_key_of_the_vectors_is_tested() -> None:
    keys = {key for case in CASES for key in case} - {"name", "shape", "bf16"}
    assert keys == {
        "nvfp4_1x16",
        "nvfp4_1x16_sr",
        "four_over_six",
        "nvfp4_16x16",
        "nvfp4_1x16_transposed_rht",
        "mxfp4_floor",
        "mxfp4_rceil",
    }


@pytest.mark.parametrize("case", recorded("nvfp4_1x16"))
def test_vectors_1x16(case: dict[str, Any]) -> None:
    expected = case["nvfp4_1x16"]
    codes, scales, amax = quantize_1x16(load(case))
    assert (to_hex(scales), to_hex(codes)) == (expected["scales"], expected["packed"])
    check_amax(amax, expected["amax"])


@pytest.mark.parametrize("case", recorded("nvfp4_1x16_sr"))
def test_vectors_stochastic(case: dict[str, Any]) -> None:
    expected = case["nvfp4_1x16_sr"]
    random_bytes = from_hex(expected["random_bytes"], torch.uint8, case["shape"])
    codes, scales, _ = quantize_1x16(load(case), random_bytes=random_bytes)
    assert (to_hex(scales), to_hex(codes)) == (case["nvfp4_1x16"]["scales"], expected["packed"])


@pytest.mark.parametrize("case", recorded("four_over_six"))
def test_vectors_four_over_six(case: dict[str, Any]) -> None:
    expected = case["four_over_six"]
    x = load(case)
    check_amax(tensor_amax(x), expected["amax"])
    # The recorded amax, since it enters the comparison of errors: the tiny tensor's would be raised to one
    # that decodes correctly, and some of its choices would be others (and better ones).
    codes, scales, _ = quantize_1x16(x, fp32(expected["amax"])[0], four_over_six=True)
    assert (to_hex(scales), to_hex(codes)) == (expected["scales"], expected["packed"])


@pytest.mark.parametrize("case", recorded("nvfp4_16x16"))
def test_vectors_16x16(case: dict[str, Any]) -> None:
    expected = case["nvfp4_16x16"]
    codes, scales, amax = quantize_16x16(load(case))
    # One scale is recorded for each tile; ours are repeated for the tile's rows.
    tiles = scales.view(torch.uint8).unflatten(0, (-1, 16))
    assert torch.equal(tiles, tiles[:, :1].expand_as(tiles))
    assert (to_hex(tiles[:, 0]), to_hex(codes)) == (expected["scales"], expected["packed"])
    check_amax(amax, expected["amax"])


@pytest.mark.parametrize("case", recorded("nvfp4_1x16_transposed_rht"))
def test_vectors_transposed_hadamard(case: dict[str, Any]) -> None:
    expected = case["nvfp4_1x16_transposed_rht"]
    codes, scales, amax = quantize_1x16(random_hadamard(load(case).t()))
    assert (to_hex(scales), to_hex(codes)) == (expected["scales"], expected["packed"])
    check_amax(amax, expected["amax"])


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
@pytest.mark.parametrize("case", recorded("mxfp4_floor"))
def test_vectors_mxfp4(case: dict[str, Any], rounding: Any) -> None:
    expected = case[f"mxfp4_{rounding}"]
    packed = expected["packed"]
    if case["name"] == "tiny_tensor_1x32":
        # Element 19 is 2**-129 under a scale of 2**-127, a quarter exactly, and ties go to the even code 0.
        # The vector says 1: it was made with float32 exp2(127), which numpy rounds to the float after 2**127.
        assert load(case)[0, 19].item() == 2.0**-129
        assert packed[18:20] == "1a"
        packed = packed[:18] + "0a" + packed[20:]
    codes, scales = quantize_mxfp4(load(case), rounding)
    assert (to_hex(scales), to_hex(codes)) == (expected["scales"], packed)


# Hand-checked cases


@pytest.mark.parametrize(
    ("x", "amax", "encode", "scales", "packed"),
    [
        pytest.param(fp32(*E2M1_VALUES), 6.0, "43e00000", "7e", "1032547698badcfe", id="G1-every-code-and-minus-zero"),
        pytest.param(
            fp32(6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5),
            6.0,
            "43e00000",
            "7e",
            "072244668faaccee",
            id="G2-ties",
        ),
        pytest.param(torch.zeros(16), 0.0, "3f800000", "00", "0000000000000000", id="G3-zeros"),
        pytest.param(
            torch.cat([row(1), row(1e-6, -5e-7, 1e-9)]),
            1.0,
            "45280000",
            "7e00",
            "0700000000000000f707000000000000",
            id="G5-scale-underflow-saturates-codes",
        ),
        pytest.param(
            fp32(100, *(0.01 * i for i in range(1, 16))),
            100.0,
            "41d70a3d",
            "7e",
            "0700000000000000",
            id="G6-outlier-erases-its-block",
        ),
        pytest.param(fp32(100, *range(1, 16)), 100.0, "41d70a3d", "7e", "0700101111112122", id="G6b-milder-outlier"),
        pytest.param(wave(32), 1.0, "45280000", "7e7e", "77e2bf76d4df75b6ef7287ff6a37fe5c", id="G7-sine"),
        pytest.param(
            wave(64, lambda i: i * math.sin(i)),
            59.0,
            "42363cbf",
            "6d767a7e",
            "21b09c54c3de74c6dd6186ee6937fe6d56fc3d67fa0f77f2be75d4df75c6ef72",
            id="G21-growing-sine",
        ),
        pytest.param(
            row(FP32_MAX, -FP32_MAX / 2, 1.0),
            FP32_MAX,
            "05280001",
            "7e",
            "d700000000000000",
            id="G11-largest-float32",
        ),
        pytest.param(row(7, 3.5, -1.75, 1, 0.3, -7), 7.0, "43c00000", "7e", "572bf10000000000", id="G22-as-nvfp4"),
    ],
)
def test_1x16(x: Tensor, amax: float, encode: str, scales: str, packed: str) -> None:
    actual_codes, actual_scales, actual_amax = quantize_1x16(x)
    assert actual_amax.item() == torch.tensor(amax).item()
    assert float_hex(encode_scale(actual_amax)) == encode
    assert (to_hex(actual_scales), to_hex(actual_codes)) == (scales, packed)
    assert hardware_quantize(x, amax) == (scales, packed)


def test_g5_underflown_block_decodes_to_signed_zeros() -> None:
    codes, scales, amax = quantize_1x16(torch.cat([row(1), row(1e-6, -5e-7, 1e-9)]))
    assert dequantize(codes, scales, amax, 32).tolist() == [1.0] + [0.0] * 31


@pytest.mark.parametrize(
    ("v", "scale", "codes"),
    [
        (2.1798e-6, "00", [7, 15, 7]),
        (2.18e-6, "01", [5, 11, 2]),
        (3.2e-6, "01", [6, 12, 3]),
        (3.5e-5, "08", [7, 13, 4]),
    ],
)
def test_g5b_smallest_scales(v: float, scale: str, codes: list[int]) -> None:
    packed, scales, _ = quantize_1x16(torch.cat([row(1), row(v, -v / 2, v / 3)]))
    assert to_hex(scales) == "7e" + scale
    assert unpack(packed)[16:19].tolist() == codes


def test_g8_infinity_as_hardware_quantizes_it() -> None:
    # Our quantizers make the block of an Inf NaN, so that it stays visible: this needs their primitives.
    x = torch.cat([row(torch.inf, 1, -3e38), row(1, -1000)])
    assert encode_scale(fp32(torch.inf)).item() == 1.0
    assert hardware_quantize(x, torch.inf) == ("7e72", "070f000000000000f000000000000000")


def test_g9_nan_as_hardware_quantizes_it() -> None:
    # Hardware passes over the NaN and turns it into +6; our quantizers give its block the scale NaN.
    assert encode_scale(fp32(2.0)).item() == 1344.0
    assert hardware_quantize(row(torch.nan, 1, -2), 2.0) == ("7e", "570f000000000000")


def test_g10_subnormals_are_not_flushed() -> None:
    x = row(1e-38, -5e-39, 2e-39, 1e-40)
    expected = ("31", "b501000000000000")
    # The smallest tensors have their amax raised, for decoding: neither codes nor scales may notice.
    codes, scales, amax = quantize_1x16(x)
    assert amax.item() > 1e-38
    assert encode_scale(amax).item() == encode_scale(fp32(1e-38)).item() == FP32_MAX
    assert (to_hex(scales), to_hex(codes)) == expected == hardware_quantize(x, 1e-38)


@pytest.mark.parametrize(("amax", "b", "scale"), [(2.1875, 1.640625, "7b"), (192.0, 9.0, "5b")])
def test_g12_scale_is_one_product(amax: float, b: float, scale: str) -> None:
    """Witness: dividing b by 6 before multiplying by the encode scale gives the scale below."""
    assert to_hex(quantize_1x16(torch.cat([row(amax), row(b)]))[1]) == "7e" + scale


@pytest.mark.parametrize(
    ("amax", "b", "x", "scale", "code"),
    [(0.287109375, 0.2451171875, 0.205078125, "7c", 7), (192.0, 9.0, 5.5, "5b", 6)],
)
def test_g12b_elements_multiply_by_one_reciprocal(amax: float, b: float, x: float, scale: str, code: int) -> None:
    """Witness: ``x * (encode / scale)`` and ``x / (scale * decode)`` give the code below."""
    packed, scales, _ = quantize_1x16(torch.cat([row(amax), row(b, x)]))
    assert to_hex(scales) == "7e" + scale
    assert unpack(packed)[17].item() == code


@pytest.fixture(scope="module")
def matrix() -> Tensor:
    x = bf16([((k % 37) + 1) * math.sin(k) for k in range(1, 513)]).view(16, 32)
    assert x[0, :4].tolist() == [1.6796875, 2.734375, 0.56640625, -3.78125]
    return x


def test_g13_rowwise(matrix: Tensor) -> None:
    codes, scales, amax = quantize_1x16(matrix)
    assert amax.item() == 36.75
    assert to_hex(scales[0]) == "737c"
    assert to_hex(codes[0]) == "21b0ac64c3de74c6dd6186ee6937fe5c"
    assert (sha(codes), sha(scales)) == ("9d04aaeda7d0d5f5", "862f9fc3ebc417d6")


def test_g13_columnwise(matrix: Tensor) -> None:
    codes, scales, _ = quantize_1x16(matrix.t())
    assert to_hex(codes[0]) == "7136b99b8e543581"
    assert (sha(codes), sha(scales)) == ("8fab5aa2de38a322", "828aa235342bc3a8")


def test_g13_tiles(matrix: Tensor) -> None:
    codes, scales, _ = quantize_16x16(matrix)
    assert to_hex(scales) == "7e" * 32
    assert to_hex(codes[0]) == "11909a32a1ac42a3cd5185ed5936fd5c"
    assert sha(codes) == "259572a344fd4531"
    transposed, _, _ = quantize_16x16(matrix.t())
    assert to_hex(transposed[0]) == "7136b99b8d543580"
    assert sha(transposed) == "8257b70e4887fbd6"
    assert torch.equal(unpack(transposed), unpack(codes).t())


def test_g13_transposed_hadamard(matrix: Tensor) -> None:
    codes, scales, amax = quantize_1x16(random_hadamard(matrix, 0).t())
    assert amax.item() == 40.75
    assert to_hex(scales) == "7a797a7a7d7b7b7b7a787d7b797b78787b78797a7a797e797b7d797c7b797d79"
    assert to_hex(codes[0]) == "c6d2253535f188f0"
    assert (sha(codes), sha(scales)) == ("cec47765633ff9c2", "193dc83641b45aa8")


def test_g13_one_amax_a_row(matrix: Tensor) -> None:
    amaxes = matrix.abs().amax(dim=1, keepdim=True).to(torch.float32)
    assert amaxes[:3, 0].tolist() == [30.625, 36.75, 33.25]
    codes, scales, amax = quantize_1x16(matrix, amaxes)
    assert torch.equal(amax, amaxes)
    assert (sha(codes), sha(scales)) == ("3f52e6e3b3909c4c", "a3fab168fa4b311a")


def test_g14_hadamard() -> None:
    transformed = random_hadamard(torch.arange(1, 17).to(torch.bfloat16))
    assert transformed.dtype == torch.bfloat16
    first = [-15.5, -7.5, 7.5, -0.5, 7.5, -0.5, -15.5, 8.5]
    assert transformed.tolist() == [*first, 8.5, 16.5, 1.5, 1.5, 1.5, -2.5, 10.5, -17.5]
    codes, scales, amax = quantize_1x16(transformed)
    assert float_hex(encode_scale(amax)) == "4319999a"
    assert (to_hex(scales), to_hex(codes)) == ("7e", "df85855f7511a1f6")
    basis = random_hadamard(torch.eye(16)[3])
    assert (basis * 4).tolist() == [-1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1]


def test_hadamard_keeps_products_and_pads_with_zeros() -> None:
    h = hadamard_matrix(torch.device("cpu"))
    assert torch.equal(h @ h.t(), torch.eye(16))
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (5, 40), generator=generator).to(torch.bfloat16)
    b = torch.randint(-8, 9, (7, 40), generator=generator).to(torch.float16)
    a_h, b_h = random_hadamard(a), random_hadamard(b)
    assert a_h.shape == (5, 48)
    # Sums of small integers in quarters: nothing rounds, so the products agree to the last bit.
    assert torch.equal(a_h.double() @ b_h.double().t(), a.double() @ b.double().t())
    assert torch.equal(random_hadamard(a.t(), 0), a_h.t())
    assert torch.equal(random_hadamard(a.unsqueeze(0), -1)[0], a_h)


def test_hadamard_rounds_once() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = x.double().unflatten(-1, (2, 16)) @ hadamard_matrix(x.device).double()
    assert torch.equal(random_hadamard(x), exact.flatten(-2).to(torch.bfloat16))


def test_g16_gemm() -> None:
    a = quantize_1x16(wave(512).view(16, 32)[:2])
    b = quantize_1x16(wave(256, math.cos).view(8, 32)[:2])
    accumulators = decode_unscaled(*a[:2], torch.bfloat16).float() @ decode_unscaled(*b[:2], torch.float32).t()
    assert accumulators.tolist() == [[2207744.0, -66031616.0], [71049216.0, 2609152.0]]
    alpha = gemm_alpha(a[2], b[2])
    assert alpha.dtype == torch.float32
    assert alpha.item() == fp32(1.3840172e-07).item()
    y = (alpha * accumulators).flatten()
    assert y.tolist() == fp32(0.30555555, -9.1388893, 9.833333, 0.3611111).tolist()


def test_g17_swizzle() -> None:
    scales = (torch.arange(256 * 8) % 251).to(torch.uint8).view(256, 8)
    flat = swizzle_scales(scales).flatten()
    offsets = {(0, 0): 0, (0, 3): 3, (0, 4): 512, (1, 0): 16, (31, 0): 496, (32, 0): 4}
    offsets |= {(33, 5): 533, (127, 7): 1023, (128, 0): 1024}
    assert {place: flat[offset].item() for place, offset in offsets.items()} == {
        place: scales[place].item() for place in offsets
    }


@pytest.mark.parametrize(
    ("x", "counts"),
    [
        (0.1, {0.0: 205, 0.5: 51}),
        (1.9, {1.5: 52, 2.0: 204}),
        (2.3, {2.0: 180, 3.0: 76}),
        (3.7, {3.0: 77, 4.0: 179}),
        (5.0, {4.0: 128, 6.0: 128}),
        (5.99, {4.0: 2, 6.0: 254}),
        (6.2, {6.0: 256}),
        (0.0, {0.0: 256}),
    ],
)
def test_g18_stochastic_counts(x: float, counts: dict[float, int]) -> None:
    random_bytes = torch.arange(256, dtype=torch.uint8)
    up = round_e2m1_stochastic(torch.full((256,), x), random_bytes)
    assert Counter(decode_e2m1(up).tolist()) == counts
    assert torch.equal(round_e2m1_stochastic(torch.full((256,), -x), random_bytes), up | 8)


@pytest.mark.parametrize(
    ("x", "encode", "scales", "packed"),
    [
        (fp32(*[10.0, 20.0, 30.0, 40.0] * 4), "4219999a", "7c", "4265426542654265"),
        (wave(32), "44c00000", "7c7c", "65d1ae65c3ce63a5de6185ed5926ed4b"),
        (
            wave(64, lambda i: i * math.sin(i)),
            None,
            "6b70787c",
            "10a09b43b2cd63b5dd6186ee6937fe6d45eb2c56e90e66e1ad54c3ce63a5de61",
        ),
    ],
    ids=["tens", "sine", "growing-sine"],
)
def test_g19_four_over_six(x: Tensor, encode: str | None, scales: str, packed: str) -> None:
    actual_codes, actual_scales, amax = quantize_1x16(x, four_over_six=True)
    if encode is not None:
        assert float_hex(encode_scale(amax, FOUR_OVER_SIX_BOUND)) == encode
    assert (to_hex(actual_scales), to_hex(actual_codes)) == (scales, packed)


@pytest.mark.parametrize(
    ("rounding", "scale", "packed", "values"),
    [
        ("floor", "7f", "672cf1", [6, 4, -2, 1, 0.5, -6]),
        ("rceil", "80", "461ae0", [8, 4, -2, 1, 0, -8]),
    ],
)
def test_g22_mxfp4(rounding: Any, scale: str, packed: str, values: list[float]) -> None:
    codes, scales = quantize_mxfp4(row(7, 3.5, -1.75, 1, 0.3, -7, length=32), rounding)
    assert (to_hex(scales), to_hex(codes)) == (scale, packed + "00" * 13)
    assert dequantize_mxfp4(codes, scales, 32).tolist() == [*values, *[0.0] * 26]

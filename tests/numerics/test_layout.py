"""The scale swizzle against its address formula, element by element."""

from __future__ import annotations

import pytest
import torch

from fp4_compile.numerics import swizzle_scales, swizzled_shape, unswizzle_scales

SHAPES = [(1, 1), (128, 4), (129, 5), (127, 3), (300, 17), (16, 96), (256, 8), (0, 4), (5, 0)]


def offset(r: int, c: int, cols: int) -> int:
    """Where cuBLAS looks for the scale of row r and block c."""
    tile = r // 128 * ((cols + 3) // 4) + c // 4
    return (tile * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_every_scale_lies_where_the_formula_says(rows: int, cols: int) -> None:
    # Random bytes from 1 on, so that a zero can only be padding.
    scales = torch.randint(1, 256, (rows, cols), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    swizzled = swizzle_scales(scales)
    assert tuple(swizzled.shape) == swizzled_shape(rows, cols)
    assert swizzled.is_contiguous()
    expected = [0] * swizzled.numel()
    for r in range(rows):
        for c in range(cols):
            expected[offset(r, c, cols)] = scales[r, c].item()  # type: ignore[call-overload]
    assert swizzled.flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_unswizzle_is_the_inverse(dtype: torch.dtype, rows: int, cols: int) -> None:
    scales = torch.randint(256, (rows, cols), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    restored = unswizzle_scales(swizzle_scales(scales.view(dtype)), rows, cols)
    assert restored.dtype == dtype
    assert torch.equal(restored.view(torch.uint8), scales)


def test_shapes_round_up_to_tiles() -> None:
    assert swizzled_shape(1, 1) == (128, 4)
    assert swizzled_shape(128, 4) == (128, 4)
    assert swizzled_shape(129, 5) == (256, 8)
    assert swizzled_shape(0, 0) == (0, 0)


def test_leading_dimensions_and_strides() -> None:
    scales = torch.randint(256, (2, 3, 130, 6), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == (2, 3, 256, 8)
    for i in range(2):
        for j in range(3):
            assert torch.equal(swizzled[i, j], swizzle_scales(scales[i, j]))
    assert torch.equal(unswizzle_scales(swizzled, 130, 6), scales)
    transposed = scales.mT
    assert torch.equal(swizzle_scales(transposed), swizzle_scales(transposed.contiguous()))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"scales has dtype torch\.float32; use float8_e4m3fn"):
        swizzle_scales(torch.zeros(128, 4))
    with pytest.raises(ValueError, match="scales has 1 dimensions; give it at least 2"):
        swizzle_scales(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"swizzled ends in \(128, 4\); 129x4 scales fill \(256, 4\)"):
        unswizzle_scales(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)

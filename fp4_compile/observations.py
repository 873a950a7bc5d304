"""The operators by which a watched graph tells what its quantizers do to their operands.

    fp4::observe(Tensor x, Tensor codes, Tensor scales, Tensor? amax, str site, str operand) -> Tensor
    fp4::observe_product(Tensor product, Tensor dy, Tensor codes, Tensor scales, Tensor? amax,
                         Tensor other, Tensor other_scales, Tensor? other_amax, str site) -> Tensor

Both hand their first codes or product on as a copy, so that they stay where they are in a graph, and add what they
saw to the collection in use. Sums are kept, not ratios: steps of gradient accumulation and uses of one weight add up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp4_compile import numerics
from fp4_compile.codegen import cpu_training
from fp4_compile.ops import define

Sums = dict[tuple[str, str], Tensor]
"""By site and operand: elements that became zero, that were cut off, all elements, squared error, squares; for
``"product"``, squared noise and squares of the product."""

_collecting: list[Sums] = []


@contextlib.contextmanager
def collected(sums: Sums) -> Iterator[None]:
    """Let everything observed in this block, in any thread, be added to ``sums``."""
    _collecting.append(sums)
    try:
        yield
    finally:
        _collecting.remove(sums)


def _add(site: str, operand: str, seen: Tensor) -> None:
    for sums in _collecting:
        before = sums.get((site, operand))
        sums[site, operand] = seen if before is None else before + seen


def decoded(codes: Tensor, scales: Tensor, amax: Tensor | None, k: int) -> Tensor:
    """What codes stand for, fp32 [..., k]; MXFP4 has no amax."""
    if amax is None:
        return cpu_training.decode_mxfp4(codes, scales)[..., :k].float()
    return numerics.dequantize(codes, scales, amax, k)


def _observe(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor | None, site: str, operand: str) -> Tensor:
    if _collecting:
        exact, rounded = x.float(), decoded(codes, scales, amax, x.shape[-1])
        largest = torch.stack((codes & 7, codes >> 4 & 7), -1).flatten(-2)[..., : x.shape[-1]] == 7
        counts = (
            ((rounded == 0) & (exact != 0)).sum(),
            (largest & (rounded.abs() < exact.abs())).sum(),
            torch.tensor(x.numel(), device=x.device),
            (rounded - exact).square().sum(),
            exact.square().sum(),
        )
        _add(site, operand, torch.stack([count.double() for count in counts]))
    return codes.clone()


def _observe_fake(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor | None, site: str, operand: str) -> Tensor:
    return torch.empty_like(codes)


def _observe_product(
    product: Tensor,
    dy: Tensor,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor | None,
    other: Tensor,
    other_scales: Tensor,
    other_amax: Tensor | None,
    site: str,
) -> Tensor:
    if _collecting:
        k = dy.shape[-1]
        exact = dy.float()
        error = decoded(codes, scales, amax, k) - exact
        second = decoded(other, other_scales, other_amax, k).mT
        with torch.autocast(dy.device.type, enabled=False):
            squares = [torch.matmul(first, second).square().sum().double() for first in (error, exact)]
        _add(site, "product", torch.stack(squares))
    return product.clone()


def _observe_product_fake(product: Tensor, *operands: Any) -> Tensor:
    return torch.empty_like(product)


observe = define(
    "observe(Tensor x, Tensor codes, Tensor scales, Tensor? amax, str site, str operand) -> Tensor",
    _observe,
    _observe_fake,
)
"""The codes, after looking at what they are of."""

observe_product = define(
    "observe_product(Tensor product, Tensor dy, Tensor codes, Tensor scales, Tensor? amax, "
    "Tensor other, Tensor other_scales, Tensor? other_amax, str site) -> Tensor",
    _observe_product,
    _observe_product_fake,
)
"""The product of a quantized gradient and another operand, after looking at what the gradient's rounding did to it."""

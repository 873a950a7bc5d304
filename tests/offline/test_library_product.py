"""cuBLASLt's product, one choice of autotuning. Torch computes it on a GPU alone: here its documented contract does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4_compile import numerics, ops
from fp4_compile._torch_compat import inductor
from fp4_compile.codegen.library import scaled_mm_by_library
from fp4_compile.offline.compile_for import prepared
from fp4_compile.offline.generate import Program
from fp4_compile.offline.trace import execute
from fp4_compile.simulation import program as simulation
from fp4_compile.testing import simulate

BLOCK, TENSOR = F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise
SWIZZLED, PLAIN = F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE


def decoded(codes: Tensor, given: list[Tensor], recipes: list[Any], swizzles: list[Any]) -> Tensor:
    """What torch takes an operand to be; its checks are those of torch's CUDA operator."""
    rows, k = codes.shape[0], codes.shape[1] * 2
    assert codes.dtype == torch.float4_e2m1fn_x2 and codes.is_contiguous() and k % 16 == 0
    scales = given[0]
    assert scales.dtype == torch.float8_e4m3fn and scales.is_contiguous()
    padded = numerics.swizzled_shape(rows, k // 16)
    assert scales.numel() == padded[0] * padded[1]
    if len(given) == 2:
        assert given[1].dtype == torch.float32 and given[1].numel() == 1
    assert [*recipes] == [BLOCK, TENSOR][: len(given)] and [*swizzles] == [SWIZZLED, PLAIN][: len(given)]
    plain = numerics.unswizzle_scales(scales.view(padded), rows, k // 16)
    values = numerics.decode_unscaled(codes.view(torch.uint8), plain, torch.float32)
    return values * given[1] if len(given) == 2 else values


def by_contract(
    a: Tensor, b: Tensor, sa: Any, ra: Any, sb: Any, rb: Any, za: Any, zb: Any, *, output_dtype: torch.dtype
) -> Tensor:
    assert b.shape[1] % 16 == 0 and b.shape[0] % 8 == 0
    return (decoded(a, sa, ra, za) @ decoded(b.t(), sb, rb, zb).t()).to(output_dtype)


def operand(rows: int, k: int, per_row: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).bfloat16()
    codes, scales, amax = numerics.quantize_1x16(x, numerics.row_amax(x) if per_row else numerics.tensor_amax(x))
    return codes, numerics.swizzle_scales(scales), amax


@pytest.mark.parametrize("a_rows", [False, True])
@pytest.mark.parametrize("b_rows", [False, True])
def test_it_is_the_product_of_ours(monkeypatch: pytest.MonkeyPatch, a_rows: bool, b_rows: bool) -> None:
    monkeypatch.setattr(F, "scaled_mm", by_contract)
    a, b = operand(130, 352, a_rows, 1), operand(96, 352, b_rows, 2)
    got = scaled_mm_by_library(*a, *b, torch.float32)
    want = ops.scaled_mm(*a, *b, None, torch.float32, True)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))
    rounded = scaled_mm_by_library(*a, *b, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), want, rtol=2**-8, atol=1e-5)


def test_where_torch_has_none_autotuning_drops_it() -> None:
    a, b = operand(128, 256, False, 1), operand(128, 256, False, 2)
    with pytest.raises(NotImplementedError, match=r"torch's NVFP4 product: .*swizzle"):
        scaled_mm_by_library(*a, *b, torch.float32)


class Layers(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, width), nn.Linear(width, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def chosen_by(monkeypatch: pytest.MonkeyPatch, pick: Any) -> list[list[str]]:
    """Let ``pick`` stand for the measurement; the choices it was given, product by product."""
    offered = []

    def select(name: str, choices: list[Any], inputs: Any, layout: Any) -> Any:
        offered.append([choice.name for choice in choices])
        return pick(choices).output_node()

    monkeypatch.setattr(inductor(), "autotune_select_algorithm", select)
    return offered


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[str]]:
    gpu, options, settings = prepared("sm_100", {"target": None})
    sources = []
    simulated = simulation.simulated(gpu, {**settings, "max_autotune_gemm": True})
    written = Program.__init__

    def keep(self: Program, part: str, source: str, *more: Any) -> None:
        sources.append(source)
        written(self, part, source, *more)

    torch._dynamo.reset()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__init__", keep)
        return execute(model, x, options, gpu.sm, simulated)[0], sources


def test_a_program_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One amax for the tensor and one for each row, bias, activation and residual behind it."""
    torch.manual_seed(0)
    model, x = Layers().bfloat16(), torch.randn(256, 128).bfloat16()
    torch._dynamo.reset()
    with torch.no_grad():
        want = simulate(model, x, "sm_100", {"target": None})
    offered = chosen_by(monkeypatch, lambda choices: choices[-1])
    monkeypatch.setattr(F, "scaled_mm", by_contract)
    got, sources = run(model, x)
    assert len(offered) == 2 and all(len(names) > 1 for names in offered)
    calls = [line for source in sources for line in source.splitlines() if "extern_kernels.fp4_scaled_mm" in line]
    assert len(calls) == 2 and "out_dtype=torch.float32" in calls[0] and "out_dtype=torch.bfloat16" in calls[1]
    assert float((got - want).float().norm() / want.float().norm()) < 2e-3
    assert not any("fp4_scaled_mm" in source and "tl.dot_scaled" in source for source in sources)


def test_it_is_offered_where_its_alignments_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = chosen_by(monkeypatch, lambda choices: choices[0])
    torch.manual_seed(0)
    run(Layers(width=200).bfloat16(), torch.randn(256, 128).bfloat16())
    # A width of 200 is no multiple of 16; 200 to be contracted are filled up to 224.
    assert ["fp4_scaled_mm_by_library" in names[-1] for names in offered] == [False, True]

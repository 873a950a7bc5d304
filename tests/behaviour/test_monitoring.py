"""Watching the quantizers of a training run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4_compile
from fp4_compile import numerics
from fp4_compile.errors import DumpError, Fp4CompileError, OptionError

ops = torch.ops.fp4


def trained(model: nn.Module, compiled: Any, x: Tensor, g: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    compiled(x).backward(g)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def make(recipe: dict[str, Any] | None = None) -> tuple[nn.Module, Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(64, 96, bias=False).to(torch.bfloat16)
    options = {"training": {"bf16_share": 0, **(recipe or {})}}
    x, g = torch.randn(48, 64).to(torch.bfloat16), torch.randn(48, 96).to(torch.bfloat16)
    return model, torch.compile(model, backend="nvfp4", options=options), x, g


def lost(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor) -> tuple[float, float, float]:
    decoded = numerics.dequantize(codes, scales, amax, x.shape[-1])
    zeros = ((decoded == 0) & (x != 0)).double().mean()
    steps = scales.float().repeat_interleave(16, -1)[..., : x.shape[-1]] * amax / (6 * 448)
    cut = (x.float().abs() > 6.0001 * steps).double().mean()
    return zeros.item(), cut.item(), ((decoded - x.float()).norm() / x.float().norm()).item()


@pytest.mark.parametrize("rounding", [False, True])
def test_what_is_seen_is_what_happened(rounding: bool) -> None:
    model, compiled, x, g = make({"stochastic_rounding": rounding})
    x[:, :3] *= 40  # so that something underflows
    with fp4_compile.monitor(compiled) as watch:
        trained(model, compiled, x, g)
        watch.step()
    seen = {(o.site.rpartition(".")[2], o.operand): o for o in watch.observations}
    assert set(seen) == {("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("wgrad", "dy"), ("wgrad", "x")} - (
        {("dgrad", "dy")} if not x.requires_grad else set()
    )
    weight = model.weight.detach()
    amax = ops.amax(weight)
    _, _, error = lost(weight, *ops.quantize(weight, amax, "16x16"), amax)
    assert math.isclose(seen["fprop", "w"].error, error, rel_tol=1e-5)
    zeros, cut, error = lost(x, *ops.quantize(x, ops.amax(x)), ops.amax(x))
    operand = seen["fprop", "x"]
    assert zeros > 0.05
    assert math.isclose(operand.underflow, zeros, rel_tol=1e-9)
    assert math.isclose(operand.saturated, cut, rel_tol=1e-9)
    assert math.isclose(operand.error, error, rel_tol=1e-5)
    if not rounding:
        dy = ops.hadamard(g.t().contiguous(), 16)
        spread = ops.hadamard(x.t().contiguous(), 16)
        rounded = numerics.dequantize(*ops.quantize(dy, ops.amax(dy)), ops.amax(dy), dy.shape[-1])
        other = numerics.dequantize(*ops.quantize(spread, ops.amax(spread)), ops.amax(spread), dy.shape[-1])
        ratio = (dy.float() @ other.mT).norm() / ((rounded - dy.float()) @ other.mT).norm()
        assert math.isclose(seen["wgrad", "dy"].gradient_to_noise, ratio.item(), rel_tol=1e-4)
    assert "wgrad" in str(watch)


@pytest.mark.parametrize("recipe", [{}, {"forward": "mxfp4", "backward": "mxfp4"}, {"weight_block": "1x16"}], ids=str)
def test_watching_changes_no_number(recipe: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(torch.bfloat16)
    compiled = torch.compile(model, backend="nvfp4", options={"training": {"bf16_share": 0, **recipe}})
    x, g = torch.randn(48, 64).to(torch.bfloat16), torch.randn(48, 64).to(torch.bfloat16)
    before = trained(model, compiled, x, g)
    with fp4_compile.monitor(compiled, every=2) as watch:
        for _ in range(3):
            assert all(map(torch.equal, before, trained(model, compiled, x, g)))
            watch.step()
        assert {o.step for o in watch.observations} == {0, 2}
        assert all(0 < o.error < 0.5 for o in watch.observations)
        ratios = [o.gradient_to_noise for o in watch.observations if o.site.endswith("wgrad") and o.operand == "dy"]
        assert all(ratio is not None and 2 < ratio < 50 for ratio in ratios)
        assert len(ratios) == 4
    count = len(watch.observations)
    assert all(map(torch.equal, before, trained(model, compiled, x, g)))
    assert len(watch.observations) == count


def test_accumulated_gradients_are_one_step() -> None:
    model, compiled, x, g = make()
    with fp4_compile.monitor(compiled) as watch:
        for _ in range(3):
            trained(model, compiled, x, g)
        watch.step()
        sites = [(o.site, o.operand) for o in watch.observations]
    assert len(sites) == len(set(sites))


def test_files_and_writers(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.tags: list[str] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.tags.append(tag)

    model, compiled, x, g = make()
    writer = Writer()
    with fp4_compile.monitor(compiled, tmp_path / "new" / "watch", writer=writer) as watch:
        for _ in range(2):
            trained(model, compiled, x, g)
            watch.step()
    lines = (tmp_path / "new" / "watch" / "monitor.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [o.step for o in watch.observations]
    assert (tmp_path / "new" / "watch" / "monitor.png").read_bytes().startswith(b"\x89PNG")
    assert any(tag.startswith("fp4/gradient_to_noise/") for tag in writer.tags)


def test_a_gradient_in_the_noise_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients of a thousand tokens that cancel: their sum is small, the noise of each is not."""
    model, compiled, _, _ = make()
    x, g = torch.ones(1024, 64).to(torch.bfloat16), torch.randn(512, 96).to(torch.bfloat16)
    with caplog.at_level(logging.WARNING, "fp4_compile"), fp4_compile.monitor(compiled) as watch:
        trained(model, compiled, x, torch.cat((g, -g)))
        watch.step()
    assert "below sqrt(3)" in caplog.text
    assert any(o.gradient_to_noise is not None and o.gradient_to_noise < math.sqrt(3) for o in watch.observations)


def test_a_gradient_that_is_not_finite_is_seen() -> None:
    model, compiled, x, g = make()
    g[3, 5] = torch.nan
    with fp4_compile.monitor(compiled) as watch:
        trained(model, compiled, x, g)
        watch.step()
    assert any(math.isnan(o.error) for o in watch.observations if o.operand == "dy")


def test_inference_is_watched_too() -> None:
    _, compiled, x, _ = make()
    with torch.no_grad(), fp4_compile.monitor(compiled) as watch:
        compiled(x)
        watch.step()
    assert [o.operand for o in watch.observations] == ["x"]


def test_mistakes(tmp_path: Path) -> None:
    _, compiled, _, _ = make()
    with pytest.raises(OptionError, match="compiled with backend"):
        fp4_compile.monitor(nn.Linear(4, 4))
    with pytest.raises(Fp4CompileError, match="counts steps"):
        fp4_compile.monitor(compiled, every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot be written"):
        fp4_compile.monitor(compiled, tmp_path / "file")
    assert "step()" in str(fp4_compile.monitor(compiled))

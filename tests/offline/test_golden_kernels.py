"""The emitted Triton of a SwiGLU block, whole: quantizers with their producers, GEMMs with their epilogues."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from swiglu import SwiGlu

import fp4_compile


def canonical(source: str) -> str:
    """A kernel from its first ``def`` on: what stands before has hashes of this build, and names are counted."""
    body = source[source.index("def triton_") :].replace("@triton.jit", "\n@triton.jit")
    return re.sub(r"(def triton_\w*?)_\d+\(", r"\1(", re.sub(r"\n{3,}", "\n\n", body)).rstrip()


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_kernels_are_as_reviewed(target: str, tmp_path: Path) -> None:
    """EXPECTTEST_ACCEPT=1 writes the files anew, to be reviewed like code."""
    model, x = SwiGlu().bfloat16(), torch.randn(200, 256).bfloat16()
    with torch.no_grad():
        fp4_compile.compile_for(model, x, target=target, out=tmp_path, options={"target": None})
    kernels = sorted(tmp_path.glob("graph_000/inference/triton_tem_*.py"))
    text = "\n\n\n".join(canonical(path.read_text(encoding="utf-8")) for path in kernels) + "\n"
    expected = Path(__file__).with_name(f"kernels_{target}.expected")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")

"""The CPU's kernels under the address and undefined-behaviour sanitizers, for each instruction set."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fp4_compile.codegen import cpu

FLAGS = "-std=c++20 -O1 -march=native -ffp-contract=off -fopenmp -fsanitize=address,undefined -fno-sanitize-recover=all"
LEVELS = {"best": None, "AVX2": 1, "plain": 0}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_stay_within_their_operands(level: str, tmp_path: Path) -> None:
    sources = [cpu.source(LEVELS[level]), Path(__file__).with_name("sanitized_kernels.cpp").read_text(encoding="utf-8")]
    source, program = tmp_path / "kernels.cpp", tmp_path / "kernels"
    source.write_text("\n".join(sources), encoding="utf-8")
    built = subprocess.run(["g++", *FLAGS.split(), source, "-o", program], capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the sanitizers' libraries are not installed")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stderr

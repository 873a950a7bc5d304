"""Every test starts from nothing compiled and a fixed seed; kernels are kept for the session.

Inductor's cache is left on, because several tests compile the same small layers, but in a folder of its own: a
result must not depend on what this machine compiled before. Torch reads the folder's name from the
environment, so it is set before anything here imports torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fp4_compile_tests_")

import pytest
import torch

_CACHE = os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget every compiled function and seed the generators, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's kernels."""
    shutil.rmtree(_CACHE, ignore_errors=True)

"""The examples: what becomes of the language model that is trained, in full."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4_compile

EXPECTED = Path(__file__).with_name("test_examples.expected")


@pytest.fixture
def hybrid_lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import hybrid_lm

    yield hybrid_lm
    sys.modules.pop("hybrid_lm")


def test_the_hybrid_models_plan_and_graph_are_as_reviewed(hybrid_lm: Any) -> None:
    """Forward and backward of a step. EXPECTTEST_ACCEPT=1 writes the file anew, to be reviewed like code."""
    ids = torch.zeros(4, 64, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        found = fp4_compile.explain(hybrid_lm.HybridLM(), ids, ids)
    [graph] = found.graphs
    text = f"{found.plan}\n\n{graph.stages['verify'].rstrip()}\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        EXPECTED.write_text(text, encoding="utf-8")
    assert text == EXPECTED.read_text(encoding="utf-8")


def test_batches_depend_on_step_and_seed_alone(hybrid_lm: Any) -> None:
    text = hybrid_lm.Text()
    first = text.batch(3, 4, seed=1)
    text.batch(9, 2, seed=5)
    assert all(map(torch.equal, first, text.batch(3, 4, seed=1)))
    assert not torch.equal(first[0], text.batch(4, 4, seed=1)[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    held = text.validation(4, 2)
    assert [ids.shape for ids, _ in held] == [(4, 64)] * 2

"""Caches never serve another decision's code, and a warm second process reuses what the first one compiled.

Each step is a process of its own with one cache folder between them, as it is for users.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

import fp4_compile
from fp4_compile import Precision

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import fp4_compile

request = json.loads(sys.argv[1])
if request.get("version"):
    fp4_compile.__version__ = request["version"]
if request.get("policy"):  # another policy: an edit of the sources, which the pipeline's digest covers
    import fp4_compile.pipeline
    import importlib
    module = importlib.import_module("fp4_compile.passes.policy")
    module.MIN_OUTPUTS = request["policy"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
x = torch.randn(32, 64)
compiled = torch.compile(model, backend=request.get("backend", "nvfp4"), options=request.get("options"))
with torch.set_grad_enabled(request.get("grad", False)):
    y = compiled(x)
    if request.get("grad"):
        y.sum().backward()
with torch.no_grad():
    error = ((y - model(x)).norm() / model(x).norm()).item()
hits = counters["inductor"]
print(json.dumps({"error": error, "sum": y.double().sum().item(), "hits": hits["fxgraph_cache_hit"],
                  "misses": hits["fxgraph_cache_miss"]}))
"""


@pytest.fixture
def process(tmp_path):
    """Runs the script in a process with this test's cache folder."""

    def run(**request):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(request)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def pinned(tmp_path, precision):
    """A plan file that puts every site of the script's model into one precision."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
    with torch.no_grad():
        plan = fp4_compile.explain(model, torch.randn(32, 64)).plan
    path = tmp_path / f"{precision.value}.json"
    fp4_compile.Plan(tuple(dataclasses.replace(d, precision=precision) for d in plan)).save(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_warm_second_process_reuses_the_code_and_gives_the_same_numbers(process, grad):
    first, second = process(grad=grad), process(grad=grad)
    assert first["hits"] == 0 and first["misses"] >= 1
    assert second["misses"] == 0 and second["hits"] == first["misses"]
    assert second["sum"] == first["sum"]
    assert 0.05 < second["error"] < 0.3


@pytest.mark.slow
def test_another_option_never_gets_the_first_ones_code(process):
    plain = process()
    tiles, again = process(options={"weight_block": "16x16"}), process(options={"weight_block": "16x16"})
    other = process(options={"four_over_six": "all"})
    assert tiles["hits"] == other["hits"] == 0
    assert again["misses"] == 0
    assert len({plain["sum"], tiles["sum"], other["sum"]}) == 3
    assert again["sum"] == tiles["sum"]


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_another_plan_never_gets_the_first_ones_code(process, tmp_path, grad):
    default = process(grad=grad)
    kept = process(grad=grad, options={"plan": pinned(tmp_path, Precision.BF16)})
    back = process(grad=grad, options={"plan": pinned(tmp_path, Precision.NVFP4)})
    assert default["error"] > 0.05
    assert kept["error"] < 1e-5
    assert back["sum"] == default["sum"]


@pytest.mark.slow
def test_inductors_own_code_for_the_model_is_not_ours(process):
    inductor, ours = process(backend="inductor"), process()
    assert inductor["error"] < 1e-5 < 0.05 < ours["error"]
    assert process(backend="inductor")["error"] < 1e-5


@pytest.mark.slow
def test_another_version_compiles_anew(process):
    process()
    assert process(version="99.0")["hits"] == 0


@pytest.mark.slow
def test_another_policy_is_followed_although_the_cache_is_warm(process):
    assert process()["error"] > 0.05
    assert process(policy=100)["error"] < 1e-5

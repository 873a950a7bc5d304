"""Around the rewrite: shapes that change, regions and branches, modes, every way to call `torch.compile`, mistakes.

The models have ReLU between their layers, which is exact, so that `by_hand` meets the same codes.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NVFP4,
    STRAIGHT_THROUGH,
    Quantizations,
    assert_by_hand,
    assert_close,
    assert_quantized,
    assert_same_step,
    by_hand,
    graph_count,
    nvfp4,
    nvfp4_linear,
    step,
)
from torch import Tensor, nn

import fp4_compile
from fp4_compile.errors import DumpError, Fp4CompileError, OptionError, PlanError

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
G = torch.randn(32, 64, generator=torch.Generator().manual_seed(8))


def layers(depth: int = 2) -> nn.Sequential:
    """Layers in NVFP4 whose activation rounds nothing."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(depth)))


def assert_works(model: nn.Module, compiled: Callable[[Tensor], Tensor], twin: nn.Module) -> None:
    """Inference and a training step of the compiled model are those of its twin."""
    with torch.no_grad():
        want = twin(X)
        assert_by_hand(compiled(X), want)
    g = torch.randn(want.shape)
    assert_same_step(step(model, X, g, compiled), step(twin, X, g))


# -- shapes that change --

ROWS = (7, 1, 2, 3, 5, 8, 13, 16, 31, 32, 48, 64, 100)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_thirteen_batch_sizes_make_three_graphs_at_most(training: bool) -> None:
    """One for the first size, one for any size, one for the single row."""
    model = layers()
    twin, compiled = by_hand(model), nvfp4(model)
    for rows in ROWS:
        x, g = torch.randn(rows, 64), torch.randn(rows, 64)
        if training:
            assert_same_step(step(model, x, g, compiled), step(twin, x, g), f"{rows} rows")
        else:
            with torch.no_grad():
                assert_by_hand(compiled(x), twin(x), f"{rows} rows")
    assert graph_count() <= 3


def test_dynamic_from_the_first_call_on() -> None:
    model = layers()
    twin, compiled = by_hand(model), nvfp4(model, dynamic=True, fullgraph=True)
    runs = Quantizations()
    with torch.no_grad():
        for shape in ((9, 64), (33, 64), (200, 64)):
            x = torch.randn(shape)
            assert_by_hand(compiled(x), twin(x), str(shape))
        assert graph_count() == 1
        assert runs.count == 1, "another batch size is no other weight"
        for shape in ((2, 5, 64), (4, 9, 64)):  # another rank is another graph
            x = torch.randn(shape)
            assert_by_hand(compiled(x), twin(x), str(shape))
        assert graph_count() == 2


def test_a_graph_for_each_shape() -> None:
    model = layers()
    twin, compiled = by_hand(model), nvfp4(model, dynamic=False)
    with torch.no_grad():
        for rows in (9, 33, 200, 33):
            x = torch.randn(rows, 64)
            assert_by_hand(compiled(x), twin(x), f"{rows} rows")
    assert graph_count() == 3


def test_a_dimension_marked_dynamic() -> None:
    model = layers()
    twin, compiled = by_hand(model), nvfp4(model)
    with torch.no_grad():
        for tokens in (24, 48, 7):
            x = torch.randn(2, tokens, 64)
            torch._dynamo.mark_dynamic(x, 1)
            assert_by_hand(compiled(x), twin(x), f"{tokens} tokens")
    assert graph_count() == 1


def test_rows_picked_by_a_mask() -> None:
    """How many there are is known when they are picked, not when the graph is compiled."""
    layer = nn.Linear(64, 96)

    def model(x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(layer(x[mask]))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled, twin = nvfp4(model, fullgraph=True), by_hand(layer)
        x = torch.randn(64, 64)
        mask = torch.zeros(64, dtype=torch.bool)
        with torch.no_grad():
            for rows in (5, 0, 64, 1, 33):
                mask = torch.randperm(64) < rows
                y = compiled(x, mask)
                assert y.shape == (rows, 96)
                assert_by_hand(y, twin(x[mask]).relu(), f"{rows} rows")
            assert graph_count() == 1
        run = step(layer, x, G.new_ones(33, 96), lambda x: compiled(x, mask))
        hand = step(twin, x, G.new_ones(33, 96), lambda x: torch.relu(twin(x[mask])))
        assert_same_step(run, hand)
        assert not run.input_gradient[~mask].any() and run.input_gradient[mask].any()
        plan = fp4_compile.explain(model, x, mask, options=STRAIGHT_THROUGH).plan
        (site,) = (d.site for d in plan.select(NVFP4))
        assert str(site.m) == "u0"


def test_a_length_read_from_a_tensor() -> None:
    layer = nn.Linear(64, 96)

    def model(x: Tensor, length: Tensor) -> Tensor:
        rows = int(length.item())
        torch._check(rows >= 0)
        torch._check(rows <= x.shape[0])
        return layer(x[:rows])

    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        compiled = nvfp4(model, fullgraph=True)
        for rows in (5, 0, 32, 1):
            want = nvfp4_linear(X[:rows], layer.weight, layer.bias)
            assert_by_hand(compiled(X, torch.tensor(rows)), want, f"{rows} rows")


# -- whole graphs, and how much work they are --


def test_torchs_own_encoder_layer_is_one_graph() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.randn(2, 24, 64)
    found = fp4_compile.explain(model, x, options=STRAIGHT_THROUGH)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    projections = {"linear1", "linear2", "self_attn", "self_attn.out_proj"}
    assert {d.site.module for d in found.plan.select(NVFP4)} <= projections
    assert len(found.plan.select(NVFP4)) == 4
    y, want = nvfp4(model, fullgraph=True)(x), model(x).detach()
    # Half of the output is the residual stream, which is exact.
    assert_close(y.detach(), want, 0.15, least=0.02)
    y.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any(), name
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused operator of torch's own, with no matmul to see
    try:
        with torch.no_grad():
            found = fp4_compile.explain(model.eval(), x)
            assert (found.graph_count, len(found.plan.select(NVFP4))) == (1, 4)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def test_fullgraph_refuses_a_graph_break() -> None:
    def model(x: Tensor) -> Tensor:
        y = x @ x.t()
        torch._dynamo.graph_break()
        return y + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        nvfp4(model, fullgraph=True)(X)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_graphs_grow_by_the_same_amount_with_each_layer(training: bool) -> None:
    def sizes(depth: int) -> dict[str, int]:
        with torch.set_grad_enabled(training):
            options = {"training": {"bf16_share": 0}}
            (graph,) = fp4_compile.explain(layers(depth), X.clone().requires_grad_(training), options=options).graphs
        assert len(graph.plan.select(NVFP4)) == depth * (3 if training else 1)
        assert graph.stages["cleanup"].count("fp4.scaled_mm") == depth * (3 if training else 1)
        # x and w, and in training x along the tokens and the gradient along both.
        assert graph.stages["cleanup"].count("fp4.quantize") == depth * (5 if training else 2)
        return {stage: text.count("\n") for stage, text in graph.stages.items()}

    two, four, eight = sizes(2), sizes(4), sizes(8)
    assert list(two) == list(four) == list(eight)
    for stage in two:
        assert 0 < eight[stage] - four[stage] == 2 * (four[stage] - two[stage]), stage


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_passes_work_grows_with_the_depth_and_not_with_its_square(training: bool) -> None:
    """Counted in lines of the passes that ran, which depend on the model alone."""
    folder = str(Path(fp4_compile.__file__).parent / "passes")
    lines = 0

    def in_a_pass(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return in_a_pass

    def follow(frame: FrameType, event: str, argument: object) -> Any:
        return in_a_pass if frame.f_code.co_filename.startswith(folder) else None

    def work(depth: int) -> int:
        nonlocal lines
        lines = 0
        model, x, before = layers(depth), X.clone().requires_grad_(training), sys.gettrace()
        torch._dynamo.reset()
        with torch.set_grad_enabled(training):
            sys.settrace(follow)
            try:
                fp4_compile.explain(model, x)
            finally:
                sys.settrace(before)
        return lines

    three, six, twelve = work(3), work(6), work(12)
    assert three > 500, "nothing was counted"
    assert twelve - six < 2.5 * (six - three), (three, six, twelve)


# -- modes --


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    model = layers()
    compiled = nvfp4(model, mode=mode)
    x = X.clone().requires_grad_()
    gradients = []
    for call in (compiled, model):  # by the whole recipe: torch.compile takes no options beside a mode
        y = call(x)
        gradients.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
    assert_quantized(*gradients, 0.5, slope_within=0.2)
    with torch.no_grad():
        assert_by_hand(compiled(X), by_hand(model)(X))
        first, second = compiled(X), compiled(-X)
        assert torch.equal(first, compiled(X)) and not torch.equal(first, second)
        assert_quantized(second, model(-X), 0.3, slope_within=0.12)


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises((torch._dynamo.exc.BackendCompilerFailed, RuntimeError), match="max-autotun"):
        nvfp4(layers(), mode="max-autotun")(X)


# -- every way to call it --


def test_as_a_decorator() -> None:
    w = torch.randn(96, 64)

    @torch.compile(backend="nvfp4")
    def function(x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.linear(x, w) * scale

    class Model:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        @torch.compile(backend="nvfp4", fullgraph=True)
        def project(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    want = nvfp4_linear(X, w)
    assert_by_hand(function(X), want)
    assert_by_hand(function(X, scale=-2.0), -2.0 * want)
    assert function.__name__ == "function"
    for weight in (w, -2 * w, torch.randn(48, 64)):
        assert_by_hand(Model(weight).project(X), nvfp4_linear(X, weight))


def test_a_module_compiled_in_place() -> None:
    model = layers()
    twin = by_hand(model)
    keys = list(model.state_dict())
    model.compile(backend="nvfp4", options=STRAIGHT_THROUGH)
    assert_works(model, model, twin)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        assert torch.equal(model(X), nvfp4(model.forward)(X))


def test_a_part_of_a_model_compiled_in_place() -> None:
    model = layers(3)
    twin = by_hand(model[1])
    model[1].compile(backend="nvfp4")
    with torch.no_grad():
        assert_by_hand(model(X), model[2](twin(model[0](X))))


def test_a_compiled_model_inside_another() -> None:
    model = layers()
    inner = nvfp4(model[1])
    with torch.no_grad():
        assert_by_hand(nvfp4(lambda x: inner(model[0](x)))(X), by_hand(model)(X))
    assert graph_count() == 1


# -- what is left of the model --


def test_the_model_can_be_exported_copied_and_pickled_afterwards() -> None:
    model = layers()
    with torch.no_grad():
        want, compiled = model(X), nvfp4(model)
        y = compiled(X)
        exported = torch.export.export(model, (X,))
        assert not any("fp4" in str(node.target) for node in exported.graph.nodes)
        assert torch.equal(exported.module()(X), want)
        assert_by_hand(nvfp4(exported.module())(X), y)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(X), want)
            assert torch.equal(nvfp4(other)(X), y)
        model.compile(backend="nvfp4")
        assert torch.equal(model(X), y)
        # torch leaves the compiled code behind when it copies a module.
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(X), want)


def test_reset_compiles_anew() -> None:
    model = layers()
    compiled = nvfp4(model)
    with torch.no_grad():
        first = compiled(X)
        assert graph_count() == 1
        torch.compiler.reset()
        model[0][0].weight.neg_()
        y = compiled(X)
        assert graph_count() == 2
        assert_by_hand(y, by_hand(model)(X))
        assert not torch.equal(y, first)


# -- mistakes --

MISTAKES: dict[str, tuple[dict[str, Any], type[Fp4CompileError], str]] = {
    "unknown option": ({"weigth_block": "1x16"}, OptionError, "did you mean 'weight_block'"),
    "an option of Inductor's": ({"max_autotune": True}, OptionError, "unknown option 'max_autotune'"),
    "wrong choice": ({"four_over_six": "weight"}, OptionError, "did you mean 'weights'"),
    "unhashable choice": ({"weight_block": ["1x16"]}, OptionError, "it takes one of"),
    "plan of a wrong type": ({"plan": 3}, OptionError, "of type int; it takes a Plan or the path"),
    "settings of a wrong type": ({"inductor": ["max_autotune"]}, OptionError, "of type list; it takes a dict"),
    "no such plan": ({"plan": "{folder}/none.json"}, PlanError, "cannot read the plan"),
    "a plan that is a folder": ({"plan": "{folder}"}, PlanError, "cannot read the plan"),
    "a plan that is no plan": ({"plan": "{folder}/file"}, PlanError, "not a plan"),
    "dump into a file": ({"dump": "{folder}/file"}, DumpError, "name a folder you may write to"),
    "dump under a file": ({"dump": "{folder}/file/new/folder"}, DumpError, "name a folder you may write to"),
    # Nobody can make one there, root included.
    "dump where nobody may write": ({"dump": "/proc/fp4_compile"}, DumpError, "name a folder you may write to"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_when_the_model_is_compiled(mistake: str, tmp_path: Path) -> None:
    given, kind, message = MISTAKES[mistake]
    (tmp_path / "file").write_text("something else")
    options = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in given.items()}
    model = layers()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as caught:
        nvfp4(model, options=options)(X)
    assert type(caught.value.inner_exception) is kind
    with pytest.raises(kind, match=message):
        fp4_compile.explain(model, X, options=options)
    assert (tmp_path / "file").read_text() == "something else"
    with torch.no_grad():  # and nothing is broken for the next one
        assert_by_hand(nvfp4(model, options={})(X), by_hand(model)(X))

"""Options are refused with a suggestion; a plan prints, saves, compares, and can be given back."""

from __future__ import annotations

import dataclasses

import pytest
import sympy
import torch
from torch import nn

import fp4_compile
from fp4_compile import Options, Plan, Precision, Reason
from fp4_compile.errors import DumpError, OptionError, PlanError
from fp4_compile.plan import Decision, Role, Site, merge

TOKENS = sympy.Symbol("s0", integer=True, nonnegative=True)


def site(module="layers.0", n=96, m=TOKENS, k=64):
    sizes = (sympy.Integer(1), sympy.sympify(m), sympy.Integer(n), sympy.Integer(k))
    return Site(module, "mm", Role.FPROP, 0, *sizes, "bf16")


PLAN = Plan(
    (
        Decision(site(), Precision.NVFP4, Reason.QUANTIZED, "weight once"),
        Decision(site("a." * 60 + "head", 10), Precision.BF16, Reason.FEW_OUTPUTS, "N=10 < 32, " * 12),
    )
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dmup": "x"}, "unknown option 'dmup', did you mean 'dump'"),
        ({"weight_blok": "1x16"}, "did you mean 'weight_block'"),
        ({"weight_block": "16x61"}, "did you mean '16x16'"),
        ({"weight_block": 16}, "it takes one of"),
        ({"four_over_six": True}, "it takes one of"),
        ({"dump": 3}, "of type int; it takes a folder's path"),
        ({"plan": {"a": 1}}, "it takes a Plan or the path"),
        ({"inductor": "max_autotune"}, "it takes a dict"),
    ],
)
def test_mistakes_are_refused_and_the_message_helps(given, message):
    with pytest.raises(OptionError, match=message):
        Options.parse(given)


def test_options_are_frozen_and_digest_what_changes_code(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().dump = "x"
    same = {Options.parse(o).digest() for o in ({}, None, {"dump": str(tmp_path)}, {"dump": tmp_path})}
    others = [
        Options.parse(o).digest()
        for o in (
            {"weight_block": "16x16"},
            {"four_over_six": "all"},
            {"plan": PLAN},
            {"inductor": {"max_autotune": True}},
        )
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 5


def test_an_inductor_setting_that_does_not_exist_is_refused():
    compiled = torch.compile(nn.Linear(64, 64), backend="nvfp4", options={"inductor": {"max_autotun": True}})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'max_autotune'") as caught:
        compiled(torch.randn(2, 64))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_explain_raises_the_mistake_itself(tmp_path):
    with pytest.raises(OptionError):
        fp4_compile.explain(nn.Linear(64, 64), torch.randn(2, 64), options={"x": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="name a folder you may write to"):
        fp4_compile.explain(nn.Linear(64, 64), torch.randn(2, 64), options={"dump": str(tmp_path / "file" / "sub")})


def test_a_plan_survives_json_and_a_file(tmp_path):
    assert Plan.from_json(PLAN.to_json()) == PLAN
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Options.parse({"plan": tmp_path / "plan.json"}).plan == PLAN


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "[]",
        '{"schema": 99, "sites": []}',
        '{"schema": 1, "sites": [{}]}',
        PLAN.to_json().replace('"m": "s0"', '"m": "__import__(\\"os\\").getcwd()"', 1),
        PLAN.to_json().replace('"m": "s0"', '"m": "open"', 1),
    ],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_a_missing_plan_file_is_refused():
    with pytest.raises(PlanError, match="cannot read the plan"):
        Options.parse({"plan": "/nowhere/plan.json"})


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_fits_its_width(width):
    lines = PLAN.render(width).splitlines()
    assert max(map(len, lines)) <= width
    assert "s0x96x64" in lines[1]
    assert lines[2].startswith("…")


def test_plans_compare_and_merge():
    pinned = Plan((dataclasses.replace(PLAN.decisions[0], precision=Precision.BF16), PLAN.decisions[1]))
    assert PLAN.diff(pinned) == "layers.0:mm.fprop: nvfp4 -> bf16"
    assert PLAN.diff(Plan(())).count("absent") == 2
    assert PLAN.diff(PLAN) == ""
    assert PLAN.digest() != pinned.digest()
    assert merge([PLAN, pinned]) == PLAN
    assert "layers.0:mm.fprop" in PLAN
    with pytest.raises(KeyError):
        PLAN["elsewhere"]


def test_the_share_of_flops():
    equal = Plan((PLAN.decisions[0], dataclasses.replace(PLAN.decisions[0], precision=Precision.BF16)))
    assert equal.fp4_share() == 0.5
    assert PLAN.fp4_share() == pytest.approx(96 / 106)
    assert Plan(()).fp4_share() is None


def test_a_given_plan_decides():
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 16))
    x = torch.randn(4, 64)
    with torch.no_grad():
        default = fp4_compile.explain(model, x).plan
        turned = Plan(
            tuple(
                dataclasses.replace(d, precision=Precision.BF16 if d.precision is Precision.NVFP4 else Precision.NVFP4)
                for d in default
            )
        )
        followed = fp4_compile.explain(model, x, options={"plan": turned}).plan
        assert default.diff(followed) == default.diff(turned) != ""
        assert {d.reason for d in followed} == {Reason.PLAN}
        compiled = torch.compile(model, backend="nvfp4", options={"plan": turned})
        hidden = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        assert 0.02 < ((compiled(x) - model(x)).norm() / model(x).norm()).item() < 0.3
        assert hidden.shape == (4, 96)


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(PlanError, match=r"names none of the \d matmuls"):
        fp4_compile.explain(nn.Linear(64, 64), torch.randn(2, 64), options={"plan": PLAN})


def test_a_plan_cannot_ask_for_the_impossible(caplog):
    x = torch.randn(8, 64, dtype=torch.float64)
    plan = fp4_compile.explain(torch.mm, x, x.t()).plan
    wish = Plan(tuple(dataclasses.replace(d, precision=Precision.NVFP4) for d in plan))
    got = fp4_compile.explain(torch.mm, x, x.t(), options={"plan": wish}).plan
    assert [d.reason for d in got] == [Reason.DTYPE]
    assert "left in float64" in caplog.text

"""From scores to plans, and the planner inside a compile: budgets, pins, targets, guards."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import graph_count, nvfp4, nvfp4_linear
from torch import Tensor, nn

import fp4_compile
from fp4_compile import Plan, Precision, Reason, Scores
from fp4_compile.errors import BudgetError, CalibrationError, DeviceError, OptionError, PlanError
from fp4_compile.plan import Role
from fp4_compile.sensitivity.static import end_factor, score_statically

NVFP4 = Precision.NVFP4


class Block(nn.Module):
    """q, k, v read one tensor, gate and up another, and a side layer reads what q, k, v read."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.side = nn.Linear(width, width)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:])
        mixed = self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        y = x + mixed + self.side(h).relu()
        return self.head(y + self.down(F.silu(self.gate(y)) * self.up(y)))


@pytest.fixture(scope="module")
def scores() -> Scores:
    torch.manual_seed(0)
    return fp4_compile.calibrate(Block(), [torch.randn(4, 32, 64) for _ in range(3)])


def chosen(plan: Plan) -> set[str]:
    return {d.site.module for d in plan.select(NVFP4)}


def test_what_belongs_together_is_found_by_structure(scores: Scores) -> None:
    groups = [sorted(key.partition(":")[0] for key in group) for group in scores.survey.groups]
    assert sorted(groups) == [["gate", "up"], ["k", "q", "v"]]
    reads = {entry.site.module: entry.reads for entry in scores.survey if entry.advised}
    assert len({reads[name] for name in ("q", "k", "v", "side")}) == 1
    assert reads["gate"] == reads["up"] != reads["down"]


def test_tied_weights_are_decided_and_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    found = fp4_compile.calibrate(Tied(), [torch.randn(8, 64)])
    assert found.survey.groups == (frozenset({"first:mm.fprop", "second:mm.fprop"}),)
    assert found.plan({"effective_bits": 4.5}).analysis.effective_bits == 4.5
    assert chosen(found.plan({"effective_bits": 15.9})) == {"first", "second"}


def test_without_a_budget_everything_that_is_safe(scores: Scores) -> None:
    plan = scores.plan()
    assert chosen(plan) == {"q", "k", "v", "o", "gate", "up", "down", "side"}
    assert plan["head:mm.fprop"].reason is Reason.FEW_OUTPUTS


@pytest.mark.parametrize(
    ("budget", "measured"),
    [
        ({"effective_bits": 8.0}, "effective_bits"),
        ({"bf16_flops": 0.4}, "flops_share"),
        ({"bf16_params": 0.4}, None),
        ({"loss_increase": 0.002}, "loss"),
    ],
)
def test_budgets_are_met(scores: Scores, budget: dict[str, float], measured: str | None) -> None:
    plan = scores.plan(budget)
    [(name, value)] = budget.items()
    analysis = plan.analysis
    assert analysis is not None
    assert analysis.gap == 0
    assert analysis.budget == f"{name} = {value:g}"
    found = getattr(analysis, measured) if measured else value
    assert (1 - found if measured == "flops_share" else found) <= value + 1e-9
    assert analysis.loss == pytest.approx(math.fsum(d.loss for d in plan.select(NVFP4)))
    picked = chosen(plan)
    assert 0 < len(picked) < 8
    for group in ({"q", "k", "v"}, {"gate", "up"}):
        assert group <= picked or not group & picked
    left = [d for d in plan if d.reason is Reason.SENSITIVE]
    assert {d.site.module for d in left} == {"q", "k", "v", "o", "gate", "up", "down", "side"} - picked


def test_siblings_may_be_told_apart(scores: Scores) -> None:
    """Which can only lower the error at a budget."""
    for bits in (6.0, 8.0, 12.0):
        alike, apart = (scores.plan({"effective_bits": bits}, siblings_agree=agree) for agree in (True, False))
        assert apart.analysis.loss <= alike.analysis.loss * (1 + 1e-12)
    forced = scores.plan({"bf16_params": 0.5}, pins={"q": "nvfp4"}, siblings_agree=False)
    assert "q" in chosen(forced)


def test_another_budget_takes_the_same_scores(scores: Scores) -> None:
    losses = [scores.plan({"effective_bits": bits}).analysis.loss for bits in (6.0, 8.0, 10.0, 14.0)]
    assert losses == sorted(losses, reverse=True)
    front = scores.plan().analysis.front
    assert [p.loss for p in front] == sorted(p.loss for p in front)
    assert [p.flops_share for p in front] == sorted(p.flops_share for p in front)


def test_a_budget_that_cannot_be_met_says_the_closest(scores: Scores) -> None:
    with pytest.raises(BudgetError, match=r"effective_bits = 3 cannot be met .* is effective_bits = 4.6") as caught:
        scores.plan({"effective_bits": 3.0})
    closest = caught.value.closest
    assert scores.plan({"effective_bits": closest + 1e-9}).analysis.effective_bits == pytest.approx(closest)


def test_pins(scores: Scores) -> None:
    plan = scores.plan({"effective_bits": 9.0}, pins={"*": "nvfp4", "[qk]": "bf16", "head": "nvfp4"})
    assert chosen(plan) == {"v", "o", "gate", "up", "down", "side", "head"}
    assert {d.site.module for d in plan if d.reason is Reason.PINNED} == {"q", "k", *chosen(plan)}
    assert plan["head:mm.fprop"].detail == "by 'head'"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"pins": {"heads": "bf16"}}, OptionError, r"pin 'heads' fits none .*did you mean 'head'"),
        ({"pins": {"head": "fp4"}}, OptionError, r"did you mean 'nvfp4'"),
        ({"budget": {"effective_bit": 5}}, OptionError, r"did you mean 'effective_bits'"),
        ({"budget": {"effective_bits": "5"}}, OptionError, "takes a number"),
        ({"budget": {"bf16_flops": 40}}, OptionError, "out of its range"),
        ({"budget": {"bf16_flops": 0.4, "speedup": 2}}, OptionError, "exactly one"),
        ({"budget": {"speedup": 2}}, OptionError, "needs a target"),
        ({"target": "sm100"}, DeviceError, "did you mean 'sm_100'"),
    ],
)
def test_mistakes(scores: Scores, arguments: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        scores.plan(arguments.get("budget"), **{k: v for k, v in arguments.items() if k != "budget"})


def test_static_scores_know_no_loss() -> None:
    static = score_statically(Block(), torch.randn(2, 8, 64))
    assert static.depth == "static"
    with pytest.raises(OptionError, match="static scores only rank"):
        static.plan({"loss_increase": 0.1})


def test_static_scores_are_the_weights_own_error() -> None:
    model = Block()
    with torch.no_grad():
        model.o.weight.copy_(torch.randint(-1, 2, (64, 64)).float())  # on the grid: no error at all
        model.down.weight.mul_(torch.rand(64, 128).pow(-2))  # outliers
    static = score_statically(model, torch.randn(2, 8, 64))
    errors = {key.partition(":")[0]: score.error for key, score in static.values.items()}
    assert errors["o"] == pytest.approx(0.0092)
    assert 0.015 < errors["q"] < 0.025


def test_the_ends_of_a_model_count_more() -> None:
    factors = [end_factor(i / 20) for i in range(21)]
    assert factors[0] == factors[-1] == 1.3
    assert factors[10] == 1.0
    assert factors == pytest.approx(factors[::-1])


def test_time_decides_with_a_target(scores: Scores) -> None:
    plan = scores.plan(target="sm_100")
    assert chosen(plan) == set()
    slow = [d for d in plan if d.reason is Reason.SLOWER]
    assert len(slow) == 8
    assert all("sm_100" in d.detail and d.seconds[1] >= d.seconds[0] for d in slow)
    assert plan.analysis.seconds == plan.analysis.bf16_seconds


def test_a_large_model_is_planned_by_time_and_speedup() -> None:
    small = Block()
    found = fp4_compile.calibrate(small, [torch.randn(4, 32, 64)])
    data = json.loads(found.to_json())
    for site in data["sites"]:  # the same model, 64 times as wide and with as many more rows
        for name in ("n", "k"):
            site[name] = str(64 * int(site[name]))
        if site["batch"] == "1":
            site["m"] = str(64 * int(site["m"]))
    large = Scores.from_json(json.dumps(data))
    free = large.plan(target="sm_100").analysis
    assert free.bf16_seconds / free.seconds > 1.5
    fastest = free.bf16_seconds / free.seconds
    half = large.plan({"speedup": 1 + (fastest - 1) / 2}, target="sm_100").analysis
    assert 1 + (fastest - 1) / 2 <= half.bf16_seconds / half.seconds + 1e-9
    assert half.loss < free.loss
    with pytest.raises(BudgetError, match="the closest is speedup = "):
        large.plan({"speedup": 8.0}, target="sm_100")


def test_scores_and_plans_survive_saving(scores: Scores, tmp_path) -> None:
    scores.save(tmp_path / "scores.json")
    again = Scores.load(tmp_path / "scores.json")
    assert again == scores
    plan = again.plan({"effective_bits": 9.0}, target="sm_120")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.diff(scores.plan({"effective_bits": 9.0}, target="sm_120")) == ""
    assert "gate:mm.fprop" in loaded.diff(scores.plan(pins={"*": "bf16"})) + plan.diff(scores.plan())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 9}', '{"schema": 1, "scores": {"a": [1]}}'])
def test_broken_files(text: str, tmp_path) -> None:
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(CalibrationError, match=r"not a file of scores|schema"):
        Scores.load(tmp_path / "scores.json")
    with pytest.raises(CalibrationError, match="cannot read"):
        Scores.load(tmp_path / "none.json")


def test_a_plan_is_carried_out(scores: Scores) -> None:
    """The compiled model is the plan's, and a plan of other shapes fits as well."""
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 5, 64)
    plan = scores.plan({"effective_bits": 9.0})
    with torch.no_grad():
        assert chosen(fp4_compile.explain(model, x, options={"plan": plan}).plan) == chosen(plan)
        everything = nvfp4(model)(x)
        assert not torch.equal(nvfp4(model, options={"plan": plan})(x), everything)
        with pytest.raises(PlanError, match="another model"):
            fp4_compile.explain(nn.Linear(64, 64), x, options={"plan": plan})


def test_a_budget_at_compile_time() -> None:
    model, x = Block().eval(), torch.randn(2, 8, 64)
    with torch.no_grad():
        found = fp4_compile.explain(model, x, options={"budget": {"bf16_params": 0.5}, "pins": {"side": "bf16"}}).plan
        assert 0 < len(chosen(found)) < 8
        assert found["side:mm.fprop"].reason is Reason.PINNED
        same = fp4_compile.explain(model, x, options={"budget": {"bf16_params": 0.5}, "pins": {"side": "bf16"}}).plan
        assert same.to_json() == found.to_json()
        nvfp4(model, options={"budget": {"bf16_params": 0.5}, "pins": {"side": "bf16"}})(x)
        for options, says in (
            ({"pins": {"sidde": "bf16"}}, "did you mean 'side'"),
            ({"budget": {"bf16_params": 0.0}}, "the closest is bf16_params"),
        ):
            with pytest.raises(Exception, match=says):
                nvfp4(model, options=options)(x)


def test_pins_reach_the_numbers() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
    with torch.no_grad():
        result = nvfp4(model, options={"pins": {"1": "bf16"}})(x)
        want = model[1](nvfp4_linear(x, model[0].weight, model[0].bias))
    torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5)


def test_backward_sites_follow_their_forward() -> None:
    plan = fp4_compile.explain(Block(), torch.randn(4, 8, 64), options={"budget": {"bf16_params": 0.5}}).plan
    forward = {d.site.module: d.precision for d in plan if d.site.role is Role.FPROP and d.site.op == "mm"}
    assert set(forward.values()) == {Precision.BF16, Precision.NVFP4}
    backward = [d for d in plan if d.site.role is not Role.FPROP and d.site.module in forward]
    assert {d.precision for d in backward} == {Precision.BF16, Precision.NVFP4}
    assert all(d.precision is forward[d.site.module] for d in backward)


def test_in_training_each_product_has_to_pay() -> None:
    """On sm_120 with 4096 tokens wgrad of a narrow layer loses, and the narrowest layer loses as a whole."""
    model = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384), nn.Linear(384, 384)).bfloat16()
    options = {"target": "sm_120", "training": {"bf16_share": 0.0}}
    x = torch.randn(4096, 384, dtype=torch.bfloat16, requires_grad=True)
    plan = fp4_compile.explain(model, x, options=options).plan
    found = {(d.site.module, d.site.role): d for d in plan}
    for layer in ("0", "2"):
        assert found[layer, Role.FPROP].precision is found[layer, Role.DGRAD].precision is Precision.NVFP4
        assert found[layer, Role.WGRAD].reason is Reason.SLOWER
    assert found["3", Role.FPROP].reason is Reason.SLOWER
    assert "with its backward" in found["3", Role.FPROP].detail
    for d in plan:
        if d.site.role is not Role.FPROP and d.site.module != "3":
            assert d.seconds is not None
            assert (d.precision is Precision.NVFP4) == (d.seconds[1] < d.seconds[0])
    pinned = fp4_compile.explain(model, x, options={**options, "pins": {"0": "nvfp4"}}).plan
    assert all(d.precision is Precision.NVFP4 for d in pinned if d.site.module == "0")


def test_few_tokens_are_no_narrow_layer() -> None:
    plan = fp4_compile.explain(nn.Linear(64, 64), torch.randn(16, 64, requires_grad=True)).plan
    [wgrad] = [d for d in plan if d.site.role is Role.WGRAD]
    assert (wgrad.precision, wgrad.reason, wgrad.detail) == (Precision.BF16, Reason.FEW_TOKENS, "16 tokens < 32")
    assert any("tokens of a step" in line for line in plan.advice())


def test_dynamic_rows_are_decided_by_guards() -> None:
    """Few rows and many get a graph each, with its own decision, and no more than that."""
    layer = nn.Linear(4096, 4096, bias=False).bfloat16()
    rows = fp4_compile.cost_model.break_even_rows(fp4_compile.cost_model.device("sm_120"), 4096, 4096)
    threshold = fp4_compile.cost_model.power_of_two_threshold(rows)
    compiled = nvfp4(layer, dynamic=True, options={"target": "sm_120"})
    with torch.no_grad():
        for m, quantized in ((3, False), (threshold, True), (5, False), (threshold + 7, True), (threshold - 1, False)):
            x = torch.randn(m, 4096).bfloat16()
            error = (compiled(x) - layer(x)).float().norm() / layer(x).float().norm()
            assert (error > 0.05) == quantized, m
    assert graph_count() == 2


def test_site_keys_are_the_modules_own_paths() -> None:
    """A pin is written with the path that named_modules gives, whatever the parts are called."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("self", nn.ModuleDict({"query": nn.Linear(64, 64), "fn": nn.Linear(64, 64)}))
            self.L = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            inner = getattr(self, "self")  # noqa: B009
            return self.L(inner["fn"](inner["query"](x)))

    model = nn.Sequential(Attention(), nn.Linear(64, 64))
    with torch.no_grad():
        plan = fp4_compile.explain(model, torch.randn(2, 64)).plan
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {d.site.module for d in plan} == linear


def test_a_decorated_forward_keeps_the_modules_own_paths() -> None:
    """As transformers decorates the forward of its models."""

    def decorated(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

        @decorated
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    with torch.no_grad():
        plan = fp4_compile.explain(Model(), torch.randn(2, 64)).plan
    assert [d.site.module for d in plan] == ["layers.0", "layers.1"]

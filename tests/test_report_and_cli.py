"""The report's page and pictures, and the command line as a user types it."""

from __future__ import annotations

import copy
import dataclasses
import sys

import matplotlib
import pytest
import sympy
import torch
from torch import nn

import fp4_compile
from fp4_compile import Plan, Precision, Reason, Scores
from fp4_compile.cli import main
from fp4_compile.errors import PlanError
from fp4_compile.plan import Decision, Role, Site
from fp4_compile.report.pictures import LONGEST_LABEL, draw

PICTURES = ("pareto.png", "sensitivity.png", "time.png", "share.png")
PNG = b"\x89PNG\r\n\x1a\n"

SCRIPT = """
import collections

import torch
from torch import nn
from beside import WIDTH


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 96)

    def forward(self, x, scale=1.0):
        return self.inner(x) * scale


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    return model, [torch.randn(8, 64) for _ in range(3)], lambda output, batch: output.square().mean()


def mapping():
    return Named(), [collections.UserDict(x=torch.randn(8, 64), scale=2.0)]


def several_arguments():
    return Named(), iter([(torch.randn(8, 64), 2.0)])


def without_batches():
    return nn.Linear(64, 64), []


def one_batch():
    return nn.Linear(64, 64), torch.randn(8, 64)


def wrong_shape():
    return nn.Linear(64, 64), [torch.randn(8, 63)]


def fails():
    raise FileNotFoundError("no weights\\nhere")


NUMBER = 3


def nothing():
    return None
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WIDTH = 64")
    (tmp_path / "broken.py").write_text("def make(:")
    (tmp_path / "needy.py").write_text("import no_such_dependency")
    return "mine.py"


@pytest.fixture(scope="module")
def scores() -> Scores:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return fp4_compile.calibrate(model, [torch.randn(8, 64)])


def site(name: str, rows: object = 8) -> Site:
    m, n, k = sympy.sympify(rows), sympy.Integer(64), sympy.Integer(64)
    return Site(name, "mm", Role.FPROP, 0, sympy.Integer(1), m, n, k, "bf16")


def decided(name: str, precision: Precision = Precision.NVFP4, **predicted: object) -> Decision:
    reason = Reason.QUANTIZED if precision is Precision.NVFP4 else Reason.SENSITIVE
    return Decision(site(name), precision, reason, "because", **predicted)


def test_a_report_has_pictures_and_every_site(scores: Scores, tmp_path) -> None:
    plan = scores.plan({"effective_bits": 10.0}, target="sm_100")
    page = plan.report(tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    assert page == str(tmp_path / "out" / "index.html")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"index.html", *PICTURES}
    for png in (tmp_path / "out").glob("*.png"):
        assert png.read_bytes().startswith(PNG)
    assert text.count("data:image/png;base64,") == 4
    assert all(d.site.key in text for d in plan)
    assert "the proven optimum" in text
    assert "http" not in text and 'src="/' not in text
    assert all(line in text for line in plan.summary().splitlines() + list(plan.advice()))


def test_a_report_without_scores_or_times(tmp_path) -> None:
    for name, plan in (("empty", Plan(())), ("one", Plan((Decision(site("a"), Precision.BF16, Reason.PLAN, ""),)))):
        plan.report(tmp_path / name)
        assert [p.name for p in (tmp_path / name).iterdir()] == ["index.html"]


def test_a_table_has_columns_for_what_is_known(tmp_path) -> None:
    Plan((decided("a"),)).report(tmp_path / "none")
    Plan((decided("a", loss=0.5, seconds=(2e-6, 1e-6)), decided("b"))).report(tmp_path / "all")
    none, every = ((tmp_path / name / "index.html").read_text() for name in ("none", "all"))
    assert "quantized: because" in none
    assert "us in BF16" not in none and "error in NVFP4" not in none
    assert '<td class="number" data-value="0.5">0.5</td><td class="number" data-value="2">2</td>' in every
    assert every.count('data-value=""') == 3


def test_advice_is_on_the_page(tmp_path) -> None:
    plan = Plan((decided("a", Precision.BF16), decided("b", Precision.BF16), decided("c")))
    assert [line[:13] for line in plan.advice()] == ["2 x sensitive"]
    plan.report(tmp_path)
    assert plan.advice()[0] in (tmp_path / "index.html").read_text()


def test_times_are_drawn_without_an_analysis_too() -> None:
    assert list(draw(Plan((decided("a", seconds=(2e-6, 1e-6)),)))) == ["time.png"]


@pytest.mark.parametrize("loss", [0.0, -1e-3, float("nan")])
def test_errors_that_a_logarithm_cannot_show(loss: float) -> None:
    assert draw(Plan((decided("a", loss=loss),))) == {}
    assert list(draw(Plan((decided("a", loss=loss), decided("b", loss=1.0))))) == ["sensitivity.png", "share.png"]


def labels(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The texts of each picture's legend and vertical axis, as drawn."""
    found: dict[str, list[str]] = {}

    def texts(figure: object) -> bytes:
        figure.canvas.draw()
        shown = [t for legend in figure.legends for t in legend.get_texts()] + figure.axes[0].get_yticklabels()
        found[figure.axes[0].get_xlabel().split()[0]] = [t.get_text() for t in shown]
        return b""

    monkeypatch.setattr("fp4_compile.report.pictures._png", texts)
    draw(plan)
    return found


def test_every_kind_of_layer_has_its_name_on_the_picture(monkeypatch) -> None:
    kinds = ["_hidden", "costs_$x$_{", "plain", "a" * 200]
    plan = Plan(tuple(decided(f"layers.{i}.{kind}", loss=0.1, seconds=(1e-6, 1e-6)) for i, kind in enumerate(kinds)))
    found = labels(plan, monkeypatch)
    assert len(found) == 3
    for texts in found.values():
        assert [t for t in texts if "_hidden" in t] and [t for t in texts if "plain" in t]
        assert r"costs_\$x\$_{" in texts  # matplotlib draws an escaped dollar as a dollar
        assert max(len(t) for t in texts if t.startswith("aaa")) == LONGEST_LABEL


def test_the_rare_kinds_of_many_go_together(monkeypatch) -> None:
    plan = Plan(tuple(decided(f"layers.kind{i}", loss=0.1, seconds=(1e-6 * i, 1e-6)) for i in range(1, 31)))
    found = labels(plan, monkeypatch)
    for texts in found.values():
        assert "other kinds" in texts and len([t for t in texts if t.startswith("kind")]) == 7
    assert found["predicted"][-1] == "kind30"


def test_time_outside_the_decided_matmuls_has_a_bar(scores: Scores, monkeypatch) -> None:
    plan = scores.plan(target="sm_100")
    assert "never in NVFP4" not in labels(plan, monkeypatch)["predicted"]
    fewer = dataclasses.replace(plan, decisions=plan.decisions[1:])
    assert "never in NVFP4" in labels(fewer, monkeypatch)["predicted"]


def test_a_users_own_plots_stay_as_they_are(monkeypatch) -> None:
    plan = Plan((decided("a", loss=0.5), decided("b", loss=0.1)))
    plain = draw(plan)
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30}):
        before = copy.deepcopy(dict(matplotlib.rcParams))
        assert draw(plan) == plain
        assert dict(matplotlib.rcParams) == before


def test_a_report_of_strange_names_and_many_sites(tmp_path) -> None:
    rows = sympy.Symbol("s0", integer=True)
    decisions = [
        Decision(site(f"blocks.{i}.<b>&{i % 11}", rows), Precision.NVFP4, Reason.QUANTIZED, "<i>", 10.0**-i)
        for i in range(200)
    ]
    Plan(tuple(decisions)).report(tmp_path)
    text = (tmp_path / "index.html").read_text()
    assert "<b>" not in text and "<i>" not in text
    assert all(f"blocks.{i}.&lt;b&gt;&amp;{i % 11}:mm.fprop" in text for i in range(200))
    assert "s0x64x64" in text


def test_a_report_that_cannot_be_written(scores: Scores, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        scores.plan().report(tmp_path / "file" / "out")


def test_a_report_without_matplotlib(scores: Scores, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlanError, match="pip install"):
        scores.plan().report(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_from_a_script_to_a_plan(script: str, tmp_path, capsys) -> None:
    assert main(["calibrate", f"{script}:make", "--out", "scores.json"]) == 0
    assert "2 of 2 matmuls in NVFP4" in capsys.readouterr().out
    command = ["plan", "scores.json", "--budget", "effective_bits=12", "--pin", "0=bf16", "--out", "plan.json"]
    assert main([*command, "--report", "page"]) == 0
    assert "page/index.html" in capsys.readouterr().out
    assert [d.precision for d in Plan.load("plan.json")] == [Precision.BF16, Precision.NVFP4]
    assert main(["plan", "scores.json", "--out", "all.json"]) == 0
    capsys.readouterr()
    assert main(["plan", "plan.json", "--diff", "all.json"]) == 0
    assert capsys.readouterr().out == "0:mm.fprop: bf16 -> nvfp4\n"


def test_explain_on_the_command_line(script: str, capsys) -> None:
    assert main(["explain", "mine:make", "--options", '{"pins": {"2": "bf16"}}', "--target", "sm_100"]) == 0
    out = capsys.readouterr().out
    assert "pinned: by '2'" in out
    assert "1 graph, 0 graph breaks" in out


@pytest.mark.parametrize("factory", ["mapping", "several_arguments"])
def test_a_batch_reaches_the_model_as_in_calibration(script: str, factory: str, capsys) -> None:
    assert main(["explain", f"{script}:{factory}", "--save", "plan.json"]) == 0
    assert "inner:mm.fprop" in capsys.readouterr().out
    assert any(d.site.module.endswith("inner") for d in Plan.load("plan.json"))


def test_a_script_in_another_folder_finds_what_lies_beside_it(script: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    assert main(["explain", f"../{script}:make"]) == 0


def test_a_measured_table_is_a_target(script: str, capsys) -> None:
    assert main(["measure", "--quick", "--out", "here.json"]) == 0
    assert "GFLOP/s in BF16" in capsys.readouterr().out
    assert main(["explain", f"{script}:make", "--target", "here.json"]) == 0


@pytest.mark.parametrize("command", [[], ["explain"], ["calibrate"], ["plan"], ["measure"]])
def test_help(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: python -m fp4_compile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "mine.py"], "names no factory"),
        (["explain", "mine.py:mak"], "has no 'mak'"),
        (["explain", "mine.py:nothing"], "returned NoneType"),
        (["explain", "mine.py:without_batches"], "gives no batches"),
        (["explain", "mine.py:one_batch"], "return a list of batches"),
        (["explain", "mine.py:NUMBER"], "is no function"),
        (["explain", "mine.py:fails"], "mine.py:fails raised FileNotFoundError: no weights here ("),
        (["explain", "mine.py:wrong_shape"], "cannot be multiplied (8x63 and 64x64)"),
        (["explain", "broken.py:make"], "raised SyntaxError"),
        (["explain", "needy.py:make"], "No module named 'no_such_dependency'"),
        (["explain", "needy:make"], "needy raised ModuleNotFoundError"),
        (["explain", "other.py:make"], "there is no file"),
        (["explain", "no_such_module:make"], "there is no module"),
        (["explain", "mine.py:make", "--options", "{"], "not JSON"),
        (["explain", "mine.py:make", "--options", "[1]"], "it takes an object"),
        (["explain", "mine.py:make", "--save", "no/plan.json"], "cannot write 'no/plan.json'"),
        (["explain", "mine.py:make", "--target", "sm100"], "did you mean 'sm_100'"),
        (["calibrate", "mine.py:without_batches", "--out", "s.json"], "no batches"),
        (["calibrate", "mine.py:wrong_shape", "--out", "s.json"], "batch 0 does not fit the model"),
        (["calibrate", "mine.py:make", "--out", "no/s.json"], "cannot write 'no/s.json'"),
        (["plan", "none.json"], "cannot read the scores"),
        (["plan", "mine.py"], "not a file of scores"),
        (["plan", "mine.py", "--diff", "mine.py"], "not a plan"),
        (["plan", "mine.py", "--budget", "effective_bits"], "has no '='"),
        (["plan", "mine.py", "--budget", "effective_bits=x"], "not a number"),
    ],
)
def test_mistakes_are_one_line(script: str, arguments: list[str], says: str, capsys) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("fp4_compile: ")
    assert says in err
    assert err.count("\n") == 1

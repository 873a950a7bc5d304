"""The report's page and pictures, and the command line as a user types it."""

from __future__ import annotations

import sys

import pytest
import sympy
import torch
from torch import nn

import fp4_compile
from fp4_compile import Plan, Precision, Reason, Scores
from fp4_compile.cli import main
from fp4_compile.errors import PlanError
from fp4_compile.plan import Decision, Role, Site

PNG = b"\x89PNG\r\n\x1a\n"

SCRIPT = '''
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    return model, [torch.randn(8, 64) for _ in range(3)], lambda output, batch: output.square().mean()


def without_batches():
    return nn.Linear(64, 64), []


def nothing():
    return None
'''


@pytest.fixture
def script(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(SCRIPT)
    return "mine.py"


@pytest.fixture(scope="module")
def scores() -> Scores:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return fp4_compile.calibrate(model, [torch.randn(8, 64)])


def site(name: str, rows: object = 8) -> Site:
    m, n, k = sympy.sympify(rows), sympy.Integer(64), sympy.Integer(64)
    return Site(name, "mm", Role.FPROP, 0, sympy.Integer(1), m, n, k, "bf16")


def test_a_report_has_pictures_and_every_site(scores: Scores, tmp_path) -> None:
    plan = scores.plan({"effective_bits": 10.0}, target="sm_100")
    page = plan.report(tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    assert page == str(tmp_path / "out" / "index.html")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"index.html", "pareto.png", "sensitivity.png", "time.png"}
    for png in (tmp_path / "out").glob("*.png"):
        assert png.read_bytes().startswith(PNG)
    assert text.count("data:image/png;base64,") == 3
    assert all(d.site.key in text for d in plan)
    assert "the proven optimum" in text
    assert "http" not in text and "src=\"/" not in text


def test_a_report_without_scores_or_times(tmp_path) -> None:
    for name, plan in (("empty", Plan(())), ("one", Plan((Decision(site("a"), Precision.BF16, Reason.PLAN, ""),)))):
        plan.report(tmp_path / name)
        assert [p.name for p in (tmp_path / name).iterdir()] == ["index.html"]


def test_a_report_of_strange_names_and_many_sites(tmp_path) -> None:
    rows = sympy.Symbol("s0", integer=True)
    decisions = [
        Decision(site(f"blocks.{i}.<b>&{i % 11}", rows), Precision.NVFP4, Reason.QUANTIZED, "<i>", 10.0**-i)
        for i in range(200)
    ]
    Plan(tuple(decisions)).report(tmp_path)
    text = (tmp_path / "index.html").read_text()
    assert "<b>" not in text and "<i>" not in text
    assert "blocks.199.&lt;b&gt;&amp;1" in text
    assert "s0x64x64" in text


def test_a_report_that_cannot_be_written(scores: Scores, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        scores.plan().report(tmp_path / "file" / "out")


def test_a_report_without_matplotlib(scores: Scores, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "mine.py"], "names no factory"),
        (["explain", "mine.py:mak"], "has no 'mak'"),
        (["explain", "mine.py:nothing"], "returned NoneType"),
        (["explain", "mine.py:without_batches"], "gives no batches"),
        (["explain", "other.py:make"], "there is no file"),
        (["explain", "no_such_module:make"], "there is no module"),
        (["explain", "mine.py:make", "--options", "{"], "not JSON"),
        (["explain", "mine.py:make", "--target", "sm100"], "did you mean 'sm_100'"),
        (["calibrate", "mine.py:without_batches", "--out", "s.json"], "no batches"),
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
    assert "Traceback" not in err

"""The command line: explain, calibrate and plan a user's own model; measure this machine; compare plans."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fp4_compile.errors import Fp4CompileError, OptionError

_TARGET = (
    "module:factory or path/to/script.py:factory; the factory takes nothing and returns (model, batches) or "
    "(model, batches, loss_fn). A batch is a dict of keywords, a tuple of arguments, or the one argument"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code, 2 for a user's mistake."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except Fp4CompileError as error:
        print(f"fp4_compile: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fp4_compile", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = _command(commands, "explain", _explain, "print what would happen to a model")
    explain.add_argument("model", help=_TARGET)
    explain.add_argument("--options", default="{}", metavar="JSON", help="as torch.compile's options")
    explain.add_argument("--target", metavar="DEVICE", help="the device whose times count, e.g. sm_100")
    _outputs(explain)

    calibrate = _command(commands, "calibrate", _calibrate, "score a model's matmuls on its batches")
    calibrate.add_argument("model", help=_TARGET)
    calibrate.add_argument("--out", required=True, metavar="SCORES", help="where the scores go; goes on if interrupted")

    plan = _command(commands, "plan", _plan, "make a plan from scores, or compare two plans")
    plan.add_argument("scores", help="what calibrate wrote; with --diff, a plan")
    plan.add_argument("--budget", metavar="NAME=VALUE", help="e.g. effective_bits=6, bf16_flops=0.1, speedup=1.5")
    plan.add_argument("--pin", action="append", default=[], metavar="PATTERN=PRECISION", help="e.g. '*.head=bf16'")
    plan.add_argument("--target", metavar="DEVICE", help="the device whose times count, e.g. sm_100")
    plan.add_argument("--diff", metavar="PLAN", help="print what this plan decides otherwise than the first")
    _outputs(plan)

    measure = _command(commands, "measure", _measure, "measure this machine for the cost model")
    measure.add_argument("--out", required=True, metavar="TABLE", help="a .json file, to be given as a target")
    measure.add_argument("--quick", action="store_true", help="fewer repetitions")
    return parser


def _command(commands: Any, name: str, run: Callable[[Any], None], about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    return parser


def _outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="PLAN", help="write the plan there, as JSON")
    parser.add_argument("--report", metavar="FOLDER", help="write a page with pictures there")


def _explain(given: Any) -> None:
    from fp4_compile.explanation import explain

    model, batches, _ = _made(given.model)
    try:
        options = json.loads(given.options)
    except ValueError as error:
        raise OptionError(f"--options is not JSON: {error}") from error
    if given.target:
        options["target"] = given.target
    batch = next(iter(batches), None)
    if batch is None:
        raise OptionError(f"{given.model} gives no batches; explain needs one")
    arguments = () if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else (batch,)
    found = explain(model, *arguments, options=options, **(batch if isinstance(batch, dict) else {}))
    print(found)
    _write(found.plan, given)


def _calibrate(given: Any) -> None:
    from fp4_compile.sensitivity.calibrated import calibrate

    model, batches, loss_fn = _made(given.model)
    scores = calibrate(model, batches, loss_fn, path=given.out)
    print(scores.plan())
    print(f"scores of {len(scores.values)} matmuls on {scores.batches} batches: {given.out}")


def _plan(given: Any) -> None:
    from fp4_compile.plan import Plan
    from fp4_compile.planner.scores import Scores

    if given.diff:
        print(Plan.load(given.scores).diff(Plan.load(given.diff)) or "the plans decide alike")
        return
    budget = dict([_pair(given.budget, "--budget", float)]) if given.budget else None
    pins = dict(_pair(pin, "--pin", str) for pin in given.pin)
    plan = Scores.load(given.scores).plan(budget, pins=pins, target=given.target)
    print(plan)
    _write(plan, given)


def _measure(given: Any) -> None:
    from fp4_compile.cost_model import measure

    device = measure(given.out, quick=given.quick)
    print(
        f"{device.name}: {device.bf16_flops * device.bf16_fraction / 1e9:.4g} GFLOP/s in BF16, "
        f"{device.memory / 1e9:.4g} GB/s, {1e6 * device.launch:.3g} us a call: {given.out}"
    )


def _write(plan: Any, given: Any) -> None:
    if given.out:
        try:
            plan.save(given.out)
        except OSError as error:
            raise OptionError(f"cannot write {given.out!r}: {error.strerror}") from error
        print(f"plan: {given.out}")
    if given.report:
        print(f"report: {plan.report(given.report)}")


def _pair(text: str, option: str, convert: Callable[[str], Any]) -> tuple[str, Any]:
    name, equals, value = text.rpartition("=")
    if not equals:
        raise OptionError(f"{option} {text!r} has no '='")
    try:
        return name, convert(value)
    except ValueError as error:
        raise OptionError(f"{option} {text!r}: {value!r} is not a number") from error


def _made(target: str) -> tuple[Any, Any, Any]:
    """What the user's factory makes: model, batches, and a loss or None."""
    place, colon, name = target.rpartition(":")
    if not colon:
        raise OptionError(f"{target!r} names no factory; write {target}:factory")
    module = _imported(place)
    if not hasattr(module, name):
        raise OptionError(f"{place} has no {name!r}")
    made = getattr(module, name)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise OptionError(f"{target} returned {type(made).__name__}, not (model, batches) or (model, batches, loss_fn)")
    model, batches, *loss_fn = made
    return model, batches, loss_fn[0] if loss_fn else None


def _imported(place: str) -> Any:
    sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise OptionError(f"there is no module {error.name!r}; a script is named by its path, with .py") from error
    spec = importlib.util.spec_from_file_location("fp4_compile_user_script", place)
    if spec is None or spec.loader is None or not os.path.exists(place):
        raise OptionError(f"there is no file {place!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

"""The command line: explain, calibrate and plan a user's own model; measure this machine; compare plans."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fp4_compile.errors import Fp4CompileError, OptionError

_MODEL = """\
MODEL is module:factory or path/to/script.py:factory. The factory takes no arguments and returns (model, batches) or
(model, batches, loss_fn), with loss_fn(output, batch) a scalar. A batch is a mapping (of keywords), a tuple or list
(of arguments), or the one argument."""
_BUDGETS = """\
budgets: loss_increase=X in the loss's unit, effective_bits=4.5..16 a weight, bf16_flops=0..1 and bf16_params=0..1 for
the largest share left in BF16, speedup=X with a --target. Without a budget, NVFP4 runs wherever it is safe and, on a
target, pays."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code, 2 for a user's mistake."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except Fp4CompileError as error:
        print(f"fp4_compile: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp4_compile",
        description="Decide which matrix multiplications of a model run in NVFP4 and which in BF16.",
        epilog="Each command has a --help of its own. Mistakes end with exit code 2.",
    )
    commands = parser.add_subparsers(required=True, title="commands")

    explain = _command(commands, "explain", _explain, "print what would happen to a model, and why", _MODEL)
    explain.add_argument("model", metavar="MODEL", help="module:factory or path/to/script.py:factory")
    explain.add_argument("--options", default="{}", metavar="JSON", help="what torch.compile would get as options")
    _target(explain)
    _outputs(explain, "--save", "--out")

    calibrate = _command(commands, "calibrate", _calibrate, "score a model's matmuls on its batches", _MODEL)
    calibrate.add_argument("model", metavar="MODEL", help="module:factory or path/to/script.py:factory")
    calibrate.add_argument(
        "--out", required=True, metavar="SCORES", help="where the scores go; run again, it goes on where it stopped"
    )

    plan = _command(commands, "plan", _plan, "make a plan from scores, or compare two plans", _BUDGETS)
    plan.add_argument("scores", metavar="SCORES", help="what calibrate wrote; with --diff, a plan")
    plan.add_argument("--budget", metavar="NAME=VALUE", help="the one limit to meet with the least error; see below")
    plan.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="PATTERN=PRECISION",
        help="modules to be bf16 or nvfp4 in any case, such as '*.head=bf16'; may be given again, the last one counts",
    )
    _target(plan)
    plan.add_argument("--diff", metavar="PLAN", help="print what this plan decides otherwise than the first, no more")
    _outputs(plan, "--out")

    measure = _command(commands, "measure", _measure, "measure this machine for the cost model")
    measure.add_argument("--out", required=True, metavar="TABLE", help="a .json file, to be given as --target")
    measure.add_argument("--quick", action="store_true", help="rougher figures in less time")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[Any], None], about: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=epilog
    )
    parser.set_defaults(run=run)
    return parser


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="DEVICE", help="the device whose times count: sm_100, or a table that measure wrote"
    )


def _outputs(parser: argparse.ArgumentParser, *names: str) -> None:
    parser.add_argument(*names, dest="out", metavar="PLAN", help="write the plan there, as JSON")
    parser.add_argument("--report", metavar="FOLDER", help="write a page with pictures there, index.html")


def _explain(given: Any) -> None:
    from fp4_compile._torch_compat import without_fake_tensor_log
    from fp4_compile.explanation import explain
    from fp4_compile.sensitivity.batches import call

    try:
        options = json.loads(given.options)
    except ValueError as error:
        raise OptionError(f"--options is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise OptionError(f'--options is {given.options}; it takes an object, such as \'{{"weight_block": "16x16"}}\'')
    if given.target:
        options["target"] = given.target
    model, batches, _ = _made(given.model)
    with _users_own(f"the batches of {given.model}"):
        batch = next(iter(batches), None)
    if batch is None:
        raise OptionError(f"{given.model} gives no batches; explain needs one")
    try:
        with without_fake_tensor_log():
            found = call(lambda *inputs, **keywords: explain(model, *inputs, options=options, **keywords), batch)
    except Fp4CompileError:
        raise
    except Exception:
        # What eager mode refuses is the user's, and said there in fewer words; anything else is ours.
        with _users_own(f"the model of {given.model}, called with its first batch,"):
            call(model, batch)
        raise
    print(found)
    _write(found.plan, given)


def _calibrate(given: Any) -> None:
    from fp4_compile._torch_compat import without_fake_tensor_log
    from fp4_compile.sensitivity.calibrated import calibrate

    folder = os.path.dirname(given.out) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(given.out):
        raise OptionError(f"cannot write {given.out!r}: give a file in a folder that is there and may be written to")
    model, batches, loss_fn = _made(given.model)
    with without_fake_tensor_log():
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
    from torch import Tensor

    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise OptionError(f"{target!r} names no factory; write module:factory or path/to/script.py:factory")
    module = _imported(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise OptionError(f"{place} has no {name!r}" if factory is None else f"{target} is no function")
    with _users_own(target):
        made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise OptionError(f"{target} returned {type(made).__name__}, not (model, batches) or (model, batches, loss_fn)")
    model, batches, *loss_fn = made
    if isinstance(batches, (Mapping, Tensor)) or not hasattr(batches, "__iter__"):
        raise OptionError(f"{target} returned a {type(batches).__name__} for the batches; return a list of batches")
    return model, batches, loss_fn[0] if loss_fn else None


def _imported(place: str) -> Any:
    sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        with _users_own(place):
            try:
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                if not f"{place}.".startswith(f"{error.name}."):
                    raise
                raise OptionError(
                    f"there is no module {error.name!r}; a script is named by its path, with .py"
                ) from error
    if not os.path.isfile(place):
        raise OptionError(f"there is no file {place!r}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(place)))  # as when the script is run
    spec = importlib.util.spec_from_file_location("fp4_compile_user_script", place)
    if spec is None or spec.loader is None:
        raise OptionError(f"{place!r} is no Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _users_own(place):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _users_own(what: str) -> Iterator[None]:
    """Around a user's code: what it raises becomes a line that says where.

    Raises:
        OptionError: it raised something.
    """
    try:
        yield
    except Fp4CompileError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        inside = last.filename == __file__ or last.filename.startswith("<")
        where = "" if inside else f" ({last.filename}, line {last.lineno})"
        raise OptionError(f"{what} raised {type(error).__name__}: {error}{where}") from error

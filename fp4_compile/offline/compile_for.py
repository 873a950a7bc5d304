"""The program of a model for a GPU, written on any machine: `compile_for`."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp4_compile.backend import inductor_settings
from fp4_compile.codegen.lowering import register_lowerings
from fp4_compile.errors import DumpError, OptionError
from fp4_compile.offline.generate import Program, Strides, generate
from fp4_compile.offline.kernels import Kernel, compile_kernel
from fp4_compile.offline.machine import Target, find_target
from fp4_compile.offline.summary import KernelSummary, Summary, summarize
from fp4_compile.offline.trace import Traced, trace
from fp4_compile.options import Options
from fp4_compile.plan import Plan, merge

log = logging.getLogger(__name__)

_MEASURING = ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning", "benchmark_epilogue_fusion")
_REFUSED = {
    **dict.fromkeys(_MEASURING, "measures kernels on the device, and none is here"),
    "combo_kernels": "joins launches that the summary tells apart",
}


@dataclasses.dataclass(frozen=True)
class Offline:
    """What `compile_for` wrote."""

    target: Target
    plan: Plan
    programs: tuple[Program, ...]
    """In the order they run; of several graphs one after the other."""
    kernels: Mapping[str, Kernel | Exception]
    """Triton's kernels by their source, compiled, or why they do not compile."""
    summary: Summary


def compile_for(
    model: Callable[..., Any],
    inputs: Any,
    target: str,
    out: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Offline:
    """Write the program that ``torch.compile(model, backend="nvfp4")`` would run on a GPU, on a machine without one.

    Nothing is computed: only the inputs' shapes and dtypes matter, and the model may be large. The backward is
    written too if gradients are enabled and something requires them.

    Args:
        model: a module or a function on the CPU.
        inputs: what it is called with: one tensor, a tuple, or a mapping of keyword arguments.
        target: a GPU in `fp4_compile.cost_model.DEVICES`: ``"sm_100"``.
        out: folder for the graphs, the plan, and of each part the Python program, every kernel's Triton source, PTX
            and cubin, and ``summary.txt`` and ``summary.json``.
        options: as for the backend. ``"target"``, whose times decide what pays, is ``target`` unless given.

    Raises:
        TargetError, DeviceError: the target is unknown, no GPU, or this installation cannot compile for it.
        OptionError, PlanError, DumpError: a mistake in the options, a folder that cannot be written.
    """
    folder = {} if out is None else {"dump": str(out)}
    gpu, chosen, settings = prepared(target, {**folder, **(options or {})})
    traced = trace(model, inputs, chosen, gpu.sm)
    result = compile_traced(traced, gpu, settings)
    if out is not None:
        _write(Path(out), traced, result)
    return result


def prepared(target: str, options: Mapping[str, Any] | None) -> tuple[Target, Options, dict[str, Any]]:
    """The GPU, the user's options, and Inductor's settings to generate code for it with.

    Raises:
        TargetError, DeviceError, OptionError: as `compile_for`.
    """
    gpu = find_target(target)
    chosen = Options.parse({"target": target, **(options or {})})
    _refuse_settings(chosen)
    register_lowerings()
    return gpu, chosen, inductor_settings(chosen, None, on_cpu=False)


def compile_traced(traced: list[Traced], target: Target, settings: Mapping[str, Any], ptx: bool = True) -> Offline:
    """Programs, kernels and summary of traced graphs, which are consumed. ``ptx``: compile the kernels."""
    programs: list[Program] = []
    kernels: dict[str, Kernel | Exception] = {}
    rows: list[KernelSummary] = []
    for graph in traced:
        kept: Strides = {}
        for part, gm in graph.parts:
            program = generate(part, gm, settings, target, kept)
            programs.append(program)
            if ptx:
                for name, source in program.kernels.items():
                    kernels[source] = kernels.get(source) or _compiled(name, source, target)
            rows += summarize(program, {name: kernels[s] for name, s in program.kernels.items() if ptx}, target)
    plan = merge(graph.plan for graph in traced)
    return Offline(target, plan, tuple(programs), kernels, Summary(target.name, tuple(rows)))


def _compiled(name: str, source: str, target: Target) -> Kernel | Exception:
    try:
        return compile_kernel(name, source, target)
    except Exception as error:  # what Triton and ptxas raise has no common type; it is part of the result
        log.warning("%s does not compile for %s", name, target.name, exc_info=True)
        return error


def _refuse_settings(options: Options) -> None:
    for key, value in options.inductor.items():
        why = _REFUSED.get(str(key).replace("-", "_"))
        if why and value:
            raise OptionError(f"option 'inductor': {key!r} {why}; leave it out")


def _write(folder: Path, traced: list[Traced], result: Offline) -> None:
    """Beside what the recorders wrote: programs and kernels of each graph, and the summary.

    Raises:
        DumpError: the folder cannot be written.
    """
    try:
        programs = iter(result.programs)
        for graph in traced:
            home = graph.recorder.path  # type: ignore[attr-defined]
            for _, program in zip(graph.parts, programs, strict=False):
                _write_program(home, program, result.kernels)
        (folder / "summary.txt").write_text(result.summary.render() + "\n", encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps(result.summary.to_dict(), indent=1), encoding="utf-8")
        result.plan.save(folder / "plan.json")
    except OSError as error:
        raise DumpError(f"cannot write {folder}: {error.strerror}") from error


def _write_program(folder: Path, program: Program, kernels: Mapping[str, Kernel | Exception]) -> None:
    (folder / f"{program.part}_program.py").write_text(program.source, encoding="utf-8")
    home = folder / program.part
    home.mkdir()
    for name, source in program.kernels.items():
        (home / f"{name}.py").write_text(source, encoding="utf-8")
        kernel = kernels.get(source)
        if isinstance(kernel, Kernel):
            (home / f"{name}.ptx").write_text(kernel.ptx, encoding="utf-8")
            (home / f"{name}.cubin").write_bytes(kernel.cubin)

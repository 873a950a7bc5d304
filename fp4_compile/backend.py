"""The backend behind ``torch.compile(model, backend="nvfp4")``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp4_compile._torch_compat import (
    compile_fx_inner,
    compile_with_inductor,
    custom_passes,
    inductor_setting_names,
    mode_settings,
    without_autograd_cache,
)
from fp4_compile.codegen.lowering import register_lowerings
from fp4_compile.errors import OptionError
from fp4_compile.options import Options, suggest
from fp4_compile.passes.hoist_weights import hoist_weights
from fp4_compile.pipeline import Pipeline
from fp4_compile.recorder import FolderRecorder, Recorder
from fp4_compile.weights import WeightStore

log = logging.getLogger(__name__)


def nvfp4(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: decide and rewrite its matmuls, then hand it to Inductor.

    Called by ``torch.compile``; ``mode`` and ``options`` are what the user gave it (see `Options`).

    Raises:
        OptionError, PlanError, DumpError: a mistake in the options.
    """
    chosen = Options.parse(options)
    recorder = FolderRecorder(chosen.dump) if chosen.dump else Recorder()
    recorder.graph("captured", gm)
    sm = gpu(example_inputs)
    if sm is not None:
        register_lowerings()
    pipeline = Pipeline(chosen, example_inputs, recorder, sm)
    on_cpu = not any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in example_inputs)
    settings = inductor_settings(chosen, mode, on_cpu=on_cpu)
    settings["joint_custom_pre_pass"] = (*custom_passes("joint_custom_pre_pass"), pipeline)
    try:
        with without_autograd_cache():
            compiled = compile_with_inductor(gm, example_inputs, _InnerCompiler(recorder), settings)
        pipeline.check_fit()
        return compiled
    finally:
        pipeline.context.weights = {}  # nothing of ours keeps a weight alive


def gpu(example_inputs: Sequence[Any]) -> int | None:
    """Compute capability of the NVIDIA GPU that the inputs lie on, 100 for sm_100; None if there are no kernels for it.

    Kernels are written for sm_80 and later.
    """
    devices = {x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
    if not devices or torch.version.cuda is None:
        return None
    major, minor = min(torch.cuda.get_device_capability(device) for device in devices)
    return major * 10 + minor if major >= 8 else None


def inductor_settings(options: Options, mode: str | None, *, on_cpu: bool) -> dict[str, Any]:
    """Inductor's settings for one compile: the mode's, then the user's.

    Raises:
        OptionError: a setting that Inductor does not have.
    """
    settings = mode_settings(mode)
    if on_cpu:
        # On a CPU the codes must be those of the tensor the model wrote: without this Inductor keeps FP32 where
        # the model rounds to BF16 between a matmul and its reader.
        settings["emulate_precision_casts"] = True
    known = inductor_setting_names() if options.inductor else []
    for key, value in options.inductor.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise OptionError(f"option 'inductor': Inductor has no setting {key!r}{suggest(name, known)}")
        settings[name] = value
    return settings


class _InnerCompiler:
    """Inductor's compile of one lowered graph, with the weight quantizers of inference graphs hoisted out."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        static = sorted(kwargs.get("static_input_idxs") or ())
        hoisted = hoist_weights(gm, static) if kwargs.get("is_inference") else None
        if hoisted is None:
            return self._compile(gm, example_inputs, kwargs)
        self._recorder.graph("weight_prologue", hoisted.prologue)
        first = len(example_inputs)
        kwargs["static_input_idxs"] = [*static, *range(first, first + hoisted.count)]
        new = [node.meta["val"] for node in gm.graph.nodes if node.meta.get("fp4_hoisted")]
        main = self._compile(gm, [*example_inputs, *new], kwargs)
        store = WeightStore(hoisted.prologue)

        def run(inputs: list[Any]) -> Any:
            values = store.get([inputs[i] for i in hoisted.inputs])
            arguments = [*inputs, *values]
            inputs.clear()
            return main(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        part = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        self._recorder.graph(f"{part}_to_inductor", gm)
        compiled = compile_fx_inner(gm, inputs, **kwargs)
        source = getattr(compiled, "source_code", None)
        if source:
            self._recorder.text(f"{part}_program", source, "py")
        return compiled

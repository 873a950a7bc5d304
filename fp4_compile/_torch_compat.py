"""Every private torch API that fp4_compile stands on, imported here and nowhere else.

A new torch release is checked by reading this file: each name says what it is used for.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.codecache import CppCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

__all__ = [
    "BackendCompilerFailed",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "InternalTorchDynamoError",
    "TorchDynamoException",
    "aot_autograd",
    "build_cpp",
    "compile_again",
    "compile_apart",
    "compile_fx_inner",
    "compile_settings",
    "compile_with_inductor",
    "custom_passes",
    "dynamo_counters",
    "dynamo_input_position",
    "fake_mode_of",
    "free_unbacked_symbols",
    "inductor_setting_names",
    "is_static_input",
    "make_boxed_func",
    "matmul_decompositions",
    "min_cut_rematerialization_partition",
    "mode_settings",
    "observe_pass",
    "outside_fake_mode",
    "select_decomp_table",
    "statically_true",
    "torch_cpu_library",
    "without_autograd_cache",
    "without_fake_tensor_log",
]


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    config_patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """Inductor's whole-graph compile with settings and an inner compiler of our own."""
    compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=dict(config_patches))
    return compiled  # type: ignore[no-any-return]


def torch_cpu_library() -> ctypes.CDLL:
    """The library that holds torch's CPU operators, and MKL in torch's own builds for x86.

    Raises:
        OSError: there is none of that name, as on other platforms.
    """
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def compile_apart(model: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """``torch.compile`` that neither uses what a model was compiled to nor counts against its recompile limit."""
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, isolate_recompiles=True)  # type: ignore
    return compiled


def build_cpp(source: str) -> Any:
    """Build C++ with the compiler, flags and cache of Inductor's CPU kernels; returns the loaded library."""
    return CppCodeCache.load(source, needs_vec_isa=True)


@contextlib.contextmanager
def without_autograd_cache() -> Iterator[None]:
    """Keep AOTAutogradCache out of a compile.

    Its key holds neither ``inner_compile`` nor what that does to the program, so it would serve another
    process's program without the weight prologue (torch 2.14; Inductor's own FxGraphCache is not affected).
    """
    with functorch_config.patch(enable_autograd_cache=False):
        yield


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Inductor settings of ``torch.compile(mode=...)``."""
    return list_mode_options(mode) if mode else {}


def compile_settings(module: torch.nn.Module, backend: str) -> dict[str, Any] | None:
    """What ``torch.compile(module, ...)`` or ``module.compile(...)`` was given; None if not for this backend."""
    context: Any = None
    if isinstance(module, OptimizedModule):
        context = module.dynamo_ctx
    elif module._compiled_call_impl is not None:
        context = inspect.getclosurevars(module._compiled_call_impl).nonlocals.get("self")
    wrapper: Any = innermost_backend(context.callback) if context is not None else None
    if getattr(wrapper, "compiler_name", None) != backend:
        return None
    given = wrapper.kwargs
    return {
        "backend": backend,
        "dynamic": wrapper.dynamic,
        "fullgraph": context.fullgraph,
        "mode": given.get("mode"),
        "options": given.get("options"),
    }


def compile_again(module: torch.nn.Module, settings: Mapping[str, Any]) -> None:
    """Let a compiled module, in place, be compiled at its next call as these settings say."""
    if isinstance(module, OptimizedModule):
        again: Any = torch.compile(module._orig_mod, **settings)
        module.dynamo_ctx = again.dynamo_ctx
        module._initialize()
    else:
        module.compile(**settings)


def inductor_setting_names() -> list[str]:
    """The names ``torch.compile``'s options accept for Inductor, dots for nested ones."""
    return list(inductor_config.get_config_copy())


def custom_passes(hook: str) -> tuple[Any, ...]:
    """Passes a user already hung on an Inductor hook; ours are added to them, never put in their place."""
    current = getattr(inductor_config, hook)
    if current is None:
        return ()
    return tuple(current) if isinstance(current, (list, tuple)) else (current,)


def matmul_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions of matrix multiplications alone: the rest of a graph keeps its fused backward."""
    aten = torch.ops.aten
    names = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot)
    table = select_decomp_table()
    return {op.default: table[op.default] for op in names if op.default in table}


def is_static_input(example: object) -> bool:
    """Whether Dynamo hands this graph input over as a parameter or buffer of a module."""
    static = getattr(example, "_dynamo_static_input_type", None) is not None
    return isinstance(example, torch.Tensor) and (static or isinstance(example, torch.nn.Parameter))


def dynamo_input_position(placeholder: fx.Node) -> int | None:
    """Which of the Dynamo graph's inputs an AOTAutograd placeholder is; None for tangents and the like."""
    description = placeholder.meta.get("desc")
    position = getattr(description, "idx", None)
    return position if isinstance(position, int) else None


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode of a graph's values."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def statically_true(condition: object) -> bool:
    """Whether a (symbolic) condition is known to hold; never adds a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))  # type: ignore[arg-type]


def free_unbacked_symbols(size: object) -> bool:
    """Whether a size depends on data, so that no guard can ask for it."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as unbacked

    return isinstance(size, torch.SymInt) and bool(unbacked(size))


def outside_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Compute on real tensors in the middle of a trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def observe_pass(gm: fx.GraphModule, name: str, run: Callable[[fx.Graph], None]) -> None:
    """Run a graph pass where torch sees it: named, timed, and disabled by ``TORCHINDUCTOR_DISABLED_PASSES``."""
    GraphTransformObserver(gm, name, subsystem="joint_graph_passes").apply_graph_pass(run)


@contextlib.contextmanager
def without_fake_tensor_log() -> Iterator[None]:
    """Keep torch from logging a traceback where an operator refuses its arguments: the exception says as much."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before

"""Every private torch API that fp4_compile stands on, imported here and nowhere else.

A new torch release is checked by reading this file: each name says what it is used for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BackendCompilerFailed",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "InternalTorchDynamoError",
    "TorchDispatchMode",
    "TorchDynamoException",
    "aot_autograd",
    "backward_at_once",
    "build_cpp",
    "compile_again",
    "compile_apart",
    "compile_fx_inner",
    "compile_settings",
    "compile_with_inductor",
    "cuda_interface",
    "custom_passes",
    "device_interfaces",
    "dynamo_input_position",
    "fake_mode_of",
    "free_unbacked_symbols",
    "fresh_device_answers",
    "generate_program",
    "inductor",
    "inductor_setting_names",
    "is_static_input",
    "load_kernel",
    "make_boxed_func",
    "matmul_decompositions",
    "min_cut_rematerialization_partition",
    "mode_settings",
    "observe_pass",
    "outside_fake_mode",
    "select_decomp_table",
    "size_hint",
    "statically_true",
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


def compile_apart(model: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """``torch.compile`` that neither uses what a model was compiled to nor counts against its recompile limit."""
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, isolate_recompiles=True)  # type: ignore
    return compiled


def build_cpp(source: str) -> Any:
    """Build C++ with the compiler, flags and cache of Inductor's CPU kernels; returns the loaded library."""
    return CppCodeCache.load(source, needs_vec_isa=True)


def graph_breaks() -> Counter[str]:
    """Dynamo's breaks so far in this process, by reason; where it gave up on the rest of a frame, too."""
    return Counter(dynamo_counters["graph_break"]) | Counter(dynamo_counters["unimplemented"])


def call_cpu_kernel(op: Any, arguments: Sequence[Any]) -> Any:
    """Call an operator's kernel for CPU tensors.

    Past torch's Python dispatcher, which is at work in a compile: it may have looked up the operator's kernels before
    this one was registered, and does not look again.
    """
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments)


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


def size_hint(size: Any) -> int:
    """The size that a symbolic one had when it was traced; adds no guard."""
    hint: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(hint)


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


def device_interfaces() -> dict[str, Any]:
    """Dynamo's and Inductor's interfaces to devices, by device name; complete."""
    from torch._dynamo import device_interface

    device_interface.init_device_reg()
    return device_interface.device_interfaces


def cuda_interface() -> type:
    """The interface that answers for CUDA devices."""
    from torch._dynamo.device_interface import CudaInterface

    return CudaInterface


@contextlib.contextmanager
def fresh_device_answers() -> Iterator[None]:
    """Have torch ask anew, inside and after, what it asks of a device once and remembers."""
    caches = _device_caches()
    try:
        for cache in caches:
            cache.cache_clear()
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def _device_caches() -> list[Any]:
    from torch._inductor import utils
    from torch._inductor.codecache import CacheBase
    from torch._inductor.codegen.cuda import cuda_env
    from torch._inductor.kernel import mm
    from torch._inductor.runtime import hints
    from torch.utils import _triton

    of_inductor = (
        "get_gpu_type",
        "is_big_gpu",
        "get_max_num_sms",
        "using_b200",
        "get_backend_num_stages",
        "get_device_tflops",
        "get_gpu_dram_gbps",
        "_triton_supported_fp8_dtypes",
    )
    found = [getattr(utils, name) for name in of_inductor if hasattr(utils, name)]
    found += [f for module in (_triton, cuda_env, hints, mm) for f in vars(module).values()]
    found += [hints.DeviceProperties.create, CacheBase.get_system]
    cached = functools._lru_cache_wrapper
    return [f for f in found if isinstance(f, cached) and f is not mm.lazy_register_extern_choice]


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile the backward with its forward, not when the first gradient is asked for."""
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


def generate_program(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Mapping[str, Any],
    *,
    is_inference: bool,
    is_backward: bool,
    look: Callable[[Any], Any],
) -> tuple[str, Any]:
    """Inductor's program for a functional graph, not loaded: what ``compile_fx_inner`` does up to there.

    ``look`` is called with Inductor's scheduler while its graph is the current one, and its answer is returned
    behind the source.
    """
    from torch._inductor import compile_fx

    driver: Any = compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with inductor_config.patch(dict(settings)), torch.no_grad(), contextlib.ExitStack() as stack:
        driver.view_to_reshape(gm)
        mode = driver.fake_tensor_prop(gm, example_inputs, force_allow_non_fake_inputs=True)
        driver._recursive_record_original_output_strides(gm)
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        driver._recursive_post_grad_passes(gm, is_inference=is_inference)
        graph = GraphLowering(
            gm,
            example_inputs=example_inputs,
            shape_env=driver.shape_env_from_inputs(example_inputs),
            is_inference=is_inference,
            is_backward=is_backward,
            get_decomp_fn=select_decomp_table,
        )
        graph.freeze_runtime_asserts()
        stack.enter_context(V.set_graph_handler(graph))
        stack.enter_context(V.set_extern_kernel_nodes([]))
        graph.run(*example_inputs)
        code, _ = graph.codegen()
        return code.value, look(graph.scheduler)


@dataclasses.dataclass(frozen=True)
class InductorKernel:
    """A Triton kernel that Inductor wrote, in the configuration that runs when nothing is autotuned."""

    tuner: Any
    config: Any
    meta: dict[str, Any]
    """What Inductor would compile it with: signature, constants, hints."""

    @property
    def options(self) -> Any:
        """Triton's compile options."""
        return self.tuner._create_compile_options(self.config, self.meta)

    def grid(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """How many programs a launch has along each axis; ``values``: its arguments, by name."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        return GridExpr.from_meta(self.tuner.inductor_meta, self.config).eval_slow({**self.config.kwargs, **values})


def load_kernel(name: str, source: str) -> InductorKernel:
    """Load a Triton kernel that Inductor wrote; no device is touched."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_helpers import _skip_gpu_driver_setup

    token = _skip_gpu_driver_setup.set(True)
    try:
        tuner = getattr(PyCodeCache.load(source), name)
    finally:
        _skip_gpu_driver_setup.reset(token)
    config = tuner.configs[0]
    return InductorKernel(tuner, config, tuner._create_compile_meta(config))


@functools.cache
def inductor() -> Any:
    """The parts of Inductor that lowerings to Triton templates are made of."""
    from types import SimpleNamespace

    from torch._inductor import ir, lowering
    from torch._inductor.select_algorithm import (
        ExternKernelChoice,
        SymbolicGridFn,
        TritonTemplate,
        autotune_select_algorithm,
    )
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    return SimpleNamespace(
        ExternKernelChoice=ExternKernelChoice,
        OrderedSet=OrderedSet,
        SymbolicGridFn=SymbolicGridFn,
        TritonTemplate=TritonTemplate,
        V=V,
        autotune_select_algorithm=autotune_select_algorithm,
        config=inductor_config,
        ir=ir,
        lowering=lowering,
    )

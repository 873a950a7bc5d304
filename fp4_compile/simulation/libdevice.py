"""libdevice's functions by the symbol that Triton calls, on arrays.

A GPU's are within a few ulp of these, which round correctly or nearly so (CUDA Math API, appendix on accuracy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fp4_compile.errors import SimulationError


def call(symbol: str, arguments: list[Any]) -> Any:
    """Call a function by its symbol, such as ``__nv_rsqrtf``.

    Raises:
        SimulationError: it is not simulated.
    """
    name = symbol.removeprefix("__nv_")
    if name not in _FUNCTIONS and name.endswith("f"):
        name = name[:-1]
    if name not in _FUNCTIONS:
        raise SimulationError(f"libdevice: {symbol} is not simulated")
    dtype = np.result_type(*arguments)
    with np.errstate(all="ignore"):
        result = _FUNCTIONS[name](*(np.asarray(a) for a in arguments))
    return result if result.dtype in (np.bool_, np.int32) else result.astype(dtype)


def _torch(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def on_arrays(*arrays: Any) -> Any:
        return function(*(torch.from_numpy(np.array(a, np.float64)) for a in arrays)).numpy()

    return on_arrays


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1.0 / np.sqrt(x.astype(np.float64)),
    "sqrt": np.sqrt,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "fast_tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "pow": np.power,
    "fabs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "nearbyint": np.rint,
    "rint": np.rint,
    "fmod": np.fmod,
    "copysign": np.copysign,
    "erf": _torch(torch.erf),
    "erfc": _torch(torch.erfc),
    "lgamma": _torch(torch.lgamma),
    "isnan": lambda x: np.isnan(x).astype(np.int32),
    "isnand": lambda x: np.isnan(x).astype(np.int32),
    "isinf": lambda x: np.isinf(x).astype(np.int32),
    "isinfd": lambda x: np.isinf(x).astype(np.int32),
    "signbit": lambda x: np.signbit(x).astype(np.int32),
    "signbitd": lambda x: np.signbit(x).astype(np.int32),
}

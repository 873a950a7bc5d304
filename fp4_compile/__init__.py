"""NVFP4 as a torch.compile backend: ``torch.compile(model, backend="nvfp4")``.

Public names: `explain` says what would happen to a model, `Options` are what ``options={...}`` takes, `Plan` is
the decision, `calibrate` makes `Scores` from data and those make plans under a budget, `monitor` watches a training
run's quantizers and `switch_precision` changes what it runs in, `compile_for` writes the program for a GPU that is
not there, `invalidate` is for weight edits torch cannot see, `fp4_compile.cost_model` predicts times,
`fp4_compile.errors` are a user's mistakes, and `fp4_compile.testing` serves users' own golden tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Monitor",
    "Options",
    "Plan",
    "Precision",
    "Reason",
    "Scores",
    "__version__",
    "calibrate",
    "compile_for",
    "explain",
    "invalidate",
    "monitor",
    "switch_precision",
]

if TYPE_CHECKING:
    from fp4_compile.explanation import explain
    from fp4_compile.monitoring import Monitor, monitor
    from fp4_compile.offline.compile_for import compile_for
    from fp4_compile.options import Options
    from fp4_compile.plan import Plan, Precision, Reason
    from fp4_compile.planner.scores import Scores
    from fp4_compile.sensitivity.calibrated import calibrate
    from fp4_compile.switching import switch_precision
    from fp4_compile.weights import invalidate

_HOMES = {
    "Monitor": "monitoring",
    "Options": "options",
    "Plan": "plan",
    "Precision": "plan",
    "Reason": "plan",
    "Scores": "planner.scores",
    "calibrate": "sensitivity.calibrated",
    "compile_for": "offline.compile_for",
    "explain": "explanation",
    "invalidate": "weights",
    "monitor": "monitoring",
    "switch_precision": "switching",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: importing fp4_compile stays free of Inductor."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fp4_compile' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"fp4_compile.{_HOMES[name]}"), name)

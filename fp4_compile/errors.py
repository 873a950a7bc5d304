"""What a user can do wrong, as types.

Dynamo wraps whatever a backend raises in ``torch._dynamo.exc.BackendCompilerFailed``; the message of these
errors is part of the wrapper's message, and the object itself is its ``inner_exception``.
"""

from __future__ import annotations


class Fp4CompileError(Exception):
    """Base of every error that fp4_compile raises on purpose."""


class OptionError(Fp4CompileError, ValueError):
    """An option is unknown, of the wrong type, or out of its range."""


class DumpError(Fp4CompileError, OSError):
    """The folder named by the ``dump`` option cannot be written."""


class PlanError(Fp4CompileError, ValueError):
    """A plan cannot be read, or does not fit the model it is given to."""


class VerificationError(Fp4CompileError, RuntimeError):
    """A pass left a graph that breaks an invariant: a fault of fp4_compile, never of the user."""


class BudgetError(Fp4CompileError):
    """A budget that no choice of matmuls can meet; ``closest`` is the closest that can be met."""

    def __init__(self, message: str, closest: float) -> None:
        super().__init__(message)
        self.closest = closest


class DeviceError(Fp4CompileError):
    """An unknown target device, or a table of measurements that cannot be used."""


class TargetError(Fp4CompileError):
    """A GPU that this installation cannot generate code for."""


class CalibrationError(Fp4CompileError):
    """Calibration data that cannot be used: no batches, a loss that is not finite, a file of another model."""


class SimulationError(Fp4CompileError, NotImplementedError):
    """A kernel or a program uses something that the simulator does not define, so it is not run."""

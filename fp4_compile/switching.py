"""Compile a module that is in use with other options: its parameters, and what trains them, stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fp4_compile._torch_compat import compile_again, compile_settings, mode_settings
from fp4_compile.errors import OptionError
from fp4_compile.options import Options
from fp4_compile.recipe import Format

BACKEND = "nvfp4"


def switch_precision(model: nn.Module, *, forward: Format | None = None, backward: Format | None = None) -> None:
    """Go on training in another precision, such as BF16 for the last part of a run (arXiv:2509.25149, appendix D).

    Takes effect at the next call, which compiles; parameters, gradients and optimizer state are not touched, and
    the rest of the recipe stays as it was. Switching back finds the code compiled before.

    Args:
        model: what ``torch.compile(model, backend="nvfp4")`` returned, a module on which ``.compile()`` was called,
            or anything that contains such modules, as DDP does. All of them are switched.
        forward: what the forward GEMMs run in from now on, ``"nvfp4"``, ``"mxfp4"`` or ``"bf16"``; None: as before.
        backward: the same for dgrad and wgrad. Published runs regain most of the loss by the forward alone.

    Raises:
        OptionError: an unknown precision, none at all, or a model that was not compiled with this backend.
    """
    changes = {name: given for name, given in (("forward", forward), ("backward", backward)) if given is not None}
    if not changes:
        raise OptionError("switch_precision takes forward=, backward= or both, and was given neither")

    def switched(options: dict[str, Any]) -> dict[str, Any]:
        training = Options.parse(options).training
        return {**options, "training": {**training.as_dict(), **changes}}

    recompile(model, switched)


def recompile(model: nn.Module, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Give all compiled modules in a model the options that ``change`` makes of theirs.

    Raises:
        OptionError: the new options are wrong, or there is no such module. Nothing is changed then.
    """
    found = [(module, settings) for module in model.modules() if (settings := compile_settings(module, BACKEND))]
    if not found:
        raise OptionError(
            f"nothing in this {type(model).__name__} was compiled with backend={BACKEND!r}: pass what "
            f"torch.compile(model, backend={BACKEND!r}) returned, or compile a function anew with other options"
        )
    for _, settings in found:
        options = dict(settings["options"] or {})
        mode = settings.pop("mode")
        if mode is not None:  # torch.compile takes either a mode or options
            options["inductor"] = {**mode_settings(mode), **options.get("inductor", {})}
        settings["options"] = dict(change(options))
        Options.parse(settings["options"])
    for module, settings in found:
        compile_again(module, settings)

"""A kernel as text: what Inductor's template engine renders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelTemplate:
    """One kernel's Jinja text.

    ``name``: unique, an identifier; ``source``: uses the hooks ``def_kernel``, ``size``, ``load_input`` and
    ``store_output`` of Inductor's Triton templates; ``grid``: sizes of the output, then ``meta`` (the kernel's
    constants), to the three grid sizes, by ``cdiv`` so that sizes may be symbolic.
    """

    name: str
    source: str
    grid: Callable[..., tuple[Any, Any, Any]]

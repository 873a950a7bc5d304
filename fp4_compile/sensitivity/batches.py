"""How a batch reaches a model, and in what state the model is while it is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch: a mapping as keywords, a tuple or list as arguments, anything else as one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a module into evaluation mode for a while: dropout is noise, and running statistics must stay."""
    training = [m for m in model.modules() if m.training] if isinstance(model, torch.nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True

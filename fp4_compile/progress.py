"""A progress bar on long work: if tqdm is installed and a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterable[Item]:
    """The items, counted on stderr while they are worked on."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[Item] = tqdm(items, desc=label, total=total, ncols=80, leave=False, file=sys.stderr, disable=None)
    return bar

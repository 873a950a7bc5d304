"""Rows of numbers as text, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def columns(rows: Sequence[dict[str, Any]], align: Callable[[str, int], str] = str.rjust) -> str:
    """Columns of a list of like rows, under their keys; floats with four digits."""
    cells = [list(rows[0])] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(align, row, widths)).rstrip() for row in cells)

"""A plan as a page to look at: what was decided, what it trades, where the error and the time are."""

from __future__ import annotations

from fp4_compile.report.page import write_report

__all__ = ["write_report"]

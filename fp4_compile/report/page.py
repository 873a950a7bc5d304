"""The page: one HTML file that needs nothing else, with its pictures inside."""

from __future__ import annotations

import base64
import html
import os
from pathlib import Path

from fp4_compile.errors import PlanError
from fp4_compile.plan import Decision, Plan, Precision, precision_name
from fp4_compile.report.pictures import draw

_CAPTIONS = {
    "pareto.png": "What can be had: every choice that is best for some trade-off, and this plan.",
    "sensitivity.png": "What each matmul is predicted to cost in NVFP4.",
    "time.png": "Where the time goes, before and after.",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; } figure { margin: 1.5rem 0; } figcaption { color: #555; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; width: 100%; }
th { text-align: left; cursor: pointer; border-bottom: 2px solid #888; }
td, th { padding: .2rem .6rem; white-space: nowrap; } td { border-bottom: 1px solid #ddd; }
.number { text-align: right; font-variant-numeric: tabular-nums; } .nvfp4 { color: #0072B2; font-weight: 600; }
"""
_SORT = """
document.querySelectorAll('th').forEach((head, column) => head.onclick = () => {
  const body = document.querySelector('tbody'), up = head.dataset.up = head.dataset.up === '1' ? '0' : '1';
  const value = row => { const c = row.cells[column]; return c.dataset.value ?? c.textContent; };
  const order = (a, b) => isNaN(a) || isNaN(b) ? String(a).localeCompare(b) : a - b;
  [...body.rows].sort((a, b) => (up === '1' ? 1 : -1) * order(value(a), value(b))).forEach(r => body.append(r));
});
"""


def write_report(plan: Plan, folder: str | os.PathLike[str]) -> str:
    """Write ``index.html`` and its pictures as PNGs into a folder; returns the page's path.

    Raises:
        PlanError: matplotlib is not installed, or the folder cannot be written.
    """
    pictures = draw(plan)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, png in pictures.items():
            Path(folder, name).write_bytes(png)
        page = Path(folder, "index.html")
        page.write_text(_page(plan, pictures), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"the report cannot be written to {os.fspath(folder)!r}: {error.strerror}") from error
    return str(page)


def _page(plan: Plan, pictures: dict[str, bytes]) -> str:
    figures = "\n".join(
        f'<figure><img alt="{_CAPTIONS[name]}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{_CAPTIONS[name]}</figcaption></figure>"
        for name, png in pictures.items()
    )
    heads = ["site", "MxNxK", "precision", "reason", "", "error", "us in BF16", "us in NVFP4"]
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "\n".join(_row(decision) for decision in plan)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>NVFP4 plan</title><style>{_STYLE}</style></head><body>
<h1>NVFP4 plan</h1>
<pre>{html.escape(plan.summary())}</pre>
{figures}
<h2>Every matmul</h2>
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></div>
<script>{_SORT}</script></body></html>
"""


def _row(decision: Decision) -> str:
    bf16, nvfp4 = decision.seconds or (None, None)
    style = ' class="nvfp4"' if decision.precision is Precision.NVFP4 else ""
    texts = [decision.site.key, decision.site.shape]
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
    cells += f"<td{style}>{html.escape(precision_name(decision))}</td>"
    cells += "".join(f"<td>{html.escape(text)}</td>" for text in (decision.reason.value, decision.detail))
    for value, scale in ((decision.loss, 1.0), (bf16, 1e6), (nvfp4, 1e6)):
        shown = "" if value is None else f"{scale * value:.3g}"
        cells += f'<td class="number" data-value="{-1 if value is None else value:.9g}">{shown}</td>'
    return f"<tr>{cells}</tr>"

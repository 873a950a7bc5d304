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
    "sensitivity.png": "What each matmul is predicted to cost in NVFP4, by kind of layer.",
    "time.png": "Where the time goes, by kind of layer. Each reader of a quantized activation is charged with the "
    "quantizer here, so that layers that share one look slower than they are.",
    "share.png": "Where the FLOPs are, by kind of layer.",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
ul { padding-left: 1.2rem; } .lead li:first-child { font-weight: 600; }
figure { margin: 1.5rem 0; } img { width: 100%; max-width: 46rem; } figcaption { color: #555; max-width: 46rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
td, th { padding: .25rem .5rem; text-align: left; vertical-align: top; white-space: nowrap; }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; cursor: pointer; }
td { border-bottom: 1px solid #ddd; }
th[aria-sort=ascending]::after { content: " \\25B2"; }
th[aria-sort=descending]::after { content: " \\25BC"; }
.site { min-width: min(17rem, 45vw); white-space: normal; overflow-wrap: anywhere; }
.reason { min-width: 12rem; white-space: normal; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.nvfp4 { color: #0072B2; font-weight: 600; }
@media print {
  body { margin: 0; max-width: none; font-size: 11px; } figure, thead, tr { break-inside: avoid; }
  img { max-width: 24rem; }
  .table { overflow: visible; } table { font-size: 8px; } .site, .reason { min-width: 0; }
}
"""
# Headings are no buttons, which Chromium leaves out where a printed page repeats the row. Rows without a value stay
# last, whichever way the column is sorted; "layers.2" comes before "layers.10".
_SORT = """
document.querySelectorAll('th').forEach((head, column, heads) => {
 head.onkeydown = event => { if (event.key === 'Enter') head.click(); };
 head.onclick = () => {
  const body = document.querySelector('tbody');
  const way = head.getAttribute('aria-sort') === 'ascending' ? 'descending' : 'ascending';
  const sign = way === 'ascending' ? 1 : -1;
  heads.forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', way);
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (a, b) => a === '' || b === '' ? (a === '') - (b === '')
    : sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
 };
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
    lines = "\n".join(f"<li>{html.escape(line)}</li>" for line in plan.summary().splitlines())
    advice = "\n".join(f"<li>{html.escape(line)}</li>" for line in plan.advice())
    figures = "\n".join(
        f'<figure><img alt="{_CAPTIONS[name]}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{_CAPTIONS[name]}</figcaption></figure>"
        for name, png in pictures.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>NVFP4 plan</title><style>{_STYLE}</style></head><body>
<h1>NVFP4 plan</h1>
<ul class="lead">
{lines}
</ul>
{f"<h2>To get more into FP4</h2><ul>{advice}</ul>" if advice else ""}
{figures}
<h2>Every matmul</h2>
<div class="table">{_table(plan)}</div>
<script>{_SORT}</script></body></html>
"""


def _table(plan: Plan) -> str:
    scored = any(d.loss is not None for d in plan)
    timed = any(d.seconds is not None for d in plan)
    numbers = ["error in NVFP4"] * scored + ["us in BF16", "us in NVFP4"] * timed
    heads = [(name, "") for name in ("site", "MxNxK", "precision", "reason")]
    heads += [(name, ' class="number"') for name in numbers]
    head = "".join(f'<th{style} tabindex="0">{name}</th>' for name, style in heads)
    rows = "\n".join(_row(decision, scored, timed) for decision in plan)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _row(decision: Decision, scored: bool, timed: bool) -> str:
    site = decision.site
    style = ' class="nvfp4"' if decision.precision is Precision.NVFP4 else ""
    reason = f"{decision.reason.value}: {decision.detail}" if decision.detail else decision.reason.value
    reason = reason.replace("->", "→")  # which a browser does not break
    cells = [
        f'<td class="site">{html.escape(site.key)}</td>',
        f'<td data-value="{site.flops:.9g}">{html.escape(site.shape)}</td>',
        f"<td{style}>{html.escape(precision_name(decision))}</td>",
        f'<td class="reason">{html.escape(reason)}</td>',
    ]
    if scored:
        cells.append(_number(decision.loss))
    if timed:
        cells += [_number(None if s is None else 1e6 * s) for s in decision.seconds or (None, None)]
    return f"<tr>{''.join(cells)}</tr>"


def _number(value: float | None) -> str:
    shown, exact = ("", "") if value is None else (f"{value:.3g}", f"{value:.9g}")
    return f'<td class="number" data-value="{exact}">{shown}</td>'

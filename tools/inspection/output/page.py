"""HTML page of a report or a difference, without scripts and network access."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from pathlib import Path

from edgellm.tools.inspection.output.plots import bars, curve, stacks
from edgellm.tools.inspection.output.tables import (
    DRAFT_TITLE,
    LAYERS_TITLE,
    PARTS_TITLE,
    PREDICTED_TITLE,
    costs_title,
    size,
    tables,
)
from edgellm.tools.inspection.report import Graph, Report
from edgellm.tools.inspection.roofline import predict
from edgellm.tools.inspection.sources.tensors import bytes_by_layer, bytes_by_part
from edgellm.tools.tables import Table

_PAGE = Path(__file__).with_name("page.html")


def report_page(report: Report, context: int) -> str:
    """Return a page with all tables, plots and tensors of a report."""
    plots = dict(_plots(report, context))
    sections = [section(table, plots.get(table.title, "")) for table in tables(report, context)]
    reports = [report, *([report.draft] if report.draft is not None else [])]
    sections += [_tensors(graph) for one in reports for graph in one.graphs if graph.tensors]
    return page(report.title, report.path, sections)


def tables_page(heading: str, path: str, found: Iterable[Table]) -> str:
    """Return a page with tables only."""
    return page(heading, path, [section(table) for table in found])


def page(heading: str, path: str, sections: Iterable[str]) -> str:
    """Return a whole page; `sections` are HTML, the other arguments plain text."""
    contents = {
        "HEADING": html.escape(heading),
        "PATH": html.escape(path),
        "SECTIONS": "\n".join(sections),
    }
    # Splitting first leaves "@" in the contents alone.
    pieces = _PAGE.read_text("utf-8").split("@")
    return "".join(contents.get(piece, piece) for piece in pieces)


def section(table: Table, plot: str = "") -> str:
    """Return a section with title, plot and table."""
    note = f'<p class="soft">{html.escape(table.note)}</p>' if table.note else ""
    return f"<section><h2>{html.escape(table.title)}</h2>{plot}{_rows(table)}{note}</section>"


def _rows(table: Table) -> str:
    kind = ' class="numbers"' if table.is_numeric else ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    body = "".join(
        f"<tr><th>{html.escape(first)}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in table.rows
    )
    return f"<table{kind}>{head}<tbody>{body}</tbody></table>"


def _tensors(graph: Graph) -> str:
    """Return a collapsed section of all tensors."""
    rows = tuple(
        (t.name, t.dtype, str(list(t.shape)), size(t.num_bytes), t.part) for t in graph.tensors
    )
    table = Table(
        title=graph.name,
        columns=("name", "type", "shape", "bytes", "part"),
        rows=rows,
        is_numeric=False,
    )
    title = html.escape(f"{len(rows)} tensors of {graph.name}")
    return f"<section><details><summary>{title}</summary>{_rows(table)}</details></section>"


def _plots(report: Report, context: int) -> Iterator[tuple[str, str]]:
    """Yield plots with the titles of their tables."""
    if by_part := bytes_by_part(report.tensors):
        yield PARTS_TITLE, bars(by_part, size)
    if len(layers := bytes_by_layer(report.graphs[0].tensors)) > 1:
        yield LAYERS_TITLE, stacks(layers, size)
    for costs in report.costs:
        yield costs_title(costs), curve(costs.ms_by_rows, lambda ms: f"{ms:.3g} ms")
    if found := predict(report, context):
        rates = {one.board.name: one.tokens_per_s for one in found}
        yield PREDICTED_TITLE, bars(rates, lambda rate: f"{rate:.1f} tokens/s")
    if report.draft is not None:
        for title, plot in _plots(report.draft, context):
            yield DRAFT_TITLE + title, plot

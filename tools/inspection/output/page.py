"""HTML page of a report or a difference, without scripts and network access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.core.html_pages import charts
from edgellm.core.html_pages.page import render
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
from edgellm.tools.inspection.sources.tensors import PARTS, bytes_by_layer, bytes_by_part
from edgellm.tools.tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from markupsafe import Markup

_PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a page, with a plot above it, or folded under its title."""

    table: Table
    plot: Markup | str = ""
    is_folded: bool = False


def report_page(report: Report, context: int) -> str:
    """Return a page with all tables, plots and tensors of a report."""
    plots = dict(_plots(report, context))
    sections = [Section(table, plots.get(table.title, "")) for table in tables(report, context)]
    reports = [report, *([report.draft] if report.draft is not None else [])]
    sections += [_tensors(graph) for one in reports for graph in one.graphs if graph.tensors]
    return page(report.title, report.path, sections)


def tables_page(heading: str, path: str, found: Iterable[Table]) -> str:
    """Return a page with tables only."""
    return page(heading, path, map(Section, found))


def page(heading: str, path: str, sections: Iterable[Section]) -> str:
    """Return a whole page."""
    return render(_PAGE, heading=heading, path=path, sections=list(sections))


def _tensors(graph: Graph) -> Section:
    """Return a folded section of all tensors."""
    rows = tuple(
        (t.name, t.dtype, str(list(t.shape)), size(t.num_bytes), t.part) for t in graph.tensors
    )
    table = Table(
        title=f"{len(rows)} tensors of {graph.name}",
        columns=("name", "type", "shape", "bytes", "part"),
        rows=rows,
        is_numeric=False,
    )
    return Section(table, is_folded=True)


def _plots(report: Report, context: int) -> Iterator[tuple[str, Markup]]:
    """Yield plots with the titles of their tables."""
    if by_part := bytes_by_part(report.tensors):
        yield PARTS_TITLE, charts.bars(by_part, size, PARTS)
    if len(layers := bytes_by_layer(report.graphs[0].tensors)) > 1:
        yield LAYERS_TITLE, _layers(layers)
    for costs in report.costs:
        yield costs_title(costs), _costs(costs.ms_by_rows)
    if found := predict(report, context):
        rates = {one.board.name: one.tokens_per_s for one in found}
        yield PREDICTED_TITLE, charts.bars(rates, lambda rate: f"{rate:.1f} tokens/s")
    if report.draft is not None:
        for title, plot in _plots(report.draft, context):
            yield DRAFT_TITLE + title, plot


def _layers(layers: Mapping[int, Mapping[str, int]]) -> Markup:
    """Plot a stacked column per layer, one block per part."""
    blocks = {
        layer: [
            charts.Block(part, value, f"layer {layer}, {part}: {size(value)}")
            for part, value in parts.items()
        ]
        for layer, parts in layers.items()
    }
    shown = [part for part in PARTS if any(part in parts for parts in layers.values())]
    return charts.columns(blocks, size, "bytes by layer") + charts.legend(shown)


def _costs(ms_by_rows: Mapping[int, float]) -> Markup:
    """Plot measured costs at equal distances."""

    def show(ms: float) -> str:
        return f"{ms:.3g} ms"

    points = [
        charts.Point(x=at, y=ms, name=str(rows), hint=f"{rows} tokens: {show(ms)}", kind="mark")
        for at, (rows, ms) in enumerate(ms_by_rows.items())
    ]
    return charts.curve(points, "cost by tokens", show)

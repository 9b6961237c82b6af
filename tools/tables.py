"""Text tables of the tools, for terminals and Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

_WIDTH_OF_FILES = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a title; the first column holds the names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_numeric: bool = True  # all columns but the first


def show(title: str, tables: Iterable[Table]) -> None:
    """Print a heading and tables, without markup in cells."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    console = Console(width=width, highlight=False, markup=False)
    console.print(Text(title, style="bold"))
    for table in tables:
        shown = RichTable(box=SIMPLE_HEAD, show_header=any(table.columns))
        for place, column in enumerate(table.columns):
            side = "right" if table.is_numeric and place > 0 else "left"
            shown.add_column(Text(column), justify=side, overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))
        console.print()
        console.print(Text(table.title, style="bold cyan"))
        console.print(shown)
        if table.note:
            console.print(Padding(Text(table.note, style="dim"), (0, 0, 0, 2)))


def markdown(table: Table) -> str:
    """Return a table in Markdown, its note below."""
    sides = ["---:" if table.is_numeric and place else "---" for place in range(len(table.columns))]
    rows = [table.columns, sides, *table.rows]
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    note = ["", table.note] if table.note else []
    return "\n".join([f"### {table.title}", "", *lines, *note, ""])


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")

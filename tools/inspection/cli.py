"""`edgellm-inspect`: contents, memory and origin of a checkpoint, bundle or engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.tools.inspection.report import Report
    from edgellm.tools.tables import Table

app = App()

Subject = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Inspect this Hugging Face checkpoint, .gguf file, bundle or engine.",
        rich_help_panel="Model",
    ),
]
Diff = Annotated[
    Path | None,
    typer.Option(
        "--diff",
        help="Compare with this folder or file of the same kind. Default: no comparison.",
        rich_help_panel="Model",
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Check all hashes; with --diff, compare the contents of tensors.",
        rich_help_panel="Debug",
    ),
]
Context = Annotated[
    int,
    typer.Option(
        "--context",
        min=0,
        help="Estimate memory and speed with this many tokens in the KV cache. Default: "
        "{default} tokens.",
        rich_help_panel="Limits",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel="Output")
]
ShowAll = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Show all tables: layers, inputs and outputs, kernels, estimates and origins, "
        "instead of one screen.",
        rich_help_panel="Output",
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Write a self-contained HTML page with plots to this file. Default: no page.",
        rich_help_panel="Output",
    ),
]


@app.command(
    common=("path", "--all", "--diff", "--verify", "--json"),
    examples=(
        "edgellm-inspect engine --verify",
        "edgellm-inspect bundle --diff other_bundle --html page.html",
    ),
)
def inspect(
    path: Subject,
    diff: Diff = None,
    verify: Verify = False,
    context: Context = 1024,
    as_json: AsJson = False,
    html: HtmlFile = None,
    show_all: ShowAll = False,
) -> None:
    """Show contents, memory, speed and origin of a checkpoint, bundle or engine."""
    from edgellm.core.artifact import check_output_file
    from edgellm.tools.inspection.sources.detect import inspect as read

    if html is not None:
        check_output_file(html, path)
    report = read(path, verify=verify)
    if diff is not None:
        _show_diff(report, read(diff, verify=verify), html, verify=verify, as_json=as_json)
        return
    if verify and not report.files:
        raise EdgeLLMError(
            f"{path} has no manifest, so there are no hashes to check",
            hint="--verify is for bundles and engines, and for --diff",
        )
    from edgellm.tools.inspection.output.as_json import report_json
    from edgellm.tools.inspection.output.tables import tables

    context = min(context, report.capacity) or context
    ending = ", all hashes right" if verify else ""
    if as_json or show_all:
        content = report_json(report, context) if as_json else None
        _print(content, report.title + ending, tables(report, context))
    else:
        from edgellm.tools.inspection.output.summary import summary

        typer.echo("\n".join(summary(report, context, ending)))
    if html is not None:
        from edgellm.tools.inspection.output.page import report_page

        _write(html, report_page(report, context))


def _show_diff(
    left: Report, right: Report, html: Path | None, *, verify: bool, as_json: bool
) -> None:
    import dataclasses

    from edgellm.tools.inspection.output.diff import compare, tables_of

    found = compare(left, right, contents=verify)
    title, paths = f"{left.kind}: differences", f"{left.path} and {right.path}"
    _print(dataclasses.asdict(found) if as_json else None, title, tables_of(found))
    if html is not None:
        from edgellm.tools.inspection.output.page import tables_page

        _write(html, tables_page(title, paths, tables_of(found)))


def _print(content: dict[str, Any] | None, title: str, tables: list[Table]) -> None:
    """Print JSON if it is given, else tables."""
    if content is not None:
        typer.echo(json.dumps(content, indent=2))
        return
    from edgellm.tools.tables import show

    show(title, tables)


def _write(html: Path, page: str) -> None:
    from edgellm.core.artifact import replace_file

    replace_file(html, page)
    typer.echo(f"{html}: written", err=True)


def main() -> None:
    """Entry point."""
    run_command(app)

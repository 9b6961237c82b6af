"""`edgellm pull`, `list`, `show` and `rm`: the stored models."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.core.cli import App
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.command.flags import DOWNLOADS_KEPT, Model, RecipeFlags, with_recipe_flags

if TYPE_CHECKING:
    from edgellm.tools.store.store import Entry, Store

app = App()

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel="Output")
]
Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Name a stored model.", rich_help_panel="Model"),
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Name stored models.", rich_help_panel="Model"),
]
_COLUMNS = "NAME", "FAMILY", "PARAMETERS", "SIZE", "PRECISION", "DRAFT", "CONTEXT", "LAST USED"
_DAY_S = 86400


@app.command(
    name="pull",
    common=("model", "--draft", "--fast"),
    examples=(
        "edgellm pull HuggingFaceTB/SmolLM2-135M-Instruct",
        "edgellm pull bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M",
    ),
)
@with_recipe_flags
def pull(model: Model, recipe_flags: RecipeFlags) -> None:
    """Download a model, or its newer version, and build its engine."""
    from edgellm.tools.store.prepare import prepare

    app.kept = DOWNLOADS_KEPT
    found = prepare(model, recipe_flags.read(), update=True)
    typer.echo(f"{found.name} is ready: edgellm run {found.name}")


@app.command(
    name="list",
    common=("--json",),
    examples=("edgellm list", "edgellm list --json"),
)
def list_models(as_json: AsJson = False) -> None:
    """List the stored models, the one used last first."""
    from edgellm.tools.store.store import Store

    store = Store()
    entries = store.entries()
    for note in store.notes():
        typer.echo(f"note: {note}", err=True)
    if as_json:
        typer.echo(json.dumps([_facts(entry) for entry in entries], indent=2))
        return
    if not entries:
        typer.echo(f"no models in {store.models}; edgellm run MODEL adds one")
        return
    rows = [_COLUMNS, *map(_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())


def _row(entry: Entry) -> tuple[str, ...]:
    record = entry.record
    return (
        record.name,
        record.family,
        f"{record.num_parameters / 1e6:.1f} M",
        f"{record.num_bytes / 1e6:.1f} MB",
        record.precision,
        record.draft,
        str(record.recipe.context),
        _ago(time.time() - entry.used_s),
    )


def _ago(seconds: float) -> str:
    for unit, size in (("day", _DAY_S), ("hour", 3600), ("minute", 60)):
        if count := int(seconds // size):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"


@app.command(
    name="show",
    common=("name", "--json"),
    examples=("edgellm show SmolLM2-135M-Instruct", "edgellm show SmolLM2-135M-Instruct --json"),
)
def show_model(name: Name, as_json: AsJson = False) -> None:
    """Show the engines of one stored model."""
    from edgellm.tools.store.store import Store

    facts = [_facts(entry) for entry in _entries(Store(), name)]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for each in facts:
        for key, value in each.items():
            typer.echo(f"{key.replace('_', ' '):12} {value}")
        typer.echo(f"{'more':12} edgellm inspect {each['engine']}")


def _facts(entry: Entry) -> dict[str, Any]:
    record = entry.record
    return {
        "name": record.name,
        "source": record.reference,
        "family": record.family,
        "parameters": record.num_parameters,
        "precision": record.precision,
        "draft": record.draft,
        "context": record.recipe.context,
        "device": record.recipe.device,
        "bytes": record.num_bytes,
        "last_used": time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s)),
        "engine": str(entry.engine),
        **({"visual": str(entry.visual)} if entry.visual else {}),
        **({"audio": str(entry.audio)} if entry.audio else {}),
    }


@app.command(
    name="rm",
    common=("names",),
    examples=("edgellm rm SmolLM2-135M-Instruct", "edgellm rm first-model second-model"),
)
def remove(names: Names) -> None:
    """Delete stored models; checkpoints, files and the hub's cache stay."""
    from edgellm.tools.store.store import Store

    store = Store()
    for entry in [entry for name in names for entry in _entries(store, name)]:
        store.remove(entry)
        size = entry.record.num_bytes / 1e6
        typer.echo(f"deleted {entry.record.name} ({size:.1f} MB): {entry.folder}")


def _entries(store: Store, name: str) -> list[Entry]:
    if found := store.named(name):
        return found
    close = store.similar(name)
    raise EdgeLLMError(
        f"no stored model has the name {name}",
        hint=f"did you mean {close}?" if close else "edgellm list shows the names",
    )

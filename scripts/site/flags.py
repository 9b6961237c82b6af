"""The flags of all commands, from their help texts."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Iterator

import typer
from typer.core import TyperCommand, TyperGroup

from edgellm.core.command_help import group_flags
from edgellm.core.commands.entry_points import MODULES
from edgellm.tools.tables import Table, markdown

_SCRIPT = re.compile(r"^([\w-]+) = ", re.MULTILINE)
# Flags of every command
_COMMON = {"debug", "install_completion", "show_completion", "help"}

_HEAD = """# Commands

All spellings of a flag work: `--maxInputLen`, `--max_input_len`, `--max-input-len`. Every command
has `--help`, `--debug` (tracebacks instead of one line), `--install-completion` and
`--show-completion`. Exit codes: 0; 1 if a part failed; 2 for errors that the user can correct;
3 for bugs; 130 after an interrupt.
"""


def command_page(project: str) -> str:
    """Return Markdown of all commands of a pyproject.toml's text, with tables of flags."""
    parts = [_HEAD]
    for name, command in commands(project):
        parts += [f"## {name}\n", _about(command), _flags(name, command)]
    return "\n".join(parts)


def commands(project: str) -> Iterator[tuple[str, TyperCommand]]:
    """Yield name and command of every script, and of every subcommand but aliases of scripts."""
    section = project.partition("[project.scripts]")[2].partition("\n[")[0]
    for name in _SCRIPT.findall(section):
        app = importlib.import_module(MODULES[name]).app
        command = typer.main.get_command(app)
        if isinstance(command, TyperGroup):
            aliases = {sub for sub, one in app.subcommands.items() if one.is_alias}
            context = typer.Context(command, info_name=name)
            for sub in command.list_commands(context):
                if sub not in aliases:
                    inner = command.get_command(context, sub)
                    assert isinstance(inner, TyperCommand)
                    yield f"{name} {sub}", inner
        else:
            assert isinstance(command, TyperCommand)
            yield name, command


def _about(command: TyperCommand) -> str:
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", (command.help or "").strip()) + "\n"


def _flags(name: str, command: TyperCommand) -> str:
    """Tables of flags by group, and the examples."""
    context = typer.Context(command, info_name=name)
    common = command.common_flags  # type: ignore[attr-defined]  # of `App`
    parts = []
    for group, records in group_flags(command, context, common).items():
        rows = tuple(
            (f"`{flag}`", _plain(text))
            for flag, text in records
            if flag.lstrip("-").replace("-", "_") not in _COMMON
        )
        if rows:
            table = markdown(Table(title="", columns=("flag", ""), rows=rows, is_numeric=False))
            parts.append(f"**{group}**\n\n{table.partition(chr(10) * 2)[2]}")
    return "\n".join([*parts, f"```shell\n{command.epilog}\n```\n"])


def _plain(text: str) -> str:
    """Escape markup, and join lines."""
    return html.escape(" ".join(text.split()), quote=False).replace("*", "&#42;")

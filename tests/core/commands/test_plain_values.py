"""Plain values of flags, read without pydantic: typer's own reading is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from edgellm.core import cli
from edgellm.core.cli import App
from edgellm.core.commands import plain_values

NAMES = ("count", "bounded", "share", "text", "path", "several", "paths", "kind", "switch")
WORDS = (
    "0",
    "7",
    "-3",
    "007",
    "8",
    "9",
    "1_0",
    " 7",
    "1.0",
    "1e1",
    "nan",
    "1.5",
    "-0.25",
    "x",
    "٣",
)


def _outcome(words):
    """What a command gets from its command line, with types; or its error."""
    app = App()
    found = []

    @app.command(name="try")
    def probe(
        count: Annotated[int, typer.Option("--count")] = 3,
        bounded: Annotated[int | None, typer.Option("--bounded", min=1, max=8)] = None,
        share: Annotated[float, typer.Option("--share", min=0.0)] = 0.5,
        text: Annotated[str | None, typer.Option("--text")] = None,
        path: Annotated[Path | None, typer.Option("--path")] = None,
        several: Annotated[list[str] | None, typer.Option("--several")] = None,
        paths: Annotated[list[Path] | None, typer.Option("--paths")] = None,
        kind: Annotated[Literal["one", "two"], typer.Option("--kind")] = "one",
        switch: Annotated[bool | None, typer.Option("--switch/--no-switch")] = None,
    ) -> None:
        values = count, bounded, share, text, path, several, paths, kind, switch
        found.extend((name, type(value), value) for name, value in zip(NAMES, values, strict=True))

    result = CliRunner().invoke(app, [str(word) for word in words])
    return repr(found), str(result.exception)


@pytest.mark.parametrize(
    "words",
    [
        (),
        *(("--count", word) for word in WORDS),
        *(("--bounded", word) for word in WORDS),
        *(("--share", word) for word in WORDS),
        *(("--text", word) for word in ("", " a ", "ä日", "\udc80", "-")),
        *(("--path", word) for word in ("a/b", "~", ".", "/", "/etc/hosts", "no such")),
        ("--several", "a", "--several", "", "--several", "1"),
        ("--paths", "a", "--paths", "."),
        ("--kind", "two"),
        ("--kind", "three"),
        ("--switch",),
        ("--noSwitch", "--bounded=5"),
        ("--unknown",),
    ],
)
def test_values_and_errors_are_those_of_typer(monkeypatch, words):
    found = _outcome(words)
    monkeypatch.setattr(cli, "read_plainly", lambda parameters: parameters)
    assert found == _outcome(words)


def test_a_file_that_may_not_be_read_is_left_to_typer(monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("x")
    info = typer.models.ParameterInfo()
    assert plain_values._path(str(tmp_path / "secret"), info) == tmp_path / "secret"
    monkeypatch.setattr(plain_values.os, "access", lambda *_: False)
    assert plain_values._path(str(tmp_path / "secret"), info) is plain_values._LEFT
    assert plain_values._path(str(tmp_path / "none"), info) == tmp_path / "none"

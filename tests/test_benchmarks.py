"""Benchmarks run, and docs/benchmarks.md has the figures of benchmarks/results.json."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from harness import results
from harness.results import FILE, PAGE, Report, Table, fill, named, read
from installed import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "run")
# The others take minutes on two cores; `python benchmarks/run.py --quick` runs them all.
CHEAP = {
    ("decode", "shape"): {"decode-small", "decode-small-speedup"},
    ("prefill", "tokens"): {"pass-tokens"},
    ("cold_start",): {"cold-start"},
    ("gpu",): set[str](),
}
MAX_SCRIPTS = 13


def _run(name: str, *words: object) -> str:
    command = [sys.executable, FOLDER / f"{name}.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_page_has_the_recorded_figures():
    page, tables = PAGE.read_text("utf-8"), read()
    assert fill(page, tables) == page, "python benchmarks/run.py --tables writes it"
    assert len(named(page)) == len(set(named(page)))
    assert set(named(page)) == set(tables)


def test_every_recorded_table_is_complete():
    for name, table in read().items():
        assert table.rows, name
        assert {len(row) for row in table.rows} == {len(table.columns)}, name
        assert re.fullmatch(r"\d{4}-\d\d(-\d\d)?", table.date), name
    assert json.loads(FILE.read_text("utf-8")).keys() == read().keys()


def test_recorded_commands_exist():
    """Their scripts and modes, and the script's flags."""
    for table in read().values():
        if not table.command.startswith("python"):
            continue
        _, script, *words = shlex.split(table.command)
        source = (ROOT / script).read_text("utf-8") + (FOLDER / "harness/command.py").read_text()
        for flag in (word for word in words if word.startswith("--")):
            name = flag.partition("=")[0]
            assert f'"{name}"' in source or f'"{name[2:]}"' in source, (script, flag)


def test_a_run_replaces_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["decode.py", "shape", "--work", "x", "--results=y", "--rounds", "2"]
    )
    path = tmp_path / "results.json"
    results.write({"other": Table(["a"], [["1"]], date="2026-11")}, path)
    Report(path).add("speed", ("engine", "tokens/s"), [["int4", 3], ["", "4 | 5"]])
    Report(path, "named").add("speed", ("engine",), [["int8"]])
    tables = read(path)
    assert list(tables) == ["other", "speed", "named"]
    assert tables["speed"].rows == [["int4", "3"], ["", "4 | 5"]]
    assert tables["speed"].command == "python benchmarks/decode.py shape --rounds 2"
    assert tables["speed"].machine
    assert "| int4 | 3 |\n| | 4" in capsys.readouterr().out
    marked = "a\n<!-- table: other -->\nold\n<!-- /table -->\nb\n"
    assert "| a |\n|---|\n| 1 |\n\n<!-- /table -->\nb\n" in fill(marked, tables)
    with pytest.raises(KeyError):
        fill("<!-- table: none -->\n<!-- /table -->", tables)


def test_the_date_of_a_run_is_spelled():
    spelled = [results._spelled(date) for date in ("2026-11-03", "2026-11", "")]
    assert spelled == ["3 November 2026", "November 2026", ""]


def test_scripts_are_few_and_the_runner_knows_them():
    import run

    assert set(SCRIPTS) == set(run.RUNS)
    assert len(SCRIPTS) <= MAX_SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_of_a_script(name, monkeypatch, capsys):
    """Each is imported, and has a quick form and help for its modes."""
    import torch  # noqa: F401  # its absence is named, so that --quick leaves this out

    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "--quick" in shown
    modes = re.search(
        r"^MODES = \{(.*?)\}", (FOLDER / f"{name}.py").read_text("utf-8"), re.M | re.S
    )
    if modes:
        assert all(mode in shown for mode in re.findall(r'"(\w+)":', modes[1]))
    tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    assert (ast.get_docstring(tree) or "").count(f"python benchmarks/{name}.py") >= 1


@pytest.mark.each_change("prefill")
@pytest.mark.real
@pytest.mark.parametrize("words", CHEAP, ids=lambda words: words[0])
def test_quick_runs(words, tmp_path, smollm2_gguf):
    """The cheapest benchmarks measure something and record it."""
    assert smollm2_gguf.exists()  # they take its tokenizer
    path = tmp_path / "results.json"
    flags = ["--work", tmp_path, "--threads", 1, "--results", path]
    _run(*words, "--quick", *(flags if words != ("gpu",) else []))
    tables = read(path) if path.exists() else {}
    assert set(tables) == CHEAP[words]
    assert all(table.machine and table.versions for table in tables.values())

"""The published figures: one JSON file, from which the tables of docs/benchmarks.md are written.

The file maps names to tables, each with its columns and rows as they are printed, and with the
command, machine, date, versions and commit of the run. `docs/benchmarks.md` has a pair of markers
for each table; what is between them is generated.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"<!-- table: ([\w.-]+) -->\n.*?<!-- /table -->", re.DOTALL)
_LIBRARIES = ("edgellm", "onnxruntime")
# Flags that a reader need not repeat
_OF_THIS_MACHINE = ("--work", "--results", "--llama_python", "--peers_python")


@dataclass(frozen=True)
class Table:
    """Figures of one run."""

    columns: list[str]
    rows: list[list[str]]
    command: str = ""  # empty: no command repeats the measurement
    machine: str = ""
    date: str = ""  # ISO 8601, without the day if it is not known
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""

    def markdown(self) -> str:
        """Return a line on the run, if its command or machine is known, and the table."""
        found = markdown(self.columns, self.rows)
        return f"{self._caption()}\n\n{found}" if self.command or self.machine else found

    def _caption(self) -> str:
        parts = [f"`{self.command}`" if self.command else "", self.machine]
        parts += [f"{name} {version}" for name, version in self.versions.items()]
        parts += [_spelled(self.date), f"commit {self.commit}" if self.commit else ""]
        return f"{', '.join(filter(None, parts))}:"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return re.sub(r"(?<=\|)  (?=\|)", " ", "\n".join(lines))


def _spelled(date: str) -> str:
    """Return 23 November 2026 of 2026-11-23."""
    if not date:
        return ""
    year, month, *day = date.split("-")
    name = datetime.date(int(year), int(month), 1).strftime("%B")
    return " ".join([*(str(int(each)) for each in day), name, year])


def read(path: Path = FILE) -> dict[str, Table]:
    """Read a results file; a missing one is empty."""
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {name: Table(**facts) for name, facts in content.items()}


def write(tables: Mapping[str, Table], path: Path = FILE) -> None:
    """Write a results file, a line for each row."""
    content = {name: asdict(table) for name, table in tables.items()}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    joined = re.sub(r"\[\n\s+(\"[^\[\]]*\")\n\s+\]", _on_one_line, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{joined}\n", "utf-8")


def _on_one_line(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]), ensure_ascii=False)


class Report:
    """The tables of one run of a script, printed and written as soon as they are measured."""

    def __init__(self, path: Path | None, first: str | None = None) -> None:
        """Open a report.

        Args:
            path: the results file; None: only print.
            first: another name of the first table.
        """
        self._path, self._first = path, first

    def add(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table, and replace the one of this name in the results file."""
        from edgellm.tools.bench.machine import facts

        name, self._first = self._first or name, None
        cells = [[str(cell) for cell in row] for row in rows]
        print(f"\n{markdown(columns, cells)}", flush=True)
        if self._path is None:
            return
        found = facts()
        versions = {name: found[name] for name in _LIBRARIES if name in found}
        machine = f"{found['CPU']}, {found['cores']} cores" if "CPU" in found else found["cores"]
        today = datetime.datetime.now().astimezone().date().isoformat()
        tables = read(self._path)
        tables[name] = Table(
            list(columns), cells, _command(sys.argv), machine, today, versions, _commit()
        )
        write(tables, self._path)


def _command(words: Sequence[str]) -> str:
    """Return the command line without folders of this machine."""
    given, kept = iter(words[1:]), []
    for word in given:
        name, has_value, _ = word.partition("=")
        if name not in _OF_THIS_MACHINE:
            kept.append(word)
        elif not has_value:
            next(given, None)
    return " ".join(["python", f"benchmarks/{Path(words[0]).name}", *map(shlex.quote, kept)])


def _commit() -> str:
    """Return the checked out commit; "" outside of a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def fill(page: str, tables: Mapping[str, Table]) -> str:
    """Return a page with the tables between its markers.

    Raises:
        KeyError: a marker names a table that is not there.
    """
    return _BLOCK.sub(
        lambda found: (
            f"<!-- table: {found[1]} -->\n\n{tables[found[1]].markdown()}\n\n<!-- /table -->"
        ),
        page,
    )


def named(page: str) -> list[str]:
    """Return the names of a page's tables."""
    return [found[1] for found in _BLOCK.finditer(page)]

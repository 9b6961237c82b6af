"""Flags that all benchmarks share."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.results import FILE, Report

QUICK_ROUNDS = 1
Mode = Callable[[argparse.Namespace, Report], None]


def parser(doc: str | None, modes: Mapping[str, Mode], *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the shared flags.

    Args:
        doc: of the script; its first paragraph is the description.
        modes: the script's functions by name; their docstrings are their help.
        rounds: the default of `--rounds`.
    """
    about = [
        f"  {name:10} {(mode.__doc__ or '').partition('.')[0]}" for name, mode in modes.items()
    ]
    made = argparse.ArgumentParser(
        description=(doc or "").partition("\n\n")[0],
        epilog="\n".join(["modes; default: all", *about]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("mode", nargs="?", choices=modes)
    made.add_argument("--work", type=Path, help="folder of models and engines, which are reused")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--rounds", type=int, default=rounds, help="alternating rounds")
    made.add_argument(
        "--quick", action="store_true", help="small shapes and few repetitions: shows that it runs"
    )
    made.add_argument("--table", help="another name of the first table in that file")
    made.add_argument("--results", type=Path, help=f"JSON file of the tables; default: {FILE.name}")
    return made


def run(
    made: argparse.ArgumentParser,
    modes: Mapping[str, Mode],
    quick: Mapping[str, object] | None = None,
) -> None:
    """Parse flags, and run the given mode, or all; `quick`: values of flags with `--quick`."""
    given = _parsed(made)
    if given.quick:
        vars(given).update(quick or {})
    report = Report(given.results or (None if given.quick else FILE), given.table)
    for name in [given.mode] if given.mode else modes:
        modes[name](given, report)


def _parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse flags, and make the working folder. Quick runs write no results unless asked to."""
    given = made.parse_args()
    if given.quick:
        given.rounds = min(given.rounds, QUICK_ROUNDS)
    if given.work is None:
        from edgellm.core.artifact import cache_folder

        given.work = cache_folder() / "benchmarks"
    given.work.mkdir(parents=True, exist_ok=True)
    return given


def has_package(name: str, python: str = sys.executable) -> bool:
    """Return whether a python has a package; say so if it has not."""
    if python == sys.executable:
        found = importlib.util.find_spec(name) is not None
    else:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"
        found = subprocess.run([python, "-c", code], check=False).returncode == 0
    if not found:
        print(f"left out: {name} is not installed", file=sys.stderr)
    return found

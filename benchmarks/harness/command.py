"""Flags that all benchmarks share."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from harness.results import FILE, Report

QUICK_ROUNDS = 1


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the shared flags.

    Args:
        doc: of the script; its first line is the description.
        rounds: the default of `--rounds`.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    made.add_argument("--work", type=Path, help="folder of models and engines, which are reused")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--rounds", type=int, default=rounds, help="alternating rounds")
    made.add_argument(
        "--quick", action="store_true", help="small shapes and few repetitions: shows that it runs"
    )
    made.add_argument("--results", type=Path, help=f"JSON file of the tables; default: {FILE.name}")
    return made


def parse(made: argparse.ArgumentParser, words: list[str] | None = None) -> argparse.Namespace:
    """Parse flags, and make the working folder. Quick runs write no results unless asked to."""
    given = made.parse_args(words)
    if given.quick:
        given.rounds = min(given.rounds, QUICK_ROUNDS)
    if given.work is None:
        from edgellm.core.artifact import cache_folder

        given.work = cache_folder() / "benchmarks"
    given.work.mkdir(parents=True, exist_ok=True)
    return given


def report(given: argparse.Namespace) -> Report:
    """Return the report of the flags."""
    return Report(given.results or (None if given.quick else FILE))


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

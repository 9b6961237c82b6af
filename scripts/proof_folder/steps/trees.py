"""Decoding with EAGLE3's draft trees, beside plain decoding, token by token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from edgellm.scripts.proof_folder.steps.dry import Mode, command_prefix
from edgellm.scripts.proof_folder.steps.outputs import Result, passed, row
from edgellm.scripts.proof_folder.steps.pair import build_pair

_IDENTICAL = re.compile(r"(\d+) tokens, identical")


def compare_trees(base: Path, draft: Path, requests: Path, backend: str, mode: Mode) -> Result:
    """Build base and draft; compare the tokens of the requests with and without trees."""
    count = len(json.loads(requests.read_text("utf-8"))["requests"])
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine")
        build_pair(base, draft, engine, backend)
        words = ("--engineDir", engine, "--inputFile", requests, "--eagle", "--prove", count)
        prefix = command_prefix(backend, mode)
        code, said = command("device_runtime", *words, "--eagleTree", "fixed", prefix=prefix)
    equal = len(_IDENTICAL.findall("\n".join(said)))
    rows = {"requests with equal tokens": row(equal, count, count - equal, 0)}
    return code == 0 and passed(rows), {"said": said, "outputs": rows}


def command(package: str, *words: object, prefix: str = "") -> tuple[int, list[str]]:
    """Run a command of edgellm; return its exit status and lines."""
    main = f"{prefix}from edgellm.{package}.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", main, *map(str, words)], capture_output=True, text=True, check=False
    )
    return result.returncode, (result.stdout + result.stderr).strip().splitlines()

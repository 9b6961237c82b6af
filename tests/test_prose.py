"""Prose of docs, help and code: words that the field does not use, and sentences that are too long.

`CHANGELOG.md` is history and is not checked.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})
MAX_WORDS = 30  # the aim is 25; lists of names are longer
# Words of the private language of earlier versions; the field's word is in the comment.
RETIRED = (
    "nobody",  # name the thing that does not exist
    "somebody",
    "whoever",
    "in company",  # in a batch
    "foresee",  # draft, predict
    "foresees",
    "foreseen",
    "foretell",
    "side by side",  # concurrently, in one batch
    "makes way",  # is preempted
)
# By file: data and names that others chose.
_UNIX_USER = ("nobody",)
ALLOWED = {
    "tests/test_prose.py": RETIRED,
    "core/graph_roles.py": ("foresee",),  # a kind of pass in released engines
    "tools/bench/measure.py": ("nobody",),  # a story
    "examples/smollm2-135m-instruct-eagle3/word_lists.py": ("somebody",),  # prompts
    "tools/evaluate/scoring/sandbox.py": _UNIX_USER,
    "tools/evaluate/scoring/sandbox_child.py": _UNIX_USER,
    "tests/tools/evaluate/test_sandbox.py": _UNIX_USER,
}
SOURCES = ("*.py", "*.h", "*.cpp", "*.md", "*.toml", "*.yml", "Makefile", "*.sh")


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    skipped = ("CHANGELOG.md", "tests/data/", "device_runtime/kernels/src/third_party/")
    return [name for name in listed.stdout.splitlines() if not name.startswith(skipped)]


def test_words_that_the_field_does_not_use_are_gone():
    word = re.compile(r"\b(" + "|".join(map(re.escape, RETIRED)) + r")\b", re.IGNORECASE)
    texts = {name: (ROOT / name).read_text("utf-8") for name in _tracked()}
    found = [
        f"{name}:{number}: {match[1]}"
        for name, text in texts.items()
        if any(map(text.lower().count, RETIRED))  # the expression is slow
        for number, line in enumerate(text.splitlines(), 1)
        for match in word.finditer(line)
        if match[1].lower() not in ALLOWED.get(name, ())
    ]
    assert found == []


def _sentences(page: str) -> list[str]:
    """Sentences of paragraphs and list items, without code, tables, headings and links."""
    page = re.sub(r"```.*?```|<!--.*?-->|^---$.*?^---$", "", page, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.|\|) ?)", page)
    prose = [
        " ".join(block.split())
        for block in blocks
        if not re.match(r"\s*(?:#|\||!|<|:::|\[)", block)
    ]
    plain = [re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", each)) for each in prose]
    return [one for each in plain for one in re.split(r"(?<=[.!?:;])\s+", each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_of_docs_are_short(page):
    long = [
        f"{len(one.split())} words: {one}"
        for one in _sentences(page.read_text("utf-8"))
        if len(one.split()) > MAX_WORDS
    ]
    assert long == []

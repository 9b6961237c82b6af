"""The prompts of a dataset, for programs that measure servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgellm.core.artifact import check_output_file, replace_file
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.datasets.questions import Question


def write(questions: Sequence[Question], output: Path, *inputs: Path) -> int:
    """Write `{"text": ...}` in a line for each question, its first turn, as GenAI-Perf wants it.

    Args:
        questions: of any dataset.
        output: a file; its name ends in .jsonl.
        inputs: files that it must not be.

    Returns:
        How many there are.

    Raises:
        EdgeLLMError: questions with pictures, which a text does not have; the file cannot be
            written.
    """
    if output.suffix != ".jsonl":
        raise EdgeLLMError(f"--convert {output}", hint="give the name of a .jsonl file")
    if with_images := sum(bool(question.images) for question in questions):
        raise EdgeLLMError(
            f"{with_images} questions have pictures, which prompts have no place for",
            hint="convert a dataset of texts",
        )
    check_output_file(output, *inputs)
    lines = (json.dumps({"text": question.turns[0]}) + "\n" for question in questions)
    replace_file(output, "".join(lines))
    return len(questions)

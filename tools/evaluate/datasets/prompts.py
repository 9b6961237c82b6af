"""Prompts of a dataset in the format of load generators."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgellm.core.artifact import check_output_file, replace_file
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.datasets.questions import Question


def write(questions: Sequence[Question], output: Path, *inputs: Path) -> int:
    """Write one line `{"text": ...}` per question with its first turn, as for GenAI-Perf.

    Args:
        questions: of any dataset.
        output: file to write; its name ends in .jsonl.
        inputs: files that `output` must not overwrite.

    Returns:
        Number of prompts.

    Raises:
        EdgeLLMError: a question has images, or the file cannot be written.
    """
    if output.suffix != ".jsonl":
        raise EdgeLLMError(f"--convert {output}", hint="give the name of a .jsonl file")
    if with_images := sum(bool(question.images) for question in questions):
        raise EdgeLLMError(
            f"{with_images} questions have images, which text prompts cannot contain",
            hint="convert a dataset without images",
        )
    check_output_file(output, *inputs)
    lines = (json.dumps({"text": question.turns[0]}) + "\n" for question in questions)
    replace_file(output, "".join(lines))
    return len(questions)

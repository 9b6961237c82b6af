"""The plan of a run: a job, resolved for the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.job import Job
from edgellm.quantize.models.language_model import QuantizedNetwork, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked job."""

    job: Job
    subject: QuantizedNetwork
    recipe: Recipe
    head: Recipe | None
    task: Task
    settings: dict[str, Any]  # all settings that affect the result

"""`edgellm-quantize draft --quantization auto`: the smallest draft with equal acceptance.

A draft is judged by the acceptance of its tokens, not by the error of its weights. Recipes are
measured over held-out hidden states of the base, the smallest first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgellm.quantize.job import Job
from edgellm.quantize.pipeline.run import Progress
from edgellm.quantize.pipeline.search.candidates import trials
from edgellm.quantize.report.report import Report

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    name: str
    quantization: str
    head: str
    more: dict[str, Any] = field(default_factory=dict)


_RECIPES = (
    _Recipe(
        name="int4, head int4",
        quantization="int4_awq",
        head="int4",
        more={"algo": "gptq", "block_size": 32},
    ),
    _Recipe(
        name="int4, head int8",
        quantization="int4_awq",
        head="int8",
        more={"algo": "gptq", "block_size": 32},
    ),
    _Recipe(
        name="awq int4, head int8",
        quantization="int4_awq",
        head="int8",
        more={"algo": "awq", "block_size": 32},
    ),
    _Recipe(name="int8, head int8", quantization="int8_sq", head="int8"),
)


def search_precisions(job: Job, points: float, progress: Progress) -> Report:
    """Quantize a draft into `job.output_dir`; resume an interrupted search.

    Args:
        job: of a draft; a head scheme given in it applies to all recipes.
        points: allowed drop in predicted base tokens against the float draft, percentage points.
        progress: called for each recipe's parts.

    Raises:
        EdgeLLMError: as `run_job`.
    """
    with trials(job) as found:
        for recipe in _RECIPES:
            head = job.lm_head_quantization or recipe.head
            report = found.run(
                recipe.name,
                progress,
                quantization=recipe.quantization,
                lm_head_quantization=head,
                **recipe.more,
            )
            if 100 * lost(report) <= points:
                return found.publish(recipe.name)
        return found.publish(min(found.reports, key=lambda name: lost(found.reports[name])))


def lost(report: Report) -> float:
    """Return the drop in the share of base tokens that the quantized draft predicts."""
    return report.quality.accuracy_float - report.quality.accuracy_quantized

"""`--keep_layers auto`: the layers most sensitive to quantization stay float, within a budget.

First all layers are quantized, and the divergence that each adds alone is measured. The layers
that save the most divergence a byte stay float. The others are quantized again, since their
inputs change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.job import Job
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.pipeline.run import Progress
from edgellm.quantize.pipeline.search.candidates import trials
from edgellm.quantize.report.report import Kept, Report

_ALL = "all layers rounded"


def search_float_layers(job: Job, progress: Progress) -> Report:
    """Quantize a language model into `job.output_dir`; resume an interrupted search.

    Args:
        job: with `keep_budget`.
        progress: called for the parts of both runs.

    Raises:
        EdgeLLMError: as `run_job`.
    """
    assert job.keep_budget is not None
    with trials(job) as found:
        whole = found.run(_ALL, progress)
        budget = job.keep_budget / 100 * whole.bytes_after
        kept = choose(_costs(job, whole, found.folder(_ALL)), budget)
        if not kept:
            return found.publish(_ALL, kept=())
        layers = tuple(sorted(each.layer for each in kept))
        name = f"rounded but for layer {', '.join(map(str, layers))}"
        rest = found.run(name, progress, keep_layers=layers, keep_budget=None)
        if rest.quality.kl_divergence < whole.quality.kl_divergence:
            return found.publish(name, kept=kept)
        return found.publish(_ALL, kept=())


def choose(costs: Sequence[Kept], budget_bytes: float) -> tuple[Kept, ...]:
    """Return the layers that fit the budget, by saved divergence a byte, best first."""
    found: list[Kept] = []
    for each in sorted(costs, key=lambda cost: cost.divergence / cost.num_bytes, reverse=True):
        if len(found) + 1 == len(costs):
            break
        if each.divergence > 0 and sum(one.num_bytes for one in (*found, each)) <= budget_bytes:
            found.append(each)
    return tuple(found)


def _costs(job: Job, report: Report, result: Path) -> list[Kept]:
    """Return the extra bytes and the saved divergence of each layer in float."""
    model = LanguageModel.open(job.model_dir, job.ignore_config_keys)
    before = model.whole.tensors.infos()
    after = open_checkpoint(str(result)).tensors.infos()
    added = sum(layer.divergence for layer in report.layers)
    found = []
    for name, layer in zip(model.layers, report.layers, strict=True):
        prefix = model.stored_name(name)
        sizes = [
            sum(info.num_bytes for key, info in infos.items() if key.startswith(prefix))
            for infos in (before, after)
        ]
        share = layer.divergence / added if added else 0.0
        found.append(
            Kept(
                layer=layer.index,
                divergence=layer.divergence,
                share=share,
                num_bytes=sizes[0] - sizes[1],
            )
        )
    return found

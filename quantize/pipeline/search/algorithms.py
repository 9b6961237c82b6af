"""`--algo auto`: tries several INT4 algorithms; the lowest KL divergence wins."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from edgellm.quantize.algorithms.autoround import is_installed
from edgellm.quantize.algorithms.residual_rotation import rotates
from edgellm.quantize.algorithms.value_rotation import rotates_values
from edgellm.quantize.formats.schemes import GPTQ, RESIDUAL, VALUES
from edgellm.quantize.job import Job
from edgellm.quantize.models.checks import HEAD
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.pipeline.run import Progress
from edgellm.quantize.pipeline.search.candidates import Trials, trials
from edgellm.quantize.pipeline.torch_device import choose_device
from edgellm.quantize.report.report import Report


@dataclass(frozen=True, slots=True)
class _Entry:
    """One candidate algorithm."""

    name: str
    algo: str
    rotate: str | None = None


# The most promising candidates come first, since the time budget ends the search.
_ENTRIES = (
    _Entry("gptq", "gptq"),
    _Entry("autoround", "autoround"),
    _Entry("gptq, values rotated", "gptq", rotate="values"),
    _Entry("gptq, all rotated", "gptq", rotate="all"),
    _Entry("awq", "awq"),
)


# Schemes whose default is GPTQ; for fp8 it takes three times as long for a quarter less KL.
_BY_GPTQ = ("int4_awq", "nvfp4")
# Of the default algorithm, whose time grows with them: a third of the samples of `--algo gptq`.
_CPU_SAMPLES, _GPU_SAMPLES = 16, 128


def with_default(job: Job) -> Job:
    """The job with GPTQ, if the user chose no algorithm and the scheme has 4 bits.

    GPTQ had the lowest KL divergence in every scheme that it is for. Drafts, whose measure is
    acceptance, and mixtures of experts, whose experts it does not round, keep the scheme's own.

    Raises:
        EdgeLLMError: as `run_job`.
    """
    is_open = job.algo is None and job.base_model_dir is None
    if not is_open or job.quantization not in _BY_GPTQ:
        return job
    if LanguageModel.open(job.model_dir, job.ignore_config_keys).family.experts is not None:
        return job
    samples = _CPU_SAMPLES if choose_device(job.device).type == "cpu" else _GPU_SAMPLES
    return replace(job, algo=GPTQ, num_samples=job.num_samples or samples)


class _OutOfTimeError(Exception):
    """The time budget is exhausted, and a candidate is finished."""


def search_algorithms(job: Job, minutes: float | None, progress: Progress) -> Report:
    """Quantize a language model into `job.output_dir` with the best algorithm.

    An interrupted search resumes; finished candidates count with their times.

    Args:
        job: whose algorithm is open.
        minutes: time budget; the first candidate is always finished.
        progress: called for each candidate's parts.

    Raises:
        EdgeLLMError: as `run_job`.
    """
    with trials(job) as found:
        _try_all(found, minutes, progress)
        reports = found.reports
        return found.publish(min(reports, key=lambda name: reports[name].quality.kl_divergence))


def ways(job: Job) -> list[str]:
    """Return the candidates for the model, the most promising first."""
    model = LanguageModel.open(job.model_dir, job.ignore_config_keys)
    has_draft = job.draft_model_dir is not None
    return [entry.name for entry in _ENTRIES if _suits(entry, model, has_draft=has_draft)]


def _suits(entry: _Entry, model: LanguageModel, *, has_draft: bool) -> bool:
    if entry.algo == "autoround":
        return is_installed() and model.family.experts is None
    takes = rotates_values(model.tensors.infos(), model.layers, model.family)
    if entry.rotate in VALUES and not takes:
        return False
    # A rotation would untie a tied head, which is no fair comparison.
    if entry.rotate in RESIDUAL and has_draft:  # its input would be rotated
        return False
    return entry.rotate not in RESIDUAL or (model.head_name == HEAD and rotates(model))


def _try_all(found: Trials, minutes: float | None, progress: Progress) -> None:
    names = ways(found.job)
    for entry in (each for each in _ENTRIES if each.name in names):
        spent = sum(report.seconds for report in found.reports.values())
        left = None if minutes is None or not found.reports else 60 * minutes - spent
        if left is not None and left <= 0:
            break
        try:
            until = _until(left, progress)
            found.run(entry.name, until, algo=entry.algo, rotate=entry.rotate)
        except _OutOfTimeError:
            break


def _until(seconds: float | None, progress: Progress) -> Progress:
    """Return a progress callback that ends a run when its time is exhausted."""
    start = time.perf_counter()

    def report(what: str, done: int, total: int) -> None:
        progress(what, done, total)
        if seconds is not None and done < total and time.perf_counter() - start > seconds:
            raise _OutOfTimeError

    return report

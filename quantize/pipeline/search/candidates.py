"""Candidate runs of a search; finished ones survive an interrupt, one becomes the result."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgellm.core.commands.output_folder import require_own
from edgellm.core.file_lock import hold
from edgellm.quantize.job import SEARCH_OPTIONS, Job
from edgellm.quantize.pipeline.checkpoint_writer import SIDE_FILE, publish
from edgellm.quantize.pipeline.run import Progress, check_divergence, run_job
from edgellm.quantize.report.html_report import PAGE, check_page, render, write_page
from edgellm.quantize.report.report import Report, Tried, read_report
from edgellm.quantize.work_folder import LOCK, WorkFolder


@dataclass(slots=True)
class Trials:
    """The candidate runs of a job by name."""

    job: Job
    work: WorkFolder
    reports: dict[str, Report] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Return the folder of a run's result."""
        return self.work.path / re.sub(r"\W+", "-", name)

    def run(self, name: str, progress: Progress, **changes: Any) -> Report:
        """Run the job with changes, unless the run is already finished.

        Raises:
            EdgeLLMError: as `run_job`; exceptions of `progress` also end the run.
        """
        own = replace(self.job, output_dir=self.folder(name), max_kl=None, report=None, **changes)
        side = own.output_dir / SIDE_FILE
        if side.exists():
            found = read_report(json.loads(side.read_text("utf-8")))
        else:
            found = run_job(own, lambda what, *parts: progress(f"{name}: {what}", *parts))
        self.reports[name] = found
        return found

    def publish(self, name: str, **more: Any) -> Report:
        """Make one run the result; `more` are extra fields of its report.

        Raises:
            EdgeLLMError: the run exceeds `--max_kl`; all runs stay.
        """
        tried = {
            each: Tried(
                found.quality.kl_divergence, found.quality.accuracy_quantized, found.bytes_after
            )
            for each, found in self.reports.items()
        }
        report = replace(self.reports[name], tried=tried, **more)
        write_page(self.job, report)
        check_divergence(self.job, report.quality)
        folder = self.folder(name)
        side = json.loads((folder / SIDE_FILE).read_text("utf-8"))
        own = asdict(report)
        side |= {key: own[key] for key in ("tried", *more)}
        (folder / SIDE_FILE).write_text(json.dumps(side, indent=2) + "\n")
        (folder / PAGE).write_text(render(report), "utf-8")
        publish(folder, self.job.output_dir, self.job.key().facts())
        self.work.remove()
        return report


@contextlib.contextmanager
def trials(job: Job) -> Iterator[Trials]:
    """Lock the result against other processes.

    Raises:
        EdgeLLMError: the output folder has other contents, or another process runs.
    """
    require_own(job.output_dir)
    check_page(job)
    work = WorkFolder(job.work_dir)
    facts = asdict(job)
    for name in ("max_kl", "report", *SEARCH_OPTIONS):
        del facts[name]
    settings = json.loads(json.dumps({"contest": facts}, default=str))
    work.claim(settings, overwrite=job.overwrite)
    busy = f"another edgellm-quantize works in {work.path}"
    with hold(work.path / LOCK, busy, "wait for it, or give another --output_dir"):
        try:
            yield Trials(job, work)
        finally:
            if work.is_there and not work.has_begun:
                work.remove()  # failed before any work

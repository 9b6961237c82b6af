"""`--algo auto`: several ways to four bits, of which the one with the least divergence stays."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.exclusive import hold
from edgellm.quantize.autoround import is_there
from edgellm.quantize.checkpointing import LOCK, WorkFolder
from edgellm.quantize.folder import SIDE_FILE, check_output, publish
from edgellm.quantize.layerwise_run import Progress, refuse_far, run_job
from edgellm.quantize.plan import Job
from edgellm.quantize.report import Report, read_report

_RESULT = "result"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One way."""

    name: str
    algo: str
    rotate: str | None = None


# The likeliest to win stand first: a budget of time ends the row.
_ENTRIES = (
    _Entry("gptq", "gptq"),
    _Entry("autoround", "autoround"),
    _Entry("gptq, values rotated", "gptq", rotate="values"),
    _Entry("awq", "awq"),
)


class _OutOfTimeError(Exception):
    """The budget is spent, and something is finished."""


def run_contest(job: Job, minutes: float | None, progress: Progress) -> Report:
    """Quantize a language model into `job.output_dir` by whichever way suits it best.

    Interrupted, it goes on where it stopped; what is finished counts with the time that it took.

    Args:
        job: whose algorithm is open.
        minutes: after which no further way is waited for; the first is finished in any case.
        progress: told of each way's parts.

    Raises:
        EdgeLLMError: as `run_job`.
    """
    check_output(job.output_dir)
    work = WorkFolder(job.work_dir)
    facts = asdict(job)
    del facts["max_kl"]
    work.claim(json.loads(json.dumps({"contest": facts}, default=str)))
    busy = f"another edgellm-quantize works in {work.path}"
    with hold(work.path / LOCK, busy, "wait for it, or give another --output_dir"):
        reports = _reports(job, minutes, progress)
        best = min(reports, key=lambda name: reports[name].quality.kl_divergence)
        tried = {name: report.quality.kl_divergence for name, report in reports.items()}
        refuse_far(job, reports[best].quality)
        folder = _job_of(job, best).output_dir
        side = json.loads((folder / SIDE_FILE).read_text("utf-8"))
        (folder / SIDE_FILE).write_text(json.dumps({**side, "tried": tried}, indent=2) + "\n")
        publish(folder, job.output_dir)
        work.remove()
    return replace(reports[best], tried=tried)


def _reports(job: Job, minutes: float | None, progress: Progress) -> dict[str, Report]:
    found: dict[str, Report] = {}
    for entry in _ENTRIES:
        if entry.algo == "autoround" and not is_there():
            continue
        spent = sum(report.seconds for report in found.values())
        left = None if minutes is None else 60 * minutes - spent
        if found and left is not None and left <= 0:
            break
        own = _job_of(job, entry.name)
        side = own.output_dir / SIDE_FILE
        if side.exists():
            found[entry.name] = read_report(json.loads(side.read_text("utf-8")))
            continue
        try:
            told = _until(entry.name, left if found else None, progress)
            found[entry.name] = run_job(own, told)
        except _OutOfTimeError:
            break
    return found


def _job_of(job: Job, name: str) -> Job:
    """The same with one algorithm, into a folder within the work folder."""
    place = next(at for at, entry in enumerate(_ENTRIES) if entry.name == name)
    entry = _ENTRIES[place]
    folder: Path = job.work_dir / f"{_RESULT}{place}"
    return replace(job, algo=entry.algo, rotate=entry.rotate, output_dir=folder, max_kl=None)


def _until(name: str, seconds: float | None, progress: Progress) -> Any:
    """Progress that ends a run when its time is spent."""
    start = time.perf_counter()

    def told(what: str, done: int, total: int) -> None:
        progress(f"{name}: {what}", done, total)
        if seconds is not None and done < total and time.perf_counter() - start > seconds:
            raise _OutOfTimeError

    return told

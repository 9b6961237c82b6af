"""A whole evaluation: questions, answers, scores and report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgellm.core.artifact import hash_engines, replace_file
from edgellm.core.commands.output_folder import finished_line
from edgellm.core.commands.progress import share_of
from edgellm.core.commands.progress import shown as show_progress
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.tools.distributed.ray_map import require_ray
from edgellm.tools.distributed.servers import Servers
from edgellm.tools.evaluate.answering import answer_all, open_logs
from edgellm.tools.evaluate.datasets.questions import FILED, Question, fingerprint, load
from edgellm.tools.evaluate.remote import answer_remotely
from edgellm.tools.evaluate.reporting.report import report_markdown, report_page, tables
from edgellm.tools.evaluate.scoring import divergence
from edgellm.tools.evaluate.scoring.rouge import require_rouge
from edgellm.tools.evaluate.scoring.sandbox import open_sandbox
from edgellm.tools.evaluate.scoring.scores import SCORES_FILE, Scores, read_scores, score
from edgellm.tools.evaluate.settings import RUN_FILE, Settings, run_folder
from edgellm.tools.tables import show


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Options of an evaluation, as given on the command line."""

    engine_dir: Path | None  # None: `servers` run the engine
    multimodal_engine_dir: Path | None
    dataset: str
    data_file: Path | None
    output_dir: Path
    limit: int | None
    spec: SpecOptions | None
    max_generate_length: int
    temperature: float
    seed: int
    repeats: int
    run_code: bool
    servers: Servers | None = None
    overwrite: bool = False  # starts anew in the folder of another run


def evaluate(job: Job) -> None:
    """Run the remaining questions, score all answers, write the report and print its tables.

    Raises:
        EdgeLLMError: data or engine are invalid, or the folder's run has other settings.
    """
    questions = load(job.dataset, job.data_file)[: job.limit]
    _check(job, questions)
    settings = settings_of(job, questions)
    runs_code = job.run_code and any(question.scoring == "code" for question in questions)
    found = None if job.overwrite else _finished(job.output_dir, settings)
    if found is not None and (found.programs or not runs_code):
        show(finished_line(job.output_dir), tables(settings, found))
        return
    llm = None
    if job.engine_dir is not None:
        llm = LLM(job.engine_dir, spec=job.spec, multimodal_engine_dir=job.multimodal_engine_dir)
    sandbox = open_sandbox() if runs_code else None
    claim = run_folder(job.output_dir, settings, overwrite=job.overwrite)
    with claim, open_logs(job.output_dir, settings) as logs:
        done = sum(len(log.records) for log in logs.values())
        with _progress(len(questions) * len(logs), done) as advance:
            if llm is not None:
                answer_all(llm, questions, settings, logs, advance)
            elif job.servers is not None:
                answer_remotely(job.servers, questions, settings, logs["plain"], advance)
        records = {mode: log.records for mode, log in logs.items()}
        divergences = None
        if llm is not None and settings.is_exact:
            divergences = divergence.compare(llm, questions, settings, records)
        scores = score(questions, records, divergences, sandbox)
        _write(job.output_dir, settings, scores)
    show(
        f"{job.output_dir}: answers, {SCORES_FILE}, report.md, report.html",
        tables(settings, scores),
    )


def _finished(folder: Path, settings: Settings) -> Scores | None:
    """The scores of a finished run in the folder; None if there is work to do.

    Raises:
        EdgeLLMError: the run has other settings or damaged files, or another process uses it.
    """
    if not (folder / SCORES_FILE).exists() or not (folder / RUN_FILE).exists():
        return None
    with run_folder(folder, settings), open_logs(folder, settings) as logs:
        if any(len(log.records) < settings.num_questions for log in logs.values()):
            return None
        return read_scores(folder)


def _write(folder: Path, settings: Settings, scores: Scores) -> None:
    """Write scores and report, each whole or not at all."""
    text = json.dumps(msgspec.to_builtins(scores), indent=1, ensure_ascii=False)
    replace_file(folder / SCORES_FILE, text + "\n")
    replace_file(folder / "report.md", report_markdown(settings, scores))
    replace_file(folder / "report.html", report_page(settings, scores))


def _check(job: Job, questions: Sequence[Question]) -> None:
    """Raise `EdgeLLMError` for jobs that would fail later."""
    if any(question.scoring == "rouge" for question in questions):
        require_rouge()
    if job.engine_dir is None:
        require_ray()
        return
    if job.multimodal_engine_dir is None and any(question.images for question in questions):
        raise EdgeLLMError(
            f"{job.dataset} has images, which need a visual engine",
            hint="give a folder of visual_build as --multimodalEngineDir",
        )
    output, engine = job.output_dir.resolve(), job.engine_dir.resolve()
    if engine in (output, *output.parents):
        raise EdgeLLMError(f"{job.output_dir} lies in the engine's folder", hint="write elsewhere")


def settings_of(job: Job, questions: Sequence[Question]) -> Settings:
    """Return all settings that the answers depend on."""
    spec = None
    if job.spec is not None:  # with JSON's types: paths as strings, tuples as lists
        spec = json.loads(json.dumps(dataclasses.asdict(job.spec), default=str))
    draft_model = job.spec.draft_engine_dir if job.spec is not None else None
    if job.engine_dir is not None:
        model = job.engine_dir.resolve().name
        engines = hash_engines(job.engine_dir, job.multimodal_engine_dir, draft_model)
    else:
        assert job.servers is not None
        model = job.servers.model()
        engines = {"of servers": model}  # the set of servers may change
    return Settings(
        dataset=job.dataset if job.dataset not in FILED else f"{job.dataset} of {job.data_file}",
        num_questions=len(questions),
        data_sha256=fingerprint(questions),
        model=model,
        engines=engines,
        spec=spec,
        max_generate_length=job.max_generate_length,
        temperature=job.temperature,
        seed=job.seed,
        repeats=job.repeats,
    )


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[], None]]:
    """Show the share of the answers; the callback counts one."""
    with show_progress() as report:
        report(share_of("answering", done, total))

        def advance() -> None:
            nonlocal done
            done += 1
            report(share_of("answering", done, total))

        yield advance

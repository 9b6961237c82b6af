"""`edgellm-eval`: evaluates an engine on a dataset, with and without speculation."""

from __future__ import annotations

from pathlib import Path

import typer

from edgellm.core.cli import NOTHING_HALF_WRITTEN, App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_files.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.evaluate.flags import EvalFlags, with_eval_flags

app = App()
app.kept = NOTHING_HALF_WRITTEN


@app.command(
    common=("--engineDir", "--dataset", "--outputDir", "--limit", "--spec"),
    examples=(
        "edgellm-eval --engineDir engine --dataset humaneval --outputDir runs/a --runCode --eagle",
        "edgellm-eval --compare runs/a runs/b",
    ),
)
@with_spec_flags
@with_eval_flags
def evaluate(
    flags: EvalFlags,
    spec_flags: SpecFlags,
) -> None:
    """Run a dataset with and without speculation, score the answers, write a report.

    Without --eagle or --spec, only plain decoding runs. The same command resumes an interrupted
    run.
    """
    how = spec_flags.read()
    if flags.compare is not None:
        _compare(*flags.compare, flags.engine_dir or flags.dataset or flags.output_dir)
        return
    if flags.convert is not None:
        _convert(
            flags.convert,
            flags.dataset,
            flags.data_file,
            flags.limit,
            flags.engine_dir or flags.output_dir,
        )
        return
    place = {"--engineDir": flags.engine_dir} if flags.ray is None else {}
    given = {**place, "--dataset": flags.dataset, "--outputDir": flags.output_dir}
    if missing := [flag for flag, value in given.items() if value is None]:
        raise EdgeLLMError(f"{missing[0]} is missing", hint="edgellm-eval --help lists the flags")
    assert flags.dataset is not None and flags.output_dir is not None  # noqa: PT018
    if flags.ray is not None:
        _reject_engines(flags.engine_dir, flags.multimodal_engine_dir, how)
    from edgellm.tools.distributed.servers import Servers
    from edgellm.tools.evaluate.evaluation import Job, evaluate

    servers = None if flags.ray is None else Servers.read(flags.ray)
    job = Job(
        engine_dir=flags.engine_dir,
        multimodal_engine_dir=flags.multimodal_engine_dir,
        dataset=flags.dataset,
        data_file=flags.data_file,
        output_dir=flags.output_dir,
        limit=flags.limit,
        spec=how,
        max_generate_length=flags.max_generate_length,
        temperature=flags.temperature,
        seed=flags.seed,
        repeats=flags.repeats,
        run_code=flags.run_code,
        servers=servers,
        overwrite=flags.overwrite,
    )
    app.kept = f"finished answers are kept in {job.output_dir}"
    evaluate(job)


def _reject_engines(engine: Path | None, multimodal_engine: Path | None, how: object) -> None:
    if engine or multimodal_engine or how:
        raise EdgeLLMError(
            "--ray uses the engines and drafts of the servers",
            hint="leave out --engineDir, --multimodalEngineDir, --eagle, --spec and their options",
        )


def _compare(one: Path, other: Path, excess: object) -> None:
    if excess:
        raise EdgeLLMError("--compare A B reads two finished runs", hint="leave out other flags")
    from edgellm.tools.evaluate.reporting.comparison import compare_runs
    from edgellm.tools.tables import show

    show(f"{one} (A) and {other} (B)", compare_runs(one, other))


def _convert(
    output: Path, dataset: str | None, data_file: Path | None, limit: int | None, excess: object
) -> None:
    if excess or dataset is None:
        raise EdgeLLMError(
            "--convert FILE writes the prompts of a dataset",
            hint="give --dataset, optionally --dataFile and --limit, and no other flags",
        )
    from edgellm.tools.evaluate.datasets.prompts import write
    from edgellm.tools.evaluate.datasets.questions import load

    number = write(load(dataset, data_file)[:limit], output, *([data_file] if data_file else []))
    typer.echo(f"{output}: {number} prompts")


def main() -> None:
    """Entry point."""
    run_command(app)

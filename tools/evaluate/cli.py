"""`edgellm-eval`: evaluates an engine on a dataset, with and without speculation."""

from __future__ import annotations

from pathlib import Path

import typer

from edgellm.core.cli import CAMEL_CASE, App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.requests.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.evaluate.flags import (
    Compare,
    Convert,
    DataFile,
    Dataset,
    EngineDir,
    Limit,
    MaxGenerateLength,
    MultimodalEngineDir,
    OutputDir,
    Ray,
    Repeats,
    RunCode,
    Seed,
    Temperature,
)

app = App(CAMEL_CASE)


@app.command(
    common=("--engineDir", "--dataset", "--outputDir", "--limit", "--spec"),
    examples=(
        "edgellm-eval --engineDir engine --dataset humaneval --outputDir runs/a --runCode --eagle",
        "edgellm-eval --compare runs/a runs/b",
    ),
)
@with_spec_flags
def evaluate(
    spec_flags: SpecFlags,
    engine_dir: EngineDir = None,
    ray: Ray = None,
    dataset: Dataset = None,
    data_file: DataFile = None,
    output_dir: OutputDir = None,
    multimodal_engine_dir: MultimodalEngineDir = None,
    limit: Limit = None,
    max_generate_length: MaxGenerateLength = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 1,
    run_code: RunCode = False,
    compare: Compare = None,
    convert: Convert = None,
) -> None:
    """Run a dataset with and without speculation, score the answers, write a report.

    Without --eagle or --spec, only plain decoding runs. The same command resumes an interrupted
    run.
    """
    how = spec_flags.read()
    if compare is not None:
        _compare(*compare, engine_dir or dataset or output_dir)
        return
    if convert is not None:
        _convert(convert, dataset, data_file, limit, engine_dir or output_dir)
        return
    place = {"--engineDir": engine_dir} if ray is None else {}
    given = {**place, "--dataset": dataset, "--outputDir": output_dir}
    if missing := [flag for flag, value in given.items() if value is None]:
        raise EdgeLLMError(f"{missing[0]} is missing", hint="edgellm-eval --help lists the flags")
    assert dataset is not None and output_dir is not None  # noqa: PT018
    if ray is not None:
        _reject_engines(engine_dir, multimodal_engine_dir, how)
    from edgellm.tools.evaluate.evaluation import Job, evaluate
    from edgellm.tools.remote.servers import Servers

    servers = None if ray is None else Servers.read(ray)
    job = Job(
        engine_dir, multimodal_engine_dir, dataset, data_file, output_dir, limit, how,
        max_generate_length, temperature, seed, repeats, run_code, servers,
    )  # fmt: skip
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

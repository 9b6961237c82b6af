"""`llm_build`: ONNX bundle to engine, on the device that will run it."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.command import run_command
from edgellm.contract import DRAFT_FOLDER, DraftEngineManifest, EdgeLLMError, EngineManifest

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": lambda name: re.sub("-(.)", lambda m: m[1].upper(), name)
    },
)


@app.command()
def llm_build(
    onnx_dir: Annotated[Path, typer.Option("--onnxDir", help="Bundle made by edgellm-export.")],
    engine_dir: Annotated[Path, typer.Option("--engineDir", help="Folder for the engine.")],
    max_input_len: Annotated[
        int, typer.Option("--maxInputLen", min=1, help="Longest prompt, tokens.")
    ] = 1024,
    kv_capacity: Annotated[
        int,
        typer.Option(
            "--maxKVCacheCapacity",
            "--maxKvCacheCapacity",
            min=2,
            help="Prompt plus answer, tokens.",
        ),
    ] = 4096,
    max_batch_size: Annotated[
        int, typer.Option("--maxBatchSize", min=1, help="Requests at a time; engines run one.")
    ] = 1,
    backend: Annotated[str, typer.Option("--backend", help="auto or onnxruntime.")] = "auto",
    threads: Annotated[
        int, typer.Option("--threads", min=0, max=os.cpu_count(), help="CPU threads, 0 takes all.")
    ] = 0,
    prefill: Annotated[
        str,
        typer.Option(
            "--prefill",
            help="Prompt precision of INT4 engines: int8 is faster but keeps a second copy of "
            "the weights, same keeps one, auto takes int8 where the CPU has int8 dot products.",
        ),
    ] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            help="Of float weights: int8 rounds them (one scale per output channel and activation "
            "row), same keeps them, auto keeps a base's and rounds a draft's where the CPU has "
            "int8 dot products.",
        ),
    ] = "auto",
    eagle_base: Annotated[
        bool, typer.Option("--eagleBase", "--specBase", help="The base of an EAGLE draft.")
    ] = False,
    eagle_draft: Annotated[
        bool,
        typer.Option(
            "--eagleDraft", "--specDraft", help="An EAGLE draft; goes into its base's engineDir."
        ),
    ] = False,
    max_verify_tree_size: Annotated[
        int,
        typer.Option("--maxVerifyTreeSize", min=1, help="Nodes of a tree, root included (base)."),
    ] = 60,
    max_draft_tree_size: Annotated[
        int, typer.Option("--maxDraftTreeSize", min=1, help="Rows drafted in a round (draft).")
    ] = 60,
    dry_run: Annotated[
        bool, typer.Option("--dryRun", "--dry-run", help="Predict sizes and speed, build nothing.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Build an engine for this machine from an ONNX bundle."""
    del debug  # read by run_command
    from edgellm.build.draft import build_draft
    from edgellm.build.engine import build_engine, check_bundle, check_draft_bundle, predict
    from edgellm.device_runtime.backends import Plan

    for flag, value, allowed in (
        ("--prefill", prefill, ("auto", "same", "int8")),
        ("--precision", precision, ("auto", "same", "int8")),
    ):
        if value not in allowed:
            raise EdgeLLMError(f"{flag} {value}: give {', '.join(allowed[:-1])} or {allowed[-1]}")
    if eagle_base and eagle_draft:
        raise EdgeLLMError(
            "--eagleBase and --eagleDraft are two builds",
            hint="run llm_build once for each, into the same --engineDir",
        )
    if max_batch_size > 1:
        typer.echo(
            "note: engines run one request at a time; --maxBatchSize is taken as 1", err=True
        )
    plan = Plan(
        max_input_len,
        kv_capacity,
        threads,
        prefill,
        precision,
        max_verify_tree_size=max_verify_tree_size if eagle_base else 0,
        max_draft_tree_size=max_draft_tree_size if eagle_draft else 0,
    )
    if dry_run:
        manifest = (check_draft_bundle if eagle_draft else check_bundle)(onnx_dir, plan)
        for line in predict(onnx_dir, manifest, plan, backend).lines():
            typer.echo(line)
        return
    start = time.perf_counter()
    with _status() as report:
        build = build_draft if eagle_draft else build_engine
        built = build(onnx_dir, engine_dir, plan, backend, report)
    _show(built, engine_dir, time.perf_counter() - start)


def _show(built: EngineManifest | DraftEngineManifest, engine_dir: Path, seconds: float) -> None:
    size = sum(record.num_bytes for record in built.files.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    graphs = ", ".join(f"{g.precision} up to {g.max_rows} rows" for g in built.graphs)
    where = engine_dir if isinstance(built, EngineManifest) else engine_dir / DRAFT_FOLDER
    typer.echo(
        f"{where}: {built.backend} {built.backend_version}, {graphs}; {size / 1e6:.1f} MB "
        f"in {seconds:.1f} s, peak memory {peak / 1e6:.0f} MB"
    )
    if isinstance(built, EngineManifest):
        typer.echo(
            f"a pass takes (rows: ms) {_listed(built.pass_cost_ms)}; "
            f"prompts in passes of {built.prefill_rows} rows"
        )
    else:
        typer.echo(f"a draft step takes (rows: ms) {_listed(built.step_cost_ms)}")


def _listed(costs: dict[str, float]) -> str:
    return ", ".join(f"{rows}: {ms:.1f}" for rows, ms in costs.items())


def _status() -> AbstractContextManager[Callable[[str], None]]:
    """A spinner that names the current step; silent when stderr is not a terminal."""
    if not sys.stderr.isatty():
        return nullcontext(lambda _step: None)
    from rich.console import Console

    class Status:
        def __enter__(self) -> Callable[[str], None]:
            self._status = Console(stderr=True).status("starting")
            self._status.start()
            return self._status.update

        def __exit__(self, *_: Any) -> None:
            self._status.stop()

    return Status()


def main() -> None:
    """Entry point."""
    run_command(app)

"""`edgellm-bench`: prefill, decode and speculation speed of an engine, interleaved."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm.core.cli import App, numbers, run_command
from edgellm.core.commands.progress import shown
from edgellm.core.errors import EdgeLLMError, require_choice
from edgellm.device_runtime.request_files.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.bench.flags import BenchFlags, with_bench_flags

if TYPE_CHECKING:
    from edgellm.core.manifest import Engine
    from edgellm.device_runtime.speculate.options import SpecOptions
    from edgellm.tools.bench.results import Results

REQUESTS = Path(__file__).with_name("requests.json")
_DEFAULT_PROMPTS = (128, 512)

app = App()
_SEED = 42  # of a file without one


@app.command(
    common=("--engineDir", "--prompt", "--generate", "--spec", "--output"),
    examples=(
        "edgellm-bench --engineDir engine --prompt 128,512 --generate 64",
        "edgellm-bench --engineDir engine --eagle --prompt 0 --generate 0 --output markdown",
    ),
)
@with_spec_flags
@with_bench_flags
def bench(
    flags: BenchFlags,
    spec_flags: SpecFlags,
) -> None:
    """Measure the speed of an engine; --eagle or --spec compares with plain decoding."""
    import msgspec

    from edgellm.device_runtime.api.llm import LLM
    from edgellm.device_runtime.request_files.request_file import read_file
    from edgellm.tools.bench.interleaved_run import Texts, Work, run
    from edgellm.tools.bench.machine import busy_warning, facts
    from edgellm.tools.bench.measure import check_sizes, no_energy
    from edgellm.tools.bench.result_formats import NAMES
    from edgellm.tools.bench.results import Results
    from edgellm.tools.energy import Meter, find_sensors

    require_choice("--output", flags.output, NAMES)
    how = spec_flags.read()
    if flags.input_file is not None and how is None:
        raise EdgeLLMError("--inputFile is for speculation", hint="give --eagle or --spec as well")
    depths = numbers("--depth", flags.depth)
    options, raws = read_file(flags.input_file or REQUESTS)
    given = getattr(options, "seed", None)
    seed = _SEED if given is None else given  # both modes draw alike
    requests = msgspec.structs.replace(options, seed=seed), raws
    meter = Meter(find_sensors()) if flags.energy else None
    llm = LLM(flags.engine_dir, verify=flags.verify, spec=how)
    prompts = _prompts(flags.prompt, llm.manifest)
    check_sizes(llm.manifest, prompts, depths, flags.generate)
    texts = Texts.at(llm, *requests, depths) if how is not None else None
    if warning := busy_warning():
        typer.echo(f"warning: {warning}", err=True)
    work = Work(
        prompts=prompts,
        depths=depths if flags.generate else (),
        generated=flags.generate,
        texts=texts,
        window=meter.window if meter is not None else no_energy,
    )
    settings = {"repetitions": str(flags.repetitions), "speculation": _described(how)}
    results = Results(
        engine=_engine(flags.engine_dir, llm.manifest),
        machine=facts(),
        settings=settings,
        measures_energy=flags.energy,
    )
    try:
        with meter or nullcontext(), shown(lines=False) as report:
            run(llm, work, results, flags.repetitions, report)
        if meter is not None:
            results.machine |= {"energy of": " + ".join(meter.names), **meter.clocks}
    finally:  # after an interrupt, prints the complete repetitions
        if results.repetitions:
            _print(results, flags.output)


def _prompts(text: str, manifest: Engine) -> tuple[int, ...]:
    """Return the requested lengths, or the default lengths that the engine supports."""
    if text:
        return tuple(length for length in numbers("--prompt", text) if length)
    fitting = tuple(length for length in _DEFAULT_PROMPTS if length <= manifest.max_input_len)
    return fitting or (manifest.max_input_len,)


def _described(how: SpecOptions | None) -> str:
    if how is None:
        return "none"
    drafters = " + ".join(filter(None, (how.network, *how.lookups)))
    bounds = {"top-k": how.top_k, "steps": how.steps, "nodes": how.verify_size}
    given = [f"{name} {value}" for name, value in bounds.items() if value is not None]
    trees = f"{len(how.choices)} choices" if how.choices else how.tree
    return ", ".join((drafters, f"trees {trees}", *given))


def _engine(folder: Path, manifest: Engine) -> dict[str, str]:
    """Describe the engine; the manifest's hash covers all of its files."""
    from edgellm.core.artifact import hash_file
    from edgellm.core.manifest import DRAFT_FOLDER, MANIFEST_NAME

    draft = folder / DRAFT_FOLDER / MANIFEST_NAME
    return {
        "engine": str(folder),
        "engine manifest sha256": hash_file(folder / MANIFEST_NAME).sha256,
        **({"draft manifest sha256": hash_file(draft).sha256} if draft.exists() else {}),
        "model": f"{manifest.decoder.model_type}, {manifest.decoder.num_parameters / 1e6:.1f} M",
        "backend": f"{manifest.library} {manifest.backend_version}",
        "precision": ", ".join(
            f"{g.precision} up to {g.max_rows} tokens" for g in manifest.main_graphs
        ),
        "threads": str(manifest.threads or "all"),
    }


def _print(results: Results, output: str) -> None:
    from edgellm.tools.bench import result_formats
    from edgellm.tools.tables import show

    if output == "text":
        title = f"edgellm-bench, {results.repetitions} repetitions"
        show(title, result_formats.tables(results))
        return
    written = {
        "markdown": result_formats.as_markdown,
        "csv": result_formats.as_csv,
        "json": result_formats.as_json,
    }
    typer.echo(written[output](results), nl=False)


def main() -> None:
    """Entry point."""
    run_command(app)

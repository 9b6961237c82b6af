"""`llm_inference`: answer the requests of a JSON file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.artifact import check_output_file, replace_file
from edgellm.command import ONE_CASE, run_command
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.requests.flags import (
    AllowSpecialTokens,
    BatchSize,
    ContextReuse,
    Debug,
    DumpOutput,
    DumpProfile,
    EngineDir,
    InputFile,
    MaxGenerateLength,
    MultimodalEngineDir,
    OutputFile,
    ProfileFile,
    Prove,
    Stream,
    TreeFile,
    Verify,
    Warmup,
)
from edgellm.device_runtime.requests.spec_flags import SpecFlags, with_spec_flags

if TYPE_CHECKING:
    from edgellm.device_runtime.engine.llm import LLM, Step
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.requests.request_file import Options
    from edgellm.device_runtime.requests.tree_log import TreeLog

app = typer.Typer(
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=ONE_CASE,
)


@app.command()
@with_spec_flags
def llm_inference(
    engine_dir: EngineDir,
    input_file: InputFile,
    output_file: OutputFile,
    spec_flags: SpecFlags,
    multimodal_engine_dir: MultimodalEngineDir = None,
    warmup: Warmup = 0,
    dump_profile: DumpProfile = False,
    profile_file: ProfileFile = None,
    batch_size: BatchSize = None,
    max_generate_length: MaxGenerateLength = None,
    tree_file: TreeFile = None,
    prove_count: Prove = 0,
    context_reuse: ContextReuse = False,
    allow_special_tokens: AllowSpecialTokens = False,
    stream: Stream = False,
    verify: Verify = None,
    dump_output: DumpOutput = False,
    debug: Debug = False,
) -> None:
    """Answer the requests of a JSON file; a bad request gets an error object of its own."""
    del debug  # read by run_command
    from edgellm.device_runtime.engine.llm import LLM

    how = spec_flags.read()
    if how is None and (prove_count or tree_file):
        flag = "--prove" if prove_count else "--treeOutputFile"
        raise EdgeLLMError(f"{flag} is about speculation", hint="give --eagle or --spec as well")
    options, requests = _read(input_file, max_generate_length, batch_size)
    outputs = _Outputs(output_file, profile_file, tree_file)
    outputs.check(input_file, engine_dir)
    llm = LLM(
        engine_dir, verify=verify, spec=how,
        multimodal_engine_dir=multimodal_engine_dir, context_reuse=context_reuse,
        allow_special_tokens=allow_special_tokens,
    )  # fmt: skip
    if prove_count:
        raise typer.Exit(_prove(llm, options, requests[:prove_count]))
    profile, responses = _answer(llm, options, requests, warmup, outputs, input_file, stream=stream)
    if dump_profile:
        typer.echo(json.dumps(profile.as_json(), indent=4))
    for response in responses if dump_output else ():
        typer.echo(f"[{response['request_idx']}] {response['output_text']}")
    raise typer.Exit(1 if _summarize(responses, profile, output_file) else 0)


def _read(
    path: Path, max_generate_length: int | None, batch_size: int | None
) -> tuple[Options, list[Any]]:
    """The request file as the flags change it."""
    from edgellm.device_runtime.requests.request_file import read_file

    options, requests = _with_length(*read_file(path), max_generate_length)
    if (batch_size or options.batch_size) > 1:
        typer.echo("note: requests run one by one, whatever the batch size", err=True)
    return options, requests


def _answer(
    llm: LLM, options: Options, requests: list[Any], warmup: int, outputs: _Outputs,
    input_file: Path, *, stream: bool,
) -> tuple[Profile, list[dict[str, Any]]]:  # fmt: skip
    """Answer everything and write the files; an interrupt keeps what was answered."""
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.requests.tree_log import TreeLog

    trees, profile, responses = TreeLog(llm.tokenizer), Profile(), []
    try:
        _run_all(llm, options, requests, warmup, responses, profile, trees, stream=stream)
    finally:
        if responses:
            outputs.write(str(input_file), responses, profile, trees)
    return profile, responses


def _prove(llm: LLM, options: Options, requests: list[Any]) -> int:
    """Print the comparison of every request; the exit status."""
    from edgellm.device_runtime.requests.prove import prove

    compared = diverged = 0
    for comparison in prove(llm, options, requests):
        typer.echo(comparison.line())
        compared += comparison.tokens > 0
        diverged += comparison.divergence is not None
    typer.echo(f"{compared - diverged} of {compared} answers identical, token by token")
    return 1 if diverged else 0


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The files that a run writes."""

    answers: Path
    profile: Path | None
    trees: Path | None

    def check(self, input_file: Path, engine_dir: Path) -> None:
        """Refuse what cannot be written, before the work."""
        paths = [path for path in (self.answers, self.profile, self.trees) if path is not None]
        for path in paths:
            check_output_file(path, input_file)
            if path.resolve().parent == engine_dir.resolve():
                raise EdgeLLMError(f"{path} lies in the engine's folder", hint="write elsewhere")
        if len({path.resolve() for path in paths}) < len(paths):
            raise EdgeLLMError("the answers, the profile and the trees are files of their own")

    def write(
        self, input_file: str, responses: list[Any], profile: Profile, trees: TreeLog
    ) -> None:
        """Write what was asked for."""
        _write_json(self.answers, {"input_file": input_file, "responses": responses})
        if self.trees is not None:
            _write_json(self.trees, trees.as_json(input_file))
        if self.profile is not None:
            _write_json(self.profile, profile.as_json())


def _with_length(
    options: Options, requests: list[Any], length: int | None
) -> tuple[Options, list[Any]]:
    """The file with one length for all requests, unless it is None."""
    if length is None:
        return options, requests
    import msgspec

    name = "max_generate_length"
    own = [
        {key: value for key, value in request.items() if key != name}
        if isinstance(request, dict)
        else request
        for request in requests
    ]
    return msgspec.structs.replace(options, max_generate_length=length), own


def _run_all(
    llm: LLM, options: Options, requests: list[Any], warmup: int,
    responses: list[dict[str, Any]], profile: Profile, trees: TreeLog, *, stream: bool,
) -> None:  # fmt: skip
    """Answer everything; `responses`, `profile` and `trees` grow as it goes."""
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.requests.runner import run_request

    def show(index: int, step: Step) -> None:
        trees.add(index, step)
        if stream:
            _print(step.text)

    for _ in range(warmup):
        run_request(llm, options, requests[0], 0, Profile(), lambda *_: None)
    with _progress(len(requests), hidden=stream) as advance:
        for index, raw in enumerate(requests):
            response = run_request(llm, options, raw, index, profile, show)
            responses.append(response)
            if stream:
                _print("\n")
            for line in response.get("warnings", ()):
                typer.echo(f"warning: request {index}: {line}", err=True)
            if "error" in response:
                _complain(index, response["error"])
            advance()


def _print(text: str) -> None:
    """Print a piece of an answer; a reader that has gone away does not stop the work."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(index: int, error: dict[str, str]) -> None:
    hint = f" ({error['hint']})" if "hint" in error else ""
    typer.echo(f"request {index} failed: {error['message']}{hint}", err=True)


def _progress(total: int, *, hidden: bool) -> Any:
    """A bar over the requests; silent when stderr is not a terminal or the text streams."""
    import contextlib

    if hidden or not sys.stderr.isatty():
        return contextlib.nullcontext(lambda: None)
    from rich.console import Console
    from rich.progress import Progress

    @contextlib.contextmanager
    def shown() -> Any:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("requests", total=total)
            yield lambda: bar.advance(task)

    return shown()


def _write_json(path: Path, content: Any) -> None:
    replace_file(path, json.dumps(content, indent=4, ensure_ascii=False) + "\n")


def _summarize(responses: list[dict[str, Any]], profile: Profile, output: Path) -> int:
    failed = sum("error" in response for response in responses)
    counts = f"{len(responses)} responses" + (f", {failed} failed" if failed else "")
    report = profile.as_json()
    decode_s = profile.decode_ms() / 1e3
    rate = profile.decoded_tokens() / decode_s if decode_s else 0.0
    line = (
        f"{output}: {counts}; prefill {report['prefill']['tokens_per_second']:.0f} tokens/s, "
        f"generation {rate:.1f} tokens/s"
    )
    if eagle := report.get("eagle_generation"):
        line += (
            f", acceptance length {eagle['acceptance_length']:.2f} with "
            f"{eagle['average_tree_size']:.1f} verified nodes"
        )
    if reused := report["prefill"]["reused_tokens"]:
        line += f"; {reused} prompt tokens reused"
    typer.echo(line)
    return failed


def main() -> None:
    """Entry point."""
    run_command(app)

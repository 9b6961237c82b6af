"""`llm_inference`: runs the requests of a JSON file."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.core.artifact import hash_engines
from edgellm.core.cli import CAMEL_CASE, App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.core.peft_adapter import hash_adapters
from edgellm.device_runtime.requests.flags import (
    AllowSpecialTokens,
    BatchSize,
    ContextReuse,
    DumpOutput,
    DumpProfile,
    EngineDir,
    InputFile,
    MaxGenerateLength,
    MultimodalEngineDir,
    OutputFile,
    ProfileFile,
    Prove,
    Resume,
    Stream,
    TreeFile,
    Verify,
    Warmup,
)
from edgellm.device_runtime.requests.spec_flags import SpecFlags, with_spec_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgellm.device_runtime.api.llm import LLM, Step
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.requests.held_interrupts import HeldInterrupts
    from edgellm.device_runtime.requests.outputs import Outputs
    from edgellm.device_runtime.requests.request_file import Options
    from edgellm.device_runtime.requests.resume import FinishedRequest, UnfinishedRun

app = App(CAMEL_CASE)


@app.command(
    common=("--engineDir", "--inputFile", "--outputFile", "--spec", "--stream"),
    examples=(
        "llm_inference --engineDir engine --inputFile requests.json --outputFile answers.json",
        "llm_inference --engineDir engine --inputFile requests.json --outputFile "
        "answers.json --eagle --dumpOutput",
    ),
)
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
    resume: Resume = False,
) -> None:
    """Run the requests of a JSON file; a failed request gets an error object."""
    from edgellm.device_runtime.requests.outputs import Outputs
    from edgellm.device_runtime.requests.request_file import read_file
    from edgellm.device_runtime.requests.resume import settings_of, unfinished_run

    how = spec_flags.read()
    if how is None and (prove_count or tree_file):
        flag = "--prove" if prove_count else "--treeOutputFile"
        raise EdgeLLMError(f"{flag} needs speculation", hint="give --eagle or --spec as well")
    given = read_file(input_file)
    options, requests = _with_flags(*given, max_generate_length, batch_size)
    outputs = Outputs(source=input_file, answers=output_file, profile=profile_file, trees=tree_file)
    outputs.check(engine_dir)
    load = functools.partial(
        _load, options, engine_dir, verify=verify, spec=how,
        multimodal_engine_dir=multimodal_engine_dir, context_reuse=context_reuse,
        allow_special_tokens=allow_special_tokens,
    )  # fmt: skip
    if prove_count:
        raise typer.Exit(_prove(load(), options, requests[:prove_count]))
    engines = hash_engines(engine_dir, multimodal_engine_dir, how and how.draft_engine_dir)
    engines |= hash_adapters(options.available_lora_weights)
    settings = settings_of(
        given, engines, how, max_generate_length=max_generate_length,
        context_reuse=context_reuse, allow_special_tokens=allow_special_tokens,
        trees=tree_file is not None,
    )  # fmt: skip
    with unfinished_run(output_file, settings, goes_on=resume) as run:
        llm = load()
        profile = _run(llm, options, requests, warmup, outputs, run, stream=stream)
        outputs.write(run, profile)
    if dump_profile:
        typer.echo(json.dumps(profile.as_json(), indent=4))
    responses = [answered.response for answered in run.in_order()]
    for response in responses if dump_output else ():
        typer.echo(f"[{response['request_idx']}] {response['output_text']}")
    size = min(options.batch_size, llm.batch_size)
    raise typer.Exit(1 if _summarize(responses, profile, output_file, size) else 0)


def _load(options: Options, engine_dir: Path, **more: Any) -> LLM:
    """The engine, with the adapters of the file."""
    from edgellm.device_runtime.api.llm import LLM

    llm = LLM(engine_dir, **more)
    for name, folder in options.available_lora_weights.items():
        llm.load_adapter(name, folder)
    return llm


def _prove(llm: LLM, options: Options, requests: list[Any]) -> int:
    """Print the comparison of every request; return the exit status."""
    from edgellm.device_runtime.requests.lossless_check import prove

    compared = diverged = equal = refused = 0
    for comparison in prove(llm, options, requests):
        typer.echo(comparison.line())
        compared += comparison.tokens > 0
        diverged += comparison.divergence is not None
        equal += comparison.has_equal_bits
        refused += comparison.refused != ""
    bits = f"; {equal} with equal bits of all logits" if equal else ""
    typer.echo(f"{compared - diverged} of {compared} answers identical, token by token{bits}")
    return 1 if diverged or refused else 0


def _with_flags(
    options: Options, requests: list[Any], length: int | None, batch_size: int | None
) -> tuple[Options, list[Any]]:
    """Override the maximum length of all requests, and the batch size, unless they are None."""
    import msgspec

    if batch_size is not None:
        options = msgspec.structs.replace(options, batch_size=batch_size)
    if length is None:
        return options, requests
    name = "max_generate_length"
    own = [
        {key: value for key, value in request.items() if key != name}
        if isinstance(request, dict)
        else request
        for request in requests
    ]
    return msgspec.structs.replace(options, max_generate_length=length), own


def _run(
    llm: LLM, options: Options, requests: list[Any], warmup: int, outputs: Outputs,
    run: UnfinishedRun, *, stream: bool,
) -> Profile:  # fmt: skip
    """Run the requests that `run` lacks; return the times of all requests."""
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.requests.held_interrupts import HeldInterrupts
    from edgellm.device_runtime.requests.responses import run_request

    left = _left(requests, run)
    if run.answered and left:
        progress = f"resuming with request {left[0]} of {len(requests)}"
        typer.echo(f"{progress}; {len(run.answered)} are finished", err=True)
    for _ in range(warmup if left else 0):
        run_request(llm, options, requests[0], 0, Profile(), lambda *_: None)
    try:
        with (
            _progress(len(requests), len(run.answered), hidden=stream) as advance,
            HeldInterrupts() as held,
        ):
            for answered in _run_all(llm, options, requests, run, outputs, held, stream=stream):
                run.add(answered)
                _report(answered.index, answered.response)
                advance()
    except KeyboardInterrupt:
        if run.answered:
            outputs.write(run, _times(run))
        raise
    finally:
        if run.answered and len(run.answered) < len(requests):
            _print_resume_command(run, len(requests))
    return _times(run)


def _left(requests: list[Any], run: UnfinishedRun) -> list[int]:
    """Indices of the requests that are not finished; failed ones count as finished."""
    done = {answered.index for answered in run.answered}
    return [index for index in range(len(requests)) if index not in done]


def _times(run: UnfinishedRun) -> Profile:
    from edgellm.device_runtime.engine.profile import Profile

    profile = Profile()
    for answered in run.in_order():
        profile.add(answered.profile)
    return profile


def _print_resume_command(run: UnfinishedRun, total: int) -> None:
    arguments = [one for one in sys.argv[1:] if one != "--resume"]
    typer.echo(
        f"{len(run.answered)} of {total} outputs are saved in {run.path}; "
        "the same command with --resume continues:\n"
        f"  {shlex.join(['llm_inference', *arguments, '--resume'])}",
        err=True,
    )


def _run_all(
    llm: LLM, options: Options, requests: list[Any], run: UnfinishedRun, outputs: Outputs,
    held: HeldInterrupts, *, stream: bool,
) -> Iterator[FinishedRequest]:  # fmt: skip
    """Outputs of the requests that `run` lacks, as they finish, in batches of `batch_size`."""
    from edgellm.device_runtime.requests.responses import run_requests
    from edgellm.device_runtime.requests.resume import FinishedRequest
    from edgellm.device_runtime.requests.tree_log import TreeLog

    left = _left(requests, run)
    trees = {index: TreeLog(llm.tokenizer) for index in left}
    printer = _Printer(left)

    def show(index: int, step: Step) -> None:
        if stream:
            with held.at_once():  # a pipe may be full
                printer.add(index, step.text)
        if outputs.trees is not None:
            trees[index].add(step)

    size = min(options.batch_size, llm.batch_size)
    if size < options.batch_size:
        typer.echo(
            f"note: the engine's batch size is {size}; build it with --maxBatchSize", err=True
        )
    raws = ((index, requests[index]) for index in left)
    for response, profile in run_requests(llm, options, raws, show, size, held):
        index = response["request_idx"]
        yield FinishedRequest(response, profile, trees.pop(index).rounds)
        if stream:
            printer.end(index)


class _Printer:
    """Prints the texts of requests in their order; later ones are buffered."""

    def __init__(self, indices: list[int]) -> None:
        self._texts = dict.fromkeys(indices, "")  # not printed yet
        self._ended: set[int] = set()

    def add(self, index: int, text: str) -> None:
        self._texts[index] += text
        self._flush()

    def end(self, index: int) -> None:
        self.add(index, "\n")
        self._ended.add(index)
        self._flush()

    def _flush(self) -> None:
        for index in list(self._texts):
            _print(self._texts[index])
            self._texts[index] = ""
            if index not in self._ended:
                return
            del self._texts[index]


def _report(index: int, response: dict[str, Any]) -> None:
    for line in response.get("warnings", ()):
        typer.echo(f"warning: request {index}: {line}", err=True)
    if "error" in response:
        _print_failure(index, response["error"])


def _print(text: str) -> None:
    """Print text; a closed pipe does not stop the run."""
    try:
        print(text, end="", flush=True)
    except OSError as error:  # such as a full disk: the output file has all outputs
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"note: outputs are not printed any more: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_failure(index: int, error: dict[str, str]) -> None:
    hint = f" ({error['hint']})" if "hint" in error else ""
    typer.echo(f"request {index} failed: {error['message']}{hint}", err=True)


def _progress(total: int, done: int, *, hidden: bool) -> Any:
    """Show the share of requests on a terminal, unless the text streams; counts one."""
    import contextlib

    if hidden or not sys.stderr.isatty():
        return contextlib.nullcontext(lambda: None)
    from edgellm.core.commands.progress import share_of, shown

    @contextlib.contextmanager
    def counted() -> Any:
        finished = done
        with shown() as report:

            def advance() -> None:
                nonlocal finished
                finished += 1
                report(share_of("requests", finished, total))

            yield advance

    return counted()


def _summarize(
    responses: list[dict[str, Any]], profile: Profile, output: Path, batch_size: int
) -> int:
    failed = sum("error" in response for response in responses)
    counts = f"{len(responses)} responses" + (f", {failed} failed" if failed else "")
    report = profile.as_json()
    decode_s = profile.decode_ms() / 1e3
    rate = profile.decoded_tokens() / decode_s if decode_s else 0.0
    line = (
        f"{output}: {counts}; prefill {report['prefill']['tokens_per_second']:.0f} tokens/s, "
        f"generation {rate:.1f} tokens/s"
    )
    if batch_size > 1:
        line += f" for each of up to {batch_size} at a time"
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

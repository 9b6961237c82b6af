"""`llm_inference`: answers prompts, and the requests of a JSON file."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.core.artifact import hash_engines
from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.core.peft_adapter import hash_adapters
from edgellm.device_runtime.request_files.flags import InferenceFlags, with_inference_flags
from edgellm.device_runtime.request_files.sampling_flags import given_flags, with_sampling_flags
from edgellm.device_runtime.request_files.spec_flags import SpecFlags, with_spec_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgellm.device_runtime.api.generation_request import GenerationDefaults
    from edgellm.device_runtime.api.llm import LLM, Step
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.request_files.held_interrupts import HeldInterrupts
    from edgellm.device_runtime.request_files.outputs import Outputs
    from edgellm.device_runtime.request_files.request_file import Options, OutputIndex
    from edgellm.device_runtime.request_files.resume import FinishedOutput, UnfinishedRun
    from edgellm.device_runtime.speculate.options import SpecOptions

app = App()


@app.command(
    common=("--engineDir", "--prompt", "--inputFile", "--outputFile", "--spec"),
    examples=(
        "llm_inference --engineDir engine --prompt 'Why is the sky blue?'",
        "llm_inference --engineDir engine --inputFile requests.json --outputFile "
        "answers.json --eagle",
    ),
)
@with_spec_flags
@with_sampling_flags
@with_inference_flags
def llm_inference(flags: InferenceFlags, spec_flags: SpecFlags, sampling_flags: Any) -> None:
    """Answer prompts, or the requests of a JSON file; a failed request gets an error object."""
    from edgellm.device_runtime.api.generation_request import GenerationDefaults
    from edgellm.device_runtime.request_files.outputs import Outputs
    from edgellm.device_runtime.request_files.resume import settings_of, unfinished_run

    how = spec_flags.read()
    if how is None and (flags.prove_count or flags.tree_file):
        flag = "--prove" if flags.prove_count else "--treeOutputFile"
        raise EdgeLLMError(f"{flag} needs speculation", hint="give --eagle or --spec as well")
    given = _requests(flags)
    options, requests = _with_flags(*given, flags.max_generate_length, flags.batch_size)
    defaults = GenerationDefaults(
        sampling=given_flags(sampling_flags), max_generate_length=flags.max_tokens
    )
    outputs = Outputs(
        source=flags.input_file, answers=flags.output_file, profile=flags.profile_file,
        trees=flags.tree_file,
    )  # fmt: skip
    outputs.check(flags.engine_dir)
    load = functools.partial(_load, flags, options, how, defaults)
    if flags.prove_count:
        raise typer.Exit(_prove(*load(), requests[: flags.prove_count]))
    engines = hash_engines(
        flags.engine_dir,
        flags.multimodal_engine_dir,
        how and how.draft_engine_dir,
        flags.audio_engine_dir,
    )
    engines |= hash_adapters(options.available_lora_weights)
    settings = settings_of(
        given, engines, how, max_generate_length=flags.max_generate_length,
        context_reuse=flags.context_reuse, allow_special_tokens=flags.allow_special_tokens,
        trees=flags.tree_file is not None, defaults=dataclasses.asdict(defaults),
    )  # fmt: skip
    prints = flags.stream or flags.prompts is not None
    with unfinished_run(flags.output_file, settings, goes_on=flags.resume) as run:
        llm, options = load()
        profile = _run(llm, options, requests, flags.warmup, outputs, run, stream=prints)
        outputs.write(run, profile)
    if flags.dump_profile:
        typer.echo(json.dumps(profile.as_json(), indent=4))
    responses = [answered.response for answered in run.in_order()]
    for response in responses if flags.dump_output else ():
        choice = f".{response['choice_idx']}" if "choice_idx" in response else ""
        typer.echo(f"[{response['request_idx']}{choice}] {response['output_text']}")
    size = min(options.batch_size, llm.batch_size)
    line, failed = _summary(responses, profile, flags.output_file, size)
    typer.echo(line, err=flags.prompts is not None)  # standard output has the texts alone
    raise typer.Exit(1 if failed else 0)


def _requests(flags: InferenceFlags) -> tuple[Options, list[Any]]:
    """Options and raw requests of the file or the prompts."""
    from edgellm.device_runtime.request_files.prompts import requests_of
    from edgellm.device_runtime.request_files.request_file import Options, read_file

    needs_file = flags.prompts is None and not flags.prove_count
    if flags.output_file is None and (flags.resume or needs_file):
        cause = "--resume needs" if flags.resume else "the requests of --inputFile need"
        if flags.input_file is not None or flags.resume:
            raise EdgeLLMError(f"{cause} --outputFile", hint="give the file to write")
    if flags.prompts is not None and flags.input_file is not None:
        raise EdgeLLMError("--prompt and --inputFile exclude each other", hint="give one of them")
    if flags.input_file is not None:
        return read_file(flags.input_file)
    if flags.prompts is None:
        raise EdgeLLMError(
            "there are no requests",
            hint="give --prompt TEXT (- reads standard input), or --inputFile with --outputFile",
        )
    return Options(), requests_of(flags.prompts)


def _load(
    flags: InferenceFlags,
    options: Options,
    spec: SpecOptions | None,
    defaults: GenerationDefaults,
) -> tuple[LLM, Options]:
    """The engine with the file's adapters, and the options as its tokenizer allows."""
    import msgspec

    from edgellm.device_runtime.api.llm import LLM

    llm = LLM(
        flags.engine_dir,
        verify=flags.verify,
        spec=spec,
        multimodal_engine_dir=flags.multimodal_engine_dir,
        audio_engine_dir=flags.audio_engine_dir,
        context_reuse=flags.context_reuse,
        allow_special_tokens=flags.allow_special_tokens,
    )
    llm.defaults = llm.defaults.overridden(defaults)
    for name, folder in options.available_lora_weights.items():
        llm.load_adapter(name, folder)
    if flags.prompts is not None and not llm.tokenizer.has_template:  # a base model
        options = msgspec.structs.replace(options, apply_chat_template=False)
    return llm, options


def _prove(llm: LLM, options: Options, requests: list[Any]) -> int:
    """Print the comparison of every request; return the exit status."""
    from edgellm.device_runtime.request_files.lossless_check import prove

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
    """Run the requests whose outputs `run` lacks; return the times of all of them."""
    from edgellm.device_runtime.engine.profile import Profile
    from edgellm.device_runtime.request_files.held_interrupts import HeldInterrupts
    from edgellm.device_runtime.request_files.responses import run_request

    left = _left(options, requests, run)
    total = len(run.answered) + len(left)
    if run.answered and left:
        progress = f"resuming with request {left[0].request} of {len(requests)}"
        typer.echo(f"{progress}; {len(run.answered)} are finished", err=True)
    for _ in range(warmup if left else 0):
        run_request(llm, options, requests[0], 0, Profile(), lambda *_: None)
    try:
        with (
            _progress(total, len(run.answered), hidden=stream) as advance,
            HeldInterrupts() as held,
        ):
            for answered in _run_all(llm, options, requests, run, outputs, held, stream=stream):
                run.add(answered)
                _report(answered.index.request, answered.response, outputs.source)
                advance()
    except KeyboardInterrupt:
        if run.answered:
            outputs.write(run, _times(run))
        raise
    finally:
        if run.answered and len(run.answered) < total:
            _print_resume_command(run, total)
    return _times(run)


def _left(options: Options, requests: list[Any], run: UnfinishedRun) -> list[OutputIndex]:
    """Places of the outputs that are not finished; failed ones count as finished."""
    from edgellm.device_runtime.request_files.request_file import outputs_of

    done = {answered.index for answered in run.answered}
    wanted = (outputs_of(options, raw, index) for index, raw in enumerate(requests))
    return [place for places in wanted for place in places if place not in done]


def _times(run: UnfinishedRun) -> Profile:
    from edgellm.device_runtime.engine.profile import Profile

    profile = Profile()
    for answered in run.in_order():
        profile.add(answered.profile)
    return profile


def _print_resume_command(run: UnfinishedRun, total: int) -> None:
    if run.path is None:
        return
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
) -> Iterator[FinishedOutput]:  # fmt: skip
    """Outputs that `run` lacks, as they finish, in batches of `batch_size`."""
    from edgellm.device_runtime.request_files.responses import run_requests
    from edgellm.device_runtime.request_files.resume import FinishedOutput
    from edgellm.device_runtime.request_files.tree_log import TreeLog

    left = _left(options, requests, run)
    trees = {place: TreeLog(llm.tokenizer) for place in left}
    printer = _Printer(left)

    def show(place: OutputIndex, step: Step) -> None:
        if stream:
            with held.at_once():  # a pipe may be full
                printer.add(place, step.text)
        if outputs.trees is not None:
            trees[place].add(step)

    size = min(options.batch_size, llm.batch_size)
    if size < options.batch_size:
        typer.echo(
            f"note: the engine's batch size is {size}; build it with --maxBatchSize", err=True
        )
    wanted = ((place, requests[place.request]) for place in left)
    for response, profile in run_requests(llm, options, wanted, show, size, held):
        finished = FinishedOutput(response, profile)
        yield dataclasses.replace(finished, rounds=trees.pop(finished.index).rounds)
        if stream:
            printer.end(finished.index)


class _Printer:
    """Prints texts of outputs in their order; later ones are buffered."""

    def __init__(self, places: list[OutputIndex]) -> None:
        self._texts = dict.fromkeys(places, "")  # not printed yet
        self._ended: set[OutputIndex] = set()

    def add(self, place: OutputIndex, text: str) -> None:
        self._texts[place] += text
        self._flush()

    def end(self, place: OutputIndex) -> None:
        self.add(place, "\n")
        self._ended.add(place)
        self._flush()

    def _flush(self) -> None:
        for place in list(self._texts):
            _print(self._texts[place])
            self._texts[place] = ""
            if place not in self._ended:
                return
            del self._texts[place]


def _report(index: int, response: dict[str, Any], source: Path | None) -> None:
    for line in response.get("warnings", ()):
        typer.echo(f"warning: request {index}: {line}", err=True)
    if "error" in response:
        _print_failure(index, response["error"], source)


def _print(text: str) -> None:
    """Print text; a closed pipe does not stop the run."""
    try:
        print(text, end="", flush=True)
    except OSError as error:  # such as a full disk: the output file has all outputs
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"note: outputs are not printed any more: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_failure(index: int, error: dict[str, str], source: Path | None) -> None:
    from edgellm.device_runtime.request_files.request_file import located

    hint = f" ({error['hint']})" if "hint" in error else ""
    typer.echo(f"request {index} failed: {located(source, error['message'])}{hint}", err=True)


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


def _summary(
    responses: list[dict[str, Any]], profile: Profile, output: Path | None, batch_size: int
) -> tuple[str, int]:
    """One line about the run, and the number of failed requests."""
    failed = sum("error" in response for response in responses)
    counts = f"{len(responses)} responses" + (f", {failed} failed" if failed else "")
    report = profile.as_json()
    decode_s = profile.decode_ms() / 1e3
    rate = profile.decoded_tokens() / decode_s if decode_s else 0.0
    place = "" if output is None else f"{output}: "
    line = (
        f"{place}{counts}; prefill {report['prefill']['tokens_per_second']:.0f} tokens/s, "
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
    seeds = [response["seed"] for response in responses if "seed" in response]
    if len(responses) == 1 and seeds:
        line += f"; seed {seeds[0]}"
    return line, failed


def main() -> None:
    """Entry point."""
    run_command(app)

"""`edgellm transcribe`: write down what audio files, or a microphone, say."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import App
from edgellm.core.errors import EdgeLLMError, RequestError, require_choice
from edgellm.tools.command.flags import Fast, Model, Quantize, RecipeFlags, use_model
from edgellm.tools.command.live_audio import LiveAudio, microphone, stopped_by_interrupt
from edgellm.tools.command.transcription_flags import (
    TranscriptionFlags,
    with_transcription_flags,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgellm.device_runtime.transcription.formats import Write
    from edgellm.device_runtime.transcription.options import TranscriptionOptions
    from edgellm.device_runtime.transcription.transcriber import Transcriber
    from edgellm.tools.store.prepare import Prepared

app = App()
_FORMATS = "txt", "srt", "vtt", "json"
_STDIN = "-"

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="Read this audio: WAV, FLAC, MP3, M4A, OGG or another file that FFmpeg reads; - is a "
        "pipe. A .pcm file has 16-bit mono samples at 16 kHz. Several files need --output_dir. "
        "Default: none, with --mic.",
        rich_help_panel="Input",
    ),
]
Mic = Annotated[
    bool,
    typer.Option(
        "--mic",
        help="Record the microphone instead of reading a FILE, and transcribe while it records; "
        "Ctrl-C ends the recording.",
        rich_help_panel="Input",
    ),
]
Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Transcribe the pipe - while it is written: raw 16-bit mono samples at 16 kHz.",
        rich_help_panel="Input",
    ),
]
Partial = Annotated[
    bool,
    typer.Option(
        "--partial/--no_partial",
        help="Print words of --live and --mic as soon as two decodings agree on them. Without it, "
        "each line is computed once, at its end. Texts with times have whole lines.",
        rich_help_panel="Output",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Write plain text (txt), subtitles (srt, vtt) or all facts (json).",
        rich_help_panel="Output",
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--output_dir",
        help="Write a file for each FILE into this folder, named after it and the format. "
        "Default: standard output.",
        rich_help_panel="Output",
    ),
]


Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        help="Speculate with this smaller speech model, which has the same tokens, or with ngram. "
        "The text stays the same. Default: no draft.",
        rich_help_panel="Speculation",
    ),
]


@app.command(
    name="transcribe",
    common=("files", "model", "--language", "--timestamps", "--format"),
    examples=(
        "edgellm transcribe talk.wav openai/whisper-tiny",
        "edgellm transcribe film.mp4 openai/whisper-small --task translate --format srt",
    ),
)
@with_transcription_flags
def transcribe(
    *,
    files: Files = None,
    model: Model,
    transcription_flags: TranscriptionFlags,
    output_format: Format = "txt",
    output_dir: OutputDir = None,
    mic: Mic = False,
    live: Live = False,
    partial: Partial = True,
    draft: Draft = "",
    quantize: Quantize = None,
    fast: Fast = False,
) -> None:
    """Write down what audio files say, with a speech model such as Whisper.

    The transcript goes to standard output, segment by segment.
    """
    require_choice("--format", output_format, _FORMATS)
    given = files or []
    _require_sources(given, output_dir, mic=mic, live=live)
    targets = _targets(given, output_dir, output_format) if output_dir is not None else []
    from edgellm.device_runtime.transcription import formats, speech_detector
    from edgellm.device_runtime.transcription.options import NO_TIMES
    from edgellm.device_runtime.transcription.transcriber import Transcriber

    is_live = mic or live
    flags = replace(transcription_flags, vad=transcription_flags.vad or is_live)
    options = flags.read(needs_times=output_format != "txt")
    if options.vad:
        speech_detector.network_file()  # before the model is made, which may take minutes
    write = formats.FORMATS[output_format]
    if output_format == "txt" and (is_live or options.timestamps != NO_TIMES):
        write = formats.lines if options.timestamps == NO_TIMES else formats.timed_lines
    samples = _samples(given[0]) if not is_live and not targets else None

    recipe = RecipeFlags(quantize=quantize, fast=fast)
    drafts: Path | str = draft
    if draft not in ("", "ngram"):
        drafts = use_model(app, draft, recipe, lambda found: found.engine)

    def start(found: Prepared) -> Transcriber:
        opened = Transcriber(found.engine, drafts)
        opened.require(options)
        return opened

    transcriber = use_model(app, model, recipe, start)
    if targets:
        _transcribe_files(transcriber, targets, options, write)
        return
    with microphone() if mic else nullcontext(LiveAudio(sys.stdin.buffer)) as audio:
        if samples is not None:
            _print(write(transcriber.transcribe(samples, options)))
            return
        with stopped_by_interrupt(audio):
            if partial and write is formats.lines:
                _print_words(transcriber, audio, options)
            else:
                _print(write(transcriber.transcribe_stream(audio, options)))


def _print_words(transcriber: Transcriber, audio: LiveAudio, options: TranscriptionOptions) -> None:
    """Print a line for each segment, whose words come as soon as they are final."""
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        typer.echo(text[len(shown) :], nl=False)
        shown = text

    for segment in transcriber.transcribe_stream(audio, options, on_words=show):
        if text := segment.text.strip():
            show(text)
            typer.echo()
        shown = ""


def _print(pieces: Iterable[str]) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)


def _require_sources(
    files: Sequence[str], output_dir: Path | None, *, mic: bool, live: bool
) -> None:
    """Reject sources that exclude each other; raises `EdgeLLMError`."""
    flag = "--mic" if mic else "--live"
    if mic and (files or live):
        other = files[0] if files else "--live"
        raise EdgeLLMError(f"--mic records, and reads no {other}", hint="give one of the two")
    if live and files != [_STDIN]:
        raise EdgeLLMError(
            "--live transcribes a pipe",
            hint="arecord -t raw ... | edgellm transcribe - MODEL --live",
        )
    if (mic or live) and output_dir is not None:
        raise EdgeLLMError(
            f"{flag} has no file for --output_dir", hint="redirect the output: > FILE"
        )
    if not files and not mic:
        raise EdgeLLMError(
            "an audio file or the model is missing",
            hint="give FILE and MODEL, or --mic and MODEL",
        )
    if len(files) > 1 and output_dir is None:
        raise EdgeLLMError(
            f"{len(files)} files need a folder for their transcripts", hint="give --output_dir"
        )


def _targets(files: Sequence[str], folder: Path, kind: str) -> list[tuple[str, Path]]:
    """Files with those of their transcripts.

    Raises:
        EdgeLLMError: a file is missing, two have one transcript, or it cannot be written.
    """
    from edgellm.core.artifact import check_output_file

    found: dict[Path, str] = {}
    for file in files:
        if not Path(file).is_file():
            raise EdgeLLMError(f"{file} is no file", hint="give audio files and then the model")
        target = folder / f"{Path(file).stem}.{kind}"
        if target in found:
            raise EdgeLLMError(
                f"{found[target]} and {file} have the same transcript, {target}",
                hint="rename one of them, or give another --output_dir",
            )
        found[target] = file
    folder.mkdir(parents=True, exist_ok=True)
    for target, file in found.items():
        check_output_file(target, Path(file))
    return [(file, target) for target, file in found.items()]


def _transcribe_files(
    transcriber: Transcriber,
    targets: Sequence[tuple[str, Path]],
    options: TranscriptionOptions,
    write: Write,
) -> None:
    """Transcribe files in their order, as many at once as the engine's batch has windows.

    Raises:
        EdgeLLMError: at the end, if some failed.
    """
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise KeyboardInterrupt

    def content(file: str) -> str:
        found = transcriber.transcribe(_samples(file), options)
        found.before_pass = check
        return "".join(write(found))

    with ThreadPoolExecutor(transcriber.num_windows) as threads:
        running = [threads.submit(content, file) for file, _ in targets]
        try:
            pairs = zip(targets, running, strict=True)
            num_failed = sum(not _is_written(target, each) for (_, target), each in pairs)
        finally:  # an interrupt ends the others before their next pass
            is_over.set()
            threads.shutdown(wait=False, cancel_futures=True)
    if num_failed:
        raise EdgeLLMError(
            f"{num_failed} of {len(targets)} files were not transcribed",
            hint="the lines above say why",
        )


def _is_written(target: Path, content: Future[str]) -> bool:
    """Write a transcript when it is computed; print its error if it is not."""
    from edgellm.core.artifact import replace_file

    try:
        replace_file(target, content.result())
    except RequestError as error:
        typer.echo(f"error: {error}", err=True)
        return False
    typer.echo(str(target))
    return True


def _samples(file: str) -> NDArray[np.float32]:
    """The audio of a file, or of standard input."""
    from edgellm.multimodal.audio import decode_audio, read_audio

    if file != _STDIN:
        return read_audio(Path(file))
    return decode_audio(io.BytesIO(sys.stdin.buffer.read()), "standard input")

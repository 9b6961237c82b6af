"""`edgellm transcribe`: write down what an audio file says."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import App
from edgellm.core.errors import require_choice
from edgellm.tools.command.flags import Fast, Model, Quantize, RecipeFlags, use_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgellm.device_runtime.transcription.transcriber import Transcription
    from edgellm.tools.store.prepare import Prepared

app = App()
_FORMATS, _TASKS = ("txt", "srt", "vtt", "json"), ("transcribe", "translate")

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Read this audio: WAV, FLAC, MP3, M4A, OGG or another file that FFmpeg reads. A .pcm "
        "file, or a pipe given as -, has 16-bit mono samples at 16 kHz.",
        rich_help_panel="Input",
    ),
]
Language = Annotated[
    str | None,
    typer.Option(
        "--language",
        help="Name the language of the speech by its code, such as en or de. Default: the model "
        "detects it in the first 30 s.",
        rich_help_panel="Input",
    ),
]
Task = Annotated[
    str,
    typer.Option(
        "--task",
        help="Write the words that are spoken (transcribe) or their English translation "
        "(translate).",
        rich_help_panel="Output",
    ),
]
Timestamps = Annotated[
    bool,
    typer.Option(
        "--timestamps",
        help="Write a line for each segment, with its times, which srt, vtt and json always have.",
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


@app.command(
    name="transcribe",
    common=("file", "model", "--language", "--timestamps", "--format"),
    examples=(
        "edgellm transcribe talk.wav openai/whisper-tiny",
        "edgellm transcribe film.mp4 openai/whisper-small --task translate --format srt",
    ),
)
def transcribe(
    file: File,
    model: Model,
    language: Language = None,
    task: Task = "transcribe",
    timestamps: Timestamps = False,
    output_format: Format = "txt",
    quantize: Quantize = None,
    fast: Fast = False,
) -> None:
    """Write down what an audio file says, with a speech model such as Whisper.

    The transcript goes to standard output, segment by segment.
    """
    require_choice("--task", task, _TASKS)
    require_choice("--format", output_format, _FORMATS)
    from edgellm.device_runtime.transcription.formats import FORMATS, plain_text, timed_lines

    samples = _samples(file)  # before the model is made, which may take minutes
    is_timed = timestamps or output_format != "txt"

    def start(found: Prepared) -> Transcription:
        from edgellm.device_runtime.transcription.options import TranscriptionOptions
        from edgellm.device_runtime.transcription.transcriber import Transcriber

        times = "segment" if is_timed else "none"
        options = TranscriptionOptions(language=language, task=task, timestamps=times)
        return Transcriber(found.engine).transcribe(samples, options)

    transcript = use_model(app, model, RecipeFlags(quantize=quantize, fast=fast), start)
    write = FORMATS.get(output_format, plain_text)
    if output_format == "txt" and timestamps:
        write = timed_lines
    for piece in write(transcript):
        typer.echo(piece, nl=False)


def _samples(file: Path) -> NDArray[np.float32]:
    """The audio of a file, or of standard input."""
    from edgellm.multimodal.audio import decode_audio, read_audio

    if str(file) != "-":
        return read_audio(file)
    return decode_audio(io.BytesIO(sys.stdin.buffer.read()), "standard input")

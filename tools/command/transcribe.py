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
from edgellm.tools.command.transcription_flags import (
    TranscriptionFlags,
    with_transcription_flags,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgellm.device_runtime.transcription.transcriber import Transcription
    from edgellm.tools.store.prepare import Prepared

app = App()
_FORMATS = "txt", "srt", "vtt", "json"

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Read this audio: WAV, FLAC, MP3, M4A, OGG or another file that FFmpeg reads. A .pcm "
        "file, or a pipe given as -, has 16-bit mono samples at 16 kHz.",
        rich_help_panel="Input",
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
@with_transcription_flags
def transcribe(
    file: File,
    model: Model,
    transcription_flags: TranscriptionFlags,
    output_format: Format = "txt",
    quantize: Quantize = None,
    fast: Fast = False,
) -> None:
    """Write down what an audio file says, with a speech model such as Whisper.

    The transcript goes to standard output, segment by segment.
    """
    require_choice("--format", output_format, _FORMATS)
    from edgellm.device_runtime.transcription.formats import FORMATS, plain_text, timed_lines

    options = transcription_flags.read(needs_times=output_format != "txt")
    samples = _samples(file)  # before the model is made, which may take minutes

    def start(found: Prepared) -> Transcription:
        from edgellm.device_runtime.transcription.transcriber import Transcriber

        return Transcriber(found.engine).transcribe(samples, options)

    transcript = use_model(app, model, RecipeFlags(quantize=quantize, fast=fast), start)
    write = FORMATS.get(output_format, plain_text)
    if output_format == "txt" and transcription_flags.timestamps:
        write = timed_lines
    for piece in write(transcript):
        typer.echo(piece, nl=False)


def _samples(file: Path) -> NDArray[np.float32]:
    """The audio of a file, or of standard input."""
    from edgellm.multimodal.audio import decode_audio, read_audio

    if str(file) != "-":
        return read_audio(file)
    return decode_audio(io.BytesIO(sys.stdin.buffer.read()), "standard input")

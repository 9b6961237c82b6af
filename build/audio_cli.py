"""`audio_build`: the bundle of an audio encoder to an engine, on the device that will run it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from edgellm.build.encoder_cli import EncoderFlags, build_encoder, with_encoder_flags
from edgellm.build.flags import EngineDir, OnnxDir
from edgellm.core.cli import App, run_command
from edgellm.core.commands.entry_points import NOTHING_HALF_WRITTEN

app = App()
app.kept = NOTHING_HALF_WRITTEN
MaxAudioSeconds = Annotated[
    int,
    typer.Option(
        "--maxAudioSeconds",
        min=1,
        max=3600,
        help="Set the longest audio clip. Default: {default} seconds.",
        rich_help_panel="Limits",
    ),
]


@app.command(
    common=("--onnxDir", "--engineDir", "--maxAudioSeconds", "--backend", "--quantize"),
    examples=(
        "audio_build --onnxDir audio_bundle --engineDir audio_engine",
        "audio_build --onnxDir audio_bundle --engineDir audio_engine "
        "--maxAudioSeconds 600 --quantize int8",
    ),
)
@with_encoder_flags
def audio_build(
    *,
    onnx_dir: OnnxDir,
    engine_dir: EngineDir,
    max_audio_s: MaxAudioSeconds = 120,
    encoder_flags: EncoderFlags,
) -> None:
    """Build an audio engine for this machine from the bundle of an encoder."""
    from edgellm.build.artifact_kinds import AUDIO
    from edgellm.build.plan import audio_plan

    build_encoder(AUDIO, onnx_dir, engine_dir, encoder_flags, partial(audio_plan, max_audio_s))


def main() -> None:
    """Entry point."""
    run_command(app)

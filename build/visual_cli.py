"""`visual_build`: the bundle of a visual encoder to an engine, on the device that will run it."""

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
MinImageTokens = Annotated[
    int,
    typer.Option(
        "--minImageTokens",
        min=1,
        help="Set the fewest tokens of an image. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
MaxImageTokens = Annotated[
    int,
    typer.Option(
        "--maxImageTokens",
        min=1,
        help="Set the most tokens of all images of a request. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
MaxPerImage = Annotated[
    int,
    typer.Option(
        "--maxImageTokensPerImage",
        min=1,
        help="Scale larger images down to this size. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]


@app.command(
    common=("--onnxDir", "--engineDir", "--maxImageTokens", "--backend", "--quantize"),
    examples=(
        "visual_build --onnxDir visual_bundle --engineDir visual_engine",
        "visual_build --onnxDir visual_bundle --engineDir visual_engine "
        "--maxImageTokens 2048 --quantize int8",
    ),
)
@with_encoder_flags
def visual_build(
    *,
    onnx_dir: OnnxDir,
    engine_dir: EngineDir,
    min_image_tokens: MinImageTokens = 4,
    max_image_tokens: MaxImageTokens = 1024,
    max_per_image: MaxPerImage = 512,
    encoder_flags: EncoderFlags,
) -> None:
    """Build a visual engine for this machine from the bundle of an encoder."""
    from edgellm.build.artifact_kinds import VISUAL
    from edgellm.build.plan import image_plan

    limited = partial(image_plan, min_image_tokens, max_image_tokens, max_per_image)
    build_encoder(VISUAL, onnx_dir, engine_dir, encoder_flags, limited)


def main() -> None:
    """Entry point."""
    run_command(app)

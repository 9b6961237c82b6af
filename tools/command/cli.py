"""`edgellm`: run, serve and keep models; also all other commands, as subcommands."""

from __future__ import annotations

from collections.abc import Iterator

from edgellm.core.cli import App, Subcommand, run_command

_OWN = {
    "Use a model": {
        "run": ("run", "Chat with a model, or answer one prompt."),
        "serve": ("serve", "Serve a model over HTTP."),
        "bench": ("bench", "Measure the speed of a model."),
        "transcribe": ("transcribe", "Write down what an audio file says."),
    },
    "Stored models": {
        "pull": ("models", "Download a model and build its engine."),
        "list": ("models", "List the stored models."),
        "show": ("models", "Show one stored model."),
        "rm": ("models", "Delete stored models."),
    },
}
_ALIASES = {
    "Single steps": {
        "export": ("edgellm.export.cli", "Export a checkpoint to a bundle."),
        "quantize": ("edgellm.quantize.cli", "Quantize a checkpoint or a draft."),
        "build": ("edgellm.build.cli", "Build an engine from a bundle."),
        "visual-build": ("edgellm.build.visual_cli", "Build a visual engine from a bundle."),
        "audio-build": ("edgellm.build.audio_cli", "Build an audio engine from a bundle."),
        "infer": ("edgellm.device_runtime.cli", "Run a file of requests."),
    },
    "Tools": {
        "doctor": ("edgellm.tools.doctor.cli", "Check this machine."),
        "inspect": ("edgellm.tools.inspection.cli", "Describe any folder of a model."),
        "transfer": ("edgellm.tools.transfer.cli", "Copy a folder to a device."),
        "eval": ("edgellm.tools.evaluate.cli", "Measure quality on benchmarks."),
        "train-draft": ("edgellm.tools.train_draft.cli", "Train a draft for a model."),
    },
}
_EXAMPLES = {
    "run": "edgellm run HuggingFaceTB/SmolLM2-135M-Instruct",
    "serve": "edgellm serve model.gguf --port 8000",
}


def _subcommands() -> Iterator[tuple[str, Subcommand]]:
    for panels, package in ((_OWN, "edgellm.tools.command."), (_ALIASES, "")):
        for panel, commands in panels.items():
            for name, (module, about) in commands.items():
                yield (
                    name,
                    Subcommand(
                        module=package + module,
                        help=about,
                        panel=panel,
                        example=_EXAMPLES.get(name, ""),
                        is_alias=panels is _ALIASES,
                    ),
                )


app = App(
    no_args_is_help=True,
    subcommands=dict(_subcommands()),
)


@app.callback()
def edgellm() -> None:
    """Run language models on this device, with lossless speculative decoding.

    MODEL is a checkpoint folder, a .gguf file, a hub id such as owner/model or
    owner/model:Q4_K_M, a bundle, an engine, or a name that `edgellm list` shows.
    """


def main() -> None:
    """Entry point."""
    run_command(app)

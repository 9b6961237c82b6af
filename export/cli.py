"""`edgellm-export`: checkpoint to ONNX bundle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from edgellm.command import run_command
from edgellm.contract import EdgeLLMError

app = typer.Typer(
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)


@app.callback()
def commands() -> None:
    """Export Hugging Face checkpoints to portable ONNX bundles (no torch, no GPU needed)."""


@app.command()
def llm(
    model_dir: Annotated[
        str, typer.Option("--model_dir", help="HF folder, .gguf file, or a cached hub id.")
    ],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Folder for the bundle.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Activations: fp16 or fp32.")] = "fp16",
    num_layers: Annotated[
        int | None, typer.Option("--num_layers", help="Keep the first N layers (debugging).")
    ] = None,
    ignore_config_keys: Annotated[
        str, typer.Option("--ignore_config_keys", help="Config keys known not to matter, a,b,c.")
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with transformers (needs edgellm[host]).")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Export a language model."""
    del debug  # read by run_command
    from edgellm.export.bundle import ExportOptions, export_llm
    from edgellm.export.progress import byte_progress, spinner
    from edgellm.export.source import open_checkpoint

    if dtype not in ("fp16", "fp32"):
        raise EdgeLLMError(f"--dtype {dtype}: give fp16 or fp32")
    if verify:
        from edgellm.export.verify import require_host

        require_host()
    start = time.perf_counter()
    keys = tuple(key for key in ignore_config_keys.split(",") if key)
    options = ExportOptions(dtype, num_layers, keys)
    checkpoint = open_checkpoint(model_dir)
    with byte_progress("exporting") as progress:
        manifest = export_llm(checkpoint, output_dir, options, progress)
    size = sum(record.num_bytes for record in manifest.files.values())
    typer.echo(
        f"{output_dir}: {manifest.decoder.model_type}, "
        f"{manifest.decoder.num_parameters / 1e6:.1f} M parameters, {dtype}, "
        f"quantization {manifest.quantization}, {size / 1e6:.1f} MB "
        f"in {time.perf_counter() - start:.1f} s"
    )
    if verify:
        from edgellm.export.verify import verify_bundle

        with spinner("comparing with transformers"):
            verdict = verify_bundle(checkpoint, output_dir, manifest)
        typer.echo(verdict)


def main() -> None:
    """Entry point."""
    run_command(app)

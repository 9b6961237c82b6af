"""`edgellm-export`: checkpoint to ONNX bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.core.cli import NOTHING_HALF_WRITTEN, App, Overwrite, numbers, run_command
from edgellm.core.commands.output_folder import OutputKey, finished_line, is_finished
from edgellm.core.commands.progress import share_of, shown
from edgellm.core.errors import EdgeLLMError, require_choice
from edgellm.core.manifest import LLM_BUNDLE, Bundle, load_bundle
from edgellm.core.model_spec import DraftSpec

if TYPE_CHECKING:
    from edgellm.export.checkpoints.checkpoint import Checkpoint

app = App(no_args_is_help=True)
app.kept = NOTHING_HALF_WRITTEN

# Names of other programs for the types of activations.
_DTYPES = {"float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _read_dtype(name: str) -> str:
    """The type of activations, from its name here or in other programs.

    ONNX Runtime's CPU provider has no bfloat16 kernel, not even of MatMul or Add, so no portable
    graph can compute in it.
    """
    dtype = _DTYPES.get(name.lower(), name.lower())
    if dtype in ("bf16", "bfloat16"):
        raise EdgeLLMError(
            f"--dtype {name}: ONNX Runtime computes no bf16 on CPUs, only fp16 or fp32",
            hint="leave it out: weights of a bf16 checkpoint keep their bits, and activations are "
            "fp16; if outputs overflow, give --dtype fp32, which has the range of bf16",
        )
    require_choice("--dtype", dtype, ("fp16", "fp32"))
    return dtype


DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        callback=_read_dtype,
        help="Choose the type of activations: fp16 (float16, half) or fp32 (float32).",
        rich_help_panel="Model",
    ),
]
Pooling = Annotated[
    str,
    typer.Option(
        "--pooling",
        help="Export an embedding model, pooled by the last token (last), the first (cls) or the "
        "mean (mean). Default: that of modules.json or the GGUF file, else a model that "
        "generates.",
        rich_help_panel="Model",
    ),
]
Reranker = Annotated[
    bool,
    typer.Option(
        "--reranker",
        help="Export a reranker like Qwen3-Reranker, which scores by its tokens yes and no.",
        rich_help_panel="Model",
    ),
]
_INPUTS = {"draft": "--draft_model_dir", "base": "--base_model_dir", "lora": "--lora_dir"}
_UNCOMPARED = "outputs were not compared with transformers (--verify does)"
_POOLED = {"last": "the last token", "mean": "the mean of all tokens", "cls": "the first token"}
Quantization = Annotated[
    str,
    typer.Option(
        "--quantization",
        help="Round the weights of linear layers: fp8, int8 or none.",
        rich_help_panel="Model",
    ),
]
IgnoredKeys = Annotated[
    str,
    typer.Option(
        "--ignore_config_keys",
        help="Ignore these unknown config keys, as a,b,c. Default: none, they are an error.",
        rich_help_panel="Debug",
    ),
]

LoraDir = Annotated[
    str | None,
    typer.Option(
        "--lora_dir",
        help="Merge the LoRA adapter of this PEFT folder into the weights. Default: no adapter.",
        rich_help_panel="Model",
    ),
]
ModelDir = Annotated[
    str,
    typer.Option(
        "--model_dir",
        help="Read this model: a Hugging Face folder, a .gguf file, or a cached hub id.",
        rich_help_panel="Model",
    ),
]
OutputDir = Annotated[
    Path,
    typer.Option("--output_dir", help="Write the bundle to this folder.", rich_help_panel="Output"),
]
NumLayers = Annotated[
    int | None,
    typer.Option(
        "--num_layers",
        help="Export the first layers only, this many of them. Default: all layers.",
        rich_help_panel="Debug",
    ),
]
IsEagleBase = Annotated[
    bool,
    typer.Option(
        "--is_eagle_base",
        help="Output the hidden states that an EAGLE-3 draft reads.",
        rich_help_panel="Speculation",
    ),
]
HiddenTaps = Annotated[
    str,
    typer.Option(
        "--hidden_taps",
        help="Output the inputs of these layers, such as 2,15,27. Default: layers 2, n/2 and "
        "n-3 with --is_eagle_base.",
        rich_help_panel="Speculation",
    ),
]
BaseDraftDir = Annotated[
    str | None,
    typer.Option(
        "--draft_model_dir",
        help="Output the hidden states that this draft reads. Default: no draft.",
        rich_help_panel="Speculation",
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Compare the bundle's logits with those of transformers; this needs edgellm[host].",
        rich_help_panel="Debug",
    ),
]
DraftDir = Annotated[
    str,
    typer.Option(
        "--draft_model_dir",
        help="Read this draft: EAGLE, Medusa heads, or a model with mtp.*, as a Hugging Face "
        "folder, .gguf file or hub id.",
        rich_help_panel="Model",
    ),
]
BaseModelDir = Annotated[
    str,
    typer.Option(
        "--base_model_dir",
        help="Name the model that the draft is for: a Hugging Face folder, a .gguf file, or "
        "a cached hub id.",
        rich_help_panel="Model",
    ),
]
DraftVocabSize = Annotated[
    int | None,
    typer.Option(
        "--draft_vocab_size",
        help="Let an MTP layer predict this many of the commonest tokens only. Default: the "
        "whole vocabulary.",
        rich_help_panel="Speculation",
    ),
]
DraftHeadRank = Annotated[
    int | None,
    typer.Option(
        "--draft_head_rank",
        min=1,
        help="Let a head of this rank, the SVD of the draft's, retrieve candidates, which the "
        "draft's head then scores. Default: the checkpoint's.",
        rich_help_panel="Speculation",
    ),
]
DraftHeadCandidates = Annotated[
    int | None,
    typer.Option(
        "--draft_head_candidates",
        min=1,
        help="Retrieve this many candidates with a low-rank head. Default: the checkpoint's, or "
        "128 tokens.",
        rich_help_panel="Speculation",
    ),
]
Eagle3Dir = Annotated[
    str,
    typer.Option(
        "--draft_model_dir",
        help="Read this EAGLE-3 draft: a Hugging Face folder or a cached hub id.",
        rich_help_panel="Model",
    ),
]
CheckpointDir = Annotated[
    Path,
    typer.Option(
        "--output_dir", help="Write the checkpoint to this folder.", rich_help_panel="Output"
    ),
]
ForeignEngine = Annotated[
    str,
    typer.Option(
        "--for",
        help="Name the engine that will read the checkpoint: vllm, sglang or tensorrt-llm.",
        rich_help_panel="Model",
    ),
]
AudioModelDir = Annotated[
    str,
    typer.Option(
        "--model_dir",
        help="Read this model that takes audio: a Hugging Face folder, or a cached hub id.",
        rich_help_panel="Model",
    ),
]
VisionModelDir = Annotated[
    str,
    typer.Option(
        "--model_dir",
        help="Read this vision-language model: a Hugging Face folder, a .gguf file with its "
        "mmproj file next to it, or a cached hub id.",
        rich_help_panel="Model",
    ),
]


Mmproj = Annotated[
    str | None,
    typer.Option(
        "--mmproj",
        help="Read the visual encoder of a .gguf model from this file, or none. Default: the "
        "mmproj file next to the model, if it fits.",
        rich_help_panel="Model",
    ),
]


@app.callback()
def commands() -> None:
    """Export Hugging Face checkpoints to portable ONNX bundles (no torch, no GPU needed)."""


@app.command(
    common=("--model_dir", "--output_dir", "--dtype", "--draft_model_dir", "--verify"),
    examples=(
        "edgellm-export llm --model_dir Qwen/Qwen3-0.6B --output_dir bundle",
        "edgellm-export llm --model_dir model --draft_model_dir draft --output_dir bundle",
    ),
)
def llm(
    model_dir: ModelDir,
    output_dir: OutputDir,
    dtype: DType = "fp16",
    num_layers: NumLayers = None,
    ignore_config_keys: IgnoredKeys = "",
    is_eagle_base: IsEagleBase = False,
    hidden_taps: HiddenTaps = "",
    draft_model_dir: BaseDraftDir = None,
    lora_dir: LoraDir = None,
    mmproj: Mmproj = None,
    pooling: Pooling = "",
    reranker: Reranker = False,
    verify: Verify = False,
    overwrite: Overwrite = False,
) -> None:
    """Export a language model."""
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint

    verdict: list[str] = []
    if verify:
        from edgellm.export.pipeline.verify import require_host

        require_host()
    start = time.perf_counter()
    options = ExportOptions(
        dtype=dtype,
        num_layers=num_layers,
        ignore_config_keys=_split(ignore_config_keys),
        is_eagle_base=is_eagle_base,
        hidden_taps=numbers("--hidden_taps", hidden_taps),
        draft_model_dir=draft_model_dir,
        lora_dir=lora_dir,
        pooling=pooling,
        reranker=reranker,
    )
    inputs = {"model_dir": model_dir, "draft": draft_model_dir, "lora": lora_dir, "mmproj": mmproj}
    key = _key("llm", options, **inputs)
    finished = is_finished(output_dir, key, overwrite=overwrite)
    if finished:
        typer.echo(finished_line(output_dir))
        if not verify:
            return
        checkpoint = open_checkpoint(model_dir, mmproj=mmproj or "")
        manifest = load_bundle(output_dir, LLM_BUNDLE)
        _compare(checkpoint, verdict, output_dir, manifest)
    else:
        with _writing() as progress:
            checkpoint = open_checkpoint(model_dir, mmproj=mmproj or "")
            check = partial(_compare, checkpoint, verdict) if verify else None
            manifest = export_llm(checkpoint, output_dir, options, progress, check, key.facts())
        _print_export(output_dir, manifest, dtype, start)
    for line in verdict:
        typer.echo(line)
    is_comparable = manifest.decoder.is_causal and manifest.decoder.audio is None
    uncompared = _UNCOMPARED if is_comparable else _UNCOMPARED.partition(" (")[0]
    proved = "outputs equal those of transformers" if verdict else uncompared
    _say_verdict(manifest, start, proved)


def _print_export(folder: Path, manifest: Bundle, dtype: str, start: float) -> None:
    """Print what was exported, and what a user should know of the checkpoint."""
    parameters = manifest.decoder.num_parameters / 1e6
    typer.echo(
        f"{folder}: {manifest.decoder.model_type}, {parameters:.1f} M parameters, "
        f"{dtype}, {_cost(manifest, start)}"
    )
    _say_contradiction(manifest)
    _say_taps(manifest)
    _say_endless(manifest)
    _say_dropped(manifest)


def _compare(checkpoint: Checkpoint, verdict: list[str], folder: Path, manifest: Bundle) -> None:
    """Append the result of `--verify` for an unpublished bundle."""
    from edgellm.export.pipeline.verify import verify_bundle

    if sys.stderr.isatty():
        typer.echo("comparing with transformers", err=True)
    verdict.append(verify_bundle(checkpoint, folder, manifest))


@app.command(
    common=("--draft_model_dir", "--base_model_dir", "--output_dir", "--dtype"),
    examples=(
        "edgellm-export draft --draft_model_dir draft --base_model_dir model "
        "--output_dir draft_bundle",
        "edgellm-export draft --draft_model_dir model --base_model_dir model "
        "--output_dir draft_bundle --draft_vocab_size 32768",
    ),
)
def draft(
    draft_model_dir: DraftDir,
    base_model_dir: BaseModelDir,
    output_dir: OutputDir,
    dtype: DType = "fp16",
    ignore_config_keys: IgnoredKeys = "",
    draft_vocab_size: DraftVocabSize = None,
    draft_head_rank: DraftHeadRank = None,
    draft_head_candidates: DraftHeadCandidates = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a draft, heads or a layer (mtp.*) for a base exported with --draft_model_dir."""
    from edgellm.export.pipeline.draft import DraftOptions, HeadOptions, export_draft
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft

    start = time.perf_counter()
    head = HeadOptions(
        vocab_size=draft_vocab_size, rank=draft_head_rank, num_candidates=draft_head_candidates
    )
    options = DraftOptions(dtype, _split(ignore_config_keys), head)
    settings = {
        "dtype": dtype,
        "ignore_config_keys": options.ignore_config_keys,
        "draft_vocab_size": draft_vocab_size,
        "draft_head_rank": draft_head_rank,
        "draft_head_candidates": draft_head_candidates,
    }
    key = _key("draft", settings, draft=draft_model_dir, base=base_model_dir)
    if is_finished(output_dir, key, overwrite=overwrite):
        typer.echo(finished_line(output_dir))
        return
    with _writing() as progress:
        checkpoint = open_draft(draft_model_dir)
        base = open_checkpoint(base_model_dir, tokenizer=False)
        manifest = export_draft(checkpoint, base, output_dir, options, progress, key.facts())
    spec = manifest.draft
    typer.echo(
        f"{output_dir}: {spec.method} draft ({manifest.provenance['exporter']}), "
        f"{spec.decoder.num_parameters / 1e6:.1f} M parameters, {_predicts(spec)}, {dtype}, "
        f"{_cost(manifest, start)}"
    )
    _say_contradiction(manifest)
    taps = ", ".join(map(str, spec.hidden_taps))
    typer.echo(f"hidden taps {taps} ({manifest.provenance['hidden_taps']})")
    _say_verdict(
        manifest, start, "llm_inference --prove compares outputs with and without it", "the draft"
    )


@app.command(
    common=("--draft_model_dir", "--base_model_dir", "--output_dir", "--for"),
    examples=(
        "edgellm-export checkpoint --draft_model_dir draft --base_model_dir model "
        "--output_dir out --for vllm",
        "edgellm-export checkpoint --draft_model_dir draft --base_model_dir model "
        "--output_dir out --for sglang",
    ),
)
def checkpoint(
    draft_model_dir: Eagle3Dir,
    base_model_dir: BaseModelDir,
    output_dir: CheckpointDir,
    engine: ForeignEngine,
    ignore_config_keys: IgnoredKeys = "",
    overwrite: Overwrite = False,
) -> None:
    """Convert an EAGLE-3 draft of any layout for another engine."""
    from edgellm.export.pipeline.eagle3_checkpoint import command_line, find_engine, hand_over
    from edgellm.export.pipeline.open_checkpoint import open_draft

    find_engine(engine)
    ignored = _split(ignore_config_keys)
    settings = {"for": engine, "ignore_config_keys": ignored}
    key = _key("checkpoint", settings, draft=draft_model_dir, base=base_model_dir)
    if is_finished(output_dir, key, overwrite=overwrite):
        command = command_line(engine, base_model_dir, output_dir)
        typer.echo(f"{finished_line(output_dir)}\n{command}")
        return
    command = hand_over(
        open_draft(draft_model_dir), base_model_dir, engine, output_dir, ignored, key.facts()
    )
    typer.echo(f"{output_dir}: for {engine}\n{command}")


@app.command(
    common=("--model_dir", "--output_dir", "--dtype", "--quantization"),
    examples=(
        "edgellm-export visual --model_dir model --output_dir visual_bundle",
        "edgellm-export visual --model_dir model --output_dir visual_bundle --quantization fp8",
    ),
)
def visual(
    model_dir: VisionModelDir,
    output_dir: OutputDir,
    dtype: DType = "fp16",
    quantization: Quantization = "none",
    ignore_config_keys: IgnoredKeys = "",
    mmproj: Mmproj = None,
    overwrite: Overwrite = False,
) -> None:
    """Export the visual encoder of a vision-language model."""
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint
    from edgellm.export.pipeline.visual import VisualOptions, export_visual

    require_choice("--quantization", quantization, ("none", "fp8", "int8"))
    start = time.perf_counter()
    options = VisualOptions(dtype, _split(ignore_config_keys), quantization)
    key = _key("visual", options, model_dir=model_dir, mmproj=mmproj)
    if is_finished(output_dir, key, overwrite=overwrite):
        typer.echo(finished_line(output_dir))
        return
    with _writing() as progress:
        checkpoint = open_checkpoint(model_dir, tokenizer=False, mmproj=mmproj or "")
        manifest = export_visual(checkpoint, output_dir, options, progress, key.facts())
    _say_encoder(manifest, output_dir, start)


@app.command(
    common=("--model_dir", "--output_dir", "--dtype", "--quantization"),
    examples=(
        "edgellm-export audio --model_dir model --output_dir audio_bundle",
        "edgellm-export audio --model_dir model --output_dir audio_bundle --quantization int8",
    ),
)
def audio(
    model_dir: AudioModelDir,
    output_dir: OutputDir,
    dtype: DType = "fp16",
    quantization: Quantization = "none",
    ignore_config_keys: IgnoredKeys = "",
    overwrite: Overwrite = False,
) -> None:
    """Export the audio encoder of a chat model."""
    from edgellm.export.pipeline.audio import export_audio
    from edgellm.export.pipeline.encoder import EncoderOptions
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint

    require_choice("--quantization", quantization, ("none", "fp8", "int8"))
    start = time.perf_counter()
    options = EncoderOptions(dtype, _split(ignore_config_keys), quantization)
    key = _key("audio", options, model_dir=model_dir)
    if is_finished(output_dir, key, overwrite=overwrite):
        typer.echo(finished_line(output_dir))
        return
    with _writing() as progress:
        checkpoint = open_checkpoint(model_dir, tokenizer=False)
        manifest = export_audio(checkpoint, output_dir, options, progress, key.facts())
    _say_encoder(manifest, output_dir, start)


@contextlib.contextmanager
def _writing() -> Iterator[Callable[[int, int], None]]:
    """Show the bytes that were written of all."""
    with shown() as report:
        report("reading the model")
        yield lambda done, total: report(share_of("writing weights", done, total))


def _key(subcommand: str, options: Any, **inputs: str | None) -> OutputKey:
    """The key of an output: the options without the paths of the inputs, and what those hold."""
    from edgellm.export.pipeline.open_checkpoint import find_path

    given = options if isinstance(options, Mapping) else dataclasses.asdict(options)
    if inputs.get("mmproj") == "none":  # no path
        given = {**given, "mmproj": inputs.pop("mmproj")}
    flags = {_INPUTS.get(name, f"--{name}"): value for name, value in inputs.items()}
    paths = {flag.removeprefix("--") for flag in flags}
    return OutputKey(
        command=f"edgellm-export {subcommand}",
        settings={f"--{name}": value for name, value in given.items() if name not in paths},
        inputs={flag: find_path(value) for flag, value in flags.items() if value is not None},
    )


def _predicts(spec: DraftSpec) -> str:
    if spec.num_heads and spec.mask_token_id is None:
        return f"{spec.num_heads} heads"
    if spec.num_heads:
        return f"{spec.num_heads} tokens a pass, each of {spec.draft_vocab_size}"
    predicted = f"{spec.draft_vocab_size} of {spec.decoder.vocab_size} tokens"
    return predicted + (f", {spec.num_candidates} candidates" if spec.num_candidates else "")


def _cost(manifest: Bundle, start: float) -> str:
    return f"quantization {manifest.quantization}, {_size(manifest, start)}"


def _size(manifest: Bundle, start: float) -> str:
    size = sum(record.num_bytes for record in manifest.files.values())
    return f"{size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s"


def _say_verdict(
    manifest: Bundle, start: float, compared: str, source: str = "the checkpoint"
) -> None:
    """Print the size, the time, and what the export proved."""
    typer.echo(
        f"verdict: {_size(manifest, start)}; all tensors of {source} are used, and all numbers are "
        f"finite; {compared}"
    )


def _say_encoder(manifest: Bundle, folder: Path, start: float) -> None:
    """Print the facts of a visual or audio encoder, and the verdict."""
    spec = manifest.encoder
    typer.echo(
        f"{folder}: {manifest.kind.partition('_')[0]} encoder of {spec.model_type}, "
        f"{spec.num_parameters / 1e6:.1f} M parameters, {manifest.options['dtype']}, "
        f"{_cost(manifest, start)}"
    )
    compared = "outputs were not compared with transformers"
    _say_verdict(manifest, start, compared, "the encoder")


def _say_taps(manifest: Bundle) -> None:
    if manifest.pooler is not None and manifest.pooler.rerank is not None:
        typer.echo(f"reranks documents: by {_POOLED[manifest.pooling]} of the last layer")
    elif manifest.pooling:
        typer.echo(f"embeds texts: by {_POOLED[manifest.pooling]}{_say_pooler(manifest)}")
    elif manifest.hidden_taps:
        typer.echo(f"hidden taps for a draft: {', '.join(map(str, manifest.hidden_taps))}")


def _say_pooler(manifest: Bundle) -> str:
    """What follows the pooling, and the names of prompts."""
    spec = manifest.pooler
    if spec is None:
        return " of the last layer, with length 1"
    dense = "".join(f", {each.in_features} to {each.out_features} numbers" for each in spec.dense)
    length = ", with length 1" if spec.normalize else ""
    prompts = f"; prompts: {', '.join(spec.prompts)}" if spec.prompts else ""
    return f" of the last layer{dense}{length}{prompts}"


def _say_endless(manifest: Bundle) -> None:
    if not manifest.eos_token_ids and not manifest.pooling:
        typer.echo(
            "warning: the checkpoint names no end token: only a stop string or the longest length "
            "ends the output; set eos_token_id in its generation_config.json",
            err=True,
        )


def _say_dropped(manifest: Bundle) -> None:
    from edgellm.export.pipeline.llm import DROPPED_TOKENS

    if dropped := manifest.provenance.get(DROPPED_TOKENS):
        typer.echo(
            f"warning: the embedding has no row for the added tokens {dropped}; their text is "
            "tokenized as ordinary text",
            err=True,
        )


def _say_contradiction(manifest: Bundle) -> None:
    from edgellm.export.checkpoints.quantization_config import contradiction

    if stated := contradiction(manifest.provenance):
        typer.echo(f"warning: {stated}: exported as floats", err=True)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main() -> None:
    """Entry point."""
    run_command(app)

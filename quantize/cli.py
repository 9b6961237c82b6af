"""`edgellm-quantize`: float checkpoint to quantized checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import NOTHING_HALF_WRITTEN, App, Overwrite, run_command
from edgellm.core.commands.extras import remedy
from edgellm.core.commands.output_folder import finished_line, is_finished
from edgellm.core.commands.progress import share_of, shown
from edgellm.core.errors import EdgeLLMError
from edgellm.quantize.pipeline.deploy_target import FLOAT, form_of_draft, form_of_head, rounds_as

if TYPE_CHECKING:
    from edgellm.quantize.job import Job

app = App(no_args_is_help=True)
app.kept = NOTHING_HALF_WRITTEN

Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Choose the output layout: modelopt, or compressed-tensors for vLLM.",
        rich_help_panel="Output",
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--lm_head_quantization",
        help="Quantize the head to fp8, nvfp4, int8, int4, int8_tied or float. Default: "
        "float on a CPU, the scheme of the layers on a GPU.",
        rich_help_panel="Model",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--kv_cache_quantization",
        help="Calibrate scales for a KV cache of fp8 or int8. Default: no scales.",
        rich_help_panel="Model",
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        "--calib_dataset",
        help="Calibrate on this text: default, FILE.jsonl or FILE.txt. Default: {default}, "
        "the built-in text.",
        rich_help_panel="Training",
    ),
]
NumSamples = Annotated[
    int | None,
    typer.Option(
        "--num_samples",
        min=1,
        help="Calibrate on this many samples. Default: 512 samples (AWQ 128); on a CPU 32 "
        "(AWQ 8, gptq 48 or, as the default, 16).",
        rich_help_panel="Limits",
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq_len",
        min=8,
        help="Set the length of a calibration sample. Default: 512 tokens; on a CPU 256.",
        rich_help_panel="Limits",
    ),
]
HeldOut = Annotated[
    int | None,
    typer.Option(
        "--held_out",
        min=1,
        help="Measure the errors on this many held-out samples. Default: 32 samples; on a CPU 8.",
        rich_help_panel="Limits",
    ),
]
AlphaStep = Annotated[
    float | None,
    typer.Option(
        "--alpha_step",
        min=0.01,
        max=1,
        help="Set the step of AWQ's search. Default: 0.1; on a CPU 0.2.",
        rich_help_panel="Training",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block_size",
        help="Set the group size of INT4 weights: 128, 64 or 32. Default: the largest that "
        "fits all layers.",
        rich_help_panel="Model",
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        "--batch_tokens",
        min=8,
        help="Limit a calibration batch to this many tokens. Default: 8192 tokens; on a CPU 2048.",
        rich_help_panel="Limits",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output_dir",
        help="Write the quantized checkpoint to this folder.",
        rich_help_panel="Output",
    ),
]
Body = Annotated[
    str,
    typer.Option(
        "--quantization",
        help="Quantize the layers to fp8, int8_sq, int4_awq, nvfp4, nvfp4_awq or mixed.",
        rich_help_panel="Model",
    ),
]
DraftBody = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        help="Quantize the draft to fp8, int8_sq, int4_awq, nvfp4, nvfp4_awq, or auto, the "
        "smallest of equal acceptance. Default: fp8, or what the GPU of --target "
        "computes.",
        rich_help_panel="Model",
    ),
]
KeepLayers = Annotated[
    str,
    typer.Option(
        "--keep_layers",
        help="Keep these decoder layers in float, such as 0,29, or auto, which searches "
        "them. Default: none.",
        rich_help_panel="Model",
    ),
]
KeepBudget = Annotated[
    float | None,
    typer.Option(
        "--keep_budget",
        min=0,
        help="Let the float layers of --keep_layers auto add this share of bytes. Default: "
        "10 percent.",
        rich_help_panel="Limits",
    ),
]
MaxLoss = Annotated[
    float | None,
    typer.Option(
        "--max_loss",
        min=0,
        help="Let --quantization auto lower the acceptance by this much. Default: 0.5 points.",
        rich_help_panel="Limits",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="Choose the device that quantizes: cpu, cuda or auto.",
        rich_help_panel="Model",
    ),
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        "--max_kl",
        min=0,
        help="Fail if the KL divergence is above this limit, in nats a token. Default: no limit.",
        rich_help_panel="Limits",
    ),
]
TimeBudget = Annotated[
    float | None,
    typer.Option(
        "--time_budget",
        min=0,
        help="Stop trying further algorithms of --algo auto after this many minutes. "
        "Default: no limit.",
        rich_help_panel="Limits",
    ),
]
Rotate = Annotated[
    str | None,
    typer.Option(
        "--rotate",
        help="Rotate hidden states (residual), attention values (values) or both (all). "
        "Outputs stay exact; residual unties the head. Default: no rotation.",
        rich_help_panel="Model",
    ),
]
TargetBits = Annotated[
    float | None,
    typer.Option(
        "--target_bits",
        min=4,
        max=16,
        help="Choose schemes by layer for this many bits a weight, with --quantization "
        "mixed. Default: --target_kl decides.",
        rich_help_panel="Limits",
    ),
]
TargetKl = Annotated[
    float | None,
    typer.Option(
        "--target_kl",
        min=0,
        help="Choose schemes by layer for this estimated KL divergence, in nats a token, "
        "with --quantization mixed. Default: --target_bits decides.",
        rich_help_panel="Limits",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help="Name the target device: cpu, gpu, or a compute capability such as 8.7. cpu "
        "quantizes inputs of int8_sq dynamically; gpu calibrates them and quantizes the "
        "head as the layers. A capability also sets a draft's scheme.",
        rich_help_panel="Model",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, help="Set the seed of samples and rotations.", rich_help_panel="Debug"
    ),
]
Answers = Annotated[
    str | None,
    typer.Option(
        "--answers",
        help="Compare greedy outputs to these prompts: default, or FILE.jsonl. Default: no "
        "comparison.",
        rich_help_panel="Debug",
    ),
]
FollowingDraft = Annotated[
    str | None,
    typer.Option(
        "--draft_model_dir",
        help="Measure the acceptance of this float draft before and after. Default: no draft.",
        rich_help_panel="Speculation",
    ),
]
ReportPage = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Also write the report to this HTML file, even if --max_kl fails. Default: no page.",
        rich_help_panel="Output",
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
ModelDir = Annotated[
    str,
    typer.Option(
        "--model_dir",
        help="Read this model: a Hugging Face folder, a .gguf file, or a cached hub id.",
        rich_help_panel="Model",
    ),
]
Algo = Annotated[
    str | None,
    typer.Option(
        "--algo",
        help="Choose the algorithm: awq, gptq, autoround or auto for int4_awq, gptq or max for "
        "fp8 and nvfp4. Default: gptq with 16 samples (on a GPU 128) for int4_awq and nvfp4; max "
        "for fp8; for mixtures of experts awq or max.",
        rich_help_panel="Model",
    ),
]
BaseModelDir = Annotated[
    str,
    typer.Option(
        "--base_model_dir",
        help="Name the float model that the draft is for.",
        rich_help_panel="Model",
    ),
]
DraftModelDir = Annotated[
    str,
    typer.Option(
        "--draft_model_dir",
        help="Read this float draft, or the MTP layer of this model.",
        rich_help_panel="Model",
    ),
]
DraftAlgo = Annotated[
    str | None,
    typer.Option(
        "--algo",
        help="Choose the algorithm: gptq, or awq for int4_awq, max for fp8 and nvfp4. Default: "
        "the scheme's own.",
        rich_help_panel="Model",
    ),
]


@app.callback()
def commands() -> None:
    """Quantize Hugging Face checkpoints with nvidia-modelopt, layer by layer (CPU or GPU)."""


@app.command(
    common=("--model_dir", "--output_dir", "--quantization", "--algo", "--target"),
    examples=(
        "edgellm-quantize llm --model_dir model --output_dir quantized --quantization int4_awq",
        "edgellm-quantize llm --model_dir model --output_dir quantized "
        "--quantization fp8 --target 8.9",
    ),
)
def llm(
    model_dir: ModelDir,
    output_dir: Output,
    quantization: Body,
    algo: Algo = None,
    time_budget: TimeBudget = None,
    rotate: Rotate = None,
    format: Format = "modelopt",
    lm_head_quantization: Head = None,
    kv_cache_quantization: Cache = None,
    calib_dataset: Dataset = "default",
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    held_out: HeldOut = None,
    alpha_step: AlphaStep = None,
    block_size: BlockSize = None,
    keep_layers: KeepLayers = "",
    keep_budget: KeepBudget = None,
    batch_tokens: BatchTokens = None,
    target: Target = "cpu",
    target_bits: TargetBits = None,
    target_kl: TargetKl = None,
    device: Device = "auto",
    seed: Seed = 0,
    max_kl: MaxKl = None,
    answers: Answers = None,
    draft_model_dir: FollowingDraft = None,
    report: ReportPage = None,
    ignore_config_keys: IgnoredKeys = "",
    overwrite: Overwrite = False,
) -> None:
    """Quantize a language model; the same command resumes an interrupted run."""
    from edgellm.quantize.job import Job
    from edgellm.quantize.pipeline.flag_checks import float_layer_options

    job = Job(
        **float_layer_options(keep_layers, keep_budget),
        model_dir=model_dir, output_dir=output_dir, quantization=quantization,
        target=rounds_as(target), algo=algo, rotate=rotate, format=format,
        lm_head_quantization=_head(lm_head_quantization, target, quantization, format),
        kv_cache_quantization=kv_cache_quantization, calib_dataset=calib_dataset,
        num_samples=num_samples, seq_len=seq_len, held_out=held_out, alpha_step=alpha_step,
        block_size=block_size, batch_tokens=batch_tokens, target_bits=target_bits,
        target_kl=target_kl, device=device, seed=seed, max_kl=max_kl, answers=answers,
        draft_model_dir=draft_model_dir, report=report,
        ignore_config_keys=_split(ignore_config_keys), time_budget=time_budget,
        overwrite=overwrite,
    )  # fmt: skip
    _run(job)


@app.command(
    common=("--base_model_dir", "--draft_model_dir", "--output_dir", "--quantization", "--target"),
    examples=(
        "edgellm-quantize draft --base_model_dir model --draft_model_dir draft "
        "--output_dir quantized_draft",
        "edgellm-quantize draft --base_model_dir model --draft_model_dir draft "
        "--output_dir quantized_draft --quantization auto",
    ),
)
def draft(
    base_model_dir: BaseModelDir,
    draft_model_dir: DraftModelDir,
    output_dir: Output,
    quantization: DraftBody = None,
    algo: DraftAlgo = None,
    max_loss: MaxLoss = None,
    lm_head_quantization: Head = None,
    calib_dataset: Dataset = "default",
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    held_out: HeldOut = None,
    alpha_step: AlphaStep = None,
    block_size: BlockSize = None,
    batch_tokens: BatchTokens = None,
    target: Target = "cpu",
    device: Device = "auto",
    seed: Seed = 0,
    max_kl: MaxKl = None,
    report: ReportPage = None,
    ignore_config_keys: IgnoredKeys = "",
    overwrite: Overwrite = False,
) -> None:
    """Quantize a draft or MTP layer with its base's hidden states."""
    from edgellm.quantize.job import Job

    body = quantization or form_of_draft(target)
    job = Job(
        model_dir=draft_model_dir, output_dir=output_dir, quantization=body,
        base_model_dir=base_model_dir, target=rounds_as(target), algo=algo,
        lm_head_quantization=_head(lm_head_quantization, target, body),
        calib_dataset=calib_dataset, num_samples=num_samples, seq_len=seq_len, held_out=held_out,
        alpha_step=alpha_step, block_size=block_size, batch_tokens=batch_tokens, device=device,
        seed=seed, max_kl=max_kl, report=report, ignore_config_keys=_split(ignore_config_keys),
        max_loss=max_loss, overwrite=overwrite,
    )  # fmt: skip
    _run(job)


def _run(job: Job) -> None:
    """Run a job, unless the output folder is its result."""
    from edgellm.quantize.pipeline.flag_checks import check_names, check_together

    check_names(job)
    check_together(job, job.time_budget, job.max_loss)
    _require_host()
    if is_finished(job.output_dir, job.key(), overwrite=job.overwrite):
        from edgellm.quantize.report.html_report import copy_page

        copy_page(job)
        typer.echo(finished_line(job.output_dir))
        return
    from edgellm.quantize.pipeline.run import run_job
    from edgellm.quantize.pipeline.search.algorithms import search_algorithms, with_default
    from edgellm.quantize.pipeline.search.draft import search_precisions
    from edgellm.quantize.pipeline.search.float_layers import search_float_layers
    from edgellm.quantize.pipeline.summary import print_summary

    _warn_of_blocks(job.model_dir)
    job = with_default(job)
    app.kept = f"finished layers are kept in {job.work_dir}"
    with _progress() as progress:
        if job.algo == "auto":
            report = search_algorithms(job, job.time_budget, progress)
        elif job.chooses_precision:
            points = 0.5 if job.max_loss is None else job.max_loss
            report = search_precisions(job, points, progress)
        elif job.keep_budget is not None:
            report = search_float_layers(job, progress)
        else:
            report = run_job(job, progress)
    print_summary(report, job.output_dir)


def _warn_of_blocks(model_dir: str) -> None:
    """Warn of a GGUF file that is quantized already: the errors of both add up."""
    if not model_dir.endswith(".gguf") or not Path(model_dir).is_file():
        return
    from edgellm.export.checkpoints.quantized.gguf import FORMS
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint

    stored = open_checkpoint(model_dir).blocks
    kinds = {info.dtype for info in stored.infos().values()} if stored is not None else set()
    if not (quantized := sorted(kinds & FORMS.keys())):
        return
    typer.echo(
        f"warning: {model_dir} is quantized already ({', '.join(quantized)}), so the errors of "
        "both add up: quantize the float checkpoint that it was made from, or give the file to "
        "edgellm-export",
        err=True,
    )


def _head(given: str | None, target: str, body: str, format: str = "modelopt") -> str | None:
    """The scheme of the head, by default that of the target; None: float."""
    if given is None:
        return form_of_head(target, body, is_modelopt=format == "modelopt")
    return None if given == FLOAT else given


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show finished parts of all."""
    with shown() as report:
        yield lambda what, done, total: report(
            share_of("quantizing", done, total, f"{what} ({done}/{total})")
        )


def _require_host() -> None:
    import importlib.util

    for name in ("torch", "transformers", "modelopt", "requests", "huggingface_hub"):
        if importlib.util.find_spec(name) is None:
            raise EdgeLLMError(f"quantizing needs {name}", hint=remedy(name))


def main() -> None:
    """Entry point."""
    run_command(app)

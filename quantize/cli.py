"""`edgellm-quantize`: float checkpoint to quantized checkpoint."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import SNAKE_CASE, App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.quantize.pipeline.deploy_target import FLOAT, form_of_draft, form_of_head, rounds_as

if TYPE_CHECKING:
    from edgellm.quantize.job import Job

app = App(SNAKE_CASE, no_args_is_help=True)

Format = Annotated[
    str, typer.Option("--format", help="Output layout: modelopt, or compressed-tensors for vLLM.")
]
Head = Annotated[
    str | None,
    typer.Option(
        "--lm_head_quantization", help="Head: fp8, nvfp4, int8, int4, int8_tied or float."
    ),
]
Cache = Annotated[
    str | None,
    typer.Option("--kv_cache_quantization", help="Calibrate KV cache scales: fp8 or int8."),
]
Dataset = Annotated[
    str, typer.Option("--calib_dataset", help="Calibration text: default, FILE.jsonl or FILE.txt.")
]
NumSamples = Annotated[
    int | None,
    typer.Option("--num_samples", min=1, help="Samples; 512 (AWQ 128); CPU: 32 (AWQ 8, gptq 48)."),
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq_len", min=8, help="Tokens of a sample. Default: 512, on a CPU 256."),
]
HeldOut = Annotated[
    int | None, typer.Option("--held_out", min=1, help="Held-out samples. Default: 32, on a CPU 8.")
]
AlphaStep = Annotated[
    float | None,
    typer.Option(
        "--alpha_step", min=0.01, max=1, help="Step of AWQ's search. Default: 0.1, on a CPU 0.2."
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option("--block_size", help="INT4 group size: 128, 64 or 32. Default: fits all layers."),
]
BatchTokens = Annotated[
    int | None,
    typer.Option("--batch_tokens", min=8, help="Tokens in a batch. Default: 8192, on a CPU 2048."),
]
Output = Annotated[Path, typer.Option("--output_dir", help="Folder of the result.")]
Body = Annotated[
    str, typer.Option("--quantization", help="fp8, int8_sq, int4_awq, nvfp4, nvfp4_awq or mixed.")
]
DraftBody = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        help="fp8, int8_sq, int4_awq, nvfp4, nvfp4_awq, or auto: smallest of equal acceptance; "
        "default: fp8, or what --target computes.",
    ),
]
KeepLayers = Annotated[
    str,
    typer.Option("--keep_layers", help="Decoder layers that stay float, such as 0,29, or auto."),
]
KeepBudget = Annotated[
    float | None,
    typer.Option("--keep_budget", min=0, help="With --keep_layers auto: percent more bytes (10)."),
]
MaxLoss = Annotated[
    float | None,
    typer.Option("--max_loss", min=0, help="With auto: allowed drop in acceptance, points (0.5)."),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto.")]
MaxKl = Annotated[
    float | None,
    typer.Option("--max_kl", min=0, help="Maximum KL divergence, nats a token; fails above it."),
]
TimeBudget = Annotated[
    float | None,
    typer.Option("--time_budget", min=0, help="With --algo auto: minutes for more algorithms."),
]
Rotate = Annotated[
    str | None,
    typer.Option("--rotate", help="residual, values or all: exact; residual unties the head."),
]
TargetBits = Annotated[
    float | None, typer.Option("--target_bits", min=4, max=16, help="With mixed: bits a weight.")
]
TargetKl = Annotated[
    float | None, typer.Option("--target_kl", min=0, help="With mixed: estimated nats a token.")
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help="Target device: cpu (int8_sq: dynamic input scales), gpu (calibrated; head in the "
        "scheme of the layers) or its compute capability (also sets a draft's scheme).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0)]
Answers = Annotated[
    str | None,
    typer.Option(
        "--answers", help="Prompts whose greedy outputs are compared: default, or FILE.jsonl."
    ),
]
FollowingDraft = Annotated[
    str | None,
    typer.Option("--draft_model_dir", help="Float draft whose acceptance is measured."),
]
ReportPage = Annotated[
    Path | None,
    typer.Option(
        "--report", help="FILE.html: also write the report there, even if --max_kl fails."
    ),
]
IgnoredKeys = Annotated[
    str, typer.Option("--ignore_config_keys", help="Config keys to ignore: a,b,c.")
]


@app.callback()
def commands() -> None:
    """Quantize Hugging Face checkpoints with nvidia-modelopt, layer by layer (CPU or GPU)."""


@app.command()
def llm(
    model_dir: Annotated[
        str, typer.Option("--model_dir", help="HF folder, .gguf file, or a cached hub id.")
    ],
    output_dir: Output,
    quantization: Body,
    algo: Annotated[
        str | None,
        typer.Option("--algo", help="int4_awq: awq, gptq, autoround or auto; fp8, nvfp4: gptq."),
    ] = None,
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
        ignore_config_keys=_split(ignore_config_keys),
    )  # fmt: skip
    _run(job, time_budget, None)


@app.command()
def draft(
    base_model_dir: Annotated[str, typer.Option("--base_model_dir", help="The float base model.")],
    draft_model_dir: Annotated[
        str, typer.Option("--draft_model_dir", help="A float draft, or a model with mtp.*.")
    ],
    output_dir: Output,
    quantization: DraftBody = None,
    algo: Annotated[str | None, typer.Option("--algo", help="gptq, or awq for int4_awq.")] = None,
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
    )  # fmt: skip
    _run(job, None, max_loss)


def _run(job: Job, minutes: float | None, points: float | None) -> None:
    """Run a job; `minutes` limit a search over algorithms, `points` one over precisions."""
    from edgellm.quantize.pipeline.flag_checks import check_names, check_together

    check_names(job)
    check_together(job, minutes, points)
    _require_host()
    from edgellm.quantize.pipeline.run import run_job
    from edgellm.quantize.pipeline.search.algorithms import search_algorithms
    from edgellm.quantize.pipeline.search.draft import search_precisions
    from edgellm.quantize.pipeline.search.float_layers import search_float_layers
    from edgellm.quantize.pipeline.summary import print_summary

    with _progress() as progress:
        if job.algo == "auto":
            report = search_algorithms(job, minutes, progress)
        elif job.chooses_precision:
            report = search_precisions(job, 0.5 if points is None else points, progress)
        elif job.keep_budget is not None:
            report = search_float_layers(job, progress)
        else:
            report = run_job(job, progress)
    print_summary(report, job.output_dir)


def _head(given: str | None, target: str, body: str, format: str = "modelopt") -> str | None:
    """The scheme of the head, by default that of the target; None: float."""
    if given is None:
        return form_of_head(target, body, is_modelopt=format == "modelopt")
    return None if given == FLOAT else given


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: print(f"{what} ({done}/{total})", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    # The current stderr: ModelOpt's prints are redirected while the bar runs.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("quantizing", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _require_host() -> None:
    import importlib.util

    for name in ("torch", "transformers", "modelopt", "requests", "huggingface_hub"):
        if importlib.util.find_spec(name) is None:
            raise EdgeLLMError(
                f"quantizing needs {name}",
                hint="in edgellm's folder: pip install torch==2.13.0, then '.[quantize]'",
            )


def main() -> None:
    """Entry point."""
    run_command(app)

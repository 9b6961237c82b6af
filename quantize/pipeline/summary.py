"""The summary that `edgellm-quantize` prints."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from edgellm.quantize.algorithms.mixed_precision.search import Mixture
from edgellm.quantize.report.notes import notes
from edgellm.quantize.report.report import Report
from edgellm.quantize.report.speed_estimate import memory_bandwidth, speed_line
from edgellm.quantize.report.verdict import LARGEST, advice, grade, verdict


def print_summary(report: Report, output: Path) -> None:
    """Print the summary of the model in `output` to stdout."""
    console, quality = Console(), report.quality
    table = Table("layer", "output error", "stream error", "worst weight", title="worst layers")
    for layer in report.worst_layers:
        name, error = max(layer.weight_errors.items(), key=lambda item: item[1])
        table.add_row(
            str(layer.index), f"{layer.output_error:.4f}", f"{layer.stream_error:.4f}",
            f"{name} {error:.4f}",
        )  # fmt: skip
    console.print(table)
    if report.mixture is not None:
        console.print(_curve(report.mixture))
    typer.echo(
        f"perplexity {quality.perplexity_float:.3f} -> {quality.perplexity_quantized:.3f}, "
        f"{report.accuracy_means} {quality.accuracy_float:.1%} -> "
        f"{quality.accuracy_quantized:.1%}"
    )
    typer.echo(
        f"KL {quality.kl_divergence:.4f} nats, top-1 agreement {quality.top1_agreement:.1%} "
        f"over {quality.tokens} held-out tokens"
    )
    for note in notes(report):
        typer.echo(note)
    typer.echo(
        f"{report.quantized_modules} layers at {report.bits_per_weight:.2f} bits a weight in the "
        f"checkpoint, {report.bytes_before / 1e6:.1f} -> {report.bytes_after / 1e6:.1f} MB"
    )
    typer.echo(
        f"{output}: {report.quantization}, lm_head {report.lm_head}, KV cache {report.kv_cache}, "
        f"{report.seconds:.1f} s, peak memory {report.peak_memory_bytes / 1e6:.0f} MB; "
        "see edgellm_quant.html"
    )
    print_verdict(report, output)


def print_verdict(report: Report, output: Path) -> None:
    """Print the verdict; a poor result and a better command on stderr."""
    for line in (*verdict(report), speed_line(report, memory_bandwidth)):
        typer.echo(line)
    if not (command := advice(report, output)):
        return
    if grade(report.quality.kl_divergence) == "poor":
        typer.echo(f"warning: the KL divergence is above {LARGEST}: try {command}", err=True)
    else:
        typer.echo(f"to lower the KL divergence: {command}")


def _curve(mixture: Mixture) -> Table:
    table = Table("bits a weight", "KL, estimated", title="sizes to choose from")
    for point in mixture.points:
        mark = " <-" if point.bits_per_weight == mixture.chosen.bits_per_weight else ""
        table.add_row(f"{point.bits_per_weight:.2f}", f"{point.divergence:.4f}{mark}")
    return table

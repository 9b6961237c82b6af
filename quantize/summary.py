"""What `edgellm-quantize` says at the end."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from edgellm.quantize.mixing import Mixture
from edgellm.quantize.report import Report

_NAMED = 4  # experts in one line


def print_summary(report: Report, output: Path) -> None:
    """What became of the model in `output`, on stdout."""
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
    if report.tried:
        ways = ", ".join(f"{name} {kl:.4f}" for name, kl in report.tried.items())
        typer.echo(f"KL of what was tried: {ways}")
    if report.few:
        typer.echo(few_line(report.few))
    if report.outliers:
        kept = ",".join(map(str, report.outliers))
        typer.echo(f"layers {kept} lose far more than the others: --keep_layers {kept} keeps them")
    typer.echo(
        f"{report.quantized_modules} layers at {report.bits_per_weight:.2f} bits a weight, "
        f"{report.bytes_before / 1e6:.1f} -> {report.bytes_after / 1e6:.1f} MB"
    )
    if report.untied_bytes:
        typer.echo(
            "the head is no longer the embedding, since the residual stream is rotated: "
            f"{report.untied_bytes / 1e6:.1f} MB more"
        )
    typer.echo(
        f"{output}: {report.quantization}, lm_head {report.lm_head}, KV cache {report.kv_cache}, "
        f"{report.seconds:.1f} s, peak memory {report.peak_memory_bytes / 1e6:.0f} MB; "
        "see edgellm_quant.html"
    )


def few_line(few: dict[str, int]) -> str:
    """Experts that saw few tokens, some of them by name."""
    named = sorted(few.items(), key=lambda item: item[1])[:_NAMED]
    listed = ", ".join(f"{name} ({tokens})" for name, tokens in named)
    more = f" and {left} more (edgellm_quant.json)" if (left := len(few) - len(named)) else ""
    return (
        f"experts that saw few tokens, rounded by what all tokens give them: {listed}{more}; "
        "--num_samples shows them more"
    )


def _curve(mixture: Mixture) -> Table:
    table = Table("bits a weight", "KL, estimated", title="sizes to choose from")
    for point in mixture.points:
        mark = " <-" if point.bits_per_weight == mixture.chosen.bits_per_weight else ""
        table.add_row(f"{point.bits_per_weight:.2f}", f"{point.divergence:.4f}{mark}")
    return table

"""The report as one HTML page: no script, no network."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.core.errors import EdgeLLMError
from edgellm.core.html_pages import charts
from edgellm.core.html_pages import page as pages
from edgellm.quantize.calibration.hidden_states import write_text
from edgellm.quantize.evaluation.layer_errors import LayerReport
from edgellm.quantize.job import Job
from edgellm.quantize.report.notes import notes
from edgellm.quantize.report.report import Report

if TYPE_CHECKING:
    from markupsafe import Markup

PAGE = "edgellm_quant.html"  # of each result
_PAGE = Path(__file__).with_name("report.html")
_HEADING = b"<h1>Quantization: "  # of each page


def render(report: Report) -> str:
    """The HTML page of a report."""
    return pages.render(
        _PAGE,
        heading=f"Quantization: {_title(report)}",
        facts=_facts(report),
        notes=notes(report),
        errors=_errors(report),
        rows=[_row(layer) for layer in report.layers],
        foot=_foot(report),
        **_mixture(report),
    )


def check_page(job: Job) -> None:
    """Raise `EdgeLLMError` unless the page of `--report` can be written."""
    path = job.report
    if path is None:
        return
    if path.suffix != ".html" or path.is_dir():
        raise EdgeLLMError(f"--report {path} is not an .html file", hint="give FILE.html")
    if not path.parent.is_dir():
        raise EdgeLLMError(
            f"--report {path}: no such folder: {path.parent}", hint="create it first"
        )
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise EdgeLLMError(
            f"--report {path}: {path.parent} is not writable: {error.strerror}",
            hint="give another folder",
        ) from None
    if path.exists() and _HEADING not in path.read_bytes():
        raise EdgeLLMError(
            f"--report {path} exists and is not a report of edgellm-quantize",
            hint="give another name",
        )


def write_page(job: Job, report: Report) -> None:
    """Write the page of `--report`, if given, atomically."""
    if job.report is not None:
        write_text(job.report, render(report))


def copy_page(job: Job) -> None:
    """Write the page of a finished result to `--report`, if given."""
    check_page(job)
    if job.report is not None:
        write_text(job.report, (job.output_dir / PAGE).read_text("utf-8"))


def _title(report: Report) -> str:
    parts = [f"{report.subject}: {report.quantization}"]
    parts += [f"lm_head {report.lm_head}"] if report.lm_head != "float" else []
    parts += [f"KV cache {report.kv_cache}"] if report.kv_cache != "float" else []
    return ", ".join(parts)


def _facts(report: Report) -> dict[str, str]:
    quality = report.quality
    accuracy = f"{quality.accuracy_float:.1%} → {quality.accuracy_quantized:.1%}"
    return {
        "perplexity": f"{quality.perplexity_float:.3f} → {quality.perplexity_quantized:.3f}",
        report.accuracy_means: accuracy,
        "KL divergence": f"{quality.kl_divergence:.4f} nats",
        "top-1 agreement": f"{quality.top1_agreement:.1%}",
        "size": f"{report.bytes_before / 1e6:.1f} → {report.bytes_after / 1e6:.1f} MB",
        "quantized layers": f"{report.quantized_modules}",
        "bits per weight": f"{report.bits_per_weight:.2f}",
        "time": f"{report.seconds:.0f} s",
        "peak memory": f"{report.peak_memory_bytes / 1e6:.0f} MB",
    }


def _errors(report: Report) -> Markup:
    """Output error (columns) and error of the residual stream (line) by layer."""
    worst = {layer.index for layer in report.worst_layers}
    blocks = {
        layer.index: [
            charts.Block(
                "worst" if layer.index in worst else "mark", layer.output_error, _hint(layer)
            )
        ]
        for layer in report.layers
    }
    streams = [layer.stream_error for layer in report.layers]
    return charts.columns(blocks, "{:.3g}".format, "Relative error by layer", streams)


def _mixture(report: Report) -> dict[str, str]:
    """Mixed precision: the choice, and the estimated divergence by bits a weight."""
    mixture = report.mixture
    if mixture is None:
        return {"chosen": "", "curve": ""}
    chosen = mixture.chosen
    words = f"{chosen.bits_per_weight:.2f} bits a weight, {chosen.divergence:.4f} nats"
    ends = mixture.points[0], mixture.points[-1]
    points = [
        charts.Point(
            x=point.bits_per_weight,
            y=point.divergence,
            name=f"{point.bits_per_weight:.1f}" if point in ends else "",
            hint=words,
            kind="worst" if point == chosen else "",
        )
        for point in mixture.points
    ]
    return {"chosen": words, "curve": charts.curve(points, words)}


def _hint(layer: LayerReport) -> str:
    return f"layer {layer.index}: output {layer.output_error:.4f}, stream {layer.stream_error:.4f}"


def _row(layer: LayerReport) -> tuple[str, ...]:
    worst = "", "float", ""
    if layer.bits:
        name, error = max(layer.weight_errors.items(), key=lambda item: item[1])
        worst = f"{error:.4f}", name, f"{sum(layer.bits.values()) / len(layer.bits):.2f}"
    errors = f"{layer.output_error:.4f}", f"{layer.stream_error:.4f}"
    return (f"{layer.index}", *errors, *worst, f"{layer.seconds:.1f}")


def _foot(report: Report) -> str:
    calibration = report.calibration
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return (
        f"Calibrated with {calibration['rows']} samples of {calibration['tokens_per_row']} tokens "
        f"of {calibration['name']} (sha256 {calibration['sha256'][:16]}…), measured on "
        f"{calibration['held_out_rows']} held-out samples. {versions}."
    )

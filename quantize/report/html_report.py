"""The report as one HTML page: no script, no network."""

from __future__ import annotations

import html
import tempfile
from pathlib import Path

from edgellm.core.errors import EdgeLLMError
from edgellm.quantize.algorithms.mixed_precision.allocation import Point
from edgellm.quantize.calibration.hidden_states import write_text
from edgellm.quantize.evaluation.layer_errors import LayerReport
from edgellm.quantize.job import Job
from edgellm.quantize.report.notes import notes
from edgellm.quantize.report.report import Report

_PAGE = Path(__file__).with_name("report.html")
_HEADING = b"<h1>Quantization: "  # of each page
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 240, 52, 24


def render(report: Report) -> str:
    """The HTML page of a report."""
    text = _PAGE.read_text("utf-8")
    for place, content in {
        "@TITLE@": html.escape(_title(report)),
        "@FACTS@": _facts(report),
        "@PLOT@": _plot(report),
        "@CURVE@": _curve(report),
        "@NOTES@": "".join(f"<p>{html.escape(note)}</p>" for note in notes(report)),
        "@ROWS@": "".join(_row(layer) for layer in report.layers),
        "@FOOT@": html.escape(_foot(report)),
    }.items():
        text = text.replace(place, content)
    return text


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


def _title(report: Report) -> str:
    parts = [f"{report.subject}: {report.quantization}"]
    parts += [f"lm_head {report.lm_head}"] if report.lm_head != "float" else []
    parts += [f"KV cache {report.kv_cache}"] if report.kv_cache != "float" else []
    return ", ".join(parts)


def _facts(report: Report) -> str:
    quality = report.quality
    accuracy = f"{quality.accuracy_float:.1%} → {quality.accuracy_quantized:.1%}"
    facts = {
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
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())


def _plot(report: Report) -> str:
    """Output error (bars) and error of the residual stream (line) by layer."""
    layers = report.layers
    top = max([*(layer.output_error for layer in layers),
               *(layer.stream_error for layer in layers), 1e-6])  # fmt: skip
    step = (_WIDTH - _LEFT) / len(layers)
    base = _HEIGHT - _BOTTOM

    def height(value: float) -> float:
        return base * (1 - value / top / 1.05)

    worst = {layer.index for layer in report.worst_layers}
    marks = [
        f'<rect class="{"worst" if layer.index in worst else "bar"}" '
        f'x="{_LEFT + layer.index * step + step * 0.15:.1f}" y="{height(layer.output_error):.1f}" '
        f'width="{step * 0.7:.1f}" height="{base - height(layer.output_error):.1f}">'
        f"<title>{_hint(layer)}</title></rect>"
        for layer in layers
    ]
    points = " ".join(
        f"{_LEFT + (layer.index + 0.5) * step:.1f},{height(layer.stream_error):.1f}"
        for layer in layers
    )
    marks.append(f'<polyline points="{points}"/>')
    marks += [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height(value):.1f}" y2="{height(value):.1f}"/>'
        f'<text class="y" x="{_LEFT - 6}" y="{height(value) + 4:.1f}">{value:.3g}</text>'
        for value in (0.0, top / 2, top)
    ]
    every = max(1, len(layers) // 16)
    marks += [
        f'<text x="{_LEFT + (layer.index + 0.5) * step:.1f}" y="{_HEIGHT - 6}">{layer.index}</text>'
        for layer in layers[::every]
    ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Relative error by layer">{"".join(marks)}</svg>'
    )


def _curve(report: Report) -> str:
    """Mixed precision: estimated divergence (up) by bits a weight, and the choice."""
    mixture = report.mixture
    if mixture is None:
        return ""
    chosen, base = mixture.chosen, _HEIGHT - _BOTTOM
    low, high = (mixture.points[at].bits_per_weight for at in (0, -1))
    top = max(*(point.divergence for point in mixture.points), 1e-6)

    def place(point: Point) -> tuple[float, float]:
        across = (point.bits_per_weight - low) / max(high - low, 1e-6)
        return _LEFT + across * (_WIDTH - 2 * _LEFT), base * (1 - point.divergence / top / 1.05)

    line = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in mixture.points)
    x, y = place(chosen)
    words = f"{chosen.bits_per_weight:.2f} bits a weight, {chosen.divergence:.4f} nats"
    ends = "".join(
        f'<text x="{_LEFT + at * (_WIDTH - 2 * _LEFT)}" y="{_HEIGHT - 6}">{bits:.1f}</text>'
        for at, bits in ((0, low), (1, high))
    )
    return (
        "<section><h2>Estimated divergence by bits a weight</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}">'
        f'<polyline points="{line}"/><circle class="worst" cx="{x:.1f}" cy="{y:.1f}" r="5">'
        f"<title>{words}</title></circle>{ends}</svg>"
        f'<p class="soft">Chosen: {words}. Each step gives more bits to the linear layers that '
        "reduce the divergence most for each bit.</p></section>"
    )


def _hint(layer: LayerReport) -> str:
    return f"layer {layer.index}: output {layer.output_error:.4f}, stream {layer.stream_error:.4f}"


def _row(layer: LayerReport) -> str:
    if not layer.bits:
        worst = "", "float", ""
    else:
        name, error = max(layer.weight_errors.items(), key=lambda item: item[1])
        bits = sum(layer.bits.values()) / len(layer.bits)
        worst = f"{error:.4f}", html.escape(name), f"{bits:.2f}"
    cells = (f"{layer.output_error:.4f}", f"{layer.stream_error:.4f}", *worst,
             f"{layer.seconds:.1f}")  # fmt: skip
    columns = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th>{layer.index}</th>{columns}</tr>"


def _foot(report: Report) -> str:
    calibration = report.calibration
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return (
        f"Calibrated with {calibration['rows']} samples of {calibration['tokens_per_row']} tokens "
        f"of {calibration['name']} (sha256 {calibration['sha256'][:16]}…), measured on "
        f"{calibration['held_out_rows']} held-out samples. {versions}."
    )

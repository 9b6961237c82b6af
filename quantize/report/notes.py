"""Notes and warnings on a result, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from edgellm.quantize.metrics.divergence import Quality
from edgellm.quantize.report.report import Report

_NAMED = 4  # experts in one line


def notes(report: Report) -> list[str]:
    """Return the sentences."""
    found = [*_measured(report.quality)]
    found += [] if report.quality.kl_float_head is None else [_head(report)]
    if report.tried:
        found.append(_tried(report))
    if report.few:
        found.append(few_line(report.few))
    if report.kept is not None:
        found += _kept(report)
    elif report.outliers:
        kept = ",".join(map(str, report.outliers))
        found.append(
            f"layers {kept} have far larger errors than the others: --keep_layers {kept} leaves "
            "them float"
        )
    if report.untied_bytes:
        found.append(
            "the head is no longer the embedding, since the residual stream is rotated: "
            f"{report.untied_bytes / 1e6:.1f} MB more"
        )
    return found


def _measured(quality: Quality) -> Iterator[str]:
    """Yield notes on kinds of text, greedy outputs and a draft's acceptance."""
    if quality.kinds:
        parts = ", ".join(
            f"{name} {each.kl_divergence:.4f} ({each.perplexity_float:.2f} -> "
            f"{each.perplexity_quantized:.2f}, {each.tokens} tokens)"
            for name, each in quality.kinds.items()
        )
        yield f"KL (and perplexity) of {parts}"
    if (asked := quality.answers) is not None:
        parts = ", ".join(
            f"{name} {each.changed} of {each.answers}" for name, each in asked.kinds.items()
        )
        yield (
            f"greedy outputs changed: {asked.changed} of {asked.answers}"
            f"{f' ({parts})' if parts else ''}; the first changed token comes after "
            f"{asked.kept:.1f} of {asked.tokens:.1f} on average"
        )
    if (rates := quality.drafted) is not None:
        yield (
            f"first candidates of the float draft that the base accepts: {rates.by_floats:.1%} "
            f"float, {rates.by_quantized:.1%} quantized"
        )


def _head(report: Report) -> str:
    """Return a note on the error of the quantized head."""
    kl, without = report.quality.kl_divergence, report.quality.kl_float_head
    return (
        f"lm_head {report.lm_head}: KL {kl:.4f} nats, with a float head {without:.4f} "
        "(--lm_head_quantization float)"
    )


def few_line(few: dict[str, int]) -> str:
    """Return a note on experts with few calibration tokens, and name some."""
    named = sorted(few.items(), key=lambda item: item[1])[:_NAMED]
    listed = ", ".join(f"{name} ({tokens})" for name, tokens in named)
    more = f" and {left} more (edgellm_quant.json)" if (left := len(few) - len(named)) else ""
    return (
        f"experts with few tokens, calibrated with all tokens instead: {listed}{more}; "
        "a larger --num_samples gives them more"
    )


def _tried(report: Report) -> str:
    assert report.tried is not None
    if report.subject == "draft":
        ways = ", ".join(
            f"{name} {one.accuracy:.1%} ({one.num_bytes / 1e6:.1f} MB)"
            for name, one in report.tried.items()
        )
        return f"first candidates that the base accepts, by candidate: {ways}"
    ways = ", ".join(f"{name} {one.kl_divergence:.4f}" for name, one in report.tried.items())
    return f"KL by candidate: {ways}"


def _kept(report: Report) -> list[str]:
    if not report.kept:
        return ["no float layer is worth its bytes within --keep_budget"]
    return [
        f"layer {one.layer} stays float: quantizing it alone adds a KL of {one.divergence:.4f}, "
        f"{one.share:.0%} of the KL of all layers, and saves {one.num_bytes / 1e6:.1f} MB"
        for one in report.kept
    ]

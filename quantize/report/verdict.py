"""The verdict of a run: its quality in a word, its size, and a command that may do better."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from edgellm.quantize.formats.schemes import ALGORITHMS, COMPRESSED_TENSORS, GPTQ
from edgellm.quantize.report.report import Report

GOOD, LARGEST = 0.03, 0.1  # KL divergence in nats a token; above the second a result is poor
_MANY_SAMPLES = 48
_SMALL_BLOCK = 32
_MORE_BITS = 1.0  # of mixed precision
_MIXED_BITS = 5.7  # about the size of INT4 in blocks of 32, at half of its divergence
_DRAFT = "draft"


def grade(divergence: float) -> str:
    """The KL divergence in a word; NaN is poor."""
    return "good" if divergence <= GOOD else "noticeable" if divergence <= LARGEST else "poor"


def verdict(report: Report) -> list[str]:
    """Quality, size, and what was checked, in sentences."""
    before, after = report.bytes_before, report.bytes_after
    lines = [
        f"size: {after / 1e6:.1f} MB, {after / before:.0%} of the float checkpoint",
        f"check: a second decoder read all {report.quantized_modules} quantized layers back, and "
        f"computed {report.quality.tokens} held-out tokens with them",
    ]
    if report.subject == _DRAFT:
        return lines
    kl = report.quality.kl_divergence
    algorithm = report.settings.get("algo")
    by = f" by {algorithm}" if algorithm else ""
    quality = (
        f"quality: {grade(kl)}, KL {kl:.4f} nats{by} (good up to {GOOD}, poor above {LARGEST})"
    )
    return [quality, *lines]


def advice(report: Report, output: Path) -> str:
    """A command that usually has a lower KL divergence; "" for drafts and good results."""
    if report.subject == _DRAFT or grade(report.quality.kl_divergence) == "good":
        return ""
    settings = report.settings
    better = _better(settings)
    kept = {
        "--model_dir": settings["model_dir"],
        "--output_dir": f"{output}-better",
        "--quantization": settings["quantization"],
        "--target": settings.get("target", "cpu"),
    }
    words = [word for pair in {**kept, **better}.items() for word in map(str, pair)]
    return shlex.join(["edgellm-quantize", "llm", *words])


def _better(settings: dict[str, Any]) -> dict[str, object]:
    """Flags that usually lower the divergence of a run with these settings."""
    scheme, algo = settings["quantization"], settings.get("algo")
    if scheme == "nvfp4_awq":
        return {"--quantization": "nvfp4", "--algo": GPTQ}
    if scheme == "mixed":
        bits = settings.get("target_bits")
        if bits is None:
            return {"--target_kl": settings["target_kl"] / 2}
        return {"--target_bits": min(16.0, bits + _MORE_BITS)}
    if GPTQ not in ALGORITHMS.get(scheme, {}):
        return {"--keep_layers": "auto"}
    found: dict[str, object] = {"--algo": GPTQ}
    if scheme == "int4_awq" and settings.get("block_size", 0) > _SMALL_BLOCK:
        return {**found, "--block_size": _SMALL_BLOCK}
    if algo != GPTQ or settings.get("num_samples", 0) < _MANY_SAMPLES:
        return {**found, "--num_samples": _MANY_SAMPLES}
    if scheme == "int4_awq" and settings.get("format") != COMPRESSED_TENSORS:
        return {"--quantization": "mixed", "--target_bits": _MIXED_BITS}
    return {**found, "--keep_layers": "auto"}

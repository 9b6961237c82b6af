"""The rows of `quality.py`: stored in a file, and printed as a Markdown table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgellm.quantize.metrics.divergence import Changes, Quality, read_changes, read_quality


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    megabytes: float
    quality: Quality
    changes: Changes
    acceptance: float | None = None  # acceptance length of the draft of examples/


def read_rows(path: Path | None, settings: Mapping[str, Any]) -> dict[str, Row]:
    """Read earlier rows of the same settings."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text("utf-8"))
    if found["settings"] != settings:
        print(f"error: {path} was measured with {found['settings']}", file=sys.stderr)
        raise SystemExit(2)
    return {name: _row(facts) for name, facts in found["rows"].items()}


def _row(facts: Mapping[str, Any]) -> Row:
    quality, changes = read_quality(facts["quality"]), read_changes(facts["changes"])
    return Row(facts["megabytes"], quality, changes, facts["acceptance"])


def keep_rows(path: Path | None, settings: Mapping[str, Any], rows: Mapping[str, Row]) -> None:
    """Write the file of `read_rows`."""
    if path is not None:
        found = {name: asdict(row) for name, row in rows.items()}
        path.write_text(json.dumps({"settings": settings, "rows": found}, indent=2) + "\n")


def table(rows: Mapping[str, Row]) -> list[str]:
    """Return lines of Markdown, the largest model first."""
    kinds = list(next(iter(rows.values())).quality.kinds)
    has_drafts = any(row.acceptance is not None for row in rows.values())
    heads = ["", "MB", "perplexity", "KL", *(f"KL, {kind}" for kind in kinds), "top-1"]
    heads += ["answers changed", "tokens before"]
    heads += ["acceptance length"] if has_drafts else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in sorted(rows.items(), key=lambda item: -item[1].megabytes):
        quality, changed = row.quality, row.changes
        cells = [
            name.removeprefix("edgellm "),
            f"{row.megabytes:.1f}",
            f"{quality.perplexity_quantized / quality.perplexity_float:.3f}",
            *(f"{each.kl_divergence:.4f}" for each in (quality, *quality.kinds.values())),
            f"{quality.top1_agreement:.1%}",
            f"{changed.changed} of {changed.answers}",
            f"{changed.kept:.0f}",
        ]
        if has_drafts:
            cells.append("" if row.acceptance is None else f"{row.acceptance:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines

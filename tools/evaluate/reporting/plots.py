"""Plots of estimates with intervals, as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping

from edgellm.tools.evaluate.scoring.bootstrap import Interval
from edgellm.tools.inspection.output.plots import WIDTH, drawing

_ROW, _NAMES, _VALUES, _AXIS = 26, 210, 170, 20


def intervals(values: Mapping[str, Interval], neutral: float) -> str:
    """Plot a dot and whiskers per name, and a line at `neutral`, which means no difference."""
    ends = [
        end for one in values.values() for end in (one.value, one.low, one.high) if end is not None
    ]
    low, high = min(neutral, *ends), max(neutral, *ends)
    scale = (WIDTH - _NAMES - _VALUES) / ((high - low) or 1.0)

    def x(value: float) -> str:
        return f"{_NAMES + (value - low) * scale:.1f}"

    height = len(values) * _ROW
    marks = [
        f'<line x1="{x(neutral)}" x2="{x(neutral)}" y1="0" y2="{height}"/>'
        f'<text x="{x(neutral)}" y="{height + _AXIS - 6}">{neutral:g}</text>'
    ]
    for place, (name, one) in enumerate(values.items()):
        y, label = place * _ROW + _ROW / 2, f"{one.value:.2f}"
        if one.low is not None and one.high is not None:
            label += f" ({one.low:.2f} to {one.high:.2f})"
            marks.append(f'<polyline points="{x(one.low)},{y} {x(one.high)},{y}"/>')
        marks.append(
            f'<circle class="mark" cx="{x(one.value)}" cy="{y}" r="5"/>'
            f'<text class="y" x="{_NAMES - 14}" y="{y + 4}">{html.escape(name)}</text>'
            f'<text class="value" x="{WIDTH - _VALUES + 14}" y="{y + 4}">{label}</text>'
        )
    return drawing("".join(marks), height + _AXIS, "ratios by category")

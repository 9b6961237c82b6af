"""Plots as inline SVG; colours are CSS classes of the page."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping

from edgellm.tools.inspection.sources.tensors import PARTS

WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 240, 64, 24
_BAR, _GAP, _NAMES = 18, 8, 210  # of horizontal bars


def bars(values: Mapping[str, float], show: Callable[[float], str]) -> str:
    """Plot horizontal bars; parts of a model have their own colours."""
    top = max(values.values(), default=0) or 1
    room = WIDTH - _NAMES - 110
    marks = []
    for place, (name, value) in enumerate(values.items()):
        y, width = place * (_BAR + _GAP), max(room * value / top, 1)
        colour = name if name in PARTS else "mark"
        marks.append(
            f'<text class="y" x="{_NAMES - 8}" y="{y + 13}">{html.escape(name)}</text>'
            f'<rect class="{colour}" x="{_NAMES}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
            f'<text class="value" x="{_NAMES + width + 6:.1f}" y="{y + 13}">'
            f"{html.escape(show(value))}</text>"
        )
    return drawing("".join(marks), len(values) * (_BAR + _GAP), "bars")


def stacks(layers: Mapping[int, Mapping[str, int]], show: Callable[[float], str]) -> str:
    """Plot a stacked column per layer, one block per part."""
    top = max(sum(parts.values()) for parts in layers.values()) * 1.05 or 1
    step, base = (WIDTH - _LEFT) / len(layers), _HEIGHT - _BOTTOM
    marks = [_axis(top, show)]
    every = max(1, len(layers) // 16)
    for place, (layer, parts) in enumerate(layers.items()):
        x, below = _LEFT + (place + 0.1) * step, float(base)
        for part, value in parts.items():
            height = base * value / top
            below -= height
            hint = html.escape(f"layer {layer}, {part}: {show(value)}")
            marks.append(
                f'<rect class="{part}" x="{x:.1f}" y="{below:.1f}" width="{step * 0.8:.1f}" '
                f'height="{height:.1f}"><title>{hint}</title></rect>'
            )
        if place % every == 0:
            marks.append(f'<text x="{x + step * 0.4:.1f}" y="{_HEIGHT - 6}">{layer}</text>')
    return drawing("".join(marks), _HEIGHT, "bytes by layer") + _legend(layers)


def curve(values: Mapping[int, float], show: Callable[[float], str]) -> str:
    """Plot a line through measured points at equal distances."""
    top = max(values.values()) * 1.05 or 1
    step, base = (WIDTH - _LEFT) / len(values), _HEIGHT - _BOTTOM
    points = [
        (_LEFT + (place + 0.5) * step, base * (1 - value / top), rows, value)
        for place, (rows, value) in enumerate(values.items())
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    marks = [_axis(top, show), f'<polyline points="{line}"/>']
    marks += [
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{rows} tokens: {show(value)}'
        f'</title></circle><text x="{x:.1f}" y="{_HEIGHT - 6}">{rows}</text>'
        for x, y, rows, value in points
    ]
    return drawing("".join(marks), _HEIGHT, "cost by tokens")


def _axis(top: float, show: Callable[[float], str]) -> str:
    base = _HEIGHT - _BOTTOM
    return "".join(
        f'<line x1="{_LEFT}" x2="{WIDTH}" y1="{base * (1 - share):.1f}" '
        f'y2="{base * (1 - share):.1f}"/><text class="y" x="{_LEFT - 6}" '
        f'y="{max(base * (1 - share) + 4, 10):.1f}">{html.escape(show(top * share))}</text>'
        for share in (0.0, 0.5, 1.0)
    )


def _legend(layers: Mapping[int, Mapping[str, int]]) -> str:
    parts = [part for part in PARTS if any(part in found for found in layers.values())]
    return '<p class="soft">' + "".join(f'<i class="{part}"></i> {part}' for part in parts) + "</p>"


def drawing(marks: str, height: int, label: str) -> str:
    """Return an SVG element as wide as the page; `marks` are SVG in 900 x `height` units."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{marks}</svg>'

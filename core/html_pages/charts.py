"""Charts as inline SVG; colours are CSS classes of `base.html`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

Show = Callable[[float], str]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 240, 64, 24
_BASE = _HEIGHT - _BOTTOM
_BAR, _GAP, _NAMES = 18, 8, 210  # of horizontal bars
_ROW, _VALUES, _AXIS = 26, 170, 20  # of intervals
_TICKS = 16  # names below columns, at most
_MARGIN = 1.05  # of the top


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a column."""

    kind: str  # CSS class
    value: float
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a curve, with a name below the axis and a hint."""

    x: float
    y: float
    name: str = ""
    hint: str = ""
    kind: str = ""  # CSS class of its dot; "": no dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An estimate with its interval, if it has one."""

    value: float
    low: float | None
    high: float | None
    text: str


def bars(values: Mapping[str, float], show: Show, kinds: Collection[str] = ()) -> Markup:
    """Horizontal bars; a name of `kinds` is the CSS class of its bar."""
    top = max(values.values(), default=0) or 1
    room = _WIDTH - _NAMES - 110
    marks = []
    for place, (name, value) in enumerate(values.items()):
        y, width = place * (_BAR + _GAP), max(room * value / top, 1)
        marks += [
            _text(_NAMES - 8, y + 13, name, "y"),
            _rect(name if name in kinds else "mark", _NAMES, y, (width, _BAR)),
            _text(_NAMES + width + 6, y + 13, show(value), "value"),
        ]
    return _drawing(marks, len(values) * (_BAR + _GAP), "bars")


def columns(
    values: Mapping[int, Sequence[Block]], show: Show, label: str, line: Sequence[float] = ()
) -> Markup:
    """A column of stacked blocks for each number, and a line through one value of each."""
    tops = [sum(block.value for block in blocks) for blocks in values.values()]
    top = max(*tops, *line, 1e-6) * _MARGIN
    step = (_WIDTH - _LEFT) / len(values)
    marks = [_axis(top, show)]
    for place, (number, blocks) in enumerate(values.items()):
        x, y = _LEFT + (place + 0.1) * step, float(_BASE)
        for block in blocks:
            height = _BASE * block.value / top
            y -= height
            marks.append(_rect(block.kind, x, y, (step * 0.8, height), block.hint))
        if place % max(1, len(values) // _TICKS) == 0:
            marks.append(_text(x + step * 0.4, _HEIGHT - 6, str(number)))
    if line:
        middle = _LEFT + 0.5 * step
        marks.append(_line((middle + at * step, _up(value, top)) for at, value in enumerate(line)))
    return _drawing(marks, _HEIGHT, label)


def curve(points: Sequence[Point], label: str, show: Show | None = None) -> Markup:
    """A line through points; `show` labels the axis of their values."""
    top = max(*(point.y for point in points), 1e-6) * _MARGIN
    low, high = points[0].x, points[-1].x
    room = _WIDTH - 2 * _LEFT

    def across(point: Point) -> float:
        return _LEFT + (point.x - low) / max(high - low, 1e-6) * room

    marks = [_axis(top, show)] if show is not None else []
    marks.append(_line((across(point), _up(point.y, top)) for point in points))
    for point in points:
        x = across(point)
        if point.kind:
            marks.append(_dot(point.kind, x, _up(point.y, top), point.hint))
        if point.name:
            marks.append(_text(x, _HEIGHT - 6, point.name))
    return _drawing(marks, _HEIGHT, label)


def intervals(values: Mapping[str, Range], neutral: float, label: str) -> Markup:
    """A dot and whiskers for each name, and a line at `neutral`, which means no difference."""
    ends = [end for one in values.values() for end in (one.value, one.low, one.high)]
    given = [neutral, *(end for end in ends if end is not None)]
    low, high = min(given), max(given)
    scale = (_WIDTH - _NAMES - _VALUES) / ((high - low) or 1.0)

    def across(value: float) -> float:
        return _NAMES + (value - low) * scale

    height, middle = len(values) * _ROW, across(neutral)
    marks = [_rule(middle, middle, 0, height), _text(middle, height + _AXIS - 6, f"{neutral:g}")]
    for place, (name, one) in enumerate(values.items()):
        y = (place + 0.5) * _ROW
        if one.low is not None and one.high is not None:
            marks.append(_line(((across(one.low), y), (across(one.high), y))))
        marks += [
            _dot("mark", across(one.value), y),
            _text(_NAMES - 14, y + 4, name, "y"),
            _text(_WIDTH - _VALUES + 14, y + 4, one.text, "value"),
        ]
    return _drawing(marks, height + _AXIS, label)


def legend(kinds: Iterable[str]) -> Markup:
    """Coloured squares with their names."""
    marks = (Markup('<i class="{}"></i> {}').format(kind, kind) for kind in kinds)
    return Markup('<p class="soft">{}</p>').format(Markup().join(marks))


def _up(value: float, top: float) -> float:
    return _BASE * (1 - value / top)


def _axis(top: float, show: Show) -> Markup:
    marks = []
    for share in (0.0, 0.5, 1.0):
        y = _up(top * share, top)
        marks += [
            _rule(_LEFT, _WIDTH, y, y),
            _text(_LEFT - 6, max(y + 4, 10), show(top * share), "y"),
        ]
    return Markup().join(marks)


def _drawing(marks: Iterable[Markup], height: float, label: str) -> Markup:
    form = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(form).format(_WIDTH, height, label, Markup().join(marks))


def _rect(kind: str, x: float, y: float, size: tuple[float, float], hint: str = "") -> Markup:
    form = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">{}</rect>'
    return Markup(form).format(kind, x, y, *size, _hint(hint))


def _dot(kind: str, x: float, y: float, hint: str = "") -> Markup:
    form = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="5">{}</circle>'
    return Markup(form).format(kind, x, y, _hint(hint))


def _hint(text: str) -> Markup:
    return Markup("<title>{}</title>").format(text) if text else Markup()


def _line(points: Iterable[tuple[float, float]]) -> Markup:
    return Markup('<polyline points="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def _rule(x: float, other_x: float, y: float, other_y: float) -> Markup:
    form = '<line x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
    return Markup(form).format(x, other_x, y, other_y)


def _text(x: float, y: float, text: str, kind: str = "") -> Markup:
    form = '<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>'
    return Markup(form).format(kind, x, y, text)

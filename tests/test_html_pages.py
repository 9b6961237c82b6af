"""Pages and charts of reports: positions, escaped names, no scripts."""

from __future__ import annotations

import pytest
from html_pages import Page
from jinja2 import UndefinedError

from edgellm.core.html_pages import charts
from edgellm.core.html_pages.page import render

NASTY = '<b>"&@'


def _elements(chart, tag):
    return [found for name, found in Page(str(chart)).elements if name == tag]


def test_bars_have_the_lengths_of_their_values():
    chart = charts.bars({"mlp": 4.0, NASTY: 1.0, "none": 0.0}, "{:g} MB".format, ["mlp"])
    rects = _elements(chart, "rect")
    assert [rect["class"] for rect in rects] == ["mlp", "mark", "mark"]
    assert [rect["width"] for rect in rects] == ["580.0", "145.0", "1.0"]
    assert _elements(chart, "b") == []
    assert "4 MB" in chart


def test_blocks_of_a_column_are_stacked():
    blocks = {0: [charts.Block("mlp", 1.0, NASTY), charts.Block("head", 3.0)]}
    chart = charts.columns(blocks, str, "bytes", [4.0])
    low, high = _elements(chart, "rect")
    assert float(high["y"]) + float(high["height"]) == pytest.approx(float(low["y"]), abs=0.1)
    assert float(high["height"]) == pytest.approx(3 * float(low["height"]), abs=0.2)
    (line,) = _elements(chart, "polyline")
    assert line["points"].endswith(high["y"])


def test_a_curve_has_dots_where_points_have_a_kind():
    points = [charts.Point(x=x, y=y, name=f"{x}") for x, y in ((4.0, 2.0), (5.0, 1.0), (8.0, 0.0))]
    points[1] = charts.Point(x=5.0, y=1.0, kind="worst", hint=NASTY)
    chart = charts.curve(points, "divergence")
    (dot,) = _elements(chart, "circle")
    assert dot["class"] == "worst"
    assert _elements(chart, "line") == []
    assert len(_elements(charts.curve(points, "divergence", str), "line")) == 3
    assert charts.curve(points[:1], "one").count("4.0</text>") == 1


def test_intervals_without_ends_are_dots():
    values = {
        "a": charts.Range(value=2.0, low=1.0, high=3.0, text="2"),
        NASTY: charts.Range(value=1.0, low=None, high=None, text="1"),
    }
    chart = charts.intervals(values, 1.0, "ratios")
    assert (len(_elements(chart, "circle")), len(_elements(chart, "polyline"))) == (2, 1)
    assert _elements(charts.intervals({"a": values[NASTY]}, 1.0, "equal"), "circle")


def test_templates_extend_the_shell_and_escape(tmp_path):
    template = tmp_path / "mine.html"
    body = "{% block body %}{{ table(('', 'n'), rows) }}{% endblock %}"
    shell = '{% extends "base.html" %}{% from "tables.html" import table %}'
    template.write_text(shell + body)
    text = render(template, heading=NASTY, rows=[(NASTY, "1")])
    names = {name for name, _ in Page(text).elements}
    assert not {"b", "script", "link"} & names
    assert text.count("&lt;b&gt;&#34;&amp;@") == 3
    with pytest.raises(UndefinedError, match="heading"):
        render(template, rows=[])

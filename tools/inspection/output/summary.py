"""Summary of a report on one screen: what it is, sizes, precision by part, limits."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from edgellm.tools.inspection.output.tables import size
from edgellm.tools.inspection.report import Report
from edgellm.tools.inspection.sources.engines import NO_TREES
from edgellm.tools.inspection.sources.tensors import PARTS, by_dtype, bytes_by_part

LINES, COLUMNS = 24, 80  # of the screen
_NAME = 21  # columns of a name
# The most important first; the title has architecture, parameters and layers.
_FACTS = (
    "contents",
    "method",
    "embeds texts by",
    "quantization",
    "activations",
    "longest prompt",
    "KV cache",
    "largest verified tree",
    "largest drafted tree",
    "tokens of an image",
    "of a request's images",
    "longest clip",
    "backend",
    "machine",
    "positions",
    "hidden taps",
    "for a base of",
    "end tokens",
    "vocabulary",
    "hidden size",
)
_ENDING = "--all shows layers, inputs and outputs, kernels, estimates and origins."


def summary(report: Report, context: int, ending: str = "") -> list[str]:
    """Return at most `LINES` lines of at most `COLUMNS` columns.

    Args:
        report: the report.
        context: tokens in the KV cache, for its size.
        ending: appended to the title.
    """
    title = [*textwrap.wrap(report.title + ending, COLUMNS)[:2], ""]
    rest = [*_sizes(report, context), *_speed(report), *_related(report), "", *_parts(report)]
    rest += ["", _ENDING]
    facts = list(_facts(report))[: LINES - len(title) - len(rest)]
    return [_clipped(line) for line in (*title, *facts, *rest)]


def _clipped(line: str) -> str:
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def _row(name: str, value: str) -> str:
    """A name and its value."""
    return f"{name:<{_NAME}}  {value}"


def _facts(report: Report) -> Iterator[str]:
    for name in _FACTS:
        value = report.facts.get(name, "")
        if value and value != "none" and value != NO_TREES:
            yield _row(name, value)


def _sizes(report: Report, context: int) -> Iterator[str]:
    types = sorted(by_dtype(report.tensors).items(), key=lambda item: -item[1][1])
    kinds = ", ".join(f"{size(num_bytes)} {name}" for name, (_, num_bytes) in types[:3])
    yield _row("weights", f"{size(sum(each for _, (_, each) in types))}: {kinds}")
    if report.kv is not None and report.kv_bytes_per_token:
        whole = f"{size(report.kv_bytes)} for {report.capacity}"
        some = f"{size(report.held_kv_bytes(context))} for {context}, {whole}"
        yield _row("KV cache size", f"{size(report.kv_bytes_per_token)} a token, {some}")
        yield _row("memory", f"{size(report.loaded_bytes + report.kv_bytes)} with the whole cache")


def _speed(report: Report) -> Iterator[str]:
    costs = report.costs[0] if report.is_decoder and report.costs else None
    if costs is None or not costs.ms_by_rows.get(1):
        return
    rows = max(count for count in costs.ms_by_rows if count not in costs.estimated)
    decode, prefill = 1e3 / costs.ms_by_rows[1], 1e3 * rows / costs.ms_by_rows[rows]
    yield _row("speed", f"decode {decode:.1f}, prefill {prefill:.0f} tokens/s, measured at build")


def _related(report: Report) -> Iterator[str]:
    if report.draft is not None:
        method = report.draft.facts.get("method", "draft model")
        yield _row("draft", f"{method}, {size(report.draft.loaded_bytes)}")
    if report.origins:
        origin = report.origins[-1]
        yield _row(f"from {origin.what}", f"{origin.path} ({origin.state})")


def _parts(report: Report) -> Iterator[str]:
    """Yield bytes, share and number formats of each part."""
    parts = bytes_by_part(report.tensors)
    whole = max(sum(parts.values()), 1)
    yield f"{'part':<{_NAME}}  {'bytes':>9}  {'share':>6}  number formats"
    for part in PARTS:
        if num_bytes := parts.get(part, 0):
            own = by_dtype(tuple(each for each in report.tensors if each.part == part))
            kinds = sorted(own, key=lambda name: -own[name][1])
            shown = f"{size(num_bytes):>9}  {num_bytes / whole:>6.1%}"
            yield f"{part:<{_NAME}}  {shown}  {', '.join(kinds)}"

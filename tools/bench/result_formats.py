"""Formats of results: tables, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from typing import Any

from edgellm.tools.bench.results import PLAIN, Results, Series
from edgellm.tools.tables import Table, markdown

NAMES = ("text", "markdown", "csv", "json")


def tables(results: Results) -> list[Table]:
    """Return the results as tables."""
    found = [_speeds(results)] if results.series else []
    found += [_texts(results)] if results.pairs else []
    found += [_energies(results)] if results.measures_energy else []
    facts = {**results.facts, "peak memory": f"{results.peak_memory_bytes / 1e6:.0f} MB"}
    return [
        *found,
        Table(
            title="Engine and machine",
            columns=("", ""),
            rows=tuple(facts.items()),
            is_numeric=False,
        ),
    ]


def as_markdown(results: Results) -> str:
    """Return the tables in Markdown."""
    return "\n".join(markdown(table) for table in tables(results))


def as_csv(results: Results) -> str:
    """Return CSV: one line per series, with engine, settings and machine."""
    rows = [{**_series_row(one, results), **results.facts} for one in _all(results)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(results: Results) -> str:
    """Return JSON with all samples."""
    content = {
        "engine": results.engine,
        "machine": results.machine,
        "settings": results.settings,
        "complete_repetitions": results.repetitions,
        "peak_memory_bytes": results.peak_memory_bytes,
        "series": [{**_series_row(one, results), "samples": one.samples} for one in _all(results)],
        "texts": [
            {
                "name": pair.plain.name,
                "ratios": pair.ratios,
                "median_ratio": _median(pair.ratios),
                "acceptance_length": pair.acceptance_length,
                "verified_nodes": pair.tree_size,
                "same_answers": pair.same_answers,
            }
            for pair in results.pairs
        ],
        "median_ratio": _median(results.ratios),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _all(results: Results) -> list[Series]:
    return [*results.series, *(one for pair in results.pairs for one in (pair.plain, pair.eagle))]


def _series_row(series: Series, results: Results) -> dict[str, Any]:
    """Return the fields of a series without its samples; energy if it is measured."""
    row = dataclasses.asdict(series)
    del row["samples"], row["energy"]
    if results.measures_energy:
        row["joules_per_token"] = round(series.joules_per_token, 6)
        row["average_watts"] = round(series.energy.average_watts, 3)
        row["peak_watts"] = round(series.energy.peak_watts, 3)
    return {
        **row,
        "repetitions": len(series.samples),
        "median_tokens_per_s": round(series.median, 4),
        "mean_tokens_per_s": round(series.mean, 4),
        "stdev_tokens_per_s": round(series.deviation, 4),
    }


def _speeds(results: Results) -> Table:
    rows = tuple(
        (one.name, _rate(one.median), _spread(one), _milliseconds(one), str(len(one.samples)))
        for one in results.series
    )
    return Table(
        title="Random tokens, plain",
        columns=("", "tokens/s, median", "mean ± sd", "ms a token", "samples"),
        rows=rows,
        note="samples are interleaved; decode T behind N: T tokens after N in the KV cache "
        "(minimum 1)",
    )


def _energies(results: Results) -> Table:
    rows = tuple(
        (
            one.name if one.mode == PLAIN else f"{one.name}, speculative",
            f"{one.joules_per_token:.4f}",
            f"{one.energy.average_watts:.2f}",
            f"{one.energy.peak_watts:.2f}" if one.energy.peak_watts else "-",
            _rate(one.median),
        )
        for one in _all(results)
    )
    return Table(
        title="Energy",
        columns=("", "joules a token", "watts, average", "watts, peak", "tokens/s, median"),
        rows=rows,
        note="of all samples, with what an idle machine takes; a peak needs 25 ms",
    )


def _texts(results: Results) -> Table:
    """Return the table of prompts; its note sums them up."""
    rows = [
        (
            pair.plain.name,
            f"{pair.plain.depth}",
            f"{pair.plain.tokens}",
            _rate(pair.plain.median),
            _rate(pair.eagle.median),
            f"{_median(pair.ratios):.2f}",
            f"{pair.acceptance_length:.2f}",
            f"{pair.tree_size:.1f}",
            f"{pair.same_answers} of {len(pair.eagle.samples)}",
        )
        for pair in results.pairs
    ]
    ratios = results.ratios
    spread = f" ± {statistics.stdev(ratios):.2f}" if len(ratios) > 1 else ""
    mean = f"mean {statistics.fmean(ratios):.2f}{spread}" if ratios else "none"
    rounds = sum(pair.rounds for pair in results.pairs)
    emitted = sum(pair.emitted for pair in results.pairs)
    return Table(
        title="Texts, plain and with EAGLE in turns",
        columns=(
            "text",
            "prompt",
            "answer",
            "plain tokens/s",
            "EAGLE tokens/s",
            "ratio",
            "acceptance",
            "nodes",
            "same answer",
        ),
        rows=tuple(rows),
        note="prompt and answer in tokens; "
        f"all: ratio {_median(ratios):.2f} (median of {len(ratios)} pairs, {mean}), "
        f"acceptance length {emitted / max(rounds, 1):.2f}",
    )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}"


def _spread(series: Series) -> str:
    return f"{series.mean:.1f} ± {series.deviation:.1f}"


def _milliseconds(series: Series) -> str:
    return f"{1e3 / series.median:.2f}" if series.median else "-"

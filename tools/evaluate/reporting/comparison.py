"""Comparison of two runs of the same questions, paired by question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.reporting.report import (
    acceptance_length,
    rate,
    rates,
    shown,
    whole_rates,
)
from edgellm.tools.evaluate.scoring.bootstrap import bootstrap, mean_of, rate_ratio, share_of
from edgellm.tools.evaluate.scoring.scores import Measure, Scores, read_scores
from edgellm.tools.evaluate.settings import Settings, read_settings
from edgellm.tools.tables import Table

Pair = tuple[list[Measure], list[Measure]]
_NOTE = "in brackets: 95 % interval of 4000 paired bootstraps over questions"


def compare_runs(one: Path, other: Path) -> list[Table]:
    """Return tables of the differences between two finished runs, with intervals.

    Raises:
        EdgeLLMError: a run is missing or not finished, or their questions differ.
    """
    settings = [read_settings(folder) for folder in (one, other)]
    if settings[0].data_sha256 != settings[1].data_sha256:
        sets = " and ".join(f"{run.dataset} ({run.num_questions})" for run in settings)
        raise EdgeLLMError(
            f"the runs have different questions: {sets}",
            hint="evaluate both with the same --dataset and --limit",
        )
    scores = [read_scores(folder) for folder in (one, other)]
    found = []
    for mode in ("plain", "spec"):
        if all(mode in run.modes for run in settings):
            found += _tables(mode, (_measures(scores[0], mode), _measures(scores[1], mode)))
    return [*found, _options(*settings)]


def _measures(scores: Scores, mode: str) -> list[Measure]:
    return [question.modes[mode] for question in scores.questions]


def _tables(mode: str, runs: Pair) -> list[Table]:
    word = "plain" if mode == "plain" else "speculative"
    answered = [pair for pair in zip(*runs, strict=True) if pair[0].turns == pair[1].turns > 0]
    both = [a for a, _ in answered], [b for _, b in answered]
    rows = [
        ("tokens/s", rate(both[0]), rate(both[1]),
         shown(rate_ratio(rates(both[0]), rates(both[1])))),
        ("tokens/s with prompts", _whole(both[0]), _whole(both[1]),
         shown(rate_ratio(whole_rates(both[0]), whole_rates(both[1])))),
    ]  # fmt: skip
    speeds = Table(
        title=f"Speed, {word}", columns=("", "A", "B", "B / A"), rows=tuple(rows), note=_NOTE
    )
    rows = list(_acceptance(both)) if mode == "spec" else []
    rows += _scores(runs)
    values = Table(
        title=f"Acceptance and scores, {word}",
        columns=("", "A", "B", "B - A"),
        rows=tuple(rows),
        note=_NOTE,
    )
    return [speeds, values] if rows else [speeds]


def _acceptance(both: Pair) -> list[tuple[str, ...]]:
    columns = [
        [float(value) for value in column]
        for run in both
        for column in ([one.emitted_tokens for one in run], [one.rounds for one in run])
    ]
    change = bootstrap(columns, lambda sums: sums[2] / sums[3] - sums[0] / sums[1])
    cells = [shown(acceptance_length(run)) for run in both]
    return [("acceptance length", *cells, shown(change, "{:+.2f}"))]


def _scores(runs: Pair) -> list[tuple[str, ...]]:
    rows = []
    for name in dict.fromkeys(name for one in runs[0] for name in one.scores):
        values = [
            (a.scores[name], b.scores[name])
            for a, b in zip(*runs, strict=True)
            if name in a.scores and name in b.scores
        ]
        means = [shown(share_of([pair[at] for pair in values]), "{:.3f}") for at in (0, 1)]
        change = shown(mean_of([b - a for a, b in values]), "{:+.3f}")
        rows.append((name, *means, change))
    return rows


def _whole(measures: Sequence[Measure]) -> str:
    tokens, seconds = (sum(column) for column in whole_rates(measures))
    return f"{tokens / seconds:.1f}" if seconds else "-"


def _options(one: Settings, other: Settings) -> Table:
    facts = [msgspec.to_builtins(run) for run in (one, other)]
    rows = tuple(
        (name.replace("_", " "), str(facts[0][name]), str(facts[1][name]))
        for name in facts[0]
        if facts[0][name] != facts[1][name]
    )
    note = "" if rows else "none"
    return Table(
        title="Different settings", columns=("", "A", "B"), rows=rows, note=note, is_numeric=False
    )

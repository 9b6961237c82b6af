"""Report of a run: tables, Markdown and an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from edgellm.core.html_pages import charts
from edgellm.tools.evaluate.scoring.bootstrap import (
    Interval,
    mean_of,
    rate_ratio,
    ratio_of,
    share_of,
)
from edgellm.tools.evaluate.scoring.scores import Measure, Scored, Scores
from edgellm.tools.evaluate.settings import Settings
from edgellm.tools.inspection.output.page import Section, page
from edgellm.tools.tables import Table, markdown

if TYPE_CHECKING:
    from markupsafe import Markup

ALL = "all"
SPEED_TITLE, ACCEPTANCE_TITLE, SCORES_TITLE = "Speed", "Acceptance", "Scores"
SAME_TITLE, RUN_TITLE = "Greedy answers, speculative against plain", "The run"
_SHOWN_DIVERGENCES = 20
_NOTE = (
    "in brackets: 95 % interval of 4000 paired bootstraps over questions; unreliable for few "
    "questions"
)
_RULES = (
    "pass@1: the program passes its test; number exact: the last number equals the reference's; "
    "text exact: equal except for spaces; ROUGE: F1, lower case, no stemming; shares have "
    "Wilson intervals"
)


def tables(settings: Settings, scores: Scores) -> list[Table]:
    """Return all tables of the report."""
    found = [_speed(settings, scores.questions)]
    if settings.spec is not None:
        found.append(_acceptance(scores.questions))
    if names := _score_names(scores.questions):
        found.append(_scores(names, settings, scores.questions))
    if scores.divergences is not None:
        found.append(_same(scores))
    return [*found, _run(settings, scores)]


def report_markdown(settings: Settings, scores: Scores) -> str:
    """Return the report in Markdown."""
    return f"## {_heading(settings)}\n\n" + "\n".join(map(markdown, tables(settings, scores)))


def report_page(settings: Settings, scores: Scores) -> str:
    """Return the report as one self-contained HTML page with plots."""
    plots = dict(_plots(settings, scores.questions))
    sections = [Section(table, plots.get(table.title, "")) for table in tables(settings, scores)]
    return page(_heading(settings), ", ".join(settings.modes), sections)


def _heading(settings: Settings) -> str:
    return f"{settings.model} on {settings.dataset}, {settings.num_questions} questions"


def by_category(questions: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Return the questions of each category; `all` comes last."""
    names = dict.fromkeys(question.category for question in questions)
    found = {name: [one for one in questions if one.category == name] for name in names}
    return {**(found if len(found) > 1 else {}), ALL: list(questions)}


def pairs(questions: Sequence[Scored]) -> list[tuple[Measure, Measure]]:
    """Return plain and speculative figures of questions with equally many turns in both modes."""
    both = [(one.modes["plain"], one.modes["spec"]) for one in questions]
    return [(plain, spec) for plain, spec in both if plain.turns == spec.turns > 0]


def rates(measures: Sequence[Measure]) -> tuple[list[float], list[float]]:
    """Return decoded tokens and decode seconds."""
    return (
        [float(one.decoded_tokens) for one in measures],
        [one.decode_ms / 1e3 for one in measures],
    )


def whole_rates(measures: Sequence[Measure]) -> tuple[list[float], list[float]]:
    """Return all tokens and seconds, prefill included."""
    return [float(one.new_tokens) for one in measures], [one.wall_s for one in measures]


def speed_ratio(questions: Sequence[Scored]) -> Interval | None:
    """Return speculative over plain decode speed."""
    plain, spec = _columns(questions)
    return rate_ratio(rates(plain), rates(spec))


def acceptance_length(measures: Sequence[Measure]) -> Interval | None:
    """Return tokens per round of speculation, the bonus token included."""
    return ratio_of([one.emitted_tokens for one in measures], [one.rounds for one in measures])


def _columns(questions: Sequence[Scored]) -> tuple[list[Measure], list[Measure]]:
    found = pairs(questions)
    return [plain for plain, _ in found], [spec for _, spec in found]


def _speed(settings: Settings, questions: Sequence[Scored]) -> Table:
    if settings.spec is None:
        rows = tuple(
            (
                name,
                f"{len(found)}",
                shown(ratio_of(*rates([one.modes["plain"] for one in found])), "{:.1f}"),
            )
            for name, found in by_category(questions).items()
        )
        return Table(
            title=SPEED_TITLE, columns=("", "questions", "plain tokens/s"), rows=rows, note=_NOTE
        )
    rows = []
    for name, found in by_category(questions).items():
        plain, spec = _columns(found)
        whole = rate_ratio(whole_rates(plain), whole_rates(spec))
        rows.append(
            (name, f"{len(plain)}", rate(plain), rate(spec), shown(speed_ratio(found)),
             shown(whole))
        )  # fmt: skip
    columns = ("", "questions", "plain tokens/s", "speculative", "ratio", "ratio with prompts")
    return Table(title=SPEED_TITLE, columns=columns, rows=tuple(rows), note=_NOTE)


def _acceptance(questions: Sequence[Scored]) -> Table:
    rows = []
    for name, found in by_category(questions).items():
        spec = [one.modes["spec"] for one in found]
        drafted = sum(one.draft_tokens for one in spec)
        accepted = sum(one.accepted_draft_tokens for one in spec)
        rows.append(
            (name, shown(acceptance_length(spec)), f"{accepted / drafted:.3f}" if drafted else "-",
             f"{accepted}", f"{drafted}")
        )  # fmt: skip
    columns = ("", "acceptance length", "acceptance_rate", "total_accepted_draft_tokens",
               "total_draft_tokens")  # fmt: skip
    note = "length: tokens per round, bonus included; rate: accepted over drafted tokens"
    return Table(title=ACCEPTANCE_TITLE, columns=columns, rows=tuple(rows), note=note)


def _score_names(questions: Sequence[Scored]) -> list[str]:
    return list(dict.fromkeys(name for one in questions for name in one.modes["plain"].scores))


def _scores(names: Sequence[str], settings: Settings, questions: Sequence[Scored]) -> Table:
    rows = []
    for name in names:
        values = {
            mode: [
                one.modes[mode].scores[name] for one in questions if name in one.modes[mode].scores
            ]
            for mode in settings.modes
        }
        cells = [shown(share_of(values[mode]), "{:.3f}") for mode in settings.modes]
        if settings.spec is not None:
            differences = [b - a for a, b in zip(values["plain"], values["spec"], strict=True)]
            cells.append(shown(mean_of(differences), "{:+.3f}"))
        rows.append((name, f"{len(values['plain'])}", *cells))
    columns = ("", "questions", "plain")
    columns += ("speculative", "difference") if settings.spec is not None else ()
    return Table(title=SCORES_TITLE, columns=columns, rows=tuple(rows), note=_RULES)


def _same(scores: Scores) -> Table:
    divergences, count = scores.divergences or [], len(scores.questions)
    rows = tuple(
        (str(one.question_id), f"{one.turn + 1}", f"{one.token}", _number(one.plain_token),
         _number(one.speculated_token), _number(one.margin), _number(one.spread))
        for one in divergences[:_SHOWN_DIVERGENCES]
    )  # fmt: skip
    more = len(divergences) - len(rows)
    note = f"{count - len(divergences)} of {count} answers have the plain answer's token ids"
    note += f"; {more} more divergences are in scores.json" if more else ""
    columns = ("first divergence in", "turn", "token", "plain", "speculative", "logit margin",
               "deviation of the logits")  # fmt: skip
    return Table(title=SAME_TITLE, columns=columns, rows=rows, note=note)


def _run(settings: Settings, scores: Scores) -> Table:
    modes = [mode for one in scores.questions for mode in one.modes.values()]
    failed = [error for mode in modes for error in mode.errors]
    spec = "" if settings.spec is None else ", ".join(
        f"{name} {value}" for name, value in settings.spec.items() if value not in (None, [], "")
    )  # fmt: skip
    facts = {
        "speculation": spec or "none: plain decoding",
        "max tokens of a turn": f"{settings.max_generate_length}",
        "temperature": f"{settings.temperature:g}",
        "repeats": f"{settings.repeats}",
        "failed turns": f"{len(failed)}" + (f": {failed[0]}" if failed else ""),
        "programs": scores.programs or "not run (--runCode)",
        "questions, sha256": settings.data_sha256,
        **{f"{role} engine, sha256": text for role, text in settings.engines.items()},
    }
    return Table(title=RUN_TITLE, columns=("", ""), rows=tuple(facts.items()), is_numeric=False)


def _plots(settings: Settings, questions: Sequence[Scored]) -> Iterator[tuple[str, Markup]]:
    """Yield plots with the titles of their tables."""
    if settings.spec is None:
        return
    categories = by_category(questions)
    if ratios := _defined(categories, speed_ratio):
        ranges = {
            name: charts.Range(value=one.value, low=one.low, high=one.high, text=shown(one))
            for name, one in ratios.items()
        }
        yield SPEED_TITLE, charts.intervals(ranges, 1.0, "ratios by category")
    lengths = _defined(
        categories, lambda found: acceptance_length([q.modes["spec"] for q in found])
    )
    if lengths:
        values = {name: length.value for name, length in lengths.items()}
        yield ACCEPTANCE_TITLE, charts.bars(values, lambda value: f"{value:.2f}")


def _defined(
    categories: dict[str, list[Scored]], estimate: Callable[[list[Scored]], Interval | None]
) -> dict[str, Interval]:
    found = {name: estimate(questions) for name, questions in categories.items()}
    return {name: one for name, one in found.items() if one is not None}


def rate(measures: Sequence[Measure]) -> str:
    """Return the decode speed, tokens/s."""
    seconds = sum(one.decode_ms for one in measures) / 1e3
    return f"{sum(one.decoded_tokens for one in measures) / seconds:.1f}" if seconds else "-"


def shown(interval: Interval | None, form: str = "{:.2f}") -> str:
    """Format an estimate with its interval."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return form.format(interval.value)
    low, high = form.format(interval.low), form.format(interval.high)
    return f"{form.format(interval.value)} ({low} to {high})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value}"

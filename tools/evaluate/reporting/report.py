"""A run as tables, Markdown and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edgellm.tools.evaluate.reporting.plots import intervals
from edgellm.tools.evaluate.scoring.bootstrap import (
    Interval,
    mean_of,
    rate_ratio,
    ratio_of,
    share_of,
)
from edgellm.tools.evaluate.scoring.scores import Measure, Scored, Scores
from edgellm.tools.evaluate.settings import Settings
from edgellm.tools.inspection.output.page import page, section
from edgellm.tools.inspection.output.plots import bars
from edgellm.tools.tables import Table, markdown

ALL = "all"
SPEED_TITLE, ACCEPTANCE_TITLE, SCORES_TITLE = "Speed", "Acceptance", "Scores"
SAME_TITLE, RUN_TITLE = "Greedy answers, speculated against plain", "The run"
_SHOWN_DIVERGENCES = 20
_NOTE = "in brackets 95 % of 4000 bootstraps over questions, paired; of few they say little"
_RULES = (
    "pass@1: the program ends without an error in its test; number exact: the last number equals "
    "the reference's; text exact: but for spaces; ROUGE: F1, lower case, no stemming; "
    "intervals of right and wrong are Wilson's"
)


def tables(settings: Settings, scores: Scores) -> list[Table]:
    """All there is to say."""
    found = [_speed(settings, scores.questions)]
    if settings.spec is not None:
        found.append(_acceptance(scores.questions))
    if names := _score_names(scores.questions):
        found.append(_scores(names, settings, scores.questions))
    if scores.divergences is not None:
        found.append(_same(scores))
    return [*found, _run(settings, scores)]


def report_markdown(settings: Settings, scores: Scores) -> str:
    """The report as Markdown."""
    return f"## {_heading(settings)}\n\n" + "\n".join(map(markdown, tables(settings, scores)))


def report_page(settings: Settings, scores: Scores) -> str:
    """The report as one page with plots, which needs no network."""
    plots = dict(_plots(settings, scores.questions))
    sections = [section(table, plots.get(table.title, "")) for table in tables(settings, scores)]
    return page(_heading(settings), ", ".join(settings.modes), sections)


def _heading(settings: Settings) -> str:
    return f"{settings.model} on {settings.dataset}, {settings.num_questions} questions"


def by_category(questions: Sequence[Scored]) -> dict[str, list[Scored]]:
    """The questions of each category; `all` comes last."""
    names = dict.fromkeys(question.category for question in questions)
    found = {name: [one for one in questions if one.category == name] for name in names}
    return {**(found if len(found) > 1 else {}), ALL: list(questions)}


def pairs(questions: Sequence[Scored]) -> list[tuple[Measure, Measure]]:
    """Plain and speculated figures of questions whose same turns were answered in both modes."""
    both = [(one.modes["plain"], one.modes["spec"]) for one in questions]
    return [(plain, spec) for plain, spec in both if plain.turns == spec.turns > 0]


def rates(measures: Sequence[Measure]) -> tuple[list[float], list[float]]:
    """Decoded tokens and the seconds that they took."""
    return (
        [float(one.decoded_tokens) for one in measures],
        [one.decode_ms / 1e3 for one in measures],
    )


def whole_rates(measures: Sequence[Measure]) -> tuple[list[float], list[float]]:
    """All tokens and seconds, with prompts."""
    return [float(one.new_tokens) for one in measures], [one.wall_s for one in measures]


def speed_ratio(questions: Sequence[Scored]) -> Interval | None:
    """Of decoding: speculated tokens/s over plain tokens/s."""
    plain, spec = _columns(questions)
    return rate_ratio(rates(plain), rates(spec))


def acceptance_length(measures: Sequence[Measure]) -> Interval | None:
    """Tokens of a round of speculation, its last one included."""
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
        return Table(SPEED_TITLE, ("", "questions", "plain tokens/s"), rows, _NOTE)
    rows = []
    for name, found in by_category(questions).items():
        plain, spec = _columns(found)
        whole = rate_ratio(whole_rates(plain), whole_rates(spec))
        rows.append(
            (name, f"{len(plain)}", rate(plain), rate(spec), shown(speed_ratio(found)),
             shown(whole))
        )  # fmt: skip
    columns = ("", "questions", "plain tokens/s", "speculated", "ratio", "ratio with prompts")
    return Table(SPEED_TITLE, columns, tuple(rows), _NOTE)


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
    note = "length: tokens of a round, its last one included; rate: accepted over drafted tokens"
    return Table(ACCEPTANCE_TITLE, columns, tuple(rows), note)


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
    columns += ("speculated", "difference") if settings.spec is not None else ()
    return Table(SCORES_TITLE, columns, tuple(rows), _RULES)


def _same(scores: Scores) -> Table:
    parted, count = scores.divergences or [], len(scores.questions)
    rows = tuple(
        (str(one.question_id), f"{one.turn + 1}", f"{one.token}", _number(one.plain_token),
         _number(one.speculated_token), _number(one.margin), _number(one.spread))
        for one in parted[:_SHOWN_DIVERGENCES]
    )  # fmt: skip
    more = len(parted) - len(rows)
    note = f"{count - len(parted)} of {count} answers have the ids of the plain ones"
    note += f"; {more} more divergences are in scores.json" if more else ""
    columns = ("first divergence in", "turn", "token", "plain", "speculated", "logit margin",
               "deviation of the logits")  # fmt: skip
    return Table(SAME_TITLE, columns, rows, note)


def _run(settings: Settings, scores: Scores) -> Table:
    modes = [mode for one in scores.questions for mode in one.modes.values()]
    failed = [error for mode in modes for error in mode.errors]
    spec = "" if settings.spec is None else ", ".join(
        f"{name} {value}" for name, value in settings.spec.items() if value not in (None, [], "")
    )  # fmt: skip
    facts = {
        "drafts": spec or "nothing: plain decoding",
        "most tokens of a turn": f"{settings.max_generate_length}",
        "temperature": f"{settings.temperature:g}",
        "repeats": f"{settings.repeats}",
        "turns not answered": f"{len(failed)}" + (f": {failed[0]}" if failed else ""),
        "programs": scores.programs or "not run (--runCode)",
        "questions, sha256": settings.data_sha256,
        **{f"{role} engine, sha256": text for role, text in settings.engines.items()},
    }
    return Table(RUN_TITLE, ("", ""), tuple(facts.items()), is_numeric=False)


def _plots(settings: Settings, questions: Sequence[Scored]) -> Iterator[tuple[str, str]]:
    """Plots by the title of the table that they stand in."""
    if settings.spec is None:
        return
    categories = by_category(questions)
    if ratios := _known(categories, speed_ratio):
        yield SPEED_TITLE, intervals(ratios, 1.0)
    lengths = _known(categories, lambda found: acceptance_length([q.modes["spec"] for q in found]))
    if lengths:
        values = {name: length.value for name, length in lengths.items()}
        yield ACCEPTANCE_TITLE, bars(values, lambda value: f"{value:.2f}")


def _known(
    categories: dict[str, list[Scored]], estimate: Callable[[list[Scored]], Interval | None]
) -> dict[str, Interval]:
    found = {name: estimate(questions) for name, questions in categories.items()}
    return {name: one for name, one in found.items() if one is not None}


def rate(measures: Sequence[Measure]) -> str:
    """Tokens per second of decoding."""
    seconds = sum(one.decode_ms for one in measures) / 1e3
    return f"{sum(one.decoded_tokens for one in measures) / seconds:.1f}" if seconds else "-"


def shown(interval: Interval | None, form: str = "{:.2f}") -> str:
    """An estimate with its interval."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return form.format(interval.value)
    low, high = form.format(interval.low), form.format(interval.high)
    return f"{form.format(interval.value)} ({low} to {high})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value}"

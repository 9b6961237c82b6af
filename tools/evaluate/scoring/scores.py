"""What the answers are worth: figures for every question, kept in scores.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.answers import Choice, Record
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.scoring.divergence import Divergence
from edgellm.tools.evaluate.scoring.exact_match import number_matches, text_matches
from edgellm.tools.evaluate.scoring.humaneval import program
from edgellm.tools.evaluate.scoring.rouge import rouge
from edgellm.tools.evaluate.scoring.sandbox import Sandbox

SCORES_FILE = "scores.json"
PASS, NUMBER, EXACT = "pass@1", "number exact", "text exact"


class Measure(msgspec.Struct, kw_only=True):
    """A question in one mode, summed over turns and repeats; scores are means over repeats."""

    turns: int
    decoded_tokens: int
    decode_ms: float
    new_tokens: int
    wall_s: float
    rounds: int
    emitted_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    scores: dict[str, float] = {}
    errors: list[str] = []  # why turns were not answered
    failures: list[str] = []  # how programs ended that did not pass


class Scored(msgspec.Struct, kw_only=True):
    """A question in all modes."""

    question_id: int | str
    category: str
    modes: dict[str, Measure]


class Scores(msgspec.Struct, kw_only=True):
    """A finished run."""

    questions: list[Scored]
    divergences: list[Divergence] | None  # None: the answers need not be the same
    programs: str  # how programs were run; empty if none was


def score(
    questions: Sequence[Question],
    records: Mapping[str, Mapping[int | str, Record]],
    divergences: list[Divergence] | None,
    sandbox: Sandbox | None,
) -> Scores:
    """Score all answers; without a sandbox code is not scored."""
    scored = [
        Scored(
            question_id=question.question_id,
            category=question.category or "all",
            modes={
                mode: _measure(question, by_id[question.question_id].choices, sandbox)
                for mode, by_id in records.items()
            },
        )
        for question in questions
    ]
    programs = ""
    if sandbox is not None:
        programs = "shut in" if sandbox.is_shielded else "with limits, but NOT shut in: no unshare"
    return Scores(questions=scored, divergences=divergences, programs=programs)


def _measure(question: Question, choices: Sequence[Choice], sandbox: Sandbox | None) -> Measure:
    failures: list[str] = []
    found = [_scores(question, choice, sandbox, failures) for choice in choices]
    return Measure(
        turns=sum(len(choice.turns) for choice in choices),
        decoded_tokens=sum(choice.decoded_tokens for choice in choices),
        decode_ms=sum(sum(choice.decode_ms) for choice in choices),
        new_tokens=sum(sum(choice.new_tokens) for choice in choices),
        wall_s=sum(sum(choice.wall_time) for choice in choices),
        rounds=sum(sum(choice.rounds) for choice in choices),
        emitted_tokens=sum(sum(choice.emitted_tokens) for choice in choices),
        draft_tokens=sum(sum(choice.draft_tokens) for choice in choices),
        accepted_draft_tokens=sum(sum(choice.accepted_draft_tokens) for choice in choices),
        scores={name: fmean(one[name] for one in found) for name in found[0]},
        errors=[choice.error for choice in choices if choice.error],
        failures=failures,
    )


def _scores(
    question: Question, choice: Choice, sandbox: Sandbox | None, failures: list[str]
) -> dict[str, float]:
    """Of one answer; a turn that was not answered is an empty answer."""
    answered = len(choice.turns) == len(question.turns)
    text = choice.turns[-1] if answered else ""
    if question.scoring == "number":
        return {NUMBER: float(number_matches(text, question.expected))}
    if question.scoring == "exact":
        return {EXACT: float(text_matches(text, question.expected))}
    if question.scoring == "rouge":
        return rouge(text, question.expected)
    if question.scoring == "code" and sandbox is not None:
        source = program(question.turns[-1], text, question.entry_point, question.test)
        outcome = sandbox.run(source)
        if not outcome.passed:
            failures.append(outcome.reason)
        return {PASS: float(outcome.passed)}
    return {}


def read_scores(folder: Path) -> Scores:
    """The scores of a run.

    Raises:
        EdgeLLMError: there are none, or they are damaged.
    """
    path = folder / SCORES_FILE
    hint = "give the command of this evaluation again: it goes on, and scores at its end"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scores)
    except FileNotFoundError:
        raise EdgeLLMError(
            f"{folder} has no {SCORES_FILE}: it is not finished", hint=hint
        ) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise EdgeLLMError(f"{path} is damaged: {error}", hint=hint) from None

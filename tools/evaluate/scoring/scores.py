"""Scores and figures of each question, stored in scores.json."""

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
    """Figures of a question in one mode, summed over turns and repeats; scores are means."""

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
    errors: list[str] = []  # of failed turns
    failures: list[str] = []  # reasons of failed programs


class Scored(msgspec.Struct, kw_only=True):
    """Figures of a question in all modes."""

    question_id: int | str
    category: str
    modes: dict[str, Measure]


class Scores(msgspec.Struct, kw_only=True):
    """Scores of a finished run."""

    questions: list[Scored]
    divergences: list[Divergence] | None  # None: the modes need not give equal answers
    programs: str  # isolation of programs; empty if none ran


def score(
    questions: Sequence[Question],
    records: Mapping[str, Mapping[int | str, Record]],
    divergences: list[Divergence] | None,
    sandbox: Sandbox | None,
) -> Scores:
    """Score all answers; without a sandbox, code is not scored."""
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
        programs = "isolated" if sandbox.is_shielded else "limited, NOT isolated: no unshare"
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
    """Score one answer; a failed turn counts as an empty answer."""
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
    """Return the scores of a run.

    Raises:
        EdgeLLMError: the run is not finished, or its scores are damaged.
    """
    path = folder / SCORES_FILE
    hint = "run the command of this evaluation again: it resumes, then scores"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scores)
    except FileNotFoundError:
        raise EdgeLLMError(
            f"{folder} has no {SCORES_FILE}: it is not finished", hint=hint
        ) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise EdgeLLMError(f"{path} is damaged: {error}", hint=hint) from None

"""First differences between plain and speculative greedy answers, with logit margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.request_files.lossless_check import first_difference, logits_behind
from edgellm.tools.evaluate.answering import sampling_of, start
from edgellm.tools.evaluate.answers import Choice, Record
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.settings import Settings


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token that differs between two answers."""

    question_id: int | str
    turn: int
    token: int  # index in the turn's answer
    plain_token: int | None = None  # None: one answer is a prefix of the other
    speculated_token: int | None = None
    margin: float | None = None  # logit of the plain token minus the speculative one's
    spread: float | None = None  # standard deviation of the logits at this token


def compare(
    llm: LLM,
    questions: Sequence[Question],
    settings: Settings,
    records: Mapping[str, Mapping[int | str, Record]],
) -> list[Divergence]:
    """Compare the greedy answers of both modes; recompute the logits at first differences."""
    found: list[Divergence] = []
    for question in questions:
        plain, spec = (records[mode][question.question_id].choices[0] for mode in settings.modes)
        place = locate(plain.token_ids, spec.token_ids)
        if place is not None:
            found.append(_explain(llm, question, settings, plain, spec, *place))
    return found


def locate(plain: Sequence[Sequence[int]], spec: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return turn and token of the first difference, None if the answers are equal."""
    for turn, (one, other) in enumerate(zip(plain, spec, strict=False)):
        if list(one) != list(other):
            place = first_difference(one, other)
            return turn, min(len(one), len(other)) if place is None else place
    return None if len(plain) == len(spec) else (min(len(plain), len(spec)), 0)


def _explain(
    llm: LLM, question: Question, settings: Settings, plain: Choice, spec: Choice,
    turn: int, token: int,
) -> Divergence:  # fmt: skip
    where = Divergence(question_id=question.question_id, turn=turn, token=token)
    if min(len(one.token_ids) for one in (plain, spec)) <= turn:
        return where
    ids, others = plain.token_ids[turn], spec.token_ids[turn]
    if token >= min(len(ids), len(others)):
        return where
    sampling = sampling_of(settings, 0, 0)
    started = start(llm, question, plain.turns[:turn], settings, "plain", sampling)
    logits = logits_behind(llm, started.prompt, ids[:token], sampling)
    one, other = ids[token], others[token]
    return msgspec.structs.replace(
        where,
        plain_token=one,
        speculated_token=other,
        margin=float(logits[one] - logits[other]),
        spread=float(logits.std()),
    )

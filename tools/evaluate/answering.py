"""Answering the questions of a dataset, plainly and speculating in turns on one engine."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.engine.profile import GENERATION, VERIFY
from edgellm.device_runtime.faults import Confined
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.evaluate.answers import Choice, OutputLog, Record
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.settings import Settings, sync_folder

OnAnswer = Callable[[], None]
_WARM_TOKENS = 2


@contextlib.contextmanager
def open_logs(folder: Path, settings: Settings) -> Iterator[dict[str, OutputLog]]:
    """The files of answers by mode; raises `EdgeLLMError` for damaged ones."""
    with contextlib.ExitStack() as stack:
        logs: dict[str, OutputLog] = {}
        for mode in settings.modes:
            logs[mode] = log = OutputLog(folder / f"{mode}.jsonl")
            stack.callback(log.close)
        sync_folder(folder)
        yield logs


def answer_all(
    llm: LLM,
    questions: Sequence[Question],
    settings: Settings,
    logs: Mapping[str, OutputLog],
    on_answer: OnAnswer,
) -> None:
    """Give every answer that `logs` lack; each is on the disk before the next one is begun.

    The modes take turns in being first, so that a machine that slows down slows both.
    """
    is_warm = False
    for place, question in enumerate(questions):
        missing = [
            mode for mode in settings.modes if question.question_id not in logs[mode].records
        ]
        if missing and not is_warm:
            warm_up(llm, question, settings)
            is_warm = True
        choices: dict[str, list[Choice]] = {mode: [] for mode in missing}
        for repeat in range(settings.repeats):
            for mode in missing if (place + repeat) % 2 == 0 else reversed(missing):
                sampling = sampling_of(settings, place, repeat)
                choices[mode].append(answer(llm, question, settings, mode, repeat, sampling))
                if repeat == settings.repeats - 1:
                    logs[mode].append(_record(question, settings, mode, choices[mode]))
                    on_answer()


def warm_up(llm: LLM, question: Question, settings: Settings) -> None:
    """Let both ways run once: the first passes of a session take longer."""
    short = msgspec.structs.replace(settings, max_generate_length=_WARM_TOKENS)
    for mode in settings.modes:
        # A question that is too long, or that fails otherwise, says so in its answer.
        with Confined(lambda _: None):
            for _ in start(llm, question, [], short, mode, SamplingParams(0)):
                pass


def sampling_of(settings: Settings, place: int, repeat: int) -> SamplingParams:
    """Of a repeat of the question at that place: the same in all modes, another for every one."""
    seed = (settings.seed + place * 1_000_003 + repeat) % 2**63
    return SamplingParams(settings.temperature, top_p=1.0, top_k=0, seed=seed)


def answer(
    llm: LLM,
    question: Question,
    settings: Settings,
    mode: str,
    repeat: int,
    sampling: SamplingParams,
) -> Choice:
    """Answer all turns of a question; a turn that fails ends it, with the reason."""
    choice = Choice.begun(repeat)
    for _ in question.turns:
        begin, failures = time.perf_counter(), list[EdgeLLMError]()
        with Confined(failures.append):
            given = start(llm, question, choice.turns, settings, mode, sampling)
            for _ in given:
                pass
            _note(choice, given, time.perf_counter() - begin)
        if failures:
            choice.error = str(failures[0])
            break
    return choice


def start(
    llm: LLM,
    question: Question,
    answered: Sequence[str],
    settings: Settings,
    mode: str,
    sampling: SamplingParams,
) -> RequestOutput:
    """Begin the turn after those that are answered; raises `RequestError` if it does not fit."""
    return llm.generate(
        conversation(question, answered),
        sampling=sampling,
        max_generate_length=settings.max_generate_length,
        speculative=mode == "spec",
    )


def conversation(question: Question, answered: Sequence[str]) -> list[dict[str, Any]]:
    """The messages up to the turn that comes next."""
    messages: list[dict[str, Any]] = []
    if question.system:
        messages.append({"role": "system", "content": question.system})
    for place, text in enumerate(question.turns[: len(answered) + 1]):
        content: Any = text
        if place == 0 and question.images:
            images = [{"type": "image", "image": image} for image in question.images]
            content = [*images, {"type": "text", "text": text}]
        messages.append({"role": "user", "content": content})
        if place < len(answered):
            messages.append({"role": "assistant", "content": answered[place]})
    return messages


def _note(choice: Choice, given: RequestOutput, wall_s: float) -> None:
    profile, counts = given.profile, given.profile.acceptance()
    passes = sum(len(profile.stages_ms.get(name, ())) for name in (GENERATION, VERIFY))
    choice.turns.append(given.text)
    choice.idxs.append(passes)
    choice.new_tokens.append(len(given.token_ids))
    choice.wall_time.append(wall_s)
    choice.token_ids.append(list(given.token_ids))
    choice.prompt_tokens.append(given.prompt_token_count)
    choice.decode_ms.append(profile.decode_ms())
    choice.emitted_tokens.append(sum(one.emitted for one in profile.rounds))
    choice.rounds.append(len(profile.rounds))
    choice.draft_tokens.append(int(counts["total_draft_tokens"]))
    choice.accepted_draft_tokens.append(int(counts["total_accepted_draft_tokens"]))
    assert given.finish_reason is not None  # it is complete
    choice.finish_reasons.append(given.finish_reason)


def _record(question: Question, settings: Settings, mode: str, choices: list[Choice]) -> Record:
    return Record(
        question_id=question.question_id,
        answer_id=uuid.uuid4().hex,
        model_id=f"{settings.model}-{mode}",
        choices=choices,
        tstamp=time.time(),
    )

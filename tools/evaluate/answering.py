"""Runs the questions of a dataset on one engine, alternating plain and speculative modes."""

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
from edgellm.device_runtime.request_faults import Confined
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.evaluate.answers import Choice, OutputLog, Record
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.settings import Settings, sync_folder

OnAnswer = Callable[[], None]
_WARM_TOKENS = 2


@contextlib.contextmanager
def open_logs(folder: Path, settings: Settings) -> Iterator[dict[str, OutputLog]]:
    """Open the answer file of each mode; raise `EdgeLLMError` if one is damaged."""
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
    """Run all questions that `logs` lack; each answer is on disk before the next one starts.

    The modes alternate in being first, so that a slower machine affects both.
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
    """Run each mode once: the first forward passes of a session take longer."""
    short = msgspec.structs.replace(settings, max_generate_length=_WARM_TOKENS)
    for mode in settings.modes:
        # Errors are ignored here: the answer itself records them.
        with Confined(lambda _: None):
            for _ in start(llm, question, [], short, mode, SamplingParams(temperature=0)):
                pass


def sampling_of(settings: Settings, place: int, repeat: int) -> SamplingParams:
    """Return the sampling of a repeat of question `place`: equal in all modes, else different."""
    seed = (settings.seed + place * 1_000_003 + repeat) % 2**63
    return SamplingParams(temperature=settings.temperature, top_p=1.0, top_k=0, seed=seed)


def answer(
    llm: LLM,
    question: Question,
    settings: Settings,
    mode: str,
    repeat: int,
    sampling: SamplingParams,
) -> Choice:
    """Run all turns of a question; a turn that fails ends it, with the error."""
    choice = Choice.empty(repeat)
    for _ in question.turns:
        begin, failures = time.perf_counter(), list[EdgeLLMError]()
        with Confined(failures.append):
            output = start(llm, question, choice.turns, settings, mode, sampling)
            for _ in output:
                pass
            _record_turn(choice, output, time.perf_counter() - begin)
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
    """Start the turn after the answered ones; raise `RequestError` if it does not fit."""
    return llm.generate(
        conversation(question, answered),
        sampling=sampling,
        max_generate_length=settings.max_generate_length,
        speculative=mode == "spec",
    )


def conversation(question: Question, answered: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages up to the next turn."""
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


def _record_turn(choice: Choice, output: RequestOutput, wall_s: float) -> None:
    profile, counts = output.profile, output.profile.acceptance()
    passes = sum(len(profile.stages_ms.get(name, ())) for name in (GENERATION, VERIFY))
    choice.turns.append(output.text)
    choice.idxs.append(passes)
    choice.new_tokens.append(len(output.token_ids))
    choice.wall_time.append(wall_s)
    choice.token_ids.append(list(output.token_ids))
    choice.prompt_tokens.append(output.prompt_token_count)
    choice.decode_ms.append(profile.decode_ms())
    choice.emitted_tokens.append(sum(one.emitted for one in profile.rounds))
    choice.rounds.append(len(profile.rounds))
    choice.draft_tokens.append(int(counts["total_draft_tokens"]))
    choice.accepted_draft_tokens.append(int(counts["total_accepted_draft_tokens"]))
    assert output.finish_reason is not None  # it is complete
    choice.finish_reasons.append(output.finish_reason)


def _record(question: Question, settings: Settings, mode: str, choices: list[Choice]) -> Record:
    return Record(
        question_id=question.question_id,
        answer_id=uuid.uuid4().hex,
        model_id=f"{settings.model}-{mode}",
        choices=choices,
        tstamp=time.time(),
    )

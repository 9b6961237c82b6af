"""Runs the questions of a dataset on several servers, distributed by Ray."""

from __future__ import annotations

import base64
import functools
import mimetypes
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.distributed.ray_map import Work, spread
from edgellm.tools.distributed.servers import RejectedError, Servers, places
from edgellm.tools.evaluate.answering import conversation
from edgellm.tools.evaluate.answers import Choice, OutputLog, Record
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.settings import Settings

Spread = Callable[[Sequence[dict[str, Any]], Work, int], Any]
_MODE = "plain"  # servers may speculate, which does not change answers


def answer_remotely(
    servers: Servers,
    questions: Sequence[Question],
    settings: Settings,
    log: OutputLog,
    on_answer: Callable[[], None],
    spread: Spread = spread,
) -> None:
    """Run all questions that `log` lacks; each answer is written when it arrives.

    Raises:
        EdgeLLMError: no server responds; `log` keeps the answers so far.
    """
    missing = [
        (place, question)
        for place, question in enumerate(questions)
        if question.question_id not in log.records
    ]
    if not missing:
        return
    rows = [
        {"place": place, "first": first, "question": msgspec.to_builtins(question)}
        for (place, question), first in zip(missing, places(len(missing), servers), strict=True)
    ]
    work = functools.partial(answer_row, servers=servers, settings=msgspec.to_builtins(settings))
    for row in spread(rows, work, len(servers.urls)):
        record = msgspec.convert(row, Record)
        if record.question_id not in log.records:  # a task may run twice
            log.append(record)
            on_answer()


def answer_row(
    row: dict[str, Any], *, servers: Servers, settings: dict[str, Any]
) -> dict[str, Any]:
    """Run the question of a row; return its `Record`."""
    question = msgspec.convert(row["question"], Question)
    run = msgspec.convert(settings, Settings)
    choices = [
        _answer(servers, question, run, row["place"], row["first"], repeat)
        for repeat in range(run.repeats)
    ]
    record = Record(
        question_id=question.question_id,
        answer_id=uuid.uuid4().hex,
        model_id=f"{run.model}-{_MODE}",
        choices=choices,
        tstamp=time.time(),
    )
    return msgspec.to_builtins(record)


def _answer(
    servers: Servers, question: Question, run: Settings, place: int, first: int, repeat: int
) -> Choice:
    choice = Choice.empty(repeat)
    for _ in question.turns:
        body = {
            "model": run.model,
            "messages": [_as_openai(one) for one in conversation(question, choice.turns)],
            "max_tokens": run.max_generate_length,
            "temperature": run.temperature,
            "seed": (run.seed + place * 1_000_003 + repeat) % 2**63,
        }
        begin = time.perf_counter()
        try:
            response = servers.post("/v1/chat/completions", body, first)
        except RejectedError as error:
            choice.error = str(error)
            break
        _record_turn(choice, response, time.perf_counter() - begin)
    return choice


def _record_turn(choice: Choice, response: dict[str, Any], wall_s: float) -> None:
    """Add a server's response to a choice; `metrics` are edgellm's own field."""
    (found,), usage = response["choices"], response["usage"]
    metrics = response.get("metrics") or {}
    drafted = metrics.get("speculative_decoding") or {}
    rounds, accepted = (
        int(drafted.get(name, 0)) for name in ("num_spec_steps", "num_accepted_draft_tokens")
    )
    tokens = int(usage["completion_tokens"])
    choice.turns.append(found["message"]["content"] or "")
    choice.idxs.append(rounds or max(tokens - 1, 0))
    choice.new_tokens.append(tokens)
    choice.wall_time.append(wall_s)
    choice.token_ids.append([])
    choice.prompt_tokens.append(int(usage["prompt_tokens"]))
    choice.decode_ms.append(float(metrics.get("generation_time_ms") or wall_s * 1e3))
    choice.emitted_tokens.append(rounds + accepted)
    choice.rounds.append(rounds)
    choice.draft_tokens.append(int(drafted.get("num_draft_tokens", 0)))
    choice.accepted_draft_tokens.append(accepted)
    choice.finish_reasons.append(found["finish_reason"])


def _as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its images as data URIs."""
    if isinstance(message["content"], str):
        return message
    items = [
        {"type": "image_url", "image_url": {"url": _data_uri(item["image"])}}
        if item["type"] == "image"
        else item
        for item in message["content"]
    ]
    return {**message, "content": items}


def _data_uri(source: str) -> str:
    if source.startswith("data:"):
        return source
    path = Path(unquote(urlsplit(source).path) if source.startswith("file:") else source)
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    try:
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise EdgeLLMError(f"cannot read {path}: {error.strerror}") from None

"""Answer files in the layout of the EAGLE repository, appended by whole lines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_files.append_log import Journal


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer to all turns of a question; lists have an item per turn.

    The first five fields are EAGLE's. `wall_time`: seconds with prefill; `decode_ms`: without.
    """

    index: int  # number of the repeat
    turns: list[str]
    idxs: list[int]  # forward passes of the base after the prefill
    new_tokens: list[int]
    wall_time: list[float]
    token_ids: list[list[int]]
    prompt_tokens: list[int]
    decode_ms: list[float]
    emitted_tokens: list[int]  # of rounds that verified a tree
    rounds: list[int]
    draft_tokens: list[int]
    accepted_draft_tokens: list[int]
    finish_reasons: list[str]
    error: str = ""  # of the turn after these

    @classmethod
    def empty(cls, index: int) -> Choice:
        """Return a choice without turns."""
        return cls(
            index=index, turns=[], idxs=[], new_tokens=[], wall_time=[], token_ids=[],
            prompt_tokens=[], decode_ms=[], emitted_tokens=[], rounds=[], draft_tokens=[],
            accepted_draft_tokens=[], finish_reasons=[],
        )  # fmt: skip

    @property
    def decoded_tokens(self) -> int:
        """Tokens computed in `decode_ms`: all but the first of each turn, which prefill gives."""
        return sum(max(count - 1, 0) for count in self.new_tokens)


class Record(msgspec.Struct, kw_only=True):
    """All answers to one question in one mode; a line of the file."""

    question_id: int | str
    answer_id: str
    model_id: str
    choices: list[Choice]
    tstamp: float


class OutputLog:
    """An answer file, open for appending."""

    def __init__(self, path: Path) -> None:
        """Read the file; an incomplete last line of an interrupted run is removed.

        Raises:
            EdgeLLMError: a line is damaged, or a question has two lines.
        """
        self._journal = Journal(path)
        self.records = read_records(path, self._journal.content)

    def append(self, record: Record) -> None:
        """Append a line, whole and synced to disk, or not at all."""
        self._journal.append(msgspec.json.encode(record))
        self.records[record.question_id] = record

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


def read_records(path: Path, content: bytes) -> dict[int | str, Record]:
    """Return the records by question; raise `EdgeLLMError` as `OutputLog` does."""
    records: dict[int | str, Record] = {}
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise EdgeLLMError(
                f"{path} line {number} is not an answer: {error}",
                hint="delete the line to run the question again",
            ) from None
        if record.question_id in records:
            raise EdgeLLMError(
                f"{path} line {number}: question {record.question_id!r} is answered twice",
                hint="delete one of the lines",
            )
        records[record.question_id] = record
    return records

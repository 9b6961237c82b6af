"""Files of answers in the layout of the EAGLE repository, which grow by whole lines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.requests.append_log import Journal


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer to all turns of a question: a list item for each turn.

    The first five fields are EAGLE's. Times: `wall_time` in s with the prompt, `decode_ms` without.
    """

    index: int  # which repeat
    turns: list[str]
    idxs: list[int]  # passes of the base after the prompt
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
    error: str = ""  # why the turn after these was not answered

    @classmethod
    def begun(cls, index: int) -> Choice:
        """One without turns yet."""
        return cls(
            index=index, turns=[], idxs=[], new_tokens=[], wall_time=[], token_ids=[],
            prompt_tokens=[], decode_ms=[], emitted_tokens=[], rounds=[], draft_tokens=[],
            accepted_draft_tokens=[], finish_reasons=[],
        )  # fmt: skip

    @property
    def decoded_tokens(self) -> int:
        """Tokens that `decode_ms` were spent on: a prompt's pass gives the first of its answer."""
        return sum(max(count - 1, 0) for count in self.new_tokens)


class Record(msgspec.Struct, kw_only=True):
    """All answers to one question in one mode: a line."""

    question_id: int | str
    answer_id: str
    model_id: str
    choices: list[Choice]
    tstamp: float


class OutputLog:
    """A file of answers, open for more."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that an interrupt cut is cut off.

        Raises:
            EdgeLLMError: a line is damaged, or a question is answered twice.
        """
        self._journal = Journal(path)
        self.records = read_records(path, self._journal.content)

    def append(self, record: Record) -> None:
        """Add a line; it is on the disk when this returns, or not there at all."""
        self._journal.append(msgspec.json.encode(record))
        self.records[record.question_id] = record

    def close(self) -> None:
        """No more answers come."""
        self._journal.close()


def read_records(path: Path, content: bytes) -> dict[int | str, Record]:
    """The answers by question; raises `EdgeLLMError` as `OutputLog` does."""
    records: dict[int | str, Record] = {}
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise EdgeLLMError(
                f"{path} line {number} is not an answer: {error}",
                hint="delete the line, and the question is answered again",
            ) from None
        if record.question_id in records:
            raise EdgeLLMError(
                f"{path} line {number}: question {record.question_id!r} is answered twice",
                hint="delete one of the lines",
            )
        records[record.question_id] = record
    return records

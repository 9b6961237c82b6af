"""Resuming an interrupted run of `llm_inference`: finished outputs in a log with its output file.

The first line holds the settings. Each further line holds one finished output with its times and
trees, in the order of finishing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from edgellm.core.errors import EdgeLLMError
from edgellm.core.file_lock import hold
from edgellm.core.strict_json import parse
from edgellm.device_runtime.engine.profile import Profile, RoundCounts
from edgellm.device_runtime.request_files.append_log import Journal
from edgellm.device_runtime.request_files.request_file import Options, OutputIndex

_SYNC_EVERY_S = 1.0
_BEGIN = b'{"kind": "unfinished run of llm_inference", '
_SETTINGS = {
    "requests": "requests in --inputFile",
    "engines": "engines",
    "spec": "ways to speculate",
    "max_generate_length": "--maxGenerateLength",
    "defaults": "--maxTokens or flags of sampling",
    "context_reuse": "--enableContextReuse",
    "allow_special_tokens": "--allowSpecialTokens",
    "trees": "--treeOutputFile (given or not)",
}


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """One output's part of the output files of a run."""

    response: dict[str, Any]
    profile: Profile
    rounds: list[dict[str, Any]] = field(default_factory=list)  # of its tree log

    @property
    def index(self) -> OutputIndex:
        """Its place."""
        return OutputIndex(self.response["request_idx"], self.response.get("choice_idx"))


@dataclass(slots=True)
class UnfinishedRun:
    """Finished outputs, in the order of finishing; extended during the run."""

    path: Path | None  # None: the outputs are not saved
    answered: list[FinishedOutput]
    _journal: Journal | None

    def in_order(self) -> list[FinishedOutput]:
        """The same in the order of the requests."""
        return sorted(self.answered, key=lambda one: one.index)

    def add(self, answered: FinishedOutput) -> None:
        """Append a finished output; it is in the file, if any, when this returns."""
        if self._journal is not None:
            self._journal.append(json.dumps(dataclasses.asdict(answered)).encode())
        self.answered.append(answered)


def path_of(output: Path) -> Path:
    """Path of the log for `output`, which exists until the run is finished."""
    return output.with_name(f"{output.name}.partial")


def settings_of(
    content: tuple[Options, list[Any]], engines: Mapping[str, str], spec: Any, **flags: Any
) -> dict[str, Any]:
    """All settings that affect outputs, as JSON values.

    Args:
        content: of the request file.
        engines: sha256 of manifests by role.
        spec: the `SpecOptions`, or None.
        flags: others by their names in `_SETTINGS`.
    """
    text = json.dumps(msgspec.to_builtins(content), sort_keys=True)
    settings = {
        "requests": hashlib.sha256(text.encode()).hexdigest(),
        "engines": dict(engines),
        "spec": None if spec is None else dataclasses.asdict(spec),
        **flags,
    }
    return json.loads(json.dumps(settings, default=str))


@contextlib.contextmanager
def unfinished_run(
    output: Path | None, settings: Mapping[str, Any], *, goes_on: bool
) -> Iterator[UnfinishedRun]:
    """Start or resume a run; the log is deleted if the block ends without an error.

    Args:
        output: the file that will be written; None: no file, and nothing to resume.
        settings: of `settings_of`.
        goes_on: whether the user gave --resume.

    Raises:
        EdgeLLMError: there are outputs but no --resume, or settings differ, or the file is
            damaged or of another program, or another process uses it.
    """
    if output is None:
        yield UnfinishedRun(None, [], None)
        return
    path = path_of(output)
    busy = f"another llm_inference is writing {output}"
    with hold(path, busy, "wait for it, or give another --outputFile"):
        _refuse_foreign(path)
        journal = Journal(path, sync_every_s=_SYNC_EVERY_S)
        run, is_done = UnfinishedRun(path, [], journal), False
        lines = journal.content.split(b"\n")[:-1]
        try:
            if not lines:
                journal.append(_BEGIN + json.dumps(settings).removeprefix("{").encode())
            elif len(lines) > 1:
                _compare(path, _begun(path, lines[0]), settings)
                run.answered = [_read(path, at, line) for at, line in enumerate(lines[1:], 2)]
                _expect_wanted(run, goes_on=goes_on)
            yield run
            is_done = True
        finally:
            journal.close()
            if is_done or not (run.answered or lines[1:]):
                path.unlink(missing_ok=True)


def _expect_wanted(run: UnfinishedRun, *, goes_on: bool) -> None:
    if run.answered and not goes_on:
        raise EdgeLLMError(
            f"{run.path} holds {len(run.answered)} answers of an interrupted run",
            hint="give --resume to continue it, or remove that file",
        )


def _refuse_foreign(path: Path) -> None:
    """Check the beginning before anything is truncated; a log may hold only a part of it."""
    with path.open("rb") as stream:
        begin = stream.read(len(_BEGIN))
    if not _BEGIN.startswith(begin):
        raise EdgeLLMError(
            f"{path} exists and is not of an interrupted run",
            hint="give another --outputFile, or move that file away",
        )


def _begun(path: Path, line: bytes) -> dict[str, Any]:
    """The settings of the run."""
    try:
        return dict(parse(line))
    except (ValueError, TypeError) as error:
        raise EdgeLLMError(f"{path} line 1 is damaged: {error}", hint="remove that file") from None


def _compare(path: Path, begun: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, label in _SETTINGS.items():
        if begun.get(name) != settings.get(name):
            raise EdgeLLMError(
                f"{path} was begun with other {label}",
                hint="give the same to resume, or remove that file",
            )


def _read(path: Path, number: int, line: bytes) -> FinishedOutput:
    try:
        raw = parse(line)
        rounds = [RoundCounts(**counts) for counts in raw["profile"].pop("rounds")]
        return FinishedOutput(
            raw["response"], Profile(**raw["profile"], rounds=rounds), raw["rounds"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EdgeLLMError(
            f"{path} line {number} is not an answer: {error!r}",
            hint="delete the line and those after it; their requests run again",
        ) from None

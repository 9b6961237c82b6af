"""The work folder: the state that resumes an interrupted run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.file_lock import hold
from edgellm.core.strict_json import parse
from edgellm.export.checkpoints.checkpoint import Safetensors, write_safetensors
from edgellm.quantize.calibration.hidden_states import write_text
from edgellm.quantize.formats.tensors import InMemory, Tensor

_JOB, LOCK = "job.json", "lock"
CALIBRATION, FLOAT, QUANTIZED = "calibration", "float", "quantized"
ROUNDED = "rounded"  # calibration hidden states after quantized layers
ANSWERS = "answers"  # quantized model's hidden states of prompts and float outputs
HEAD_PART = "head"


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """Finished parts, and the hidden states that enter the next layer."""

    path: Path

    @property
    def log(self) -> Path:
        """The log of ModelOpt's output."""
        return self.path / "modelopt.log"

    @property
    def is_there(self) -> bool:
        """Whether a run was started in this folder."""
        return (self.path / _JOB).exists()

    @property
    def has_begun(self) -> bool:
        """Whether the folder holds more than the job and the lock."""
        return {path.name for path in self.path.iterdir()} > {_JOB, LOCK}

    def claim(self, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Create the folder, or resume from it; with `overwrite` remove a run of other settings.

        Raises:
            EdgeLLMError: the folder has other settings or other contents, or is not writable.
        """
        job = self.path / _JOB
        text = json.dumps(settings, indent=2)
        if job.exists() and job.read_text("utf-8") == text:
            return
        if job.exists() and not overwrite:
            raise EdgeLLMError(
                f"{self.path} holds an unfinished run with other settings",
                hint="give the same settings to resume, or --overwrite to discard it",
            )
        if job.exists():
            busy = f"another edgellm-quantize works in {self.path}"
            with hold(self.path / LOCK, busy, "wait for it, or give another --output_dir"):
                self.remove()
        if self.path.exists() and any(self.path.iterdir()):
            raise EdgeLLMError(
                f"{self.path} exists and is not of an interrupted run",
                hint="give another --output_dir, or move that folder away",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(job, text)
        except OSError as error:
            raise EdgeLLMError(f"cannot write {self.path}: {error.strerror}") from None

    def states(self, stream: str, layer: int) -> Path:
        """Return the file of hidden states of `stream` that enter `layer`."""
        return self.path / f"{stream}.{layer:05d}.states"

    def drop_states(self, before: int) -> None:
        """Remove the hidden states that enter layers below `before`."""
        for path in self.path.glob("*.states"):
            if int(path.name.split(".")[1]) < before:
                path.unlink()

    def has(self, part: str) -> bool:
        """Return whether `part` ("layer.00003" or "head") is finished."""
        return (self.path / f"{part}.json").exists()

    def store(self, part: str, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Store a finished part; its facts are written last and mark it finished."""
        partial = self.path / f"{part}.partial"
        write_safetensors(partial, InMemory(tensors), sorted(tensors))
        partial.replace(self.path / f"{part}.safetensors")
        write_text(self.path / f"{part}.json", json.dumps(facts))

    def tensors(self, part: str) -> Safetensors:
        """Open the tensors of a finished part."""
        return Safetensors([self.path / f"{part}.safetensors"])

    def facts(self, part: str) -> Any:
        """Read the facts of `store`."""
        try:
            return parse((self.path / f"{part}.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BrokenArtifactError(
                f"{self.path / part}.json is damaged ({error})", hint="remove the folder"
            ) from None

    def remove(self) -> None:
        """Remove the folder after the run."""
        shutil.rmtree(self.path, ignore_errors=True)


def layer_part(index: int) -> str:
    """Return the name of a decoder layer's part."""
    return f"layer.{index:05d}"


def as_facts(report: Any, **more: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and `more`, as a dict for JSON."""
    return {**asdict(report), **more}

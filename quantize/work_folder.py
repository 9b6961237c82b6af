"""The work folder: what an interrupted run goes on with."""

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
from edgellm.core.strict_json import parse
from edgellm.export.checkpoints.hf import Safetensors, write_safetensors
from edgellm.quantize.calibration.hidden_states import write_text
from edgellm.quantize.formats.tensors import InMemory, Tensor

_JOB, LOCK = "job.json", "lock"
CALIBRATION, FLOAT, QUANTIZED = "calibration", "float", "quantized"
ROUNDED = "rounded"  # the calibration text after layers that are quantized
ANSWERS = "answers"  # prompts with the float model's answers, as the quantized model reads them
HEAD_PART = "head"


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """Finished parts and the hidden states at the place where the work stopped."""

    path: Path

    @property
    def log(self) -> Path:
        """What ModelOpt printed."""
        return self.path / "modelopt.log"

    @property
    def is_there(self) -> bool:
        """Whether a run began here."""
        return (self.path / _JOB).exists()

    @property
    def has_begun(self) -> bool:
        """Whether anything was done there."""
        return {path.name for path in self.path.iterdir()} > {_JOB, LOCK}

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Make the folder, or go on with it.

        Raises:
            EdgeLLMError: it is of a run with other settings, of something else, or not writable.
        """
        job = self.path / _JOB
        text = json.dumps(settings, indent=2)
        if job.exists():
            if job.read_text("utf-8") != text:
                raise EdgeLLMError(
                    f"{self.path} holds a run with other settings",
                    hint="repeat its settings to go on, or remove that folder",
                )
            return
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
        """The file of the states of `stream` that enter `layer`."""
        return self.path / f"{stream}.{layer:05d}.states"

    def drop_states(self, before: int) -> None:
        """Remove the states that enter layers below `before`."""
        for path in self.path.glob("*.states"):
            if int(path.name.split(".")[1]) < before:
                path.unlink()

    def has(self, part: str) -> bool:
        """Whether `part` ("layer.00003" or "head") is finished."""
        return (self.path / f"{part}.json").exists()

    def store(self, part: str, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Keep a finished part; its facts are written last and make it finished."""
        partial = self.path / f"{part}.partial"
        write_safetensors(partial, InMemory(tensors), sorted(tensors))
        partial.replace(self.path / f"{part}.safetensors")
        write_text(self.path / f"{part}.json", json.dumps(facts))

    def tensors(self, part: str) -> Safetensors:
        """The tensors of a finished part."""
        return Safetensors([self.path / f"{part}.safetensors"])

    def facts(self, part: str) -> Any:
        """What `store` was told."""
        try:
            return parse((self.path / f"{part}.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BrokenArtifactError(
                f"{self.path / part}.json is damaged ({error})", hint="remove the folder"
            ) from None

    def remove(self) -> None:
        """The run is finished."""
        shutil.rmtree(self.path, ignore_errors=True)


def layer_part(index: int) -> str:
    """The name of a decoder layer's part."""
    return f"layer.{index:05d}"


def as_facts(report: Any, **more: Any) -> dict[str, Any]:
    """A dataclass and more, as JSON holds it."""
    return {**asdict(report), **more}

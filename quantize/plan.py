"""The plan of a run: what the user chose, and what it means for the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.models.language_model import QuantizedNetwork, Task


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the user chose; None: a default that depends on device and scheme."""

    model_dir: str
    output_dir: Path
    quantization: str
    base_model_dir: str | None = None  # of a draft; None: `model_dir` is a language model
    algo: str | None = None  # None: AWQ where there is a choice
    rotate: str | None = None  # see `ROTATIONS`; changes nothing in floats
    format: str = "modelopt"
    lm_head_quantization: str | None = None
    kv_cache_quantization: str | None = None
    calib_dataset: str = "default"
    num_samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    alpha_step: float | None = None
    block_size: int | None = None  # of INT4
    keep_layers: tuple[int, ...] = ()  # that stay floats
    keep_budget: float | None = None  # percent of the result's bytes, for layers yet to be found
    target_bits: float | None = None  # a weight, of mixed precision
    target_kl: float | None = None  # nats a token, an estimate
    target: str = "cpu"  # whose rounding of INT8 inputs is reckoned with
    batch_tokens: int | None = None
    device: str = "auto"
    seed: int = 0
    max_kl: float | None = (
        None  # nats a token over the held-out text, above which nothing is written
    )
    answers: str | None = None  # prompts whose answers are compared: "default", or a file
    draft_model_dir: str | None = None  # of a float draft that is to follow the result
    report: Path | None = None  # a further page, also of what is refused
    ignore_config_keys: tuple[str, ...] = ()

    @property
    def work_dir(self) -> Path:
        """Where the state of the run is until it is finished."""
        return self.output_dir.parent / f"{self.output_dir.resolve().name}.quantizing"


@dataclass(frozen=True, slots=True)
class Plan:
    """A job whose every check is passed."""

    job: Job
    subject: QuantizedNetwork
    recipe: Recipe
    head: Recipe | None
    task: Task
    settings: dict[str, Any]  # what makes the result what it is

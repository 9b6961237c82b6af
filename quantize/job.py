"""The job of a run: the user's options. Imports no torch, for commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The user's options; None: a default that depends on device and scheme."""

    model_dir: str
    output_dir: Path
    quantization: str
    base_model_dir: str | None = None  # of a draft; None: `model_dir` is a language model
    algo: str | None = None  # None: AWQ if several are possible
    rotate: str | None = None  # see `ROTATIONS`; exact in float
    format: str = "modelopt"
    lm_head_quantization: str | None = None
    kv_cache_quantization: str | None = None
    calib_dataset: str = "default"
    num_samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    alpha_step: float | None = None
    block_size: int | None = None  # INT4 group size
    keep_layers: tuple[int, ...] = ()  # layers that stay float
    keep_budget: float | None = None  # percent of the result's bytes for float layers of the search
    target_bits: float | None = None  # bits a weight of mixed precision
    target_kl: float | None = None  # estimated nats a token
    target: str = "cpu"  # device whose rounding of INT8 inputs is simulated
    batch_tokens: int | None = None
    device: str = "auto"
    seed: int = 0
    max_kl: float | None = None  # maximum nats a token over the held-out text
    answers: str | None = None  # prompts of greedy agreement: "default", or a file
    draft_model_dir: str | None = None  # a float draft whose acceptance is measured
    report: Path | None = None  # extra HTML report, also of failed runs
    ignore_config_keys: tuple[str, ...] = ()

    @property
    def chooses_precision(self) -> bool:
        """Whether the precision of a draft is searched."""
        return self.quantization == "auto" and self.base_model_dir is not None

    @property
    def work_dir(self) -> Path:
        """The folder of the run's state until it is finished."""
        return self.output_dir.parent / f"{self.output_dir.resolve().name}.quantizing"

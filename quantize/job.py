"""The job of a run: the user's options. Imports no torch, for commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from edgellm.core.commands.output_folder import OutputKey

SEARCH_OPTIONS = ("time_budget", "max_loss", "overwrite")  # that no single run depends on
_MODELS = ("model_dir", "base_model_dir", "draft_model_dir")


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
    time_budget: float | None = None  # minutes of a search over algorithms
    max_loss: float | None = None  # points of acceptance that a search over precisions may lose
    overwrite: bool = False  # replaces another result, and another run's unfinished state

    def key(self) -> OutputKey:
        """What determines the output folder.

        Raises:
            EdgeLLMError: there is no such model.
        """
        from edgellm.export.pipeline.open_checkpoint import find_path

        settings = asdict(self)
        models = {name: settings.pop(name) for name in _MODELS}
        texts = {name: settings.pop(name) for name in ("calib_dataset", "answers")}
        for name in ("output_dir", "device", "report", "overwrite"):
            del settings[name]
        inputs = {f"--{name}": find_path(value) for name, value in models.items() if value}
        inputs |= {f"--{name}": Path(text) for name, text in texts.items() if text}
        flags = {f"--{name}": value for name, value in settings.items()}
        what = "llm" if self.base_model_dir is None else "draft"
        return OutputKey(command=f"edgellm-quantize {what}", settings=flags, inputs=inputs)

    @property
    def chooses_precision(self) -> bool:
        """Whether the precision of a draft is searched."""
        return self.quantization == "auto" and self.base_model_dir is not None

    @property
    def work_dir(self) -> Path:
        """The folder of the run's state until it is finished."""
        return self.output_dir.parent / f"{self.output_dir.resolve().name}.quantizing"

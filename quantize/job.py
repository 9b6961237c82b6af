"""What the user chose, checked against the model: the plan of a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from edgellm.contract import EdgeLLMError
from edgellm.export.checkpoint import Checkpoint
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.source import open_checkpoint
from edgellm.quantize import checks
from edgellm.quantize.calibration import Calibration, load_tokenizer, read_calibration
from edgellm.quantize.device import choose_device
from edgellm.quantize.engine import Recipe
from edgellm.quantize.schemes import HEAD_SCHEMES, KV_SCHEMES, SCHEMES, Scheme, block_size, choose


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the user chose; None: a default that depends on device and scheme."""

    model_dir: str
    output_dir: Path
    quantization: str
    lm_head_quantization: str | None = None
    kv_cache_quantization: str | None = None
    calib_dataset: str = "default"
    num_samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    alpha_step: float | None = None
    batch_tokens: int | None = None
    device: str = "auto"
    seed: int = 0
    ignore_config_keys: tuple[str, ...] = ()

    @property
    def work_dir(self) -> Path:
        """Where the state of the run is until it is finished."""
        return self.output_dir.parent / f"{self.output_dir.resolve().name}.quantizing"


@dataclass(frozen=True, slots=True)
class Plan:
    """A job whose every check is passed."""

    job: Job
    checkpoint: Checkpoint
    config: DecoderConfig
    recipe: Recipe
    head: Recipe | None
    calibration: Calibration
    batch_rows: int
    device: torch.device
    settings: dict[str, Any]  # what makes the result what it is

    @property
    def head_name(self) -> str:
        """The tensor that is the float model's output head."""
        infos = self.checkpoint.tensors.infos()
        return checks.head_name(infos, self.config.tie_word_embeddings)


@dataclass(frozen=True, slots=True)
class _Amounts:
    """How much text; CPUs get through less in the same time."""

    num_samples: int
    seq_len: int
    held_out: int
    alpha_step: float
    batch_tokens: int


def _amounts(scheme: Scheme, device: torch.device) -> _Amounts:
    if device.type == "cpu":
        return _Amounts(8 if scheme.is_awq else 32, 256, 8, 0.2, 2048)
    return _Amounts(128 if scheme.is_awq else 512, 512, 32, 0.1, 8192)


def make_plan(job: Job, resuming: bool) -> Plan:
    """Everything that can be found out before the work.

    Raises:
        EdgeLLMError: something of it will not do; names it and the remedy.
    """
    scheme = SCHEMES[choose("--quantization", job.quantization, SCHEMES)]
    head_scheme = None
    if job.lm_head_quantization is not None:
        name = choose("--lm_head_quantization", job.lm_head_quantization, HEAD_SCHEMES)
        head_scheme = HEAD_SCHEMES[name]
    if job.kv_cache_quantization is not None:
        choose("--kv_cache_quantization", job.kv_cache_quantization, KV_SCHEMES)
    device = choose_device(job.device)
    checkpoint = open_checkpoint(job.model_dir)
    config = checks.check_model(checkpoint, job.ignore_config_keys)
    recipe, head = _recipes(job, scheme, head_scheme, checkpoint, config, device)
    amounts = _amounts(scheme, device)
    seq_len = job.seq_len or amounts.seq_len
    if seq_len > config.max_position_embeddings:
        raise EdgeLLMError(
            f"--seq_len {seq_len}: the model has {config.max_position_embeddings} positions"
        )
    calibration = read_calibration(
        job.calib_dataset,
        load_tokenizer(checkpoint.tokenizer_files),
        num_samples=job.num_samples or amounts.num_samples,
        num_held_out=job.held_out or amounts.held_out,
        seq_len=seq_len,
        vocab_size=config.vocab_size,
        seed=job.seed,
    )
    batch_tokens = job.batch_tokens or amounts.batch_tokens
    plan = Plan(
        job, checkpoint, config, recipe, head, calibration, max(1, batch_tokens // seq_len),
        device, _settings(job, recipe, head, calibration, checkpoint, batch_tokens),
    )  # fmt: skip
    _check_resources(plan, batch_tokens)
    if not resuming:
        checks.check_weights(checkpoint.tensors)
    return plan


def _recipes(
    job: Job,
    scheme: Scheme,
    head_scheme: Scheme | None,
    checkpoint: Checkpoint,
    config: DecoderConfig,
    device: torch.device,
) -> tuple[Recipe, Recipe | None]:
    infos = checkpoint.tensors.infos()
    body, head = checks.linear_shapes(infos), (config.vocab_size, config.hidden_size)
    alpha_step = job.alpha_step or _amounts(scheme, device).alpha_step
    if head_scheme is None:
        return Recipe(scheme, block_size(scheme, body), alpha_step, job.kv_cache_quantization), None
    # The layout has one block size for all INT4 layers.
    both = {**body, "lm_head": head}
    body_block = block_size(scheme, both if scheme is head_scheme else body)
    head_block = body_block if scheme is head_scheme else block_size(head_scheme, {"lm_head": head})
    return (
        Recipe(scheme, body_block, alpha_step, job.kv_cache_quantization),
        Recipe(head_scheme, head_block, alpha_step),
    )


def _check_resources(plan: Plan, batch_tokens: int) -> None:
    infos, calibration = plan.checkpoint.tensors.infos(), plan.calibration
    if plan.device.type == "cpu":
        needed = checks.needed_bytes(plan.config, infos, batch_tokens, plan.head is not None)
        checks.check_memory(needed, checks.available_bytes())
    tokens = calibration.rows.size + 2 * calibration.held_out.size
    states = 2 * 4 * plan.config.hidden_size * tokens  # those before and those behind a layer
    result = sum(info.num_bytes for info in infos.values())
    checks.check_disk(plan.job.output_dir, states + 2 * result)


def _settings(
    job: Job,
    recipe: Recipe,
    head: Recipe | None,
    calibration: Calibration,
    checkpoint: Checkpoint,
    batch_tokens: int,
) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that began."""
    facts = asdict(job)
    for name in ("output_dir", "device"):
        del facts[name]
    infos = checkpoint.tensors.infos()
    names = sorted((name, info.dtype, info.shape) for name, info in infos.items())
    described = json.dumps([checkpoint.config, names], sort_keys=True)
    facts |= {
        "block_size": recipe.block_size,
        "lm_head_block_size": None if head is None else head.block_size,
        "alpha_step": recipe.alpha_step,
        "batch_tokens": batch_tokens,
        "num_samples": len(calibration.rows),
        "held_out": len(calibration.held_out),
        "seq_len": calibration.rows.shape[1],
        "calibration_sha256": calibration.sha256,
        "model_sha256": hashlib.sha256(described.encode()).hexdigest(),
    }
    return json.loads(json.dumps(facts, default=str))

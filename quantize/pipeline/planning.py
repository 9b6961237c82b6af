"""Makes the plan of a run: checks the options against the model."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from edgellm.core.commands.extras import install
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.quantize.algorithms.autoround import is_installed
from edgellm.quantize.algorithms.residual_rotation import rotated
from edgellm.quantize.algorithms.value_rotation import check_values
from edgellm.quantize.calibration.text import Calibration, load_tokenizer, read_calibration
from edgellm.quantize.formats.schemes import (
    COMPRESSED_TENSORS,
    HEAD_SCHEMES,
    KV_SCHEMES,
    RESIDUAL,
    ROTATIONS,
    TABLE_BLOCKS,
    TARGETS,
    VALUES,
    Recipe,
    Scheme,
    block_size,
    check_format,
    check_targets,
    choose,
    choose_scheme,
    smallest_bits,
)
from edgellm.quantize.job import SEARCH_OPTIONS, Job
from edgellm.quantize.metrics.questions import Questions, read_questions
from edgellm.quantize.models import checks
from edgellm.quantize.models.draft import open_float_draft
from edgellm.quantize.models.eagle_draft import Draft
from edgellm.quantize.models.language_model import LanguageModel, QuantizedNetwork, Task
from edgellm.quantize.models.mtp_draft import MtpDraft
from edgellm.quantize.pipeline.torch_device import choose_device
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import WorkFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Amounts:
    """Default amounts of text; smaller on CPUs, which are slower."""

    num_samples: int
    seq_len: int
    held_out: int
    alpha_step: float
    batch_tokens: int


def _amounts(scheme: Scheme, device: torch.device) -> _Amounts:
    """Return default amounts; fewer for AWQ and AutoRound, which repeat forward passes."""
    searches = scheme.is_awq or scheme.is_autoround
    if device.type == "cpu":
        rows = 48 if scheme.form else 8 if scheme.is_awq else 16 if searches else 32
        return _Amounts(
            num_samples=rows, seq_len=256, held_out=8, alpha_step=0.2, batch_tokens=2048
        )
    return _Amounts(
        num_samples=128 if searches else 512,
        seq_len=512,
        held_out=32,
        alpha_step=0.1,
        batch_tokens=8192,
    )


def make_plan(job: Job) -> Plan:
    """Make the plan, with all checks that need no computation.

    Raises:
        EdgeLLMError: an option is invalid for the model.
    """
    scheme = choose_scheme(job.quantization, job.algo)
    head, cache = job.lm_head_quantization, job.kv_cache_quantization
    check_format(job.format, scheme, head, cache)
    head_scheme = None
    if job.lm_head_quantization is not None:
        name = choose("--lm_head_quantization", job.lm_head_quantization, HEAD_SCHEMES)
        head_scheme = HEAD_SCHEMES[name]
    if job.kv_cache_quantization is not None:
        choose("--kv_cache_quantization", job.kv_cache_quantization, KV_SCHEMES)
    choose("--target", job.target, TARGETS)
    if job.rotate is not None:
        choose("--rotate", job.rotate, ROTATIONS)
    check_targets(scheme, job.target_bits, job.target_kl, is_draft=job.base_model_dir is not None)
    if scheme.is_autoround:
        _check_autoround(job)
    device = choose_device(job.device)
    if job.base_model_dir is None:
        subject: QuantizedNetwork = _language_model(job)
    else:
        subject = open_float_draft(job.model_dir, job.base_model_dir, job.ignore_config_keys)
    if subject.family.experts is not None and (scheme.is_autoround or scheme.is_mixed):
        raise EdgeLLMError(
            f"{'--quantization mixed' if scheme.is_mixed else '--algo autoround'} does not support "
            "mixture-of-experts models",
            hint="choose int4_awq without --algo, or int8_sq",
        )
    _check_layers(job, subject)
    recipe, head = _recipes(job, scheme, head_scheme, subject, device)
    _check_bits(job, recipe.block_size)
    amounts = _amounts(scheme, device)
    seq_len = job.seq_len or amounts.seq_len
    positions = subject.config.max_position_embeddings
    if seq_len > positions:
        raise EdgeLLMError(f"--seq_len {seq_len}: the model has {positions} positions")
    batch_tokens = job.batch_tokens or amounts.batch_tokens
    task = Task(
        calibration=_calibration(job, subject.reader, amounts, seq_len),
        work=WorkFolder(job.work_dir),
        batch_rows=max(1, batch_tokens // seq_len),
        device=device,
        questions=_questions(job, subject.reader),
    )
    settings = _settings(job, recipe, head, subject, task, batch_tokens)
    plan = Plan(job=job, subject=subject, recipe=recipe, head=head, task=task, settings=settings)
    _check_resources(plan, batch_tokens)
    if not task.work.is_there:
        checks.check_weights(subject.checkpoint.tensors)
    return plan


def _calibration(job: Job, reader: LanguageModel, amounts: _Amounts, seq_len: int) -> Calibration:
    """Read the calibration text and the held-out text."""
    return read_calibration(
        job.calib_dataset,
        load_tokenizer(reader.checkpoint.tokenizer_files),
        num_samples=job.num_samples or amounts.num_samples,
        num_held_out=job.held_out or amounts.held_out,
        seq_len=seq_len,
        vocab_size=reader.config.vocab_size,
        seed=job.seed,
    )


def _questions(job: Job, reader: LanguageModel) -> Questions | None:
    """Read the prompts of greedy agreement, if requested."""
    if job.answers is None:
        return None
    tokenizer = load_tokenizer(reader.checkpoint.tokenizer_files)
    positions = reader.config.max_position_embeddings
    return read_questions(job.answers, tokenizer, reader.checkpoint, positions)


def _language_model(job: Job) -> LanguageModel:
    model = LanguageModel.open(job.model_dir, job.ignore_config_keys)
    if job.rotate not in RESIDUAL:
        return model
    return rotated(model, job.seed, job.ignore_config_keys)


def _check_layers(job: Job, subject: QuantizedNetwork) -> None:
    """Raise `EdgeLLMError` for unknown layers, impossible rotations, or if no layer is left."""
    if job.rotate in VALUES:
        check_values(subject.tensors.infos(), subject.layers, subject.family)
    carried = subject.reader.carried
    if job.kv_cache_quantization is not None and carried is not None and carried.sources:
        raise EdgeLLMError(
            "--kv_cache_quantization: layers of this model share keys and values, which get no "
            "calibrated scales",
            hint="leave it out: the KV cache has float16 then",
        )
    kept, count = {*job.keep_layers}, len(subject.layers)
    if job.keep_budget is not None and job.kv_cache_quantization is not None:
        raise EdgeLLMError(
            "--keep_layers auto: KV cache scales are calibrated in quantized layers",
            hint="leave out --keep_layers or --kv_cache_quantization",
        )
    if job.keep_budget is not None and job.quantization == "mixed":
        raise EdgeLLMError(
            "--quantization mixed chooses the float layers itself",
            hint="leave out --keep_layers",
        )
    if not kept:
        return
    flag = f"--keep_layers {','.join(map(str, job.keep_layers))}"
    if not kept <= {*range(count)}:
        raise EdgeLLMError(f"{flag}: the model has layers 0 to {count - 1}")
    if len(kept) == count:
        raise EdgeLLMError(f"{flag} leaves no layer to quantize", hint="name fewer layers")
    if job.kv_cache_quantization is not None:
        raise EdgeLLMError(
            f"{flag}: KV cache scales are calibrated in quantized layers, and need all of them",
            hint="leave out --keep_layers or --kv_cache_quantization",
        )


def _check_bits(job: Job, block_size: int) -> None:
    """Raise `EdgeLLMError` for a target size below the minimum."""
    if job.target_bits is None:
        return
    smallest = smallest_bits(block_size)
    if job.target_bits < smallest:
        raise EdgeLLMError(
            f"--target_bits {job.target_bits:g}: INT4 in blocks of {block_size} has "
            f"{smallest:g} bits a weight",
            hint=f"give --target_bits {smallest:g} or more, or a larger --block_size",
        )


def _check_autoround(job: Job) -> None:
    """Raise `EdgeLLMError` if AutoRound is unsupported here or not installed."""
    if job.base_model_dir is not None:
        raise EdgeLLMError("--algo autoround does not support drafts", hint="leave out --algo")
    if not is_installed():
        raise EdgeLLMError(
            "--algo autoround needs the package auto-round",
            hint=install("autoround"),
        )


def _recipes(
    job: Job,
    scheme: Scheme,
    head_scheme: Scheme | None,
    subject: QuantizedNetwork,
    device: torch.device,
) -> tuple[Recipe, Recipe | None]:
    infos = subject.tensors.infos()
    body = checks.linear_shapes(infos, subject.layers, subject.family)
    out, width = infos[subject.head_name].shape
    alpha_step = job.alpha_step or _amounts(scheme, device).alpha_step
    # TensorRT needs twice the bytes for negative scales.
    has_signs = job.target == "cpu" and job.format != COMPRESSED_TENSORS
    own = Recipe(
        scheme=scheme,
        block_size=0,
        alpha_step=alpha_step,
        kv_cache=job.kv_cache_quantization,
        target=job.target,
        has_signs=has_signs,
    )
    if head_scheme is None:
        return replace(own, block_size=block_size(scheme, body, job.block_size)), None
    # The layout has one block size for all INT4 layers.
    shared = scheme.is_int4 and head_scheme.is_int4
    if isinstance(subject, MtpDraft):
        raise EdgeLLMError(
            f"{subject.checkpoint.label}: its MTP layer uses the base's head",
            hint="leave out --lm_head_quantization and --quantization auto, which quantizes heads",
        )
    if isinstance(subject, Draft) and subject.facts.low_rank is not None:
        raise EdgeLLMError(
            f"{subject.checkpoint.label}: its low-rank head looks up rows of the float head",
            hint="leave out --lm_head_quantization and --quantization auto, which quantizes heads",
        )
    if head_scheme.is_table:
        _check_table(subject, width)
    head = {"lm_head": (out, width)}
    body_block = block_size(scheme, {**body, **head} if shared else body, job.block_size)
    head_block = body_block if shared else block_size(head_scheme, head, job.block_size)
    return replace(own, block_size=body_block), Recipe(
        scheme=head_scheme, block_size=head_block, alpha_step=alpha_step
    )


def _check_table(subject: QuantizedNetwork, width: int) -> None:
    """Raise `EdgeLLMError` unless the head is tied, and groups divide its inputs."""
    if subject.head_name != checks.EMBEDDING or subject is not subject.reader:
        raise EdgeLLMError(
            "--lm_head_quantization int8_tied: head and embedding are two matrices here",
            hint="choose int8, which quantizes only the head",
        )
    if width % TABLE_BLOCKS[-1]:
        raise UnsupportedModelError(
            f"--lm_head_quantization int8_tied: the hidden size {width} is not a multiple of "
            f"{TABLE_BLOCKS[-1]}",
            hint="leave it out",
        )


def _check_resources(plan: Plan, batch_tokens: int) -> None:
    subject, task, scheme = plan.subject, plan.task, plan.recipe.scheme
    if task.device.type == "cpu":
        needed = subject.needed_bytes(
            batch_tokens, scheme.layer_copies, with_head=plan.head is not None
        )
        if scheme.follows_rounded:  # a layer's inputs, outputs and inputs after quantized layers
            needed += 3 * 4 * math.prod(subject.states_shape(task.calibration.rows, 0))
        checks.check_memory(needed, checks.available_bytes())
    result = sum(info.num_bytes for info in subject.checkpoint.tensors.infos().values())
    checks.check_disk(plan.job.output_dir, subject.states_bytes(task.calibration) + 2 * result)


def _settings(
    job: Job,
    recipe: Recipe,
    head: Recipe | None,
    subject: QuantizedNetwork,
    task: Task,
    batch_tokens: int,
) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the interrupted one."""
    facts = asdict(job)
    for name in ("output_dir", "device", "max_kl", "report", *SEARCH_OPTIONS):
        del facts[name]
    infos = subject.tensors.infos()
    names = sorted((name, info.dtype, info.shape) for name, info in infos.items())
    described = json.dumps([subject.checkpoint.config, names], sort_keys=True)
    calibration = task.calibration
    facts |= {
        "block_size": recipe.block_size,
        "lm_head_block_size": None if head is None else head.block_size,
        "alpha_step": recipe.alpha_step,
        "batch_tokens": batch_tokens,
        "num_samples": len(calibration.rows),
        "held_out": len(calibration.held_out),
        "seq_len": calibration.rows.shape[1],
        "calibration_sha256": calibration.sha256,
        "answers_sha256": None if task.questions is None else task.questions.sha256,
        "model_sha256": hashlib.sha256(described.encode()).hexdigest(),
    }
    return json.loads(json.dumps(facts, default=str))

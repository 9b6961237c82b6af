"""One run of `edgellm-train-draft`: corpus, training, and the draft's folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgellm.core.artifact import move_files, own_files, temporary_folder
from edgellm.core.commands.output_folder import OutputKey, require_own
from edgellm.core.commands.progress import Report, share_of, shown
from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
    UnsupportedModelError,
)
from edgellm.core.file_lock import hold
from edgellm.core.resources import explain_full_disk
from edgellm.export.config.hidden_taps import check_taps, default_taps
from edgellm.export.pipeline.open_checkpoint import find_path
from edgellm.quantize.pipeline.torch_device import choose_device
from edgellm.tools.distributed.servers import Servers
from edgellm.tools.train_draft.base import Base, Prompt, load_base
from edgellm.tools.train_draft.data.corpus import (
    Generation,
    Sample,
    answer_prompts,
    read_conversations,
    stored_answers,
    write_prompts,
)
from edgellm.tools.train_draft.data.hidden_states import FeatureCache, row_lengths
from edgellm.tools.train_draft.data.remote import answer_prompts_remotely
from edgellm.tools.train_draft.methods.dflash import Blocks
from edgellm.tools.train_draft.methods.eagle1 import Eagle1
from edgellm.tools.train_draft.methods.eagle3 import Eagle3
from edgellm.tools.train_draft.methods.low_rank_head import TrainedLowRankHead
from edgellm.tools.train_draft.methods.medusa import Medusa
from edgellm.tools.train_draft.methods.method import Learner
from edgellm.tools.train_draft.train import STATE_FILE, Progress, Recipe, Trainer

_BLOCKS = ("dflash", "dspark")
_TAPPED = ("eagle3", *_BLOCKS)
_CORPUS = "corpus.sha256"
# Of a work folder; job.json, which owns the others, is removed last.
_STATE_FILES = ("prompts.jsonl", "answers.jsonl", _CORPUS, "features.bin",
                "features.known", STATE_FILE, "job.json")  # fmt: skip
_RUN_ONLY = ("output_dir", "work_dir", "device", "save_every", "cache_features", "servers",
             "overwrite")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All options of a run."""

    base_model_dir: str
    output_dir: Path
    data: tuple[Path, ...]
    self_prompts: int  # number of further prompts, written by the base
    work_dir: Path
    init_from: Path | None
    draft_vocab_size: int
    hidden_taps: tuple[int, ...]
    held_out: int
    cache_features: bool
    save_every: int
    device: str
    recipe: Recipe
    generation: Generation
    method: str = "eagle3"  # "eagle3", "eagle", "medusa", "dflash" or "dspark"
    num_heads: int = 0  # for "medusa"
    block_size: int = 0  # for "dflash" and "dspark"
    num_layers: int = 0  # for "dflash" and "dspark"
    sliding_window: int = 0  # not for "medusa"; 0: full attention
    draft_head_rank: int = 0  # for "eagle3"; 0: the draft is trained, not its low-rank head
    servers: Servers | None = None  # complete prompts instead of the loaded base
    overwrite: bool = False  # replaces another result, and another run's state

    def key(self) -> OutputKey:
        """What determines the output folder; raises `EdgeLLMError` for a missing base."""
        settings = _facts(self)
        for name in ("base_model_dir", "data", "init_from"):
            del settings[name]
        settings |= settings.pop("recipe") | settings.pop("generation")
        flags = {f"--{name}": value for name, value in settings.items()}
        inputs = {"--base_model_dir": find_path(self.base_model_dir), "--init_from": self.init_from}
        inputs |= {f"--data {number}": path for number, path in enumerate(self.data, 1)}
        return OutputKey(command="edgellm-train-draft", settings=flags, inputs=inputs)


def run(job: Job) -> None:
    """Complete prompts, train, and write the draft.

    Raises:
        EdgeLLMError: data, base or folders are invalid.
    """
    device = choose_device(job.device)
    if device.type == "cuda":
        # cuDNN plans its attention anew for each shape, and here most batches have another shape.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    require_own(job.output_dir)
    _check_owner(job)
    base = load_base(job.base_model_dir, device)
    taps = _taps(job, base.config.num_hidden_layers) if job.method in _TAPPED else ()
    samples, prompts = read_conversations(job.data, base)
    limit = job.recipe.max_tokens
    samples = [sample for sample in samples if len(sample.prompt.ids) < limit]
    prompts = [prompt for prompt in prompts if len(prompt.ids) < limit]
    _check_sizes(job, base, len(samples) + len(prompts) + job.self_prompts)
    torch.manual_seed(job.recipe.seed)
    learner = _learner(job, base, taps)
    if job.init_from is not None:
        learner.load(job.init_from)
    _claim(job)
    busy = f"another edgellm-train-draft uses {job.work_dir}"
    with (
        hold(job.work_dir / "lock", busy, "wait for it, or give another --work_dir"),
        explain_full_disk(job.work_dir, hint="free some space and run it again to resume"),
        shown(lines=False) as progress,
    ):
        _complete_and_train(job, base, learner, samples, prompts, progress)


def _complete_and_train(
    job: Job,
    base: Base,
    learner: Learner,
    samples: list[Sample],
    prompts: list[Prompt],
    progress: Report,
) -> None:
    """Complete prompts, train, and write the draft's folder."""
    if job.self_prompts:
        prompts += _self_prompts(job, base, progress)
    if prompts:
        samples += _completed(job, base, prompts, progress)
    samples = _shuffled(job, samples)
    if job.init_from is None:
        learner.start(samples)
    trainer = Trainer(
        learner=learner, recipe=job.recipe, folder=job.work_dir, device=base.model.device
    )
    if trainer.resume():
        _log(f"resuming at step {trainer.step}")
    estimate = _train(job, trainer, samples, progress)
    training = {"acceptance_length_estimate": estimate, **_facts(job)}
    with temporary_folder(job.output_dir) as folder:
        learner.write(folder, training)
        written = {path.name for path in folder.iterdir()}
        old = own_files(job.output_dir)
        move_files(folder, job.output_dir, sorted(written), old, job.key().facts())
    size = _count(learner.module) / 1e6
    _log(f"{job.output_dir}: {job.method} draft of {size:.1f} M parameters, {_show(estimate)}")


def _learner(job: Job, base: Base, taps: tuple[int, ...]) -> Learner:
    recipe = job.recipe
    if job.method == "medusa":
        return Medusa(
            base=base,
            base_name=job.base_model_dir,
            num_heads=job.num_heads,
            decay=recipe.unroll_weight,
        )
    if job.method in _BLOCKS:
        return Blocks(
            base=base,
            method=job.method,
            taps=taps,
            draft_vocab_size=job.draft_vocab_size,
            block_size=job.block_size,
            num_layers=job.num_layers,
            decay=recipe.unroll_weight,
            sliding_window=job.sliding_window,
        )
    if job.method == "eagle":
        return Eagle1(
            base=base,
            steps=recipe.unrolls,
            noise=recipe.feature_noise,
            sliding_window=job.sliding_window,
        )
    draft = Eagle3(
        base=base,
        taps=taps,
        draft_vocab_size=job.draft_vocab_size,
        unrolls=recipe.unrolls,
        decay=recipe.unroll_weight,
        sliding_window=job.sliding_window,
    )
    return TrainedLowRankHead(draft, job.draft_head_rank) if job.draft_head_rank else draft


def _check_owner(job: Job) -> None:
    """Reject the work folder of another run, or discard that run with `overwrite`."""
    path = job.work_dir / "job.json"
    if not path.exists() or path.read_text("utf-8") == _facts_text(job):
        return
    if not job.overwrite:
        raise EdgeLLMError(
            f"{job.work_dir} holds a run with other settings",
            hint="give its settings to resume, another --work_dir, or --overwrite to discard it",
        )
    busy = f"another edgellm-train-draft uses {job.work_dir}"
    with hold(job.work_dir / "lock", busy, "wait for it, or give another --work_dir"):
        for name in _STATE_FILES:
            (job.work_dir / name).unlink(missing_ok=True)


def _claim(job: Job) -> None:
    """Create the work folder and mark it as this run's."""
    try:
        job.work_dir.mkdir(parents=True, exist_ok=True)
        _write(job.work_dir / "job.json", _facts_text(job))
    except OSError as error:
        raise EdgeLLMError(f"cannot write {job.work_dir}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def _facts_text(job: Job) -> str:
    return json.dumps(_facts(job), indent=2)


def _facts(job: Job) -> dict[str, Any]:
    """Return the settings that determine the resulting draft."""
    facts = dataclasses.asdict(job)
    for name in _RUN_ONLY:
        del facts[name]
    return json.loads(json.dumps(facts, default=str))


def _taps(job: Job, layers: int) -> tuple[int, ...]:
    taps = job.hidden_taps or default_taps(layers)
    if layers in taps or len(set(taps)) < len(taps):
        raise LimitError(
            f"hidden taps {taps} are invalid for a base with {layers} layers",
            hint=f"give different layers below {layers} with --hidden_taps",
        )
    return check_taps(taps, layers, "--hidden_taps")


def _check_sizes(job: Job, base: Base, conversations: int) -> None:
    """Raise `EdgeLLMError` for sizes that cannot work, before hours of training."""
    if conversations <= job.held_out:
        raise EdgeLLMError(
            f"{conversations} conversations, {job.held_out} of them held out, leave none to train",
            hint="give more --data, a smaller --held_out, or a larger --max_tokens",
        )
    for flag, wanted, maximum, what in (
        ("draft_vocab_size", job.draft_vocab_size, base.config.vocab_size, "tokens"),
        ("num_layers", job.num_layers, base.config.num_hidden_layers, "layers"),
    ):
        if wanted > maximum:
            raise LimitError(f"--{flag} {wanted} exceeds the base's {maximum} {what}")
    _check_window(job, base)
    _check_rank(job, base)


def _check_rank(job: Job, base: Base) -> None:
    if not job.draft_head_rank:
        return
    if job.init_from is None:
        raise EdgeLLMError(
            "--draft_head_rank trains a low-rank head for a trained draft, and there is none",
            hint="train the draft first, without it, and give its folder as --init_from",
        )
    maximum = min(job.draft_vocab_size, base.config.hidden_size)
    if job.draft_head_rank > maximum:
        raise LimitError(
            f"--draft_head_rank {job.draft_head_rank} exceeds the head's rank {maximum}",
            hint=f"give {maximum} or less; a low rank saves time",
        )


def _check_window(job: Job, base: Base) -> None:
    if 0 < job.sliding_window < job.block_size:
        raise LimitError(
            f"--sliding_window {job.sliding_window} is shorter than a block of {job.block_size}",
            hint=f"give {job.block_size} or more",
        )
    has_axes = job.method not in _BLOCKS and "mrope_section" in base.config.rope_parameters
    if job.sliding_window and has_axes:
        raise UnsupportedModelError(
            f"--sliding_window: {job.method} drafts of a base with M-RoPE have no windows",
            hint="leave it out, or give --method dflash",
        )


def _self_prompts(job: Job, base: Base, progress: Report) -> list[Prompt]:
    store = job.work_dir / "prompts.jsonl"
    for count in write_prompts(base, store, job.self_prompts, job.generation):
        progress(share_of("writing prompts", count, job.self_prompts))
        _log(f"the base has written {count} of {job.self_prompts} prompts")
    _, prompts = read_conversations([store], base)
    return [prompt for prompt in prompts if len(prompt.ids) < job.recipe.max_tokens]


def _completed(job: Job, base: Base, prompts: list[Prompt], progress: Report) -> list[Sample]:
    store, limit = job.work_dir / "answers.jsonl", job.generation.generation_minutes
    if limit and (job.work_dir / _CORPUS).exists():
        answering = iter(())  # the training has begun with the answers of this time
    elif job.servers is None:
        deadline = time.monotonic() + 60 * limit if limit else None
        if limit:
            prompts = _mixed(prompts, job.recipe.seed)
        answering = answer_prompts(base, prompts, store, job.generation, deadline)
    else:
        answering = answer_prompts_remotely(
            job.servers, prompts, base.stop_ids, store, job.generation
        )
    for count in answering:
        progress(share_of("completing prompts", count, len(prompts)))
        _log(f"the base has answered {count} of {len(prompts)} prompts")
    wanted = set(prompts)
    image_id = base.pictures.token_id if base.pictures is not None else None
    return [
        sample
        for sample in stored_answers(store)
        # Without answers in which the base generates an image token.
        if sample.prompt in wanted and image_id not in sample.answer
    ]


def _mixed(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Shuffle prompts, so that a part of them has all kinds."""
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [prompts[index] for index in order]


def _shuffled(job: Job, samples: list[Sample]) -> list[Sample]:
    """Return the corpus in the order of this run.

    Raises:
        EdgeLLMError: the corpus has changed since the run started.
    """
    digest = _digest(samples)
    path = job.work_dir / _CORPUS
    if path.exists() and path.read_text("utf-8") != digest:
        raise EdgeLLMError(
            f"the conversations have changed since the run in {job.work_dir} started",
            hint="restore the --data files, or give another --work_dir",
        )
    _write(path, digest)
    order = np.random.default_rng(job.recipe.seed).permutation(len(samples))
    tokens = sum(len(sample.answer) for sample in samples)
    _log(f"{len(samples)} conversations with {tokens} tokens to train on")
    return [samples[index] for index in order]


def _digest(samples: Sequence[Sample]) -> str:
    """Return the hash of a corpus."""
    content = hashlib.sha256()
    for sample in samples:
        pictures = [dataclasses.astuple(picture) for picture in sample.prompt.pictures]
        content.update(json.dumps(pictures).encode())
        for ids in (sample.prompt.ids, sample.answer):
            content.update(np.asarray([len(ids), *ids], np.int64).tobytes())
    return content.hexdigest()


def _train(job: Job, trainer: Trainer, samples: list[Sample], show: Report) -> float:
    """Train to the end; return the last estimate on held-out text."""
    held_out, trained = samples[: job.held_out], samples[job.held_out :]
    cache = None
    if job.cache_features:
        lengths = row_lengths(trained, job.recipe.max_tokens)
        tapped = trainer.learner.tapped
        width = tapped.num_streams, tapped.base.config.hidden_size
        cache = FeatureCache(job.work_dir / "features.bin", lengths, width)
    estimate: float | None = None

    def report(progress: Progress) -> None:
        nonlocal estimate
        part = f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}"
        show(share_of("training", progress.step, progress.steps, part))
        if progress.acceptance_length is not None:
            estimate = progress.acceptance_length
            _log(
                f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
                f"{progress.tokens_per_second:.0f} tokens/s, {_show(estimate)}"
            )

    trainer.run(trained, held_out, cache=cache, save_every=job.save_every, report=report)
    return trainer.acceptance_length(held_out) if estimate is None else estimate


def _show(estimate: float) -> str:
    return f"acceptance length {estimate:.2f} (estimate, chain, held-out text)"


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""One run of `edgellm-train-draft`: corpus, features, training, the draft's folder."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edgellm.artifact import temporary_folder
from edgellm.contract import EdgeLLMError, LimitError
from edgellm.tools.train_draft.base import load_base
from edgellm.tools.train_draft.corpus import (
    Generation,
    Sample,
    answer_prompts,
    draft_vocabulary,
    read_conversations,
    stored_answers,
)
from edgellm.tools.train_draft.features import FeatureCache, TappedBase
from edgellm.tools.train_draft.layout import (
    FILES,
    draft_shape,
    read_draft,
    start_from_base,
    write_draft,
)
from edgellm.tools.train_draft.network import Draft
from edgellm.tools.train_draft.train import Frozen, Progress, Recipe, Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the user chose."""

    base_model_dir: str
    output_dir: Path
    data: tuple[Path, ...]
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


def run(job: Job) -> None:
    """Answer what has no answer, train, write the draft.

    Raises:
        EdgeLLMError: data, base or folders are not what they should be.
    """
    device = _device(job.device)
    _check_output(job.output_dir)
    _claim(job)
    model, tokenizer, stop_ids = load_base(job.base_model_dir, device)
    taps = _taps(job, model)
    samples = _corpus(job, model, tokenizer, stop_ids)
    if len(samples) <= job.held_out:
        raise EdgeLLMError(
            f"{len(samples)} conversations, {job.held_out} of them held out, leave none to learn",
            hint="give more --data or a smaller --held_out",
        )
    if job.draft_vocab_size > model.config.vocab_size:
        raise LimitError(
            f"--draft_vocab_size {job.draft_vocab_size} exceeds the base's "
            f"{model.config.vocab_size} tokens"
        )
    vocabulary = draft_vocabulary(samples, model.config.vocab_size, job.draft_vocab_size)
    draft = Draft(draft_shape(model.config, job.draft_vocab_size, len(taps)))
    if job.init_from is None:
        start_from_base(draft, model, vocabulary)
    else:
        vocabulary = read_draft(draft, job.init_from)
    trainer = Trainer(draft, _frozen(model, taps, vocabulary), job.recipe, job.work_dir, device)
    if trainer.resume():
        _say(f"going on at step {trainer.step}")
    estimate = _train(job, trainer, samples)
    training = {"acceptance_length_estimate": estimate, **_facts(job)}
    with temporary_folder(job.output_dir) as folder:
        write_draft(draft, folder, vocabulary, taps, model.config, training)
        job.output_dir.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).replace(job.output_dir / name)
    _say(f"{job.output_dir}: draft of {_count(draft) / 1e6:.1f} M parameters, {_show(estimate)}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EdgeLLMError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def _check_output(output: Path) -> None:
    """Refuse to overwrite files that are not a draft of this tool."""
    taken = [name for name in FILES if (output / name).exists()]
    if taken and not (output / FILES[-1]).exists():
        raise EdgeLLMError(
            f"{output} already holds {taken[0]}, which this command did not make",
            hint="give another --output_dir",
        )


def _claim(job: Job) -> None:
    """Make the work folder, or make sure that it belongs to the same run."""
    facts = json.dumps(_facts(job), indent=2)
    path = job.work_dir / "job.json"
    if path.exists() and path.read_text("utf-8") != facts:
        raise EdgeLLMError(
            f"{job.work_dir} holds a run with other settings",
            hint="repeat its settings to go on, or give another --work_dir",
        )
    try:
        job.work_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(facts, "utf-8")
    except OSError as error:
        raise EdgeLLMError(f"cannot write {job.work_dir}: {error.strerror}") from None


def _facts(job: Job) -> dict[str, Any]:
    """The settings that make a run what it is."""
    facts = dataclasses.asdict(job)
    for name in ("output_dir", "work_dir", "device", "save_every", "cache_features"):
        del facts[name]
    return json.loads(json.dumps(facts, default=str))


def _taps(job: Job, model: PreTrainedModel) -> tuple[int, ...]:
    layers = model.config.num_hidden_layers
    taps = job.hidden_taps or (2, layers // 2, layers - 3)
    if len(set(taps)) != len(taps) or not all(0 <= tap < layers for tap in taps):
        raise LimitError(
            f"hidden taps {taps} of a base with {layers} layers",
            hint="give different layers with --hidden_taps",
        )
    return taps


def _corpus(
    job: Job,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: frozenset[int],
) -> list[Sample]:
    samples, prompts = read_conversations(job.data, tokenizer)
    if prompts:
        store = job.work_dir / "answers.jsonl"
        for count in answer_prompts(model, prompts, store, stop_ids, job.generation):
            _say(f"the base has answered {count} of {len(prompts)} prompts")
        wanted = {tuple(prompt) for prompt in prompts}
        samples += [sample for sample in stored_answers(store) if sample.prompt in wanted]
    samples = [sample for sample in samples if len(sample.prompt) < job.recipe.max_tokens]
    order = np.random.default_rng(job.recipe.seed).permutation(len(samples))
    tokens = sum(len(sample.answer) for sample in samples)
    _say(f"{len(samples)} conversations with {tokens} tokens to learn")
    return [samples[index] for index in order]


def _frozen(model: PreTrainedModel, taps: tuple[int, ...], vocabulary: np.ndarray) -> Frozen:
    ids = torch.from_numpy(vocabulary).to(model.device)
    known = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=model.device)
    known[ids] = True
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()[ids]
    return Frozen(TappedBase(model, taps), embedding, head, known)


def _train(job: Job, trainer: Trainer, samples: list[Sample]) -> float:
    """Train to the end; the last estimate on held-out text."""
    held_out, learned = samples[: job.held_out], samples[job.held_out :]
    cache = None
    if job.cache_features:
        lengths = [min(len(s.prompt) + len(s.answer), job.recipe.max_tokens) for s in learned]
        width = trainer.draft.shape.num_taps + 1, trainer.draft.shape.hidden_size
        cache = FeatureCache(job.work_dir / "features.bin", lengths, width)
    estimate = 1.0

    def report(progress: Progress) -> None:
        nonlocal estimate
        if progress.acceptance_length is not None:
            estimate = progress.acceptance_length
            _say(
                f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
                f"{progress.tokens_per_second:.0f} tokens/s, {_show(estimate)}"
            )

    trainer.run(learned, held_out, cache=cache, save_every=job.save_every, report=report)
    return estimate


def _show(estimate: float) -> str:
    return f"acceptance length {estimate:.2f} (estimate, chain, held-out text)"


def _count(draft: Draft) -> int:
    return sum(parameter.numel() for parameter in draft.parameters())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

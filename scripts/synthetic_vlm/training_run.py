"""One run: training from random weights, evaluation, and the checkpoint's folder."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from edgellm.core.artifact import temporary_folder
from edgellm.core.errors import EdgeLLMError
from edgellm.scripts.synthetic_vlm.card import model_card
from edgellm.scripts.synthetic_vlm.checkpoint import (
    make_config,
    make_model,
    read_model,
    write_model,
    write_processor,
)
from edgellm.scripts.synthetic_vlm.conversations import KINDS, Encoder
from edgellm.scripts.synthetic_vlm.evaluate import Exactness, measure
from edgellm.scripts.synthetic_vlm.train import Progress, Recipe, Trainer

TRAINING = "training.json"
_FRESH_SCENES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The user's options."""

    output_dir: Path
    recipe: Recipe
    threads: int  # 0: torch's default
    save_every: int
    fresh_scenes: int = _FRESH_SCENES  # of each kind, for the model card
    # Of the model, see `make_config`; tests use smaller ones.
    sizes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def run(job: Job) -> None:
    """Train or resume an interrupted run, evaluate, and write the checkpoint.

    Raises:
        EdgeLLMError: the folders hold other files.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if job.threads:
        torch.set_num_threads(job.threads)
    work = job.output_dir.parent / (job.output_dir.resolve().name + ".training")
    _check_output(job)
    _claim(job, work)
    torch.manual_seed(job.recipe.seed)
    config = make_config(**job.sizes)
    model = make_model(config)
    with tempfile.TemporaryDirectory() as name:
        write_processor(Path(name), config)
        encoder = Encoder.read(Path(name))
    trainer = Trainer(model=model, encoder=encoder, recipe=job.recipe, folder=work)
    if trainer.resume():
        _log(f"resuming at step {trainer.step}")
    trainer.run(save_every=job.save_every, report=lambda progress: _report(job, progress))
    with temporary_folder(job.output_dir) as folder:
        write_model(folder, model.to(torch.bfloat16))
        write_processor(folder, model.config)
        exactness = _measured(job, folder, encoder)
        _write_facts(folder, job, trainer, exactness)
        job.output_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            path.replace(job.output_dir / path.name)
    one = exactness["one"]
    _log(f"{job.output_dir}: {one.exact} of {one.scenes} captions of fresh scenes are exact")


def _check_output(job: Job) -> None:
    """Raise `EdgeLLMError` unless the folder is empty, or a checkpoint of the same settings."""
    output, settings = job.output_dir, json.loads(json.dumps(_facts(job)))
    if output.exists() and not output.is_dir():
        raise EdgeLLMError(f"{output} is a file", hint="give another --output_dir")
    if not output.exists() or not any(output.iterdir()):
        return
    made = _facts_of(output / TRAINING)
    if not made:
        raise EdgeLLMError(
            f"{output} holds files that this command did not make", hint="give another --output_dir"
        )
    if settings != {name: made.get(name) for name in settings}:
        raise EdgeLLMError(
            f"{output} holds a model that was trained with other settings",
            hint="give another --output_dir, or remove the folder",
        )


def _facts_of(path: Path) -> dict[str, Any]:
    """Read an earlier run's training.json; return an empty dict if it is invalid."""
    try:
        facts = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and "exactness" in facts else {}


def _claim(job: Job, work: Path) -> None:
    """Create or reuse the work folder; raise `EdgeLLMError` if its settings differ."""
    path, text = work / "job.json", json.dumps(_facts(job), indent=2)
    try:
        if path.exists() and path.read_text("utf-8") != text:
            raise EdgeLLMError(
                f"{work} holds a run with other settings",
                hint="give the same settings to resume, or remove the folder",
            )
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise EdgeLLMError(f"cannot write {work}: {error.strerror}") from None


def _facts(job: Job) -> dict[str, Any]:
    """Return the settings that affect the result."""
    return {**dataclasses.asdict(job.recipe), **job.sizes}


def _report(job: Job, progress: Progress) -> None:
    if progress.step % job.save_every == 0 or progress.step == progress.steps:
        _log(
            f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
            f"{progress.right_cells:.0%} of cells right, {progress.seconds:.1f} s a step"
        )


def _measured(job: Job, folder: Path, encoder: Encoder) -> dict[str, Exactness]:
    """Evaluate the written model, in bfloat16 precision, by kind of conversation."""
    model = read_model(folder)
    return {kind: measure(model, encoder, kind, job.fresh_scenes) for kind in KINDS}


def _write_facts(folder: Path, job: Job, trainer: Trainer, exactness: dict[str, Exactness]) -> None:
    """Write training.json and the model card."""
    facts = {
        **_facts(job),
        "parameters": sum(value.numel() for value in trainer.model.parameters()),
        "training_seconds": round(trainer.seconds),
        "threads": torch.get_num_threads(),
        "exactness": {kind: dataclasses.asdict(one) for kind, one in exactness.items()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / TRAINING).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    card = model_card(facts, trainer.model.config.to_dict(), job.output_dir.resolve().name)
    (folder / "README.md").write_text(card, "utf-8")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""`python -m edgellm.scripts.synthetic_vlm`: a small vision-language model of drawn scenes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgellm.core.cli import App, run_command
from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError

app = App()

Output = Annotated[Path, typer.Option("--output_dir", help="Folder for the checkpoint.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
BatchSize = Annotated[int, typer.Option("--batch_size", min=1, help="Conversations of a step.")]
LearningRate = Annotated[float, typer.Option("--learning_rate", min=0)]
Threads = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: all.")]
SaveEvery = Annotated[int, typer.Option("--save_every", min=1, help="Steps between saved states.")]


@app.command()
def synthetic_vlm(
    output_dir: Output,
    steps: Steps = 800,
    batch_size: BatchSize = 16,
    learning_rate: LearningRate = 2e-3,
    threads: Threads = 0,
    save_every: SaveEvery = 25,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Train a synthetic model of Qwen2.5-VL's classes; the same command resumes."""
    _require_host()
    from edgellm.scripts.synthetic_vlm.train import Recipe
    from edgellm.scripts.synthetic_vlm.training_run import Job, run

    warmup_steps = max(1, min(30, steps // 10))
    recipe = Recipe(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        seed=seed,
    )
    run(Job(output_dir=output_dir, recipe=recipe, threads=threads, save_every=save_every))


def _require_host() -> None:
    import importlib.util

    for name in ("torch", "transformers", "tokenizers", "PIL"):
        if importlib.util.find_spec(name) is None:
            raise EdgeLLMError(
                f"training needs {name}",
                hint=install("host"),
            )


def main() -> None:
    """Entry point."""
    run_command(app)

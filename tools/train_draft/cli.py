"""`edgellm-train-draft`: an EAGLE3 draft for a base, from conversations or from prompts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgellm.command import numbers, run_command
from edgellm.contract import EdgeLLMError

app = typer.Typer(
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)


BaseModel = Annotated[
    str, typer.Option("--base_model_dir", help="HF folder, .gguf file, or a cached hub id.")
]
Output = Annotated[Path, typer.Option("--output_dir", help="Folder for the draft.")]
Data = Annotated[
    list[Path] | None,
    typer.Option("--data", help='JSONL of {"messages": [...]}; the base answers prompts.'),
]
SelfPrompts = Annotated[
    int, typer.Option("--self_prompts", min=0, help="Prompts that the base writes itself.")
]
Work = Annotated[
    Path | None, typer.Option("--work_dir", help="State of the run; default <output_dir>.training.")
]
InitFrom = Annotated[
    Path | None, typer.Option("--init_from", help="Go on with this draft's weights.")
]
Taps = Annotated[
    str, typer.Option("--hidden_taps", help="Layers whose input is read; default 2,n/2,n-3.")
]
Unrolls = Annotated[
    int, typer.Option("--unrolls", min=1, max=16, help="Draft steps trained in a row.")
]
UnrollWeight = Annotated[
    float, typer.Option("--unroll_weight", min=0, help="Loss weight of step j: this to the j.")
]
MaxTokens = Annotated[
    int, typer.Option("--max_tokens", min=16, help="Longer conversations are cut.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max_new_tokens", min=1, help="Of an answer that the base writes.")
]
SampledShare = Annotated[
    float, typer.Option("--sampled_share", min=0, max=1, help="Answers sampled, not greedy.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.01, help="Of the sampled answers.")
]
HeldOut = Annotated[
    int, typer.Option("--held_out", min=1, help="Conversations kept for the estimate.")
]
CacheFeatures = Annotated[
    bool,
    typer.Option(
        "--cache_features/--no_cache_features",
        help="Keep the base's features on disk: (taps + 1) * hidden * 2 bytes a token.",
    ),
]


@app.command()
def train_draft(
    base_model_dir: BaseModel,
    output_dir: Output,
    data: Data = None,
    self_prompts: SelfPrompts = 0,
    work_dir: Work = None,
    init_from: InitFrom = None,
    draft_vocab_size: Annotated[int, typer.Option("--draft_vocab_size", min=1)] = 8192,
    hidden_taps: Taps = "",
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 6,
    unrolls: Unrolls = 5,
    unroll_weight: UnrollWeight = 0.9,
    learning_rate: Annotated[float, typer.Option("--learning_rate", min=0)] = 1e-3,
    warmup_steps: Annotated[int, typer.Option("--warmup_steps", min=1)] = 100,
    batch_tokens: Annotated[int, typer.Option("--batch_tokens", min=64)] = 4096,
    max_tokens: MaxTokens = 512,
    max_new_tokens: MaxNewTokens = 192,
    sampled_share: SampledShare = 0.25,
    temperature: Temperature = 0.8,
    generation_batch: Annotated[int, typer.Option("--generation_batch", min=1)] = 256,
    held_out: HeldOut = 64,
    cache_features: CacheFeatures = True,
    save_every: Annotated[int, typer.Option("--save_every", min=1, help="Steps.")] = 100,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or auto.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Train an EAGLE3 draft; run the same command again after an interrupt to go on."""
    del debug  # read by run_command
    if not data and not self_prompts:
        raise EdgeLLMError(
            "no conversations to learn from",
            hint="give --data FILE.jsonl, or --self_prompts N to let the base write N prompts",
        )
    _require_host()
    from edgellm.tools.train_draft.corpus import Generation
    from edgellm.tools.train_draft.run import Job, run
    from edgellm.tools.train_draft.train import Recipe

    job = Job(
        base_model_dir=base_model_dir,
        output_dir=output_dir,
        data=tuple(data or ()),
        self_prompts=self_prompts,
        work_dir=work_dir or output_dir.parent / (output_dir.resolve().name + ".training"),
        init_from=init_from,
        draft_vocab_size=draft_vocab_size,
        hidden_taps=numbers("--hidden_taps", hidden_taps),
        held_out=held_out,
        cache_features=cache_features,
        save_every=save_every,
        device=device,
        recipe=Recipe(
            epochs, unrolls, unroll_weight, learning_rate, warmup_steps, batch_tokens, max_tokens,
            max_gradient_norm=1.0, seed=seed,
        ),
        generation=Generation(max_new_tokens, sampled_share, temperature, generation_batch, seed),
    )  # fmt: skip
    run(job)


def _require_host() -> None:
    import importlib.util

    for name in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise EdgeLLMError(
                f"training needs {name}",
                hint="in edgellm's folder: pip install torch==2.13.0, then '.[host]'",
            )


def main() -> None:
    """Entry point."""
    run_command(app)

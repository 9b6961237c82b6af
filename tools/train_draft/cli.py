"""`edgellm-train-draft`: trains a draft for a base, from conversations or from prompts only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import SNAKE_CASE, App, numbers, run_command
from edgellm.core.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.tools.remote.servers import Servers

app = App(SNAKE_CASE)


BaseModel = Annotated[
    str,
    typer.Option(
        "--base_model_dir", help="Base model: Hugging Face folder, .gguf file, or cached hub id."
    ),
]
Output = Annotated[Path, typer.Option("--output_dir", help="Folder to write the draft to.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data", help='JSONL file of {"messages": [...]}; the base completes prompts. Repeatable.'
    ),
]
SelfPrompts = Annotated[
    int,
    typer.Option("--self_prompts", min=0, help="Number of prompts that the base writes itself."),
]
Work = Annotated[
    Path | None,
    typer.Option("--work_dir", help="Folder of the run's state. Default: <output_dir>.training."),
]
InitFrom = Annotated[
    Path | None,
    typer.Option(
        "--init_from", help="Draft whose weights training starts from. Default: the base's layers."
    ),
]
Taps = Annotated[
    str,
    typer.Option(
        "--hidden_taps",
        help="Base layers whose inputs eagle3, dflash and dspark read. Default: 2,n/2,n-3.",
    ),
]
Ray = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="URL,URL",
        help="Servers of the base that complete prompts; Ray distributes them. Default: none.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help="Training method: eagle3, eagle (EAGLE-1, also for EAGLE-2), medusa, dflash, dspark.",
    ),
]
DraftVocabSize = Annotated[
    int | None,
    typer.Option(
        "--draft_vocab_size",
        min=1,
        help="Tokens of the draft's head with eagle3, dflash and dspark. Default: 8192.",
    ),
]
NumHeads = Annotated[
    int | None,
    typer.Option("--num_heads", min=1, max=16, help="Number of Medusa heads. Default: 4."),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block_size",
        min=2,
        max=64,
        help="Tokens of a block of dflash and dspark, with the newest token. Default: 8.",
    ),
]
NumLayers = Annotated[
    int | None,
    typer.Option(
        "--num_layers", min=1, max=16, help="Number of layers of dflash and dspark. Default: 2."
    ),
]
FeatureNoise = Annotated[
    float | None,
    typer.Option(
        "--feature_noise",
        min=0,
        help="Width of uniform noise on eagle's hidden states. Default: 0.2.",
    ),
]
Unrolls = Annotated[
    int | None,
    typer.Option(
        "--unrolls",
        min=1,
        max=16,
        help="Consecutive draft steps: trained with eagle3, estimated with eagle. Default: 5.",
    ),
]
UnrollWeight = Annotated[
    float | None,
    typer.Option(
        "--unroll_weight",
        min=0,
        help="Loss weight of step or head j is this to the power j. "
        "Default: 0.9 with eagle3, else 0.8.",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max_tokens", min=16, help="Maximum tokens of a conversation; longer ones are truncated."
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max_new_tokens", min=1, help="Maximum tokens that the base generates."),
]
SampledShare = Annotated[
    float,
    typer.Option(
        "--sampled_share",
        min=0,
        max=1,
        help="Share of prompts completed by sampling.",
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.01, help="Temperature of sampled completions.")
]
HeldOut = Annotated[
    int,
    typer.Option(
        "--held_out", min=1, help="Conversations that are held out to estimate the acceptance."
    ),
]
CacheFeatures = Annotated[
    bool,
    typer.Option(
        "--cache_features/--no_cache_features",
        help="Cache the base's hidden states on disk: (taps + 1) * hidden * 2 bytes a token.",
    ),
]
Epochs = Annotated[
    int, typer.Option("--epochs", min=1, help="Number of passes over the conversations.")
]
LearningRate = Annotated[float, typer.Option("--learning_rate", min=0, help="Peak learning rate.")]
WarmupSteps = Annotated[int, typer.Option("--warmup_steps", min=1, help="Steps of linear warm-up.")]
BatchTokens = Annotated[
    int, typer.Option("--batch_tokens", min=64, help="Maximum tokens of a training batch.")
]
GenerationBatch = Annotated[
    int,
    typer.Option("--generation_batch", min=1, help="Prompts that the base completes per batch."),
]
SaveEvery = Annotated[
    int, typer.Option("--save_every", min=1, help="Steps between saves of the state.")
]
Device = Annotated[str, typer.Option("--device", help="Device of the training: cpu, cuda or auto.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of order, noise and sampling.")]


@dataclass(frozen=True, slots=True)
class MethodFlags:
    """Flags of some methods only; None: not given, or not a flag of the method."""

    draft_vocab_size: int | None
    hidden_taps: str | None
    unrolls: int | None
    unroll_weight: float | None
    num_heads: int | None
    feature_noise: float | None
    block_size: int | None = None
    num_layers: int | None = None

    def completed(self, method: str) -> MethodFlags:
        """Fill in the defaults of `method`; raise `EdgeLLMError` for flags of another method."""
        default = _DEFAULTS.get(method)
        if default is None:
            *others, last = _DEFAULTS
            raise EdgeLLMError(f"--method {method}: give {', '.join(others)} or {last}")
        chosen = {}
        for name in self.__slots__:
            given, usual = getattr(self, name), getattr(default, name)
            if given is not None and usual is None:
                owners = [key for key, one in _DEFAULTS.items() if getattr(one, name) is not None]
                *some, last = owners
                named = f"{', '.join(some)} and {last}" if some else last
                raise EdgeLLMError(f"--{name} is for --method {named}, not {method}")
            chosen[name] = usual if given is None else given
        return MethodFlags(**chosen)


_DEFAULTS = {  # hidden_taps "": `default_taps`
    "eagle3": MethodFlags(8192, "", 5, 0.9, None, None),
    "eagle": MethodFlags(None, None, 5, None, None, 0.2),
    "medusa": MethodFlags(None, None, None, 0.8, 4, None),
    "dflash": MethodFlags(8192, "", None, 0.8, None, None, 8, 2),
    "dspark": MethodFlags(8192, "", None, 0.8, None, None, 8, 2),
}


@app.command()
def train_draft(
    base_model_dir: BaseModel,
    output_dir: Output,
    method: Method = "eagle3",
    data: Data = None,
    self_prompts: SelfPrompts = 0,
    ray: Ray = "",
    work_dir: Work = None,
    init_from: InitFrom = None,
    draft_vocab_size: DraftVocabSize = None,
    num_heads: NumHeads = None,
    block_size: BlockSize = None,
    num_layers: NumLayers = None,
    feature_noise: FeatureNoise = None,
    hidden_taps: Taps = "",
    epochs: Epochs = 6,
    unrolls: Unrolls = None,
    unroll_weight: UnrollWeight = None,
    learning_rate: LearningRate = 1e-3,
    warmup_steps: WarmupSteps = 100,
    batch_tokens: BatchTokens = 4096,
    max_tokens: MaxTokens = 512,
    max_new_tokens: MaxNewTokens = 192,
    sampled_share: SampledShare = 0.25,
    temperature: Temperature = 0.8,
    generation_batch: GenerationBatch = 256,
    held_out: HeldOut = 64,
    cache_features: CacheFeatures = True,
    save_every: SaveEvery = 100,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Train a draft; after an interrupt, the same command resumes."""
    _require_data(data, self_prompts)
    taps, blocks = hidden_taps or None, (block_size, num_layers)
    given = MethodFlags(
        draft_vocab_size, taps, unrolls, unroll_weight, num_heads, feature_noise, *blocks
    )
    own = given.completed(method)
    _require_host()
    from edgellm.tools.train_draft.data.corpus import Generation
    from edgellm.tools.train_draft.train import Recipe
    from edgellm.tools.train_draft.training_run import Job, run

    job = Job(
        base_model_dir=base_model_dir, output_dir=output_dir, data=tuple(data or ()),
        self_prompts=self_prompts, init_from=init_from,
        work_dir=work_dir or output_dir.parent / (output_dir.resolve().name + ".training"),
        draft_vocab_size=own.draft_vocab_size or 0,
        hidden_taps=numbers("--hidden_taps", own.hidden_taps or ""),
        held_out=held_out, cache_features=cache_features, save_every=save_every, device=device,
        recipe=Recipe(
            epochs, own.unrolls or 0, own.unroll_weight or 0.0, learning_rate, warmup_steps,
            batch_tokens, max_tokens, 1.0, seed, own.feature_noise or 0.0,
        ),
        generation=Generation(max_new_tokens, sampled_share, temperature, generation_batch, seed),
        method=method, num_heads=own.num_heads or 0, block_size=own.block_size or 0,
        num_layers=own.num_layers or 0, servers=_servers(ray),
    )  # fmt: skip
    run(job)


def _require_data(data: list[Path] | None, self_prompts: int) -> None:
    if not data and not self_prompts:
        raise EdgeLLMError(
            "no conversations to train on",
            hint="give --data FILE.jsonl, or --self_prompts N to let the base write N prompts",
        )


def _servers(ray: str) -> Servers | None:
    from edgellm.tools.remote.ray_map import require_ray
    from edgellm.tools.remote.servers import Servers

    if not ray:
        return None
    require_ray()
    return Servers.read(ray)


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

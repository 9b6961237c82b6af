"""`edgellm-train-draft`: trains a draft for a base, from conversations or from prompts only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import (
    NOTHING_HALF_WRITTEN,
    App,
    Overwrite,
    numbers,
    run_command,
    with_flags,
)
from edgellm.core.commands.extras import remedy
from edgellm.core.commands.output_folder import finished_line, is_finished
from edgellm.core.errors import EdgeLLMError, require_choice

if TYPE_CHECKING:
    from edgellm.tools.distributed.servers import Servers
    from edgellm.tools.train_draft.training_run import Job

app = App()
app.kept = NOTHING_HALF_WRITTEN


BaseModel = Annotated[
    str,
    typer.Option(
        "--base_model_dir",
        help="Read this base model: a Hugging Face folder, a .gguf file, or a cached hub id.",
        rich_help_panel="Model",
    ),
]
Output = Annotated[
    Path,
    typer.Option("--output_dir", help="Write the draft to this folder.", rich_help_panel="Output"),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        help='Train on this JSONL file of {"messages": [...]}; the base completes prompts. '
        "Repeatable. Default: none, but --self_prompts.",
        rich_help_panel="Training",
    ),
]
SelfPrompts = Annotated[
    int,
    typer.Option(
        "--self_prompts",
        min=0,
        help="Train on this many prompts that the base writes itself. Default: {default} prompts.",
        rich_help_panel="Training",
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work_dir",
        help="Keep the state of the run in this folder. Default: <output_dir>.training.",
        rich_help_panel="Output",
    ),
]
InitFrom = Annotated[
    Path | None,
    typer.Option(
        "--init_from",
        help="Start from the weights of this draft. Default: the base's layers.",
        rich_help_panel="Model",
    ),
]
Taps = Annotated[
    str,
    typer.Option(
        "--hidden_taps",
        help="Read the inputs of these base layers for eagle3, dflash and dspark. Default: "
        "layers 2, n/2 and n-3.",
        rich_help_panel="Model",
    ),
]
Ray = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="URL,URL",
        help="Let these servers of the base complete the prompts, as URL,URL; Ray "
        "distributes them. Default: none.",
        rich_help_panel="Server",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help="Choose the training method: eagle3, eagle (EAGLE-1, also for EAGLE-2), medusa, "
        "dflash or dspark.",
        rich_help_panel="Model",
    ),
]
DraftVocabSize = Annotated[
    int | None,
    typer.Option(
        "--draft_vocab_size",
        min=1,
        help="Set the vocabulary of the draft's head for eagle3, dflash and dspark. Default: "
        "8192 tokens.",
        rich_help_panel="Model",
    ),
]
NumHeads = Annotated[
    int | None,
    typer.Option(
        "--num_heads",
        min=1,
        max=16,
        help="Train this many Medusa heads. Default: 4 heads.",
        rich_help_panel="Model",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block_size",
        min=2,
        max=64,
        help="Set the size of a block of dflash and dspark, with the newest token. Default: "
        "8 tokens.",
        rich_help_panel="Model",
    ),
]
NumLayers = Annotated[
    int | None,
    typer.Option(
        "--num_layers",
        min=1,
        max=16,
        help="Set the number of layers of dflash and dspark. Default: 2 layers.",
        rich_help_panel="Model",
    ),
]
SlidingWindow = Annotated[
    int | None,
    typer.Option(
        "--sliding_window",
        min=1,
        help="Let each token of the draft attend to this many tokens, itself included; not for "
        "medusa. Default: all tokens.",
        rich_help_panel="Model",
    ),
]
DraftHeadRank = Annotated[
    int | None,
    typer.Option(
        "--draft_head_rank",
        min=1,
        help="Train a low-rank head of this rank for the draft in --init_from, which stays "
        "unchanged (EAGLE-4); for eagle3. Default: train the draft.",
        rich_help_panel="Model",
    ),
]
FeatureNoise = Annotated[
    float | None,
    typer.Option(
        "--feature_noise",
        min=0,
        help="Set the width of uniform noise on eagle's hidden states. Default: 0.2.",
        rich_help_panel="Training",
    ),
]
Unrolls = Annotated[
    int | None,
    typer.Option(
        "--unrolls",
        min=1,
        max=16,
        help="Draft this many consecutive steps; eagle3 trains them, eagle estimates them. "
        "Default: 5 steps.",
        rich_help_panel="Training",
    ),
]
UnrollWeight = Annotated[
    float | None,
    typer.Option(
        "--unroll_weight",
        min=0,
        help="Weight the loss of step or head j by this to the power j. Default: 0.9 with "
        "eagle3, else 0.8.",
        rich_help_panel="Training",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max_tokens",
        min=16,
        help="Truncate longer conversations to this length. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max_new_tokens",
        min=1,
        help="Let the base generate at most this many tokens. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
SampledShare = Annotated[
    float,
    typer.Option(
        "--sampled_share",
        min=0,
        max=1,
        help="Complete this share of the prompts by sampling. Default: {default} of them.",
        rich_help_panel="Sampling",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        min=0.01,
        help="Sample completions at this temperature.",
        rich_help_panel="Sampling",
    ),
]
HeldOut = Annotated[
    int,
    typer.Option(
        "--held_out",
        min=1,
        help="Hold out this many conversations, which estimate the acceptance. Default: "
        "{default} conversations.",
        rich_help_panel="Limits",
    ),
]
CacheFeatures = Annotated[
    bool,
    typer.Option(
        "--cache_features/--no_cache_features",
        help="Cache the base's hidden states on disk, (taps + 1) * hidden * 2 bytes a token.",
        rich_help_panel="Training",
    ),
]
Epochs = Annotated[
    int,
    typer.Option(
        "--epochs",
        min=1,
        help="Pass this many times over the conversations. Default: {default} epochs.",
        rich_help_panel="Training",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0.01,
        help="End the training, with a small learning rate, after this time; the draft then "
        "depends on the machine's speed. Default: after all epochs.",
        rich_help_panel="Training",
    ),
]
GenerationMinutes = Annotated[
    float | None,
    typer.Option(
        "--generation_minutes",
        min=0.01,
        help="Begin no batch of completions after this time; their number then depends on the "
        "machine's speed. Default: complete all prompts.",
        rich_help_panel="Limits",
    ),
]
LearningRate = Annotated[
    float,
    typer.Option(
        "--learning_rate", min=0, help="Set the peak learning rate.", rich_help_panel="Training"
    ),
]
WarmupSteps = Annotated[
    int,
    typer.Option(
        "--warmup_steps",
        min=1,
        help="Warm the learning rate up linearly. Default: {default} steps.",
        rich_help_panel="Training",
    ),
]
BatchTokens = Annotated[
    int,
    typer.Option(
        "--batch_tokens",
        min=64,
        help="Limit a training batch to this many tokens. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
GenerationBatch = Annotated[
    int,
    typer.Option(
        "--generation_batch",
        min=1,
        help="Complete this many prompts in one batch. Default: {default} prompts.",
        rich_help_panel="Limits",
    ),
]
SaveEvery = Annotated[
    int,
    typer.Option(
        "--save_every",
        min=1,
        help="Save the state after this many steps. Default: {default} steps.",
        rich_help_panel="Output",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="Choose the device of the training: cpu, cuda or auto.",
        rich_help_panel="Training",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        help="Set the seed of order, noise and sampling.",
        rich_help_panel="Training",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFlags:
    """Flags of some methods only; None: not given, or not a flag of the method."""

    draft_vocab_size: int | None = None
    hidden_taps: str | None = None
    unrolls: int | None = None
    unroll_weight: float | None = None
    num_heads: int | None = None
    feature_noise: float | None = None
    block_size: int | None = None
    num_layers: int | None = None
    sliding_window: int | None = None
    draft_head_rank: int | None = None

    @classmethod
    def read(cls, flags: TrainFlags) -> MethodFlags:
        """Take those of all flags; no `--hidden_taps` is None."""
        given = {name: getattr(flags, name) for name in cls.__slots__}
        return cls(**{**given, "hidden_taps": flags.hidden_taps or None})

    def completed(self, method: str) -> MethodFlags:
        """Fill in the defaults of `method`; raise `EdgeLLMError` for flags of another method."""
        require_choice("--method", method, _DEFAULTS)
        default = _DEFAULTS[method]
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


# hidden_taps "": `default_taps`; sliding_window 0: full attention; draft_head_rank 0: no such head
_DEFAULTS = {
    "eagle3": MethodFlags(
        draft_vocab_size=8192,
        hidden_taps="",
        unrolls=5,
        unroll_weight=0.9,
        sliding_window=0,
        draft_head_rank=0,
    ),
    "eagle": MethodFlags(
        unrolls=5,
        feature_noise=0.2,
        sliding_window=0,
    ),
    "medusa": MethodFlags(
        unroll_weight=0.8,
        num_heads=4,
    ),
    "dflash": MethodFlags(
        draft_vocab_size=8192,
        hidden_taps="",
        unroll_weight=0.8,
        block_size=8,
        num_layers=2,
        sliding_window=0,
    ),
    "dspark": MethodFlags(
        draft_vocab_size=8192,
        hidden_taps="",
        unroll_weight=0.8,
        block_size=8,
        num_layers=2,
        sliding_window=0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """Values of the flags of the command."""

    base_model_dir: BaseModel
    output_dir: Output
    method: Method = "eagle3"
    data: Data = None
    self_prompts: SelfPrompts = 0
    ray: Ray = ""
    work_dir: Work = None
    init_from: InitFrom = None
    draft_vocab_size: DraftVocabSize = None
    num_heads: NumHeads = None
    block_size: BlockSize = None
    num_layers: NumLayers = None
    sliding_window: SlidingWindow = None
    draft_head_rank: DraftHeadRank = None
    feature_noise: FeatureNoise = None
    hidden_taps: Taps = ""
    epochs: Epochs = 6
    minutes: Minutes = None
    unrolls: Unrolls = None
    unroll_weight: UnrollWeight = None
    learning_rate: LearningRate = 1e-3
    warmup_steps: WarmupSteps = 100
    batch_tokens: BatchTokens = 4096
    max_tokens: MaxTokens = 512
    max_new_tokens: MaxNewTokens = 192
    sampled_share: SampledShare = 0.25
    temperature: Temperature = 0.8
    generation_batch: GenerationBatch = 256
    generation_minutes: GenerationMinutes = None
    held_out: HeldOut = 64
    cache_features: CacheFeatures = True
    save_every: SaveEvery = 100
    device: Device = "auto"
    seed: Seed = 0
    overwrite: Overwrite = False


with_train_flags = with_flags("flags", TrainFlags)


@app.command(
    common=("--base_model_dir", "--output_dir", "--data", "--method", "--epochs"),
    examples=(
        "edgellm-train-draft --base_model_dir model --data prompts.jsonl --output_dir draft",
        "edgellm-train-draft --base_model_dir model --self_prompts 2000 --method "
        "medusa --output_dir heads",
    ),
)
@with_train_flags
def train_draft(
    flags: TrainFlags,
) -> None:
    """Train a draft; after an interrupt, the same command resumes."""
    _require_data(flags.data, flags.self_prompts)
    own = MethodFlags.read(flags).completed(flags.method)
    _require_host()
    from edgellm.tools.train_draft.training_run import run

    job = _job(flags, own)
    if is_finished(job.output_dir, job.key(), overwrite=job.overwrite):
        typer.echo(finished_line(job.output_dir))
        return
    app.kept = f"prompts and the last saved step are kept in {job.work_dir}"
    run(job)


def _job(flags: TrainFlags, own: MethodFlags) -> Job:
    from edgellm.tools.train_draft.data.corpus import Generation
    from edgellm.tools.train_draft.train import Recipe
    from edgellm.tools.train_draft.training_run import Job

    return Job(
        base_model_dir=flags.base_model_dir,
        output_dir=flags.output_dir,
        data=tuple(flags.data or ()),
        self_prompts=flags.self_prompts,
        init_from=flags.init_from,
        work_dir=flags.work_dir
        or flags.output_dir.parent / (flags.output_dir.resolve().name + ".training"),
        draft_vocab_size=own.draft_vocab_size or 0,
        hidden_taps=numbers("--hidden_taps", own.hidden_taps or ""),
        held_out=flags.held_out,
        cache_features=flags.cache_features,
        save_every=flags.save_every,
        device=flags.device,
        recipe=Recipe(
            epochs=flags.epochs,
            unrolls=own.unrolls or 0,
            unroll_weight=own.unroll_weight or 0.0,
            learning_rate=flags.learning_rate,
            warmup_steps=flags.warmup_steps,
            batch_tokens=flags.batch_tokens,
            max_tokens=flags.max_tokens,
            max_gradient_norm=1.0,
            seed=flags.seed,
            feature_noise=own.feature_noise or 0.0,
            minutes=flags.minutes or 0.0,
        ),
        generation=Generation(
            max_new_tokens=flags.max_new_tokens,
            sampled_share=flags.sampled_share,
            temperature=flags.temperature,
            batch=flags.generation_batch,
            seed=flags.seed,
            generation_minutes=flags.generation_minutes or 0.0,
        ),
        method=flags.method,
        overwrite=flags.overwrite,
        num_heads=own.num_heads or 0,
        block_size=own.block_size or 0,
        num_layers=own.num_layers or 0,
        sliding_window=own.sliding_window or 0,
        draft_head_rank=own.draft_head_rank or 0,
        servers=_servers(flags.ray),
    )


def _require_data(data: list[Path] | None, self_prompts: int) -> None:
    if not data and not self_prompts:
        raise EdgeLLMError(
            "no conversations to train on",
            hint="give --data FILE.jsonl, or --self_prompts N to let the base write N prompts",
        )


def _servers(ray: str) -> Servers | None:
    from edgellm.tools.distributed.ray_map import require_ray
    from edgellm.tools.distributed.servers import Servers

    if not ray:
        return None
    require_ray()
    return Servers.read(ray)


def _require_host() -> None:
    import importlib.util

    for name in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise EdgeLLMError(f"training needs {name}", hint=remedy(name))


def main() -> None:
    """Entry point."""
    run_command(app)

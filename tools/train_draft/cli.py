"""`edgellm-train-draft`: a draft for a base, from conversations or from prompts alone."""

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
    str,
    typer.Option(
        "--hidden_taps", help="Of eagle3, dflash, dspark: layers whose input is read. [2,n/2,n-3]"
    ),
]
Ray = Annotated[
    str,
    typer.Option(
        "--ray", metavar="URL,URL", help="Servers of the base answer prompts; Ray spreads them."
    ),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help="eagle3; eagle (EAGLE-1, which EAGLE-2 uses, too); medusa; dflash; dspark.",
    ),
]
DraftVocabSize = Annotated[
    int | None,
    typer.Option(
        "--draft_vocab_size", min=1, help="Of eagle3, dflash, dspark: tokens of its head. [8192]"
    ),
]
NumHeads = Annotated[int | None, typer.Option("--num_heads", min=1, max=16, help="Of medusa. [4]")]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block_size",
        min=2,
        max=64,
        help="Of dflash, dspark: rows of a block, the newest token's among them. [8]",
    ),
]
NumLayers = Annotated[
    int | None, typer.Option("--num_layers", min=1, max=16, help="Of dflash, dspark. [2]")
]
FeatureNoise = Annotated[
    float | None,
    typer.Option("--feature_noise", min=0, help="Of eagle: width of uniform noise. [0.2]"),
]
Unrolls = Annotated[
    int | None,
    typer.Option(
        "--unrolls",
        min=1,
        max=16,
        help="Draft steps in a row: of eagle3 those trained, of eagle those estimated. [5]",
    ),
]
UnrollWeight = Annotated[
    float | None,
    typer.Option(
        "--unroll_weight",
        min=0,
        help="Loss weight of step j, of heads head j: this to the j. [0.9, of others 0.8]",
    ),
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


@dataclass(frozen=True, slots=True)
class MethodFlags:
    """The flags that not all methods have; None: not given, or of other methods."""

    draft_vocab_size: int | None
    hidden_taps: str | None
    unrolls: int | None
    unroll_weight: float | None
    num_heads: int | None
    feature_noise: float | None
    block_size: int | None = None
    num_layers: int | None = None

    def completed(self, method: str) -> MethodFlags:
        """With what `method` takes by default; raises `EdgeLLMError` for flags of another one."""
        default = _DEFAULTS.get(method)
        if default is None:
            *others, last = _DEFAULTS
            raise EdgeLLMError(f"--method {method}: give {', '.join(others)} or {last}")
        chosen = {}
        for name in self.__slots__:
            given, usual = getattr(self, name), getattr(default, name)
            if given is not None and usual is None:
                owners = [one for one, of in _DEFAULTS.items() if getattr(of, name) is not None]
                *some, last = owners
                named = f"{', '.join(some)} and {last}" if some else last
                raise EdgeLLMError(f"--{name} is for --method {named}, not {method}")
            chosen[name] = usual if given is None else given
        return MethodFlags(**chosen)


_DEFAULTS = {  # of no taps: default_taps
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
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 6,
    unrolls: Unrolls = None,
    unroll_weight: UnrollWeight = None,
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
) -> None:
    """Train a draft; run the same command again after an interrupt to go on."""
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
            "no conversations to learn from",
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

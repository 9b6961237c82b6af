"""Converts an EAGLE-3 draft of any public layout to the format of other engines.

Sources: vLLM 0.32 (`llama_eagle3.py`, `gpu_model_runner.py`), which was also run
(docs/how-to/hand-over.md), SGLang (`models/llama_eagle3.py`) and TensorRT-LLM
(`_torch/models/modeling_speculative.py`, `llmapi/llm_args.py`). All three use SpecForge's tensor
names and `d2t` as differences. They differ in the supported parts of a draft, and in the config
keys of the taps. From 0.24 on vLLM reads GGUF files with its plugin `vllm-gguf-plugin`; that
command was not run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.core.artifact import move_files, own_files, temporary_folder
from edgellm.core.commands.output_folder import require_own
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.resources import require_space
from edgellm.export.checkpoints.checkpoint import (
    Checkpoint,
    TensorInfo,
    TensorSource,
    read_whole,
    write_safetensors,
)
from edgellm.export.checkpoints.residual_rotation import refuse_rotated
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.layer_types import FULL, SLIDING
from edgellm.export.draft_checkpoints.config import TAP_IDS, DraftConfig
from edgellm.export.draft_checkpoints.low_rank_head import UP
from edgellm.export.draft_checkpoints.tensors import complete, read_target_ids
from edgellm.export.graph.architecture import (
    ExportOptions,
    read_architecture,
)
from edgellm.export.pipeline.draft import DraftOptions, understand_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, read_json

_EMBEDDING = "embed_tokens.weight"
_KEPT = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "head_dim", "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_theta",
         "rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias",
         "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype",
         "dtype")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Draft features that an engine supports, and its command."""

    command: str  # with {base}, {draft}, {outputs}: the tapped layers, and {tokenizer}: flags
    gguf: str = ""  # installs what reads a GGUF base; "": it takes none with a draft
    more_layers: bool = False
    any_taps: bool = False  # not just three
    norms: frozenset[str] = frozenset()  # of `Norms`
    biases: bool = False  # of q, k and v
    own_embedding: bool = False  # not just the base's
    windows: bool = False  # by `layer_types` and `sliding_window`


ENGINES = {
    "vllm": Engine(
        command="vllm serve {base}{tokenizer} --speculative-config "
        '\'{{"method": "eagle3", "model": "{draft}", "num_speculative_tokens": 3}}\'',
        gguf="pip install 'vllm>=0.24' 'vllm-gguf-plugin>=0.0.2'",
        more_layers=True,
        any_taps=True,
        norms=frozenset(["before_residual", "before_fc", "fc_norm", "output"]),
        biases=True,
        own_embedding=True,
        windows=True,  # `LlamaAttention` of `llama.py`; this was not run
    ),
    "sglang": Engine(
        command="python -m sglang.launch_server --model-path {base} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {draft}"
    ),
    "tensorrt-llm": Engine(
        command='Eagle3DecodingConfig(max_draft_len=3, speculative_model="{draft}", '
        "eagle3_layers_to_capture={{{outputs}}})",
        any_taps=True,
        norms=frozenset(["before_fc", "fc_norm", "output"]),
        biases=True,
    ),
}


def hand_over(
    draft: Checkpoint,
    base_dir: str,
    name: str,
    output: Path,
    ignored: tuple[str, ...] = (),
    facts: dict[str, Any] | None = None,
) -> str:
    """Write a draft to `output` in the format of the engine `name`.

    `facts`: see `edgellm.core.artifact.move_files`.

    Returns:
        The engine's command with the draft.

    Raises:
        EdgeLLMError: `output` is foreign, an unknown engine, or an error of `export_draft`.
        UnsupportedModelError: a draft that the engine does not support or computes differently.
    """
    engine = find_engine(name)
    require_own(output)
    has_gguf = _is_gguf(base_dir)
    if has_gguf and not engine.gguf:
        raise UnsupportedModelError(
            f"--for {name}: it takes no draft for the GGUF file {base_dir}",
            hint="give the Hugging Face folder of the base as --base_model_dir, or --for vllm",
        )
    base = open_checkpoint(base_dir, tokenizer=has_gguf)
    refuse_rotated(base, f"--for {name}")
    config = understand_draft(draft, base, DraftOptions(ignore_config_keys=ignored))
    if not isinstance(config, DraftConfig) or config.method != "eagle3":
        raise UnsupportedModelError(f"{draft.label}: only EAGLE-3 drafts are handed over")
    if draft.quant_config:
        raise UnsupportedModelError(
            f"{draft.label} is quantized", hint="give the float draft that it was made from"
        )
    _check(draft, config, name, engine)
    own = _own_embedding(draft.tensors, base.tensors)
    if own and not engine.own_embedding:
        raise UnsupportedModelError(
            f"{draft.label} has an embedding of its own; it was not checked that {name} reads it",
            hint="others: vllm",
        )
    _, _, decoder = read_architecture(base, ExportOptions(ignore_config_keys=ignored))
    targets = read_target_ids(Weights(source=draft.tensors), config, decoder)
    with temporary_folder(output) as folder:
        whole = complete(draft.tensors, base.tensors, config)
        dropped = () if own else (_EMBEDDING,)  # engines use the base's
        tensors = _HandedTensors(draft=whole, config=config, targets=targets, dropped=dropped)
        require_space(folder, sum(info.num_bytes for info in tensors.infos().values()))
        write_safetensors(folder / "model.safetensors", tensors, sorted(tensors.infos()))
        text = json.dumps(_config(draft.config, config), indent=2)
        (folder / "config.json").write_text(text + "\n", "utf-8")
        for file, content in base.tokenizer_files.items():  # of a GGUF file
            (folder / file).write_bytes(content)
        names = sorted(path.name for path in folder.iterdir())
        move_files(folder, output, names, own_files(output), facts)
    return command_line(name, base_dir, output)


def find_engine(name: str) -> Engine:
    """The engine of a name; raises `EdgeLLMError` for unknown ones."""
    engine = ENGINES.get(name)
    if engine is None:
        raise EdgeLLMError(f"--for {name}: no such engine", hint=f"give {', '.join(ENGINES)}")
    return engine


def command_line(name: str, base_dir: str, output: Path) -> str:
    """The command of an engine with a draft that `hand_over` wrote.

    A GGUF base takes the tokenizer of the draft's folder, and an installation before it.
    """
    engine = find_engine(name)
    taps = read_json(output / "config.json")[TAP_IDS]
    outputs = ", ".join(str(tap - 1) for tap in taps)
    has_gguf, base = _is_gguf(base_dir), shlex.quote(base_dir)
    tokenizer = f" --tokenizer {shlex.quote(str(output))}" if has_gguf else ""
    line = engine.command.format(base=base, draft=output, outputs=outputs, tokenizer=tokenizer)
    return f"{engine.gguf}\n{line}" if has_gguf else line


def _is_gguf(model_dir: str) -> bool:
    path = Path(model_dir).expanduser()
    return path.is_file() and path.suffix == ".gguf"


def _check(draft: Checkpoint, config: DraftConfig, name: str, engine: Engine) -> None:
    norms = config.norms
    wanted = {part for part in norms.__slots__ if getattr(norms, part)}
    layers, taps = config.decoder.num_hidden_layers, config.hidden_taps
    for is_there, what in (
        (wanted - engine.norms, f"norms ({', '.join(sorted(wanted - engine.norms))})"),
        (config.qk_norm, "norms of queries and keys"),
        (layers > 1 and not engine.more_layers, f"{layers} layers"),
        (len(taps) != 3 and not engine.any_taps, f"{len(taps)} taps"),
        (config.decoder.qkv_bias and not engine.biases, "biases of q, k and v"),
        (config.decoder.sliding_window and not engine.windows, "layers with a sliding window"),
        (0 in taps, "the embedding as a tap"),
    ):
        if is_there:
            raise UnsupportedModelError(
                f"{draft.label} has {what}, which {name} does not compute",
                hint=f"others: {', '.join(each for each in ENGINES if each != name)}",
            )


def _config(stored: Mapping[str, Any], draft: DraftConfig) -> dict[str, Any]:
    """config.json; taps are layer inputs at the top level, layer outputs below it."""
    inner = stored.get("transformer_layer_config") or stored
    norms, decoder = draft.norms, draft.decoder
    flags = {
        "norm_before_residual": norms.before_residual,
        "norm_before_fc": norms.before_fc,
        "fc_norm": norms.fc_norm,
        "norm_output": norms.output,
        "bias": draft.fc_bias,
    }
    kinds = [FULL if kind is None or kind.window is None else SLIDING for kind in decoder.kinds]
    window = decoder.sliding_window
    eagle = {TAP_IDS: [tap - 1 for tap in draft.hidden_taps], "use_aux_hidden_state": True}
    eagle |= {"norm_before_fc": True} if norms.before_fc else {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: inner[key] for key in _KEPT if key in inner},
        "num_hidden_layers": decoder.num_hidden_layers,
        **({} if window is None else {"sliding_window": window, "layer_types": kinds}),
        "attention_bias": decoder.qkv_bias,
        "vocab_size": decoder.vocab_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.base_hidden_size,
        "tie_word_embeddings": False,
        **{key: True for key, is_set in flags.items() if is_set},
        TAP_IDS: list(draft.hidden_taps),
        "eagle_config": eagle,
    }


def _own_embedding(draft: TensorSource, base: TensorSource) -> bool:
    """Whether the draft has an embedding that is not its base's."""
    mine, theirs = draft.infos().get(_EMBEDDING), base.infos().get(f"model.{_EMBEDDING}")
    if mine is None or mine != theirs:
        return mine is not None
    return read_whole(draft, _EMBEDDING) != read_whole(base, f"model.{_EMBEDDING}")


class _HandedTensors:
    """A draft's tensors by SpecForge's names, with vocabulary tables if it is smaller.

    An EAGLE-4 draft's low-rank head is left out: these engines compute the whole head.
    """

    def __init__(
        self, *, draft: TensorSource, config: DraftConfig, targets: Any, dropped: tuple[str, ...]
    ) -> None:
        self._draft = draft
        self._names: dict[str, str] = {}
        for name in draft.infos():
            is_computed = name in ("d2t", "t2d") or name.startswith(UP)
            if not is_computed and name not in dropped and not name.endswith("inv_freq"):
                self._names[name.replace("layers.0.", "midlayer.", 1)] = name
        self._tables: dict[str, np.ndarray] = {}
        if targets is not None:
            known = np.zeros(config.decoder.vocab_size, np.bool_)
            known[targets] = True
            self._tables = {"d2t": targets - np.arange(len(targets)), "t2d": known}

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        infos = {name: self._draft.infos()[stored] for name, stored in self._names.items()}
        kinds = {"d2t": "I64", "t2d": "BOOL"}
        return infos | {
            name: TensorInfo(kinds[name], table.shape) for name, table in self._tables.items()
        }

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource`."""
        if name in self._tables:
            yield memoryview(self._tables[name].tobytes())
        else:
            yield from self._draft.stream(self._names[name])

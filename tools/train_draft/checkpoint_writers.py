"""Draft checkpoints in the layouts of public runtimes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.resources import require_space
from edgellm.core.strict_json import parse
from edgellm.export.checkpoints.residual_rotation import KEY as ROTATION
from edgellm.export.draft_checkpoints.low_rank_head import ARCHITECTURE, CANDIDATES_KEY
from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.methods.eagle_network import Draft, DraftShape, Layer

TRAINING = "training.json"  # marks the folder as written by this command
HEADS = "medusa_lm_head.safetensors"
FILES = (TRAINING, "config.json", "model.safetensors", HEADS)  # one of the weights
EAGLE1_EMBEDDING = "embed_tokens.weight"
_EAGLE, _TAP_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"


def draft_shape(
    config: PretrainedConfig, draft_vocab_size: int, num_taps: int, sliding_window: int = 0
) -> DraftShape:
    """Return the sizes of a draft: one layer of the base, with a smaller head."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DraftShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        draft_vocab_size=draft_vocab_size,
        num_taps=num_taps,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        mrope_section=tuple(config.rope_parameters.get("mrope_section", ())),
        mrope_interleaved=config.model_type.startswith("qwen3_vl"),
        sliding_window=sliding_window,
    )


@torch.no_grad()
def start_from_base(draft: Draft, base: Base, vocabulary: np.ndarray) -> None:
    """Initialize a draft as an early exit of the base.

    `fc` selects the last auxiliary hidden state. The layer is the base's last one and ignores the
    embedding. Norm and head are the base's.
    """
    size = draft.shape.hidden_size
    torch.nn.init.normal_(draft.fc.weight, std=0.01)
    draft.fc.weight[:, -size:] += torch.eye(size)
    copy_layer(draft.layer, base)
    weight = base.layers[-1].get_parameter("input_layernorm.weight")
    draft.midlayer.hidden_norm.weight.copy_(weight)
    draft.norm.weight.copy_(base.decoder.get_parameter("norm.weight"))
    draft.lm_head.weight.copy_(base.head[torch.from_numpy(vocabulary).to(base.head.device)])


@torch.no_grad()
def copy_layer(layer: Layer, base: Base) -> None:
    """Copy the base's last layer; in wider projections, to the last columns."""
    last = base.layers[-1]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, theirs = (one.get_parameter(f"self_attn.{name}.weight") for one in (layer, last))
        nn.init.normal_(weight[:, : -theirs.shape[1]], std=0.01)
        weight[:, -theirs.shape[1] :] = theirs
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "post_attention_layernorm"):  # fmt: skip
        layer.get_parameter(f"{name}.weight").copy_(last.get_parameter(f"{name}.weight"))


def write_draft(
    draft: Draft,
    folder: Path,
    vocabulary: np.ndarray,
    taps: Sequence[int],
    base: PretrainedConfig,
    training: dict[str, Any],
) -> None:
    """Write an EAGLE-3 draft into the existing `folder`."""
    config, tables = _eagle3_config(draft, vocabulary, taps, base)
    tensors = {**draft.state_dict(), **tables}
    write_checkpoint(folder, "model.safetensors", tensors, config, training)


def write_eagle4(
    draft: Draft,
    folder: Path,
    vocabulary: np.ndarray,
    taps: Sequence[int],
    base: Base,
    training: dict[str, Any],
    factors: Mapping[str, Tensor],
    num_candidates: int,
) -> None:
    """Write an EAGLE-4 draft in NeMo Automodel's layout into the existing `folder`.

    There a draft has the whole vocabulary of its base, whose embedding is in the file. A smaller
    one has EAGLE-3's tables instead, and no embedding.

    Args:
        draft: the draft.
        folder: of the result.
        vocabulary: ids of the draft's tokens, int64 [V].
        taps: the base's layers whose inputs it reads.
        base: the base model.
        training: settings and the estimate.
        factors: of the low-rank head, by their published names.
        num_candidates: tokens that it retrieves.
    """
    config, tables = _eagle3_config(draft, vocabulary, taps, base.config)
    config |= {"architectures": [ARCHITECTURE], CANDIDATES_KEY: num_candidates}
    if len(vocabulary) == base.config.vocab_size:
        tables = {EAGLE1_EMBEDDING: base.embedding}
    own = {
        name.replace("midlayer.", "layers.0.", 1): value
        for name, value in draft.state_dict().items()
    }
    tensors = {**own, **tables, **factors}
    write_checkpoint(folder, "model.safetensors", tensors, config, training)


def _eagle3_config(
    draft: Draft, vocabulary: np.ndarray, taps: Sequence[int], base: PretrainedConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json of a draft, and the tables of its vocabulary."""
    ids = torch.from_numpy(vocabulary)
    known = torch.zeros(base.vocab_size, dtype=torch.bool)
    known[ids] = True
    tables = {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    config = {
        **draft_config(draft.shape, base, "LlamaForCausalLMEagle3"),
        "draft_vocab_size": draft.shape.draft_vocab_size,
        # The top-level ids name layers by their input, as in speculators and vLLM; the nested
        # ids by their output, as in SpecForge, hence the - 1.
        _TAP_IDS: list(taps),
        _EAGLE: {_TAP_IDS: [tap - 1 for tap in taps], "use_aux_hidden_state": True},
    }
    return config, tables


def draft_config(shape: DraftShape, base: PretrainedConfig, architecture: str) -> dict[str, Any]:
    """Return the config fields that all drafts share."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        **shape.rope_config,
        **shape.window_config(1),
        "max_position_embeddings": base.max_position_embeddings,
        "vocab_size": base.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **({ROTATION: rotation} if (rotation := getattr(base, ROTATION, None)) else {}),
    }


def write_checkpoint(
    folder: Path,
    weights: str,
    tensors: Mapping[str, Tensor],
    config: dict[str, Any],
    training: dict[str, Any],
) -> None:
    """Write config.json, the file `weights` (floats as bfloat16) and training.json."""
    stored = {
        name: (value.detach().bfloat16() if value.is_floating_point() else value).cpu().contiguous()
        for name, value in tensors.items()
    }
    require_space(folder, sum(value.nbytes for value in stored.values()))
    save_file(stored, folder / weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # safetensors creates files that only their owner may read.
    shutil.copymode(folder / "config.json", folder / weights)
    (folder / TRAINING).write_text(json.dumps(training, indent=2) + "\n")


def read_weights(module: nn.Module, path: Path, ignored: tuple[str, ...] = ()) -> None:
    """Load a module's weights that `write_checkpoint` wrote, without the `ignored` tensors.

    Raises:
        BrokenArtifactError: the file is missing or has other sizes.
    """
    try:
        tensors = {name: value.float() for name, value in load_file(path).items()}
        for name in ignored:
            del tensors[name]
        module.load_state_dict(tensors)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise BrokenArtifactError(
            f"{path} holds no draft of these sizes: {str(error).splitlines()[0]}",
            hint="give a draft of this command for this base, with the same --method",
        ) from None


def read_window(folder: Path) -> int:
    """Return the window of a draft's layers by its config, 0: full attention.

    Raises:
        BrokenArtifactError: the folder has no such config.
    """
    try:
        return int(parse((folder / "config.json").read_text("utf-8")).get("sliding_window") or 0)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{folder} holds no draft: {str(error).splitlines()[0]}",
            hint="give a draft of this command for this base as --init_from",
        ) from None


def read_draft(draft: Draft, folder: Path, taps: Sequence[int], vocab_size: int) -> np.ndarray:
    """Load an EAGLE-3 draft of the same sizes; return its vocabulary, int64 [Vd].

    Raises:
        BrokenArtifactError: the folder is not such a draft, or has other sizes.
        EdgeLLMError: it uses other hidden taps of the base.
    """
    try:
        config = parse((folder / "config.json").read_text("utf-8"))
        theirs = [tap + 1 for tap in config[_EAGLE][_TAP_IDS]]
        tensors = load_file(folder / "model.safetensors")
        vocabulary = (tensors.pop("d2t") + torch.arange(draft.shape.draft_vocab_size)).numpy()
        tensors.pop("t2d", None)
        draft.load_state_dict({name: value.float() for name, value in tensors.items()})
        if vocabulary.max() >= vocab_size or vocabulary.min() < 0:
            raise ValueError(f"d2t exceeds the base's {vocab_size} tokens")  # noqa: TRY301
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        detail = (str(error) or repr(error)).splitlines()[0]
        raise BrokenArtifactError(
            f"{folder} holds no draft of these sizes: {detail}",
            hint="give a draft of this command for this base, and its --draft_vocab_size",
        ) from None
    if theirs != list(taps):
        raise EdgeLLMError(
            f"{folder} uses the hidden taps {theirs}, not {list(taps)}",
            hint=f"give --hidden_taps {','.join(map(str, theirs))}",
        )
    return vocabulary

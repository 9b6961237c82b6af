"""A draft on disk, in the layout that the public EAGLE3 runtimes read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgellm.contract import BrokenArtifactError, EdgeLLMError
from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.network import Draft, DraftShape

TRAINING = "training.json"  # tells that the others are this command's
FILES = (TRAINING, "config.json", "model.safetensors")
_EAGLE, _TAP_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"


def draft_shape(config: PretrainedConfig, draft_vocab_size: int, num_taps: int) -> DraftShape:
    """The sizes of one layer of the base, with a smaller head."""
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
    )


@torch.no_grad()
def start_from_base(draft: Draft, base: Base, vocabulary: np.ndarray) -> None:
    """Start as an early exit of the base instead of from noise.

    The fused feature is the highest tap, the layer is the base's last one with nothing read from
    the embedding, norm and head are the base's.
    """
    size = draft.shape.hidden_size
    torch.nn.init.normal_(draft.fc.weight, std=0.01)
    draft.fc.weight[:, -size:] += torch.eye(size)
    last = base.layers[-1]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = draft.midlayer.get_parameter(f"self_attn.{name}.weight")
        nn.init.normal_(weight[:, :size], std=0.01)
        weight[:, size:] = last.get_parameter(f"self_attn.{name}.weight")
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "post_attention_layernorm"):  # fmt: skip
        weight = last.get_parameter(f"{name}.weight")
        draft.midlayer.get_parameter(f"{name}.weight").copy_(weight)
    draft.midlayer.hidden_norm.weight.copy_(last.get_parameter("input_layernorm.weight"))
    draft.norm.weight.copy_(base.decoder.get_parameter("norm.weight"))
    draft.lm_head.weight.copy_(base.head[torch.from_numpy(vocabulary).to(base.head.device)])


def write_draft(
    draft: Draft,
    folder: Path,
    vocabulary: np.ndarray,
    taps: Sequence[int],
    base: PretrainedConfig,
    training: dict[str, Any],
) -> None:
    """Write config.json and model.safetensors (bfloat16) into the existing `folder`."""
    shape = draft.shape
    ids = torch.from_numpy(vocabulary)
    known = torch.zeros(base.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors: dict[str, Tensor] = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
    }
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
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
        "max_position_embeddings": base.max_position_embeddings,
        "vocab_size": base.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # In this key an id names the layer whose output is read, hence the - 1.
        _EAGLE: {_TAP_IDS: [tap - 1 for tap in taps], "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # safetensors makes files that nobody but their owner may read.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    (folder / TRAINING).write_text(json.dumps(training, indent=2) + "\n")


def read_draft(draft: Draft, folder: Path, taps: Sequence[int], vocab_size: int) -> np.ndarray:
    """Load a draft of this layout and of the same sizes; its vocabulary, int64 [Vd].

    Raises:
        BrokenArtifactError: it is none, or of other sizes.
        EdgeLLMError: it reads other taps of the base.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        theirs = [tap + 1 for tap in config[_EAGLE][_TAP_IDS]]
        tensors = load_file(folder / "model.safetensors")
        vocabulary = (tensors.pop("d2t") + torch.arange(draft.shape.draft_vocab_size)).numpy()
        tensors.pop("t2d", None)
        draft.load_state_dict({name: value.float() for name, value in tensors.items()})
        if vocabulary.max() >= vocab_size or vocabulary.min() < 0:
            raise ValueError(f"d2t leaves the base's {vocab_size} tokens")  # noqa: TRY301
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        detail = (str(error) or repr(error)).splitlines()[0]
        raise BrokenArtifactError(
            f"{folder} holds no draft of these sizes: {detail}",
            hint="give a draft that this command made for this base, and its --draft_vocab_size",
        ) from None
    if theirs != list(taps):
        raise EdgeLLMError(
            f"{folder} reads the taps {theirs}, not {list(taps)}",
            hint=f"give --hidden_taps {','.join(map(str, theirs))}",
        )
    return vocabulary

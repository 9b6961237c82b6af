"""The base model in torch, for generation and hidden states."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.vlm import is_vlm
from edgellm.export.graph.architecture import end_ids
from edgellm.export.pipeline.causal_lm import register_causal_lms
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools.train_draft.data.float_weights import float_weights, has_own_head, require_known
from edgellm.tools.train_draft.data.images import Picture, Pictures, is_encoded


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and the pictures of its image tokens."""

    ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Token ids of B conversations, padded to S tokens on either side."""

    ids: Tensor  # int64 [B, S]
    attends: Tensor  # bool [B, S]: False for padding
    pictures: tuple[tuple[Picture, ...], ...]  # of each row, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A loaded language model, or a vision-language model with its image processing."""

    model: PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    stop_ids: frozenset[int]  # tokens that end an output
    pictures: Pictures | None = None

    @property
    def config(self) -> PretrainedConfig:
        """Config of the language model."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> nn.Module:
        """The language model without its head."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers; raises `EdgeLLMError` if they are not one list."""
        layers = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise EdgeLLMError(f"{type(self.model).__name__} has no list of decoder layers to tap")
        return layers

    @property
    def head(self) -> Tensor:
        """The weight of the output head [V, H]."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head.weight.detach()

    @property
    def embedding(self) -> Tensor:
        """The embedding table [V, H]."""
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        return embedding.weight.detach()

    @property
    def has_position_axes(self) -> bool:
        """Whether a token has three positions (M-RoPE)."""
        return "mrope_section" in self.config.rope_parameters

    def positions(self, rows: Rows) -> Tensor:
        """Return position ids, int64 [A, B, S]: A = 3 for M-RoPE, else 1; padding has 0."""
        if not self.has_position_axes:
            return (rows.attends.long().cumsum(-1) - 1).clamp(min=0)[None]
        assert self.pictures is not None
        positions = torch.zeros(3, *rows.ids.shape, dtype=torch.int64)
        for row, (ids, attends) in enumerate(zip(rows.ids, rows.attends, strict=True)):
            own = self.pictures.positions(ids[attends].numpy(), rows.pictures[row])
            positions[:, row, attends] = own
        return positions

    def inputs(self, rows: Rows, positions: Tensor) -> dict[str, Any]:
        """Return the decoder's inputs: embeddings of tokens and pictures, mask, positions."""
        device = self.model.device
        ids, positions = to_device(rows.ids, device), to_device(positions, device)
        embeds = self.model.get_input_embeddings()(ids)
        inputs = {
            "attention_mask": to_device(rows.attends, device).long(),
            "position_ids": positions if self.has_position_axes else positions[0],
        }
        shown = [picture for pictures in rows.pictures for picture in pictures]
        if shown:
            assert self.pictures is not None
            encoded = [self.pictures.encode(picture) for picture in shown]
            is_image = ids == self.pictures.token_id
            embeds = embeds.masked_scatter(
                is_image[..., None], torch.cat([embeds for embeds, _ in encoded])
            )
            levels = torch.cat([levels for _, levels in encoded], 1)
            if len(levels):
                inputs |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(levels)}
        return {"inputs_embeds": embeds, **inputs}


def load_base(base_model_dir: str, device: torch.device) -> Base:
    """Load a checkpoint, with dequantized layers, in the `compute_dtype` of a device.

    Raises:
        EdgeLLMError: `base_model_dir` is not a supported checkpoint.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    checkpoint = open_checkpoint(base_model_dir)
    require_known(checkpoint)
    takes_pictures = is_vlm(checkpoint) and is_encoded(checkpoint.config["model_type"])
    if checkpoint.quant_config and takes_pictures:
        raise UnsupportedModelError(
            f"{checkpoint.label} is a quantized vision-language model",
            hint="train with its float checkpoint",
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in checkpoint.tokenizer_files.items():
            (folder / file).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = compute_dtype(device)
    model = (_whole_model if takes_pictures else _text_model)(checkpoint, dtype)
    nn.Module.to(model, device)
    pictures = Pictures(model, Path(checkpoint.label)) if takes_pictures else None
    return Base(
        model=model.eval(), tokenizer=tokenizer, stop_ids=_stop_ids(checkpoint), pictures=pictures
    )


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float32 on CPUs without bfloat16 instructions."""
    is_slow = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if is_slow else torch.bfloat16


def _stop_ids(checkpoint: Checkpoint) -> frozenset[int]:
    name = "eos_token_id"
    if not (found := end_ids(checkpoint)):
        raise UnsupportedModelError(
            f"{checkpoint.label} has no {name}, so that no output would end",
            hint=f'add it to the base\'s generation_config.json: {{"{name}": ...}}',
        )
    return frozenset(found)


def _whole_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Load a vision-language model; transformers maps the tensor names of its versions."""
    try:
        return AutoModelForImageTextToText.from_pretrained(
            checkpoint.label, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {checkpoint.label}: {str(error).splitlines()[0]}"
        ) from None


def _text_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    register_causal_lms()
    config = AutoConfig.for_model(**checkpoint.config)
    config.tie_word_embeddings &= not has_own_head(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device="cpu")
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    tensors = float_weights(checkpoint, shapes, dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    absent = [name for name in missing if name not in tied]
    if absent or unexpected:
        raise UnsupportedModelError(
            "tensors that transformers misses or does not expect: "
            f"{', '.join([*absent, *unexpected][:4])}"
        )
    # RoPE frequencies are not parameters: `to_empty` left them unset.
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)
    return model


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; a copy to a GPU does not wait for the GPU's earlier work."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def padded(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Pad token ids to int64 [B, S]; also return bool [B, S], False for padding."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    attends = torch.zeros(len(rows), longest, dtype=torch.bool)
    for at, row in enumerate(rows):
        own = slice(longest - len(row), None) if left else slice(len(row))
        ids[at, own] = torch.tensor(row)
        attends[at, own] = True
    return ids, attends

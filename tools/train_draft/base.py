"""The base in torch: what it is asked for while a draft is trained."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from edgellm.contract import UnsupportedModelError
from edgellm.export.checkpoint import Checkpoint, read_whole
from edgellm.export.source import open_checkpoint

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_base(
    base_model_dir: str, device: torch.device
) -> tuple[PreTrainedModel, transformers.PreTrainedTokenizerBase, frozenset[int]]:
    """Model in bfloat16, tokenizer, and the ids that end an answer.

    Raises:
        EdgeLLMError: `base_model_dir` is no checkpoint that edgellm can read.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    checkpoint = open_checkpoint(base_model_dir)
    if checkpoint.quant_config:
        raise UnsupportedModelError(
            f"{checkpoint.label} is quantized", hint="train with the float checkpoint it came from"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in checkpoint.tokenizer_files.items():
            (folder / file).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    model = _model(checkpoint)
    nn.Module.to(model, device)
    return model.eval(), tokenizer, _stop_ids(checkpoint)


def _stop_ids(checkpoint: Checkpoint) -> frozenset[int]:
    name = "eos_token_id"
    found = checkpoint.generation_config.get(name)
    found = checkpoint.config.get(name) if found is None else found
    if found is None:
        raise UnsupportedModelError(
            f"{checkpoint.label} names no {name}, so that no answer would end",
            hint=f'add it to the base\'s generation_config.json: {{"{name}": ...}}',
        )
    return frozenset(found if isinstance(found, list) else [found])


def _model(checkpoint: Checkpoint) -> PreTrainedModel:
    config = AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.to_empty(device="cpu")
    tensors = {
        name: torch.frombuffer(read_whole(checkpoint.tensors, name), dtype=_DTYPES[info.dtype])
        .reshape(info.shape)
        .to(torch.bfloat16)
        for name, info in checkpoint.tensors.infos().items()
        if info.dtype in _DTYPES
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    absent = [name for name in missing if name not in tied]
    if absent or unexpected:
        raise UnsupportedModelError(
            f"transformers does not take these tensors: {', '.join([*absent, *unexpected][:4])}"
        )
    # Rope frequencies are no parameters: `to_empty` left them unset.
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)
    return model


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The weight of the base's output head [V, H]."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head.weight.detach()


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """The base's embedding table [V, H]."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding.weight.detach()

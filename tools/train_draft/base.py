"""The base in torch: what it is asked for while a draft is trained."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
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
    source = checkpoint.generation_config.get("eos_token_id", checkpoint.config["eos_token_id"])
    stop_ids = frozenset(source if isinstance(source, list) else [source])
    return _model(checkpoint).to(device).eval(), tokenizer, stop_ids


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
    untied = [name for name in missing if not name.startswith("lm_head")]
    if untied or unexpected:
        raise UnsupportedModelError(
            f"transformers does not take these tensors: {', '.join([*untied, *unexpected][:4])}"
        )
    _restore_buffers(model)
    return model


def _restore_buffers(model: PreTrainedModel) -> None:
    """Recompute what `to_empty` left unset: rope frequencies are no parameters."""
    rotary = model.get_decoder().rotary_emb
    rotary.__init__(config=model.config)

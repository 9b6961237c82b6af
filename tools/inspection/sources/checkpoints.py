"""Reports of Hugging Face checkpoints: config.json and headers of weight files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgellm.core.model_spec import KVCacheSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo
from edgellm.export.draft_checkpoints import kinds
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools.inspection.report import Graph, Report, flat
from edgellm.tools.inspection.sources.param_count import count_parameters
from edgellm.tools.inspection.sources.provenance import of_checkpoint
from edgellm.tools.inspection.sources.tensors import VISION, Contents, Tensor, layer_of, part_of

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "moe_num_experts")
_TAKEN_COUNTS = ("num_experts_per_tok", "moe_k", "top_k_experts")
_OF_EXPERTS = re.compile(r"\.experts\.|block_sparse_moe\.(?:in|out)put_linear\.")
LOADS_AS = "floats in two bytes, as stored by edgellm-export --dtype fp16; the rest as it is"
FLOAT_BYTES = 2
_FLOATS = ("F64", "F32", "F16", "BF16")
_FUSE = "fc.weight"  # only in EAGLE drafts
_SHOWN = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size",
    "max_position_embeddings", "sliding_window", "tie_word_embeddings",
)  # fmt: skip


def inspect_checkpoint(folder: Path) -> Report:
    """Return the report of a folder with config.json and weights.

    Raises:
        EdgeLLMError: the folder is not a checkpoint, or damaged.
    """
    checkpoint = open_checkpoint(str(folder), tokenizer=False)
    config = checkpoint.config
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else config
    infos = checkpoint.tensors.infos()
    tensors = tuple(_tensors(checkpoint, infos))
    has_vision = any(tensor.part == VISION for tensor in tensors)
    own = kinds.kind_of(infos) if len(kinds.own_names(infos)) == len(infos) else None
    is_draft = _FUSE in infos or own is not None
    kind = "vision-language model" if has_vision else "language model"
    if is_draft:
        kind = own.TITLE if own is not None else "EAGLE draft"
    facts = {"architecture": str(config.get("model_type")), "contents": kind}
    facts["parameters"] = f"{count_parameters(checkpoint):,}"
    facts |= {key: str(text[key]) for key in _SHOWN if text.get(key) is not None}
    quantization, contradiction = _quantization(checkpoint, infos)
    facts["quantization"] = quantization + contradiction
    if checkpoint.quant_config:
        facts["quantization config"] = ", ".join(
            f"{key} {value}"
            for key, value in flat(checkpoint.quant_config).items()
            if isinstance(value, (str, int, float)) and not isinstance(value, bool)
        )
    kv = _cache(text)
    return Report(
        path=str(folder),
        kind="hf_checkpoint",
        title=f"Hugging Face checkpoint: {config.get('model_type')}, {kind}, "
        f"{kv.num_layers if kv else '?'} layers, quantization {quantization}",
        facts=facts,
        description=flat({"config": config, "quantization": checkpoint.quant_config}),
        graphs=(Graph(name="weights", tensors=tensors),),
        origins=of_checkpoint(str(folder)),
        loads_as=LOADS_AS,
        kv=kv,
        capacity=_number(text, "max_position_embeddings"),
        is_decoder=kv is not None and not is_draft,
    )


def _quantization(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo]) -> tuple[str, str]:
    """Return the quantization, and a note if config.json contradicts the tensors."""
    configured = checkpoint.quantization
    if configured != "none" and all(info.dtype in _FLOATS for info in infos.values()):
        return "none", f" (config.json says {configured}, but all weights are floats)"
    return configured, ""


def _tensors(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo]) -> Iterator[Tensor]:
    parts = {name: part_of(name) for name in infos}
    has_head, share = "head" in parts.values(), _expert_share(checkpoint.config)
    for name, info in infos.items():
        part = parts[name]
        is_float = info.dtype in _FLOATS
        yield Tensor(
            name=name,
            dtype=info.dtype,
            shape=info.shape,
            num_bytes=info.num_bytes,
            loaded_bytes=math.prod(info.shape) * FLOAT_BYTES if is_float else info.num_bytes,
            part=part,
            layer=layer_of(name),
            is_read_whole=part != VISION and (part != "embedding" or not has_head),
            contents=_contents(checkpoint, name),
            token_share=share if _OF_EXPERTS.search(name) else 1.0,
        )


def _expert_share(config: Mapping[str, Any]) -> float:
    """Return the share of experts that a token uses."""
    taken = next((count for key in _TAKEN_COUNTS if (count := _number(config, key))), 0)
    counts = (_number(config, key) for key in _EXPERT_COUNTS)
    count = next((count for count in counts if count), 0)
    return min(1.0, taken / count) if taken and count else 1.0


def _contents(checkpoint: Checkpoint, name: str) -> Contents:
    return lambda: checkpoint.tensors.stream(name)


def _cache(config: Mapping[str, Any]) -> KVCacheSpec | None:
    """Return the KV cache in float16; None if the config lacks its sizes."""
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    head_dim = _number(config, "head_dim")
    if heads and not head_dim:
        head_dim = _number(config, "hidden_size") // heads
    if not (layers and kv_heads and head_dim):
        return None
    return KVCacheSpec(num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, dtype="float16")


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0

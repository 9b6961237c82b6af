"""Writing a bundle: graph, weights, tokenizer, manifest; all or nothing."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgellm.artifact import check_output, publish, temporary_folder
from edgellm.contract import (
    BrokenArtifactError,
    BundleManifest,
    DecoderSpec,
    KVCacheSpec,
    UnsupportedModelError,
)
from edgellm.export import models
from edgellm.export.checkpoint import Checkpoint
from edgellm.export.config import ConfigReader
from edgellm.export.decoder import build_decoder
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.op import OPSET, Op
from edgellm.export.weights import Weights, write_weights

GRAPH_FILE, WEIGHTS_FILE = "model.onnx", "model.weights"
_JSON_FILES = "config.json", "generation_config.json"
_DTYPES = {"fp16": ir.DataType.FLOAT16, "fp32": ir.DataType.FLOAT}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the user chose."""

    dtype: str = "fp16"
    num_layers: int | None = None
    ignore_config_keys: tuple[str, ...] = ()


Progress = Callable[[int, int], None]  # bytes written, bytes in all


def export_llm(
    checkpoint: Checkpoint, output: Path, options: ExportOptions, progress: Progress | None = None
) -> BundleManifest:
    """Export a decoder to `output`, which afterwards holds a whole bundle or what it held before.

    Raises:
        UnsupportedModelError: an architecture, config key or quantization that is not understood.
        BrokenArtifactError: missing, superfluous or damaged tensors.
        EdgeLLMError: `output` cannot be written.
    """
    check_output(
        output, "llm_bundle", [GRAPH_FILE, WEIGHTS_FILE, *_JSON_FILES, *checkpoint.tokenizer_files]
    )
    architecture, config = read_architecture(checkpoint, options)
    weights = Weights(checkpoint.tensors)
    dtype = _DTYPES[options.dtype]
    model, op = build_decoder(architecture, config, weights, dtype)
    _refuse_leftovers(weights, config)
    eos_token_ids = _eos_token_ids(checkpoint, config.vocab_size)
    total = sum(stored.num_bytes for _, stored in op.parameters.values())
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        if progress is not None:
            progress(written, total)

    with temporary_folder(output) as folder:
        record = write_weights(folder / WEIGHTS_FILE, op.parameters.values(), advance)
        ir.save(model, folder / GRAPH_FILE)
        for name, content in checkpoint.tokenizer_files.items():
            (folder / name).write_bytes(content)
        contents = checkpoint.config, checkpoint.generation_config
        for name, content in zip(_JSON_FILES, contents, strict=True):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        manifest = BundleManifest(
            decoder=_decoder_spec(checkpoint, config, op),
            dtype=dtype.numpy().name,
            quantization=str(checkpoint.quant_config.get("quant_algo") or "none"),
            opset=OPSET,
            eos_token_ids=eos_token_ids,
            options=dataclasses.asdict(options),
            provenance={
                "checkpoint": checkpoint.label,
                "edgellm": version("edgellm"),
                "onnx_ir": version("onnx-ir"),
                "python": platform.python_version(),
            },
            files={WEIGHTS_FILE: record},
        )
        return publish(folder, output, manifest)


def read_architecture(checkpoint: Checkpoint, options: ExportOptions) -> tuple[Any, DecoderConfig]:
    """The architecture's module and its facts; every config key is understood or refused."""
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModelError(f"{checkpoint.label}: config.json has no model_type")
    architecture = models.find(model_type)
    reader = ConfigReader(checkpoint.config)
    config = architecture.Config.from_hf(reader)
    reader.finish(options.ignore_config_keys)
    if options.num_layers is not None:
        if not 1 <= options.num_layers <= config.num_hidden_layers:
            raise UnsupportedModelError(
                f"--num_layers {options.num_layers}: the model has {config.num_hidden_layers}"
            )
        config = dataclasses.replace(config, num_hidden_layers=options.num_layers)
    return architecture, config


def _refuse_leftovers(weights: Weights, config: DecoderConfig) -> None:
    """A tensor that the graph does not use means that the model is not the one we computed."""
    layers = tuple(f"model.layers.{index}." for index in range(config.num_hidden_layers))
    left = [
        name
        for name in weights.unused()
        if not name.endswith("rotary_emb.inv_freq")
        and not (name.startswith("model.layers.") and not name.startswith(layers))
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
    ]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise BrokenArtifactError(
            f"the checkpoint has tensors that the architecture does not use: {shown}",
            hint="model_type in config.json does not describe these weights",
        )


def _decoder_spec(checkpoint: Checkpoint, config: DecoderConfig, op: Op) -> DecoderSpec:
    infos = checkpoint.tensors.infos()
    parameters = sum(
        stored.num_bytes * 8 // stored.dtype.bitwidth
        for _, stored in op.parameters.values()
        if stored.name in infos and not stored.name.endswith("_scale")
    )
    return DecoderSpec(
        model_type=checkpoint.config["model_type"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_positions=config.max_position_embeddings,
        num_parameters=parameters,
        kv=KVCacheSpec(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            op.dtype.numpy().name,
        ),
        sliding_window=config.sliding_window,
    )


def _eos_token_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """All ids that end an answer: those of the generation config and of the model's config."""
    found: set[Any] = set()
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    for token_id in found:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise UnsupportedModelError(f"eos_token_id {token_id!r} is no token of the model")
    return tuple(sorted(found))

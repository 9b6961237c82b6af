"""Atomic export of an encoder's bundle, of images or audio: graph, weights, configs, manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core.artifact import check_output, publish, temporary_folder
from edgellm.core.graph_roles import ENCODER
from edgellm.core.manifest import Bundle, GraphSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed, with_parts
from edgellm.export.checkpoints.encoder_hash import encoder_hash
from edgellm.export.checkpoints.quantization_config import judge
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.graph.bundle_files import (
    DTYPES,
    Progress,
    count_parameters,
    file_names,
    refuse_leftovers,
    versions,
    write_graphs,
)
from edgellm.export.graph.encoder_weights import own_leftovers
from edgellm.export.onnx.builder import OPSET, Op

_GRAPH, _CONFIG = "model", "config.json"


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Options of an encoder's export."""

    dtype: str = "fp16"
    ignore_config_keys: tuple[str, ...] = ()
    quantization: str = "none"  # "int8" or "fp8" rounds the weights of linear layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """What the encoders of images and those of audio do differently."""

    name: str  # "visual" or "audio"
    bundle: str  # kind
    # The encoder's module and config; raises `EdgeLLMError`
    read: Callable[[Checkpoint, EncoderOptions], tuple[ModuleType, Any]]
    build: Callable[[ModuleType, Any, Weights, ir.DataType], tuple[ir.Model, Op]]
    has_processor: bool  # the bundle has the checkpoint's processor files
    check: Callable[[Path], object]  # a folder with these files; raises `EdgeLLMError`


def export_encoder(
    modality: Modality,
    checkpoint: Checkpoint,
    output: Path,
    options: EncoderOptions,
    progress: Progress | None = None,
    facts: dict[str, Any] | None = None,
) -> Bundle:
    """Export an encoder to `output` atomically: after an error `output` is unchanged.

    `facts`: see `edgellm.core.artifact.publish`.

    Raises:
        UnsupportedModelError: the model has no such encoder, or an unknown one or config key.
        BrokenArtifactError: missing, unexpected or damaged tensors of the encoder.
        EdgeLLMError: `output` cannot be written.
    """
    files = checkpoint.processor_files if modality.has_processor else {}
    check_output(output, modality.bundle, [*file_names((_GRAPH,)), _CONFIG, *files], facts)
    encoder, config = modality.read(checkpoint, options)
    parts: Mapping[str, str] = getattr(encoder.Model, "renamed", {})  # by those of files
    names = {with_parts(name, parts): name for name in checkpoint.tensors.infos()}
    tensors = Renamed(checkpoint.tensors, names)
    weights = Weights(
        source=tensors,
        quantization=checkpoint.quant_config,
        rounding=options.quantization,
    )
    dtype = DTYPES[options.dtype]
    model, op = modality.build(encoder, config, weights, dtype)
    refuse_leftovers(own_leftovers(weights, encoder), f"checkpoint's {modality.name} encoder")
    with temporary_folder(output) as folder:
        records = write_graphs(folder, {_GRAPH: (model, op)}, progress)
        (folder / _CONFIG).write_text(json.dumps(checkpoint.config, indent=2) + "\n", "utf-8")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        modality.check(folder)
        manifest = Bundle(
            kind=modality.bundle,
            graphs={ENCODER: GraphSpec(f"{_GRAPH}.onnx")},
            spec=config.spec(checkpoint.config["model_type"], count_parameters([op], tensors)),
            dtype=dtype.numpy().name,
            quantization=_quantization(checkpoint, options, weights.layouts),
            opset=OPSET,
            options=dataclasses.asdict(options),
            provenance={
                "checkpoint": checkpoint.label,
                **encoder_hash(checkpoint),
                **versions(),
            },
            files=records,
        )
        return publish(folder, output, manifest, facts=facts)


def _quantization(checkpoint: Checkpoint, options: EncoderOptions, layouts: set[str]) -> str:
    """Quantization of the graph's linear layers; most quantized checkpoints have float encoders."""
    if options.quantization != "none":
        return options.quantization
    return judge(checkpoint, layouts, options.ignore_config_keys)[0]

"""Atomic export of a visual encoder's bundle: graph, weights, configs, manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm.core.artifact import check_output, publish, temporary_folder
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.graph_roles import ENCODER
from edgellm.core.manifest import VISUAL_BUNDLE, Bundle, GraphSpec
from edgellm.export import visual
from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed, with_parts
from edgellm.export.checkpoints.encoder_hash import encoder_hash
from edgellm.export.checkpoints.quantization_config import judge
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.bundle_files import (
    DTYPES,
    Progress,
    count_parameters,
    file_names,
    refuse_leftovers,
    versions,
    write_graphs,
)
from edgellm.export.graph.visual import build_visual, own_leftovers
from edgellm.export.onnx.builder import OPSET
from edgellm.multimodal import processors

_GRAPH, _CONFIG = "model", "config.json"
_PROCESSORS = {"preprocessor_config.json", "processor_config.json"}  # of images


@dataclass(frozen=True, slots=True)
class VisualOptions:
    """Options of an encoder's export."""

    dtype: str = "fp16"
    ignore_config_keys: tuple[str, ...] = ()
    quantization: str = "none"  # "int8" or "fp8" rounds the weights of linear layers


def export_visual(
    checkpoint: Checkpoint,
    output: Path,
    options: VisualOptions,
    progress: Progress | None = None,
    facts: dict[str, Any] | None = None,
) -> Bundle:
    """Export an encoder to `output` atomically: after an error `output` is unchanged.

    `facts`: see `edgellm.core.artifact.publish`.

    Raises:
        UnsupportedModelError: not a vision-language model, or an unknown encoder or config key.
        UnsupportedModelError: settings of the processor that edgellm does not support.
        BrokenArtifactError: missing, unexpected or damaged tensors of the encoder.
        EdgeLLMError: the processor's config is missing, or `output` cannot be written.
    """
    names = [*file_names((_GRAPH,)), _CONFIG, *checkpoint.processor_files]
    check_output(output, VISUAL_BUNDLE, names, facts)
    encoder, config = read_encoder(checkpoint, options)
    if _PROCESSORS.isdisjoint(checkpoint.processor_files):
        raise EdgeLLMError(
            f"{checkpoint.label} has no preprocessor_config.json",
            hint="copy preprocessor_config.json or processor_config.json to the weights' folder",
        )
    parts: Mapping[str, str] = getattr(encoder.Model, "renamed", {})  # by those of files
    names = {with_parts(name, parts): name for name in checkpoint.tensors.infos()}
    tensors = Renamed(checkpoint.tensors, names)
    weights = Weights(
        source=tensors,
        quantization=checkpoint.quant_config,
        rounding=options.quantization,
    )
    dtype = DTYPES[options.dtype]
    model, op = build_visual(encoder, config, weights, dtype)
    refuse_leftovers(own_leftovers(weights, encoder), "checkpoint's visual encoder")
    with temporary_folder(output) as folder:
        records = write_graphs(folder, {_GRAPH: (model, op)}, progress)
        (folder / _CONFIG).write_text(json.dumps(checkpoint.config, indent=2) + "\n", "utf-8")
        for name, content in checkpoint.processor_files.items():
            (folder / name).write_bytes(content)
        processors.load(folder)  # `visual_build` and the device read the same files
        parameters = count_parameters([op], tensors)
        manifest = Bundle(
            kind=VISUAL_BUNDLE,
            graphs={ENCODER: GraphSpec(f"{_GRAPH}.onnx")},
            spec=config.spec(checkpoint.config["model_type"], parameters),
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


def read_encoder(checkpoint: Checkpoint, options: VisualOptions) -> tuple[ModuleType, Any]:
    """The encoder's module and its facts; unknown keys of `vision_config` are rejected.

    Raises:
        UnsupportedModelError: not a vision-language model, or an unsupported one.
    """
    model = ConfigReader(checkpoint.config)
    model_type = model.read("model_type", str)
    vision_config = model.optional("vision_config", dict)
    if vision_config is None:
        raise UnsupportedModelError(
            f"{checkpoint.label} is a text-only model ({model_type}): it has no visual encoder",
            hint="edgellm-export llm exports it; the encoder of a .gguf model is a file that "
            "--mmproj names",
        )
    encoder = visual.find(model_type)
    vision = ConfigReader(vision_config)
    config = encoder.Config.from_hf(vision, model)
    vision.finish(options.ignore_config_keys)
    return encoder, config


def _quantization(checkpoint: Checkpoint, options: VisualOptions, layouts: set[str]) -> str:
    """Quantization of the graph's linear layers; most quantized checkpoints have float encoders."""
    if options.quantization != "none":
        return options.quantization
    return judge(checkpoint, layouts, options.ignore_config_keys)[0]

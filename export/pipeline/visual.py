"""Export of a visual encoder's bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm.core.errors import EdgeLLMError, UnsupportedModelError
from edgellm.core.manifest import VISUAL_BUNDLE, Bundle
from edgellm.export import visual
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.bundle_files import Progress
from edgellm.export.graph.encoder import build_visual
from edgellm.export.pipeline.encoder import EncoderOptions, Modality, export_encoder
from edgellm.multimodal import processors

_PROCESSORS = {"preprocessor_config.json", "processor_config.json"}  # of images


@dataclass(frozen=True, slots=True)
class VisualOptions(EncoderOptions):
    """Options of a visual encoder's export."""


def export_visual(
    checkpoint: Checkpoint,
    output: Path,
    options: VisualOptions,
    progress: Progress | None = None,
    facts: dict[str, Any] | None = None,
) -> Bundle:
    """Export a visual encoder; as `export_encoder`.

    Raises:
        UnsupportedModelError: settings of the processor that edgellm does not support.
        EdgeLLMError: the processor's config is missing.
    """
    return export_encoder(_VISUAL, checkpoint, output, options, progress, facts)


def read_encoder(checkpoint: Checkpoint, options: EncoderOptions) -> tuple[ModuleType, Any]:
    """The encoder's module and its facts; unknown keys of `vision_config` are rejected.

    Raises:
        UnsupportedModelError: not a vision-language model, or an unsupported one.
        EdgeLLMError: the processor's config is missing.
    """
    model = ConfigReader(checkpoint.config)
    model_type = model.read("model_type", str)
    vision_config = model.optional("vision_config", dict)
    if vision_config is None:
        kind = "a text-only" if model.optional("audio_config", dict) is None else "an audio"
        raise UnsupportedModelError(
            f"{checkpoint.label} is {kind} model ({model_type}): it has no visual encoder",
            hint="edgellm-export llm exports it; the encoder of a .gguf model is a file that "
            "--mmproj names",
        )
    encoder = visual.find(model_type)
    vision = ConfigReader(vision_config)
    config = encoder.Config.from_hf(vision, model)
    vision.finish(options.ignore_config_keys)
    if _PROCESSORS.isdisjoint(checkpoint.processor_files):
        raise EdgeLLMError(
            f"{checkpoint.label} has no preprocessor_config.json",
            hint="copy preprocessor_config.json or processor_config.json to the weights' folder",
        )
    return encoder, config


_VISUAL = Modality(
    name="visual",
    bundle=VISUAL_BUNDLE,
    read=read_encoder,
    build=build_visual,
    has_processor=True,
    check=processors.load,  # `visual_build` and the device read the same files
)

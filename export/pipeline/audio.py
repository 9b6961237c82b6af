"""Export of the bundle of a chat model's audio encoder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import AUDIO_BUNDLE, Bundle
from edgellm.export import audio
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.config.audio import extractor_settings
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.bundle_files import Progress
from edgellm.export.graph.encoder import build_audio
from edgellm.export.pipeline.encoder import EncoderOptions, Modality, export_encoder


def export_audio(
    checkpoint: Checkpoint,
    output: Path,
    options: EncoderOptions,
    progress: Progress | None = None,
    facts: dict[str, Any] | None = None,
) -> Bundle:
    """Export an audio encoder; as `export_encoder`.

    Raises:
        UnsupportedModelError: settings of the feature extractor that edgellm does not support.
    """
    return export_encoder(_AUDIO, checkpoint, output, options, progress, facts)


def _read(checkpoint: Checkpoint, options: EncoderOptions) -> tuple[ModuleType, Any]:
    """The encoder's module and its facts; unknown keys of `audio_config` are rejected.

    Raises:
        UnsupportedModelError: the model has no audio encoder, or an unsupported one.
    """
    model = ConfigReader(checkpoint.config)
    model_type = model.read("model_type", str)
    audio_config = model.optional("audio_config", dict)
    if audio_config is None:
        raise UnsupportedModelError(
            f"{checkpoint.label} has no audio encoder of a chat model ({model_type})",
            hint="edgellm-export llm exports it, also the encoder of a model that transcribes",
        )
    encoder = audio.find(model_type)
    reader = ConfigReader(audio_config)
    extractor = extractor_settings(checkpoint.processor_files)
    config = encoder.Config.from_hf(reader, model, extractor)
    reader.finish(options.ignore_config_keys)
    return encoder, config


_AUDIO = Modality(
    name="audio",
    bundle=AUDIO_BUNDLE,
    read=_read,
    build=build_audio,
    has_processor=False,  # the manifest says how features are made
    check=lambda _: None,
)

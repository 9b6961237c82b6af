"""Architecture and config of a checkpoint's language model, with unknown keys rejected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import AudioSpec
from edgellm.export import encoders, models, speech
from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed
from edgellm.export.checkpoints.vlm import text_tower
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.audio_spec import read_audio


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of a language model's export."""

    dtype: str = "fp16"
    num_layers: int | None = None
    ignore_config_keys: tuple[str, ...] = ()
    is_eagle_base: bool = False  # output hidden taps for a draft, as the next two imply
    hidden_taps: tuple[int, ...] = ()
    draft_model_dir: str | None = None  # the draft whose config has the taps
    lora_dir: str | None = None  # an adapter to merge
    pooling: str = ""  # of `POOLINGS`: an embedding model
    reranker: bool = False  # score by the logits of "yes" and "no"


def read_architecture(
    checkpoint: Checkpoint, options: ExportOptions
) -> tuple[Checkpoint, Any, DecoderConfig]:
    """The language model, its architecture's module and config; unknown keys are rejected."""
    found = text_tower(checkpoint)
    tower, images = found.checkpoint, found.images
    model_type = tower.config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModelError(f"{checkpoint.label}: config.json has no model_type")
    encoder = encoders.find(model_type)
    if encoder is not None:
        tower = replace(tower, tensors=_below_model(tower, encoder.PREFIX))
    listener = speech.find(model_type)
    architecture = encoder or listener or models.find(model_type)
    reader = ConfigReader(tower.config)
    config = replace(architecture.Config.from_hf(reader), images=images)
    reader.finish(options.ignore_config_keys)
    if options.num_layers is not None:
        if not 1 <= options.num_layers <= config.num_hidden_layers:
            raise UnsupportedModelError(
                f"--num_layers {options.num_layers}: the model has {config.num_hidden_layers}"
            )
        config = replace(config, num_hidden_layers=options.num_layers)
        if not config.attending_layers:
            raise UnsupportedModelError(
                f"--num_layers {options.num_layers}: none of these layers attends"
            )
    if listener is not None:
        _refuse_flags(options)
        config = replace(config, audio=_read_audio(checkpoint, config))
    return tower, architecture, config


def _read_audio(checkpoint: Checkpoint, config: Any) -> AudioSpec:
    return read_audio(
        checkpoint,
        num_mel_bins=config.num_mel_bins,
        num_positions=config.num_positions,
        heads=(config.num_hidden_layers, config.num_attention_heads),
    )


def _refuse_flags(options: ExportOptions) -> None:
    """Reject flags that speech models do not have; raises `UnsupportedModelError`."""
    given = {
        "--pooling": options.pooling,
        "--reranker": options.reranker,
        "--is_eagle_base": options.is_eagle_base,
        "--hidden_taps": options.hidden_taps,
        "--draft_model_dir": options.draft_model_dir,
    }
    for flag, value in given.items():
        if value:
            raise UnsupportedModelError(
                f"{flag}: not for speech models, which transcribe audio", hint="leave it out"
            )


def _below_model(tower: Checkpoint, prefix: str) -> Renamed:
    """An encoder's tensors as `model.*`, those of its head by their own names."""
    names = tower.tensors.infos()
    if any(name.startswith(prefix) for name in names):
        own = {
            f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: name
            for name in names
        }
    else:  # saved without a head
        own = {f"model.{name}": name for name in names}
    return Renamed(tower.tensors, own)


def end_ids(checkpoint: Checkpoint) -> set[Any]:
    """All ids that end an answer: of the generation config, the model's configs, the tokenizer.

    Raises:
        UnsupportedModelError: an id that is no whole number.
    """
    tower = text_tower(checkpoint).checkpoint
    found: set[Any] = {checkpoint.eos_token_id} - {None}
    for source in (checkpoint.generation_config, checkpoint.config, tower.config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [each for each in ids if type(each) is not int]:
            raise UnsupportedModelError(
                f"eos_token_id {wrong[0]!r} is not a token of the model",
                hint="correct it in generation_config.json or config.json (and its text_config)",
            )
        found.update(ids)
    return found

"""Extracts the language model of a checkpoint with encoders of images or audio as a checkpoint.

Transformers 5 nests its config in `text_config` and names its tensors `model.language_model.*`;
older checkpoints of the hub have flat configs and other prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import ImageSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed, with_parts
from edgellm.export.config.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    text_type: str = ""  # the architecture of the text tower; "": its config says it
    # Keys of the text tower that its own configs omit
    text_keys: Mapping[str, Any] = field(default_factory=dict)
    # Of configs that hold the text tower's keys as well as these.
    other_keys: tuple[str, ...] = ()
    interleaves_axes: bool = False  # of M-RoPE, even if its config does not state it
    sections: tuple[int, ...] = ()  # of M-RoPE, if its config does not state them
    takes_grids: bool = True  # M-RoPE of images; else their tokens have positions as text does
    omits_tying: bool = False  # without `tie_word_embeddings` the text model's default counts
    # Key of an image's tokens, and its default, if these may attend to each other
    bidirectional: tuple[str, int] | None = None
    states_attention: bool = False  # of the text config: whether they do
    attention: str | None = None  # of a text config that should state it, and omits the key
    # Parts of tensors' names in the text architecture by those of files
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: re.Pattern[str] | None = None  # names of tensors of another model in the checkpoint
    sees: bool = True  # False: no visual encoder, or an unsupported one
    audio_token: tuple[str, int] | None = None  # key of its tokens of audio, and its default
    # Keys and defaults of tokens around those of a clip, which its processor adds
    audio_ends: tuple[tuple[str, int], ...] = ()


_QWEN_KEYS = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
_GEMMA4_AUDIO = ("audio_token_id", 258881)
_GEMMA4_AUDIO_ENDS = ("boa_token_id", 256000), ("eoa_token_index", 258883)
# The text model of Cosmos3-Edge computes as Arcee's does. Its checkpoint also has the layers of a
# generator of images, which transformers ignores, too.
_GENERATOR = re.compile(
    r"(_moe_gen\.|\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen)\.|"
    r"(^|\.)(action_modality_embed$|action_proj_(in|out)\.|time_embedder\.|proj_(in|out)\.))"
)
_QWEN3_5_SECTIONS = 11, 11, 10
_FAMILIES = {
    "cosmos3_edge": _Family(
        text_type="arcee",
        interleaves_axes=True,
        renamed={
            "to_q": "q_proj",
            "to_k": "k_proj",
            "to_v": "v_proj",
            "to_out": "o_proj",
            "fc1": "up_proj",
            "fc2": "down_proj",
        },
        ignored=_GENERATOR,
    ),
    "gemma3": _Family(omits_tying=True, bidirectional=("mm_tokens_per_image", 256)),
    "gemma3n": _Family(omits_tying=True, sees=False),
    "gemma4": _Family(
        omits_tying=True,
        bidirectional=("vision_soft_tokens_per_image", 280),
        states_attention=True,
        audio_token=_GEMMA4_AUDIO,
        audio_ends=_GEMMA4_AUDIO_ENDS,
    ),
    "gemma4_unified": _Family(
        omits_tying=True,
        bidirectional=("vision_soft_tokens_per_image", 280),
        states_attention=True,
        attention="vision",
        audio_token=_GEMMA4_AUDIO,
        audio_ends=_GEMMA4_AUDIO_ENDS,
    ),
    "qwen2_vl": _Family(text_type="qwen2", other_keys=_QWEN_KEYS),
    "qwen2_5_vl": _Family(text_type="qwen2", other_keys=_QWEN_KEYS),
    "qwen3_vl": _Family(text_type="qwen3", interleaves_axes=True),
    "qwen3_vl_moe": _Family(
        text_type="qwen3_moe", text_keys={"norm_topk_prob": True}, interleaves_axes=True
    ),
    "qwen3_asr": _Family(sees=False, audio_token=("audio_token_id", 151676)),
    "qwen3_5": _Family(interleaves_axes=True, sections=_QWEN3_5_SECTIONS),
    "qwen3_5_moe": _Family(interleaves_axes=True, sections=_QWEN3_5_SECTIONS),
    "internvl": _Family(),
    "lfm2_vl": _Family(omits_tying=True),
    "lfm3_vl": _Family(omits_tying=True),
    "minicpmv4_6": _Family(takes_grids=False),
    "minicpmv4_7": _Family(interleaves_axes=True, sections=_QWEN3_5_SECTIONS),
    "mistral3": _Family(omits_tying=True),
    "muse_glimmer": _Family(),
    "idefics3": _Family(),
    "smolvlm": _Family(),
    "voxtral": _Family(sees=False, audio_token=("audio_token_id", 24)),
}
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
_BACKBONE = "backbone."  # of Nemotron-H
_HEAD_PREFIXES = ("lm_head.", "language_model.lm_head.")
_NOT_TEXT_PREFIXES = (
    "model.visual.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.connector.",
    "model.multi_modal_projector.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.vision_adapter.",
    "model.vision_projection.",
    "model.projector.",
)
# Keys of Idefics3's text configs for its connector and training.
_NOT_TEXT = ("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler")


def is_vlm(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a visual encoder."""
    config = checkpoint.config
    return config.get("model_type") in supported() and config.get("vision_config") is not None


def supported() -> list[str]:
    """The model types of vision-language models whose encoder is supported."""
    return sorted(name for name, family in _FAMILIES.items() if family.sees)


def takes_audio(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has an audio encoder that is supported."""
    config = checkpoint.config
    family = _FAMILIES.get(str(config.get("model_type")))
    return (
        family is not None
        and family.audio_token is not None
        and config.get("audio_config") is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTower:
    """The language model of a checkpoint."""

    checkpoint: Checkpoint
    images: ImageSpec | None = None  # of its images and audio; None: text only
    prefix: str = "model."  # of its tensors in the whole checkpoint
    head_prefix: str = "lm_head."
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of files by those of its names

    def stored_name(self, name: str) -> str:
        """Name of the language model's tensor or module in the whole checkpoint."""
        name = with_parts(name, self.renamed)
        for own, stored in (("lm_head", self.head_prefix), ("model.", self.prefix)):
            if name.startswith(own):
                found = stored.removesuffix(".") + name.removeprefix(own.removesuffix("."))
                return found.lstrip(".")
        return name


def text_tower(checkpoint: Checkpoint) -> TextTower:
    """The language model of a checkpoint, with facts of its images.

    Raises:
        UnsupportedModelError: the whole checkpoint's config lacks keys.
    """
    if checkpoint.config.get("model_type") not in _FAMILIES:
        return _plain(checkpoint)
    config, infos = checkpoint.config, checkpoint.tensors.infos()
    reader = ConfigReader(config)
    images = None
    if is_vlm(checkpoint) or takes_audio(checkpoint):
        images = _image_spec(reader, sees=is_vlm(checkpoint), hears=takes_audio(checkpoint))
    prefix = _present(infos, [(prefix, f"{prefix}layers.") for prefix in (*_TEXT_PREFIXES, "")])
    head = _present(infos, [(prefix, prefix) for prefix in _HEAD_PREFIXES])
    family = _FAMILIES[config["model_type"]]
    names = {
        plain + with_parts(name.removeprefix(stored), family.renamed): name
        for name in infos
        for plain, stored in (("lm_head.", head), ("model.", prefix))
        if name.startswith(stored) and not name.startswith(_NOT_TEXT_PREFIXES)
        if stored or not name.startswith(head)
        if not (family.ignored and family.ignored.search(name))
    }
    parts = {part for name in names.values() for part in name.split(".")}
    renamed = {plain: stored for stored, plain in family.renamed.items() if stored in parts}
    tower = replace(
        checkpoint,
        config=_text_config(config),
        tensors=Renamed(checkpoint.tensors, names),
        quant_config=_renamed_layers(checkpoint.quant_config, prefix, head, family.renamed),
    )
    if images is None or not _FAMILIES[images.model_type].takes_grids:
        tower = _on_one_axis(tower)
    return TextTower(
        checkpoint=tower, images=images, prefix=prefix, head_prefix=head, renamed=renamed
    )


def _plain(checkpoint: Checkpoint) -> TextTower:
    """A text-only checkpoint, whose tensors may have other prefixes."""
    checkpoint = _on_one_axis(checkpoint)
    infos = checkpoint.tensors.infos()
    if any(name.startswith(_BACKBONE) for name in infos):
        prefix = _BACKBONE
        names = {own_name(name): name for name in infos}
    elif "embed_tokens.weight" in infos and "model.embed_tokens.weight" not in infos:
        prefix = ""  # saved without its head, as embedding models are
        names = {f"model.{name}": name for name in infos}
    else:
        return TextTower(checkpoint=checkpoint)
    return TextTower(
        checkpoint=replace(
            checkpoint,
            tensors=Renamed(checkpoint.tensors, names),
            quant_config=_renamed_layers(checkpoint.quant_config, prefix, "lm_head.", {}),
        ),
        prefix=prefix,
    )


def _on_one_axis(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with plain RoPE: positions of text are the same on all axes of M-RoPE."""
    config = {**checkpoint.config}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), dict):
            config[key] = {name: rope[name] for name in rope if not name.startswith("mrope_")}
    return replace(checkpoint, config=config)


def own_name(name: str) -> str:
    """Name of a Nemotron-H tensor in edgellm."""
    return name.replace(_BACKBONE, "model.", 1) if name.startswith(_BACKBONE) else name


def _present(names: Iterable[str], choices: list[tuple[str, str]]) -> str:
    """The first choice whose second item is a prefix of a name; else the first choice."""
    return next(
        (choice for choice, begin in choices if any(name.startswith(begin) for name in names)),
        choices[0][0],
    )


def _renamed_layers(
    config: dict[str, Any], prefix: str, head: str, renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Config entries by layer, with edgellm's names of layers."""
    layers = config.get("quantized_layers")
    if not isinstance(layers, dict):
        return config
    own = {}
    for name, value in layers.items():
        for plain, stored in (("lm_head", head.removesuffix(".")), ("model.", prefix)):
            if name.startswith(stored):
                own[with_parts(plain + name.removeprefix(stored), renamed)] = value
                break
    return {**config, "quantized_layers": own}


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    family = _FAMILIES[config["model_type"]]
    text = config.get("text_config")
    if text is None and family.other_keys:
        text = {key: value for key, value in config.items() if key not in family.other_keys}
    if not isinstance(text, dict):
        raise UnsupportedModelError("config.json has no text_config")
    # Either config may state it; transformers 5 reads the outer one. Gemma's text config omits it.
    stated = [each.get("tie_word_embeddings") for each in (config, text)]
    tied = {"tie_word_embeddings": any(stated)}
    if family.omits_tying and stated == [None, None]:
        tied = {}
    text = {key: value for key, value in text.items() if key not in _NOT_TEXT}
    model_type = family.text_type or text.get("model_type")
    for key in ("rope_parameters", "rope_scaling"):
        if family.interleaves_axes and isinstance(text.get(key), dict):
            usual = {"mrope_section": [*family.sections]} if family.sections else {}
            text[key] = {**usual, **text[key], "mrope_interleaved": True}
    return {**text, **family.text_keys, **tied, "model_type": model_type}


def _image_spec(reader: ConfigReader, *, sees: bool, hears: bool) -> ImageSpec:
    model_type = reader.read("model_type", str)
    family, token_id, indexes = _FAMILIES[model_type], None, []
    audio_token_id, ends = None, tuple[int, ...]()
    if sees:
        token_id = reader.optional("image_token_index", int)  # its first name
        if token_id is None:
            token_id = reader.read("image_token_id", int)
        indexes = reader.read("vision_config", dict, {}).get("deepstack_visual_indexes") or []
    if hears:
        assert family.audio_token is not None
        key, usual = family.audio_token
        audio_token_id = reader.read(key, int, usual)
        ends = tuple(reader.read(key, int, usual) for key, usual in family.audio_ends)
    return ImageSpec(
        model_type=model_type,
        token_id=token_id,
        audio_token_id=audio_token_id,
        audio_ends=ends,
        num_deepstack=len(indexes),
        bidirectional_tokens=_bidirectional_tokens(reader, family) if sees else 0,
    )


def _bidirectional_tokens(reader: ConfigReader, family: _Family) -> int:
    """Maximum tokens of an image, if they attend to each other; else 0."""
    if family.bidirectional is None:
        return 0
    text = ConfigReader(reader.read("text_config", dict, {}))
    text.assume(use_bidirectional_attention=family.attention)
    if family.states_attention and text.optional("use_bidirectional_attention", str) is None:
        return 0
    return reader.positive(*family.bidirectional)

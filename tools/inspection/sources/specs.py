"""Texts about the model of a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from edgellm.core.manifest import Bundle, EncoderSpec, Engine
from edgellm.core.model_spec import (
    AudioEncoderSpec,
    AudioSpec,
    DecoderSpec,
    DraftSpec,
    ImageSpec,
    VisionSpec,
)
from edgellm.tools.inspection.report import flat

Manifest = Bundle | Engine


def described(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest without its files, flattened."""
    fields = dataclasses.asdict(manifest)
    del fields["files"]
    return flat(fields)


def decoder_title(spec: DecoderSpec) -> str:
    """Return a short title of a decoder."""
    return (
        f"{spec.model_type}, {spec.num_parameters / 1e6:.1f} M parameters, {_layers(spec)} layers"
    )


def _layers(spec: DecoderSpec) -> str:
    """Return the numbers of attention and recurrent layers; a layer may be both."""
    if spec.recurrent is None:
        layers = spec.num_layers or spec.kv.num_layers
        shared = layers - spec.kv.num_layers
        return f"{layers}" + (f", {shared} of them with shared KV," if shared else "")
    recurrent = {name.split(".")[1] for name in spec.recurrent.states}
    return f"{spec.kv.num_layers} attention and {len(recurrent)} recurrent"


def _heads(spec: DecoderSpec) -> str:
    """Return the KV heads and their sizes of all kinds of layers."""
    found = sorted({spec.kv.heads_of(layer) for layer in range(spec.kv.num_layers)})
    return ", ".join(f"{count} of {size}" for count, size in found)


def encoder_title(spec: EncoderSpec) -> str:
    """Return a short title of an encoder of images or audio."""
    return f"{spec.model_type}, {spec.num_parameters / 1e6:.1f} M parameters"


def decoder_facts(spec: DecoderSpec) -> dict[str, str]:
    """Return the sizes of a decoder."""
    images = spec.images
    return {
        "architecture": spec.model_type,
        "parameters": f"{spec.num_parameters:,}",
        "layers": _layers(spec),
        "hidden size": str(spec.hidden_size),
        "KV heads": _heads(spec),
        "vocabulary": str(spec.vocab_size),
        "positions": str(spec.max_positions),
        **({"sliding window": str(spec.sliding_window)} if spec.sliding_window else {}),
        **({"residual stream": f"rotated, {spec.rotation}"} if spec.rotation else {}),
        **({} if images is None else _encoders(images)),
        **({} if spec.audio is None else {"audio": _audio(spec.audio)}),
    }


def _encoders(spec: ImageSpec) -> dict[str, str]:
    """Return the encoders whose rows a decoder takes."""
    taken = {"images": spec.token_id, "audio in prompts": spec.audio_token_id}
    text = f"by a {spec.model_type} encoder"
    return {name: text for name, token_id in taken.items() if token_id is not None}


def _audio(spec: AudioSpec) -> str:
    """Return the window of a speech model and its languages."""
    languages = f"{len(spec.languages)} languages" if spec.languages else "English"
    return f"windows of {spec.num_frames / 100:g} s, {spec.num_mel_bins} mel bins, {languages}"


def draft_facts(spec: DraftSpec) -> dict[str, str]:
    """Return the sizes of a draft and of its base."""
    if spec.num_heads and spec.mask_token_id is None:
        own = {
            "heads": str(spec.num_heads),
            "parameters": f"{spec.decoder.num_parameters:,}",
            "vocabulary": str(spec.decoder.vocab_size),
        }
    else:
        own = {**decoder_facts(spec.decoder), "draft vocabulary": str(spec.draft_vocab_size)}
    if spec.num_candidates:
        own["low-rank head"] = f"retrieves {spec.num_candidates} tokens"
    if spec.mask_token_id is not None:
        own["tokens of a pass"] = str(spec.num_heads)
    if spec.block is not None:
        rule = "causal" if spec.block.is_causal else "bidirectional"
        own["block"] = f"{spec.block.size} tokens, {spec.block.levels} predicted, {rule}"
    return {
        "method": spec.method,
        **own,
        "for a base of": f"{spec.base_num_layers} layers of {spec.base_hidden_size}",
        "hidden taps": listed(spec.hidden_taps),
    }


def vision_facts(spec: VisionSpec) -> dict[str, str]:
    """Return the sizes of a visual encoder."""
    tiles = f"tiles of {spec.image_size} pixels, {spec.tokens_per_tile} tokens each"
    grid = f"patches of {spec.patch_size} pixels, {spec.merge_size} x {spec.merge_size} a token"
    return {
        "architecture": spec.model_type,
        "parameters": f"{spec.num_parameters:,}",
        "width of a token": str(spec.hidden_size),
        "images": tiles if spec.image_size else grid,
        "deepstack levels": str(spec.num_deepstack),
    }


def audio_facts(spec: AudioEncoderSpec) -> dict[str, str]:
    """Return the sizes of an audio encoder."""
    frames = f"{spec.chunk_frames} frames, {spec.chunk_tokens} tokens"
    return {
        "architecture": spec.model_type,
        "parameters": f"{spec.num_parameters:,}",
        "width of a token": str(spec.hidden_size),
        "features": f"{spec.num_mel_bins} mel bins" if spec.num_mel_bins else "samples",
        "chunks": f"of {frames}, windows of {spec.window_chunks}",
    }


def end_tokens(token_ids: Iterable[int]) -> str:
    """Return the ids of end tokens, or how outputs end without them."""
    shown = listed(token_ids)
    return "none: the maximum length or a stop string ends outputs" if shown == "none" else shown


def request_defaults(values: Mapping[str, Any]) -> str:
    """Return the values of options that a request does not give, or who has them."""
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    return shown or "edgellm's: the model recommends none"


def listed(numbers: Iterable[int]) -> str:
    """Return comma-separated numbers, or "none"."""
    return ", ".join(map(str, numbers)) or "none"

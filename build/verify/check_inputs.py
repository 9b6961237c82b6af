"""Random inputs for a graph of each role: a prompt, one token, a tree, an image, a clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.graph_roles import AUDIO_ENCODER, BLOCK, ROLES, Rows
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import (
    AudioEncoderSpec,
    AudioSpec,
    BlockSpec,
    DecoderSpec,
    DraftSpec,
    VisionSpec,
)
from edgellm.device_runtime.arrays import ImageRows
from edgellm.multimodal.audio import SAMPLE_RATE
from edgellm.multimodal.audio_features import prepare
from edgellm.multimodal.patch_grid import grid_inputs

Inputs = Mapping[str, NDArray[Any]]
_PROMPT = 6  # rows
_CLIP_S = 2.6
# A root, two children, a child of each: siblings and cousins must not attend to each other.
_PARENTS = (-1, 0, 0, 1, 2)


def sample_passes(role: str, bundle: Bundle, capacity: int, max_rows: int) -> list[Inputs]:
    """Inputs of passes one after the other, by contract name.

    Args:
        role: of the graph.
        bundle: that it is of.
        capacity: rows of its cache.
        max_rows: of a pass.
    """
    random = np.random.default_rng(7)
    facts = ROLES[role]
    if facts.rows is Rows.ITEM:
        spec = bundle.spec
        is_audio = isinstance(spec, AudioEncoderSpec)
        return [_clip(spec, random) if is_audio else _image(bundle.vision, random)]
    if facts.rows is Rows.AUDIO:
        return [_window(role, bundle, random)]
    if facts.has_cache:
        passes = _rows(bundle.decoder, capacity, max_rows, random)
        sizes = [each[graph_io.INPUT_IDS].shape[1] for each in passes]
    else:
        passes, sizes = [{}], [1 if facts.rows is Rows.ONE else _PROMPT]
    found: list[Inputs] = [
        {**each, **{name: _of_a_draft(name, bundle.draft, rows, random) for name in facts.inputs}}
        for each, rows in zip(passes, sizes, strict=True)
    ]
    block = bundle.draft.block if role == BLOCK else None
    return found if block is None else [_with_block(each, block) for each in found]


def _with_block(inputs: Inputs, block: BlockSpec) -> Inputs:
    """The second half of the rows as a block after the first, which is text."""
    ids = np.array(inputs[graph_io.INPUT_IDS])
    rows = ids.shape[1]
    own = np.arange(rows // 2, rows)
    ids[:, own[1:]] = block.mask_token_id
    ids[:, own[0]] += ids[:, own[0]] == block.mask_token_id  # the newest token is none
    seen = np.tri(rows, dtype=np.bool_) if block.is_causal else np.ones((rows, rows), np.bool_)
    return {
        **inputs,
        graph_io.INPUT_IDS: ids,
        graph_io.POSITION_IDS: inputs[graph_io.WRITE_INDEX] + np.arange(rows)[None],
        graph_io.LOGITS_INDEX: own,
        graph_io.TREE_MASK: seen,
    }


def _rows(
    spec: DecoderSpec, capacity: int, max_rows: int, random: np.random.Generator
) -> list[dict[str, NDArray[Any]]]:
    nodes, prompt = len(_PARENTS), min(_PROMPT, max_rows, capacity - 1)
    sizes = [prompt, 1] if spec.is_causal else [prompt]  # an encoder's text is one pass
    if spec.is_causal and max_rows >= nodes and prompt + 1 + nodes <= capacity:
        sizes.append(nodes)
    passes: list[dict[str, NDArray[Any]]] = []
    begin = 0
    for at, rows in enumerate(sizes):
        positions, more = np.arange(begin, begin + rows), {}
        if at == 2:
            depths, more[graph_io.TREE_MASK] = _tree()
            positions = begin + depths
        passes.append(
            {
                graph_io.INPUT_IDS: random.integers(0, spec.vocab_size, (1, rows)),
                graph_io.POSITION_IDS: np.tile(positions, (spec.position_axes, 1)),
                graph_io.WRITE_INDEX: np.array([begin]),
                graph_io.LOGITS_INDEX: np.arange(rows),
                **more,
            }
        )
        begin += rows
    return passes


def _tree() -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Depths and attention mask of the nodes."""
    mask = np.eye(len(_PARENTS), dtype=np.bool_)
    for node, parent in enumerate(_PARENTS[1:], 1):
        mask[node] |= mask[parent]
    return mask.sum(axis=1) - 1, mask


def _of_a_draft(name: str, spec: DraftSpec, rows: int, random: np.random.Generator) -> NDArray[Any]:
    """An input of a draft's graphs."""
    if name == graph_io.TOP_K:
        return np.array([spec.draft_vocab_size])  # all, since the order may change
    width = {
        graph_io.HIDDEN_TAPS: spec.taps_width,
        graph_io.DRAFT_HIDDEN: spec.decoder.hidden_size,
    }[name]
    return random.standard_normal((1, rows, width), np.float32)


def _image(spec: VisionSpec, random: np.random.Generator) -> Inputs:
    """An image of noise: two tiles, or a grid that has windows of several sizes."""
    if spec.image_size:
        shape = (2, 3, spec.image_size, spec.image_size)
        return {graph_io.PIXEL_VALUES: random.standard_normal(shape, np.float32)}
    side = max(spec.window_size, spec.merge_size)
    rows, columns = side + spec.merge_size, 2 * side
    pixels = random.standard_normal((rows * columns, spec.patch_values), np.float32)
    return {graph_io.PIXEL_VALUES: pixels, **grid_inputs(rows, columns, spec)}


def _clip(spec: AudioEncoderSpec, random: np.random.Generator) -> Inputs:
    """A clip of noise that ends within a chunk."""
    samples = 0.1 * random.standard_normal(int(_CLIP_S * SAMPLE_RATE))
    return prepare(samples.astype(np.float32), spec).inputs


def audio_of(bundle: Bundle) -> AudioSpec:
    """The audio of a speech model."""
    assert bundle.decoder.audio is not None
    return bundle.decoder.audio


def _window(role: str, bundle: Bundle, random: np.random.Generator) -> Inputs:
    """A window of noise, or hidden states of one."""
    spec = audio_of(bundle)
    if role == AUDIO_ENCODER:
        shape = (1, spec.num_mel_bins, spec.num_frames)
        return {graph_io.INPUT_FEATURES: random.standard_normal(shape, np.float32)}
    shape = (1, spec.num_positions, bundle.decoder.hidden_size)
    return {graph_io.ENCODER_HIDDEN: random.standard_normal(shape, np.float32)}


def _cross(spec: DecoderSpec, audio: AudioSpec) -> Inputs:
    """Random keys and values of audio, which engines may keep in half precision."""
    random = np.random.default_rng(8)
    shape = (1, audio.num_heads, audio.num_positions, spec.hidden_size // audio.num_heads)
    return {
        graph_io.cross_name(layer, part): random.standard_normal(shape)
        .astype(np.float16)
        .astype(np.float32)
        for layer in range(spec.num_layers)
        for part in ("key", "value")
    }


def held_inputs(role: str, bundle: Bundle) -> Inputs:
    """Audio, and image rows that no token of the samples uses, if the graph takes some."""
    if not ROLES[role].has_cache:
        return {}
    if bundle.decoder.audio is not None:
        return _cross(bundle.decoder, bundle.decoder.audio)
    images = bundle.decoder.images
    if images is None:
        return {}
    none = ImageRows.none(bundle.decoder.hidden_size, images.num_deepstack)
    levels = {graph_io.DEEPSTACK_EMBEDS: none.deepstack} if images.num_deepstack else {}
    return {graph_io.IMAGE_EMBEDS: none.embeds, **levels}

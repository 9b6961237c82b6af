"""Sliding windows of a draft's layers, by its config.

speculators writes `layer_types`, also for layers of Llama, which have none in transformers. vLLM
reads the same keys.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import FULL, SLIDING, AttentionKind, window_of
from edgellm.export.config.reader import ConfigReader


def with_windows(config: DecoderConfig, reader: ConfigReader) -> DecoderConfig:
    """The same layers with the windows of the config.

    Without `layer_types`, `sliding_window` holds from layer `max_window_layers` on, or for all
    layers, unless `use_sliding_window` is false. A token attends to itself and to the tokens
    before it in its window, as in vLLM and transformers.

    Args:
        config: of layers without windows; there may be fewer than the config names.
        reader: of the config.

    Raises:
        UnsupportedModelError: types of other layers, a window without layers, layers without a
            window, or windows with M-RoPE.
    """
    count, window = config.num_hidden_layers, reader.optional("sliding_window", int)
    stated = reader.optional("use_sliding_window", bool)
    is_used = stated is not False and window is not None
    first = reader.optional("max_window_layers", int) or 0
    usual = [SLIDING if is_used and layer >= first else FULL for layer in range(count)]
    types = reader.read("layer_types", list, []) or usual
    if len(types) < count or any(each not in (FULL, SLIDING) for each in types):
        raise UnsupportedModelError(
            f"config.json: layer_types = {types} of {count} layers",
            hint=f"name {FULL} or {SLIDING} for each layer",
        )
    kinds = config.layer_kinds[:count]
    if SLIDING not in types[:count]:
        if stated:
            raise UnsupportedModelError(
                "config.json: use_sliding_window = True, but no layer slides",
                hint="give sliding_window and layer_types, or set use_sliding_window to false",
            )
        return replace(config, layer_kinds=kinds)
    if window is None:
        raise UnsupportedModelError(
            f"config.json: sliding_window = {window}, but layers slide",
            hint="give sliding_window the number of tokens that a token attends to",
        )
    if config.position_axes > 1:
        raise UnsupportedModelError(
            "config.json: a sliding window with M-RoPE is not supported in drafts",
            hint="use a draft with full attention",
        )
    slid = zip(kinds, types, strict=False)
    return config.attending(tuple(_slid(kind, window_of(each, window)) for kind, each in slid))


def _slid(kind: AttentionKind | None, window: int | None) -> AttentionKind:
    assert kind is not None
    return replace(kind, window=window)

"""Config of encoders of texts."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.export.config.decoder import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """Typed facts of encoders; `rms_norm_eps` is the epsilon of their layer norms."""

    is_causal: bool = False
    first_position: int = 0  # row of the first token in a table of positions
    norm_bias: bool = True  # of layer norms

"""Rows by which a draft predicts several tokens in one pass (P-EAGLE, arXiv 2602.01469).

After the newest row of the text stand rows of a mask token, whose feature is learned as well; row
d predicts the token d + 1 further on. vLLM 0.32 and speculators read the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.config.reader import ConfigReader

FEATURE = "mask_hidden"  # of all mask rows, as wide as the base's taps
_TOKEN_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")  # of speculators, and of vLLM
_DEPTH_KEYS = ("num_depths", "para_depths")
_USUAL_DEPTH = 8
_TRAINING = ("down_sample_ratio", "down_sample_ratio_min", "max_seq_len")


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Mask token of a P-EAGLE draft, and its hidden state."""

    token_id: int
    depth: int  # tokens that a pass predicts; one row less is a mask's

    @classmethod
    def read(
        cls, reader: ConfigReader, infos: Mapping[str, TensorInfo], vocab_size: int
    ) -> MaskRows | None:
        """Read config.json; None: the draft has none.

        Raises:
            UnsupportedModelError: no mask token, several, or an invalid one.
            BrokenArtifactError: the mask's hidden state is missing.
        """
        read = {key: reader.optional(key, int) for key in _TOKEN_KEYS}
        stated = {key: value for key, value in read.items() if value is not None}
        tokens = {*stated.values()}
        is_parallel = reader.optional("parallel_drafting", bool)
        depths = [found for key in _DEPTH_KEYS if (found := reader.optional(key, int))]
        depths += _proposed(reader.optional("speculators_config", dict) or {})
        if FEATURE not in infos:
            if tokens or is_parallel:
                raise BrokenArtifactError(
                    f"config.json names a mask token, but the draft has no tensor {FEATURE}",
                    hint="the checkpoint is incomplete, or not P-EAGLE's",
                )
            return None
        reader.skip(*_TRAINING)
        if len(tokens) != 1 or not 0 <= (token_id := tokens.pop()) < vocab_size:
            shown = ", ".join(f"{key} = {value}" for key, value in stated.items())
            raise UnsupportedModelError(
                f"config.json does not say which token {FEATURE} belongs to: {shown or 'no key'}",
                hint=f"one of {', '.join(_TOKEN_KEYS)} names it",
            )
        return cls(token_id, max(depths, default=_USUAL_DEPTH))


def _proposed(config: Mapping[str, Any]) -> list[int]:
    """Numbers of tokens in speculators' proposal methods."""
    methods = config.get("proposal_methods")
    found = (
        method.get("speculative_tokens")
        for method in (methods if isinstance(methods, list) else [])
        if isinstance(method, dict)
    )
    return [tokens for tokens in found if isinstance(tokens, int) and tokens > 0]

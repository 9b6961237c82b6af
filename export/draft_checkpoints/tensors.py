"""A draft's tensors with those that it shares with its base, and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import TensorInfo, TensorSource
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.draft_checkpoints.config import DraftConfig

_EMBEDDING = "embed_tokens.weight"
_BASE_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head."


class DraftTensors:
    """The draft's own and shared tensors, under the draft's names."""

    def __init__(
        self, draft: TensorSource, borrowed: Mapping[str, tuple[TensorSource, str]]
    ) -> None:
        """`borrowed`: source and its name of each shared tensor, by the draft's name."""
        self._places = {name: (draft, name) for name in draft.infos()} | dict(borrowed)
        self._infos = {
            name: source.infos()[there] for name, (source, there) in self._places.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major little-endian data in pieces."""
        source, there = self._places[name]
        return source.stream(there)


def complete(draft: TensorSource, base: TensorSource, config: DraftConfig) -> DraftTensors:
    """Add the embedding and the head that a draft shares with its base.

    Raises:
        UnsupportedModelError: the base's tensors differ from the draft's sizes or vocabulary.
        BrokenArtifactError: the base lacks them, too.
    """
    own, there = draft.infos(), base.infos()
    borrowed: dict[str, tuple[TensorSource, str]] = {}
    if _EMBEDDING not in own:
        _expect_same_width(config, _EMBEDDING)
        borrowed[_EMBEDDING] = (base, _existing(_BASE_EMBEDDING, there))
    if any(name.startswith(_HEAD) for name in own):
        return DraftTensors(draft, borrowed)
    if config.draft_vocab_size != config.decoder.vocab_size:
        raise UnsupportedModelError(
            f"the draft has no lm_head.weight, and the base's predicts all "
            f"{config.decoder.vocab_size} tokens, not draft_vocab_size = {config.draft_vocab_size}"
        )
    if config.fuses and config.decoder.tie_word_embeddings and _EMBEDDING in own:
        return DraftTensors(draft, {_HEAD + "weight": (draft, _EMBEDDING)})
    _expect_same_width(config, "lm_head.weight")
    heads = [name for name in there if name.startswith(_HEAD)]
    borrowed |= {name: (base, name) for name in heads}
    if not heads:
        borrowed[_HEAD + "weight"] = (base, _existing(_BASE_EMBEDDING, there))
    return DraftTensors(draft, borrowed)


def read_target_ids(
    weights: Weights, config: DraftConfig, base: DecoderConfig
) -> NDArray[np.int64] | None:
    """The base's id of each id of the draft, int64 [draft vocabulary]; None if they are equal.

    `d2t` holds differences (target = id + d2t[id]); `t2d` marks the targets and must agree.

    Raises:
        BrokenArtifactError: no `d2t` for a smaller vocabulary, or tables that contradict.
    """
    size = config.draft_vocab_size
    ids = np.arange(size)
    info = weights.info("d2t")
    if info is not None:
        dtype = info.dtype if info.dtype == "I32" else "I64"
        ids = ids + weights.array("d2t", (size,), dtype)().astype(np.int64)
        if ids.min() < 0 or ids.max() >= base.vocab_size:
            raise BrokenArtifactError(
                f"d2t names token {ids.min() if ids.min() < 0 else ids.max()}, the base has "
                f"{base.vocab_size}",
                hint="d2t holds differences: target id = draft id + d2t[draft id]",
            )
        if len(np.unique(ids)) != size:
            raise BrokenArtifactError(
                "d2t maps several draft ids to one token",
                hint="d2t holds differences: target id = draft id + d2t[draft id]",
            )
    elif size != base.vocab_size:
        raise BrokenArtifactError(
            f"the draft has no d2t, but predicts only {size} of {base.vocab_size} tokens",
            hint="d2t says which tokens these are; the checkpoint is incomplete",
        )
    _check_marks(weights, ids, base.vocab_size)
    return None if np.array_equal(ids, np.arange(base.vocab_size)) else ids


def _check_marks(weights: Weights, ids: NDArray[np.int64], vocab_size: int) -> None:
    info = weights.info("t2d")
    if info is None:
        return
    dtype = info.dtype if info.dtype in ("U8", "I8", "I32", "I64") else "BOOL"
    marks = weights.array("t2d", (vocab_size,), dtype)().astype(np.bool_)
    expected = np.zeros(vocab_size, np.bool_)
    expected[ids] = True
    if wrong := np.flatnonzero(marks != expected).tolist():
        raise BrokenArtifactError(
            f"d2t and t2d contradict each other at {len(wrong)} tokens, the first is {wrong[0]}",
            hint="d2t holds differences: target id = draft id + d2t[draft id]",
        )


def _expect_same_width(config: DraftConfig, name: str) -> None:
    if config.decoder.hidden_size != config.base_hidden_size:
        raise UnsupportedModelError(
            f"the draft has no {name}, and the base's has rows of {config.base_hidden_size} "
            f"values instead of {config.decoder.hidden_size}"
        )


def _existing(name: str, infos: Iterable[str]) -> str:
    if name not in infos:
        raise BrokenArtifactError(f"the base has no tensor {name}")
    return name

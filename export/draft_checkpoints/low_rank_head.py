"""A low-rank head, which retrieves the tokens that a draft's own head scores (EAGLE-4).

NeMo Automodel publishes the layout: `efficient_lm_head_down_proj.weight` [R, D] and
`efficient_lm_head.weight` [V, R]. They start there as the truncated SVD of the head, and are
trained by KL divergence. V draft vocabulary, D hidden size, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import TensorInfo, TensorSource
from edgellm.export.checkpoints.lora_merge import floats
from edgellm.export.checkpoints.residual_rotation import F32, Computed, Recipe, row_pieces
from edgellm.export.config.reader import ConfigReader

UP, DOWN = "efficient_lm_head", "efficient_lm_head_down_proj"
ARCHITECTURE = "LlamaForCausalLMEagle4"
NUM_CANDIDATES = 128  # if config.json does not say
CANDIDATES_KEY = "num_candidates"
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankHead:
    """Sizes of a low-rank head."""

    rank: int
    num_candidates: int  # tokens that it retrieves, at most the draft vocabulary

    @classmethod
    def read(
        cls, reader: ConfigReader, infos: Mapping[str, TensorInfo], vocab_size: int
    ) -> LowRankHead | None:
        """Read config.json and tensor names; None: the draft has none.

        Raises:
            UnsupportedModelError: only a part of one, or one in another layout.
        """
        wanted = {f"{name}.weight" for name in (UP, DOWN)}
        found = sorted(name for name in infos if name.startswith(UP))
        if not found:
            return None
        if {*found} != wanted:
            raise UnsupportedModelError(
                f"the draft has {', '.join(found)}; of a low-rank head, "
                f"{' and '.join(sorted(wanted))} are read",
                hint="give the draft as NeMo Automodel exports it, in floats",
            )
        candidates = reader.positive(CANDIDATES_KEY, NUM_CANDIDATES)
        rank = infos[f"{DOWN}.weight"].shape[0]
        return cls(rank=rank, num_candidates=min(candidates, vocab_size))


def num_candidates(low_rank: LowRankHead | None) -> int:
    """See `DraftSpec.num_candidates`."""
    return 0 if low_rank is None else low_rank.num_candidates


def with_factors(tensors: TensorSource, head: str, low_rank: LowRankHead | None) -> TensorSource:
    """A draft's tensors with those of its low-rank head; missing ones are the SVD of the head.

    Args:
        tensors: of the draft, shared ones included.
        head: name of the head's weight [V, D], whose rows are looked up.
        low_rank: None: the draft has no low-rank head.

    Raises:
        UnsupportedModelError: the head is quantized, or has a smaller rank.
    """
    if low_rank is None:
        return tensors
    infos, rank = tensors.infos(), low_rank.rank
    info = infos.get(head)
    if info is None or info.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{head} is quantized, so a low-rank head cannot look up its rows",
            hint="give a draft with a float head; llm_build --quantize int8 or int4 rounds it",
        )
    if f"{UP}.weight" in infos:
        return tensors
    vocab_size, size = info.shape
    if rank > min(vocab_size, size):
        raise UnsupportedModelError(
            f"--draft_head_rank {rank}: the head [{vocab_size}, {size}] has a smaller rank",
            hint=f"give {min(vocab_size, size)} or less; a low rank saves time",
        )

    @cache
    def basis() -> F32:
        return principal_inputs(floats(tensors, head), rank)

    def up() -> Iterator[F32]:
        return row_pieces(floats(tensors, head), lambda rows: rows @ basis())

    recipes = {
        f"{UP}.weight": Recipe(TensorInfo("F32", (vocab_size, rank)), up),
        f"{DOWN}.weight": Recipe(TensorInfo("F32", (rank, size)), lambda: [basis().T]),
    }
    return Computed(tensors, recipes)


def principal_inputs(head: F32, rank: int) -> F32:
    """The first right singular vectors of a head [V, D], float32 [D, R].

    The best approximation of rank R is `head @ vectors @ vectors.T`. The vectors are eigenvectors
    of head^T head, which has D x D numbers however large the vocabulary is.

    Raises:
        BrokenArtifactError: the head has NaN or infinity.
    """
    gram = np.zeros((head.shape[1],) * 2)
    for rows in row_pieces(head, lambda rows: rows):
        wide = rows.astype(np.float64)
        gram += wide.T @ wide
    if not np.isfinite(gram).all():
        raise BrokenArtifactError(
            "the draft's head holds values that are not finite numbers",
            hint="the checkpoint is damaged; fetch it again",
        )
    _, vectors = np.linalg.eigh(gram)
    return np.ascontiguousarray(vectors[:, ::-1][:, :rank], np.float32)

"""Protocol of backends that run rounds of speculation on the device, without the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import Outputs

Scored = Literal["draft", "rates", "places"]  # see `grow_level`
RATE_POINTS = 11  # of a curve of acceptance rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Limits of draft trees; memory and passes for them are prepared at load."""

    top_k: int  # children of each expanded node
    widths: tuple[int, ...]  # expanded nodes of level 1, 2, ...; the last level has no children
    nodes: tuple[int, ...]  # sizes of verified trees, root included; ascending
    scored: Scored  # score that selects nodes
    places: NDArray[np.float64] | None = None  # scores by place in the pool; only for "places"

    @property
    def levels(self) -> int:
        """Maximum levels below the root."""
        return len(self.widths) + 1

    def pool_size(self, levels: int) -> int:
        """Candidates of a tree with `levels`, root included."""
        return 1 + self.top_k * sum((1, *self.widths)[:levels])


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters and random numbers of a request that samples."""

    rules: NDArray[np.float64]  # [4]: temperature, top_k, top_p, min_p
    uniforms: NDArray[np.float64]  # [1 + levels]: the next random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """A sequence's part of a round."""

    root: int  # the newest token
    base_start: tuple[int, int]  # length of the base's cache, and the next position id
    draft_start: tuple[int, int]  # the same of the draft
    levels: int  # from 1 to `Growth.levels`
    nodes: int  # one of `Growth.nodes`
    rates: NDArray[np.float64] | None = None  # [2, RATE_POINTS] for "rates", see `grow_level`
    accepts: Literal["greedy", "sampled", "host"] = "greedy"
    draws: Draws | None = None  # for "sampled"
    caches: tuple[KVCache | None, KVCache | None] = (
        None,
        None,
    )  # base's and draft's; None: the first
    root_row: int = 0  # row of the draft's latest pass with the root's children


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """The result of a round on the host; the tree has N nodes."""

    token_ids: NDArray[np.int64]  # [N]
    parents: NDArray[np.int64]  # [N]; -1 for the root
    log_probs: NDArray[np.float32]  # [N]; the draft's, given the parent; 0 for the root
    accepted: tuple[list[int], int] | None  # path and bonus token; None: the host accepts
    outputs: Outputs  # of the base's pass; rows from N on are padding


class Rounds(Protocol):
    """Runs rounds of a base and its draft on one device."""

    def maximum(self, nodes: int) -> int:
        """Maximum batch size of a round with trees of `nodes`."""
        ...

    def ask(self, orders: Sequence[RoundOrder]) -> None:
        """Enqueue a round of at most `maximum` sequences.

        The draft's last pass must be an asynchronous one, see `Runner.run_async`.
        """
        ...

    def finish(self) -> list[RoundOutcome]:
        """Wait for the round; outputs must be read before the base's next pass."""
        ...

"""Rounds of a tree that a device runs alone: what a session asks of a backend that can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners import Cache, Outputs, Runner

Scored = Literal["draft", "rates", "places"]  # see `grow_level`
RATE_POINTS = 11  # of a curve of acceptance rates


@dataclass(frozen=True, slots=True)
class Growth:
    """What trees may become, for which memory and passes are made at load."""

    top_k: int  # children of a node that gets some
    widths: tuple[int, ...]  # nodes of level 1, 2, ... that get children; the last level has none
    nodes: tuple[int, ...]  # sizes of trees that are verified, root included; ascending
    scored: Scored  # by what nodes are chosen
    places: NDArray[np.float64] | None = None  # scores by place in the pool; of "places" alone

    @property
    def levels(self) -> int:
        """Of the deepest tree, below the root."""
        return len(self.widths) + 1

    def pool_size(self, levels: int) -> int:
        """Nodes that a tree of so many levels is chosen from, root included."""
        return 1 + self.top_k * sum((1, *self.widths)[:levels])


@dataclass(frozen=True, slots=True)
class Draws:
    """How a request that is not greedy draws."""

    rules: NDArray[np.float64]  # [4]: temperature, top_k, top_p, min_p
    uniforms: NDArray[np.float64]  # [1 + levels]: random numbers of the next draws


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """A sequence's part of a round."""

    root: int  # the newest token
    base_start: tuple[int, int]  # rows of the base's cache, and the position of the next
    draft_start: tuple[int, int]  # of the draft's
    levels: int  # 1 to those of `Growth`
    nodes: int  # one of those of `Growth`
    rates: NDArray[np.float64] | None = None  # [2, RATE_POINTS] of "rates", see `grow_level`
    accepts: Literal["greedy", "sampled", "host"] = "greedy"
    draws: Draws | None = None  # of "sampled"
    caches: tuple[Cache | None, Cache | None] = None, None  # base's and draft's; None: the only one
    root_row: int = 0  # of the draft's latest pass, whose candidates are the root's children


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What the host gets to know of a round; the tree has N nodes."""

    token_ids: NDArray[np.int64]  # [N]
    parents: NDArray[np.int64]  # [N]; -1 for the root
    log_probs: NDArray[np.float32]  # [N]; of the draft, given the parent; 0 for the root
    accepted: tuple[list[int], int] | None  # path and the token behind it; None: the host's work
    outputs: Outputs  # of the base's pass, of which rows N and more are padding


class Rounds(Protocol):
    """A base and its draft on one device."""

    def maximum(self, nodes: int) -> int:
        """Sequences of a round of trees of so many nodes."""
        ...

    def ask(self, orders: Sequence[RoundOrder]) -> None:
        """Ask for a round of several sequences, as many as `maximum` allows.

        The draft's pass before was one that was asked for, see `Asked`.
        """
        ...

    def finish(self) -> list[RoundOutcome]:
        """Wait for it; outputs are to be read before the base's next pass."""
        ...


@runtime_checkable
class Asked(Runner, Protocol):
    """A draft's runner whose passes the host need not wait for."""

    def ask_many(
        self, parts: Sequence[tuple[Cache, Mapping[str, NDArray[Any]]]]
    ) -> list[tuple[Outputs, int | None]]:
        """A pass for several sequences, each of which wants one row; outputs are fetched when read.

        Returns:
            What `run` would give for each, and its row of the pass's candidates on the device;
            None: they were too many for one pass, and its candidates have come to the host.
        """
        ...


@runtime_checkable
class GrowsTrees(Runner, Protocol):
    """A base's runner that can run rounds on its device."""

    def open_rounds(self, draft: Runner, growth: Growth) -> Rounds | None:
        """Make what rounds need; None: these two, or this GPU, run them with the host's help."""
        ...

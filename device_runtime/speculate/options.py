"""How to speculate: what drafts, how large trees are, what is accepted."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.speculate.accept import accept_exactly, accept_typically
from edgellm.device_runtime.speculate.loop import Accept
from edgellm.device_runtime.speculate.policy import TreeLimits

NETWORKS = ("eagle",)
LOOKUPS = ("ngram", "suffix")
TREES = ("cost", "fixed")
_DEFAULTS = {"eagle": TreeLimits(), None: TreeLimits(steps=16)}  # by network


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """How to speculate; a bound that is None is the method's own."""

    network: str | None = "eagle"  # of `NETWORKS`; None: text alone drafts
    lookups: tuple[str, ...] = ()  # of `LOOKUPS`; merged into the network's trees
    top_k: int | None = None  # children of a node
    steps: int | None = None  # levels
    verify_size: int | None = None  # nodes, root included
    tree: str = "cost"  # "cost": sized by measured costs; "fixed": always the bounds' size
    typical_acceptance: float | None = None  # a threshold; None is exact

    def __post_init__(self) -> None:
        """Refuse unknown names and options by which nothing is drafted; raises `EdgeLLMError`."""
        for what, names, known in (
            ("network", () if self.network is None else (self.network,), NETWORKS),
            ("lookup", self.lookups, LOOKUPS),
            ("tree", (self.tree,), TREES),
        ):
            for name in names:
                if name not in known:
                    raise EdgeLLMError(
                        f"unknown {what} {name!r} of a draft", hint=f"give {' or '.join(known)}"
                    )
        if self.network is None and not self.lookups:
            raise EdgeLLMError("neither a network nor a lookup drafts")

    def limits(self, built_size: int) -> TreeLimits:
        """The bounds for a base that was built for trees of `built_size` nodes."""
        default = _DEFAULTS[self.network]
        return TreeLimits(
            default.top_k if self.top_k is None else self.top_k,
            default.steps if self.steps is None else self.steps,
            min(default.verify_size, built_size) if self.verify_size is None else self.verify_size,
        )

    @property
    def accept(self) -> Accept:
        """The acceptance rule."""
        if self.typical_acceptance is None:
            return accept_exactly
        return functools.partial(accept_typically, threshold=self.typical_acceptance)

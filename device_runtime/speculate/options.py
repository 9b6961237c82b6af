"""Options of speculative decoding: drafter, tree size, acceptance rule."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.device_runtime.speculate import drafter_registry
from edgellm.device_runtime.speculate.acceptance import (
    Accept,
    Typical,
    accept_exactly,
    accept_typically,
)
from edgellm.device_runtime.speculate.policy.static_tree import Choice, check_choices
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

OWN = "own"  # the draft in the engine's folder
AUTO = "auto"  # the engine's draft network and all lookups; chosen every round
TREES = ("cost", "fixed")
_DEFAULTS = TreeLimits()
_TEXT_DEFAULTS = TreeLimits(steps=16)  # without a network


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOptions:
    """Options of speculative decoding; a bound that is None has the method's default."""

    network: str | None = OWN  # or a network of `drafters`, or `AUTO`; None: lookups only
    draft_engine_dir: Path | None = None  # for "draft": an engine of llm_build, of any model
    lookups: tuple[str, ...] = ()  # of `drafters`; merged into the network's trees
    top_k: int | None = None  # maximum children of a node
    steps: int | None = None  # levels
    verify_size: int | None = None  # nodes, root included
    adapts: bool = False  # rounds skip the network when lookups alone are faster
    tree: str = "cost"  # "cost": sized by measured costs; "fixed": always the maximum size
    choices: tuple[Choice, ...] = ()  # a static tree, if not empty
    max_non_leaves: int = 10  # nodes with children per level of the static tree
    typical: Typical | None = None  # None: exact acceptance

    def __post_init__(self) -> None:
        """Reject unknown names and options that draft nothing; raises `EdgeLLMError`."""
        named = () if self.network in (None, OWN, AUTO) else (self.network,)
        for what, names, known in (
            ("network", named, drafter_registry.networks()),
            ("lookup", self.lookups, drafter_registry.lookups()),
            ("tree", (self.tree,), TREES),
        ):
            for name in names:
                if name not in known:
                    raise EdgeLLMError(
                        f"unknown {what} {name!r} of a draft", hint=f"give {' or '.join(known)}"
                    )
        goes_with_folder = self.draft_engine_dir is not None
        if self.network != AUTO and (self.network == "draft") != goes_with_folder:
            raise EdgeLLMError(
                "a draft model and the folder of its engine go together",
                hint="give --draftEngineDir for --spec draft, and only for it",
            )
        if self.network is None and not self.lookups:
            raise EdgeLLMError("neither a network nor a lookup drafts")
        if self.choices:
            if self.network is None or self.lookups:
                raise EdgeLLMError(
                    "a static tree is a network's alone: its places go by the network's ranks"
                )
            check_choices(self.choices, self.max_non_leaves)

    def limits(self, built_size: int) -> TreeLimits:
        """The limits for a base engine that was built for trees of `built_size` nodes.

        Raises:
            LimitError: a static tree exceeds the given limits.
        """
        default = _TEXT_DEFAULTS if self.network is None else _DEFAULTS
        if self.network not in (None, OWN):
            default = drafter_registry.network(self.network).DEFAULTS
        top_k = default.top_k if self.top_k is None else self.top_k
        steps = default.steps if self.steps is None else self.steps
        if self.choices:
            return self._static_limits(top_k, steps)
        size = min(default.verify_size, built_size)
        size = size if self.verify_size is None else self.verify_size
        text_steps = default.text_steps if self.steps is None else self.steps
        return TreeLimits(top_k=top_k, steps=steps, verify_size=size, text_steps=text_steps)

    def _static_limits(self, top_k: int, steps: int) -> TreeLimits:
        """The limits of a static tree."""
        widest, deepest = 1 + max(itertools.chain(*self.choices)), max(map(len, self.choices))
        parents = {path[:-1] for path in self.choices} - {()}
        taken = TreeLimits(
            top_k=widest, steps=deepest, verify_size=1 + len(self.choices), static_rows=len(parents)
        )
        for flag, wanted, maximum in (
            ("--eagleDraftTopK", taken.top_k, top_k),
            ("--eagleDraftStep", taken.steps, steps),
            ("--eagleVerifyTreeSize", taken.verify_size, self.verify_size or taken.verify_size),
        ):
            if wanted > maximum:
                raise LimitError(
                    f"the choices take {flag} {wanted}, {maximum} is the bound",
                    hint=f"give {flag} {wanted}, or fewer choices",
                )
        return taken

    @property
    def accept(self) -> Accept:
        """The acceptance rule."""
        if self.typical is None:
            return accept_exactly
        return functools.partial(accept_typically, typical=self.typical)

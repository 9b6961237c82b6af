"""What a drafter is opened with, what it gives then, and limits that all of them keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgellm.core.artifact import require_pair
from edgellm.core.errors import (
    BrokenArtifactError,
    LimitError,
)
from edgellm.core.graph_roles import HOST, PASS
from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, Engine, load_engine
from edgellm.core.model_spec import DraftSpec
from edgellm.device_runtime.kv_cache.prefix_cache import SequenceCache
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.device_speculation import Growth
from edgellm.device_runtime.speculate import drafter_registry
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.drafter import Drafter, SpecState
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What is to be opened."""

    engine: Path
    base: Engine
    session: DecoderNetwork  # of the base
    options: SpecOptions
    limits: TreeLimits
    verify: bool | None  # see `FileCheck`

    def pass_costs(self) -> Mapping[str, float]:
        """Of the base: what the build measured, or passes now if it was compiled ahead of time."""
        return self.session.costs_of(self.base)[PASS]

    def shared_costs(self) -> SharedCosts | None:
        """Of the base's passes in company, where they were measured."""
        return SharedCosts.find(PASS, self.session.costs_of(self.base))

    @property
    def host_ms(self) -> tuple[float, float]:
        """What the host does to ask a network for a tree, and for a tree that is verified.

        Zeros where no build has measured it.
        """
        measured = self.base.cost_ms.get(HOST, {})  # by rows that a drafted round verifies
        vain = measured.get("1", 0.0)
        if "2" not in measured:  # an older build measured both together
            return vain / 2, vain / 2
        return vain, max(measured["2"] - vain, 0.0)

    def image_ids(self, *, reads_rows: bool) -> ImageIds | None:
        """Of a base that takes images, for a draft that takes their rows or does not."""
        images = self.base.decoder.images
        if images is None:
            return None
        return ImageIds(self.base.decoder.vocab_size, None if reads_rows else images.token_id)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """What drafts, loaded."""

    costs: Costs
    start: Callable[[SpecState], Drafter]  # the drafter of a request; computes nothing
    caches: tuple[SequenceCache, ...] = ()  # whose rows go with the base's; they outlast an answer
    growth: Growth | None = None  # of trees that the device grows alone


class LoadsDrafter(Protocol):
    """A module of `speculate.drafters` that has a network."""

    def open(self, order: DrafterContext) -> LoadedDrafter:
        """Load it; raises as `Drafters`."""
        ...


def open_own(order: DrafterContext, name: str) -> tuple[Path, Engine]:
    """The draft engine in the folder of its base, which must be that of the drafter `name`.

    Raises:
        BrokenArtifactError: there is none, or another.
        LimitError: as `check_tree_size`.
    """
    folder, manifest = find_own(order)
    own = drafter_registry.own(manifest)
    if own != name:
        raise BrokenArtifactError(
            f"--spec {name}: the draft of {order.engine} is of {manifest.draft.method}",
            hint=f"give --spec {own}, or --eagle for whatever draft an engine has",
        )
    require_pair(manifest.draft, order.base, str(order.engine))
    check_tree_size(order)
    return folder, manifest


def find_own(order: DrafterContext) -> tuple[Path, Engine]:
    """The draft engine in the folder of its base; raises `BrokenArtifactError` if there is none."""
    engine, base, folder = order.engine, order.base, order.engine / DRAFT_FOLDER
    if not base.max_verify_tree_size or not base.hidden_taps:
        raise BrokenArtifactError(
            f"{engine} is not an EAGLE base",
            hint="export with --is_eagle_base or --draft_model_dir, and build with --eagleBase",
        )
    if not folder.is_dir():
        raise BrokenArtifactError(
            f"{engine} has no draft engine", hint="run llm_build --eagleDraft into the folder"
        )
    return folder, load_engine(folder, DRAFT_ENGINE)


def check_tree_size(order: DrafterContext) -> None:
    """Refuse trees that the base was not built for.

    Raises:
        BrokenArtifactError: it was built for none.
        LimitError: says which flag, and what the engine takes.
    """
    limits, base, engine = order.limits, order.base, order.engine
    if not base.max_verify_tree_size:
        raise BrokenArtifactError(
            f"{engine} was built for plain decoding",
            hint="build it with --maxVerifyTreeSize 16, for example",
        )
    if min(limits.top_k, limits.steps, limits.verify_size) < 1:
        raise LimitError("top-k, steps and tree size of a draft start at 1")
    if limits.verify_size > base.max_verify_tree_size:
        raise LimitError(
            f"trees of {limits.verify_size} nodes (--eagleVerifyTreeSize) exceed the engine's "
            f"{base.max_verify_tree_size}",
            hint="take less, or build with a larger --maxVerifyTreeSize",
        )
    if limits.verify_size >= base.max_kv_cache_capacity:
        raise LimitError(
            f"a KV cache of {base.max_kv_cache_capacity} tokens is too small for trees of "
            f"{limits.verify_size}",
            hint="give a smaller --eagleVerifyTreeSize, or build with --maxKVCacheCapacity",
        )


def check_candidates(limits: TreeLimits, draft: DraftSpec) -> None:
    """Refuse more candidates of a row than the draft has tokens; raises `LimitError`."""
    if limits.top_k > draft.draft_vocab_size:
        raise LimitError(
            f"--eagleDraftTopK {limits.top_k} exceeds the draft's vocabulary of "
            f"{draft.draft_vocab_size}"
        )

"""The interface for loading drafters, and limit checks that all drafters share."""

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
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.prefix_cache.pinned_prefixes import CachedNetwork
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.device_speculation import Growth
from edgellm.device_runtime.speculate import drafter_registry
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.drafter import Drafter, SpecState
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """The inputs for loading a drafter."""

    engine: Path
    base: Engine
    network: DecoderNetwork  # the base
    options: SpecOptions
    limits: TreeLimits
    verify: bool | None  # see `FileCheck`

    def pass_costs(self) -> Mapping[str, float]:
        """Pass times of the base: from the build, or measured now after a cross-compiled build."""
        return self.network.costs_of(self.base)[PASS]

    def shared_costs(self) -> SharedCosts | None:
        """Pass times of the base in batches, if the build measured them."""
        return SharedCosts.find(PASS, self.network.costs_of(self.base))

    @property
    def host_ms(self) -> tuple[float, float]:
        """Host times in ms: for proposing a tree, and for verifying one.

        Zeros if the build did not measure them.
        """
        measured = self.base.cost_ms.get(HOST, {})  # by tokens that a round verifies
        vain = measured.get("1", 0.0)
        if "2" not in measured:  # an older build measured both together
            return vain / 2, vain / 2
        return vain, max(measured["2"] - vain, 0.0)

    def image_ids(self, *, has_embeddings: bool) -> ImageIds | None:
        """Token ids of image positions; None if the base takes no images.

        Args:
            has_embeddings: whether the draft takes image embeddings.
        """
        images = self.base.decoder.images
        if images is None:
            return None
        token_id = images.audio_token_id if images.token_id is None else images.token_id
        return ImageIds(self.base.decoder.vocab_size, None if has_embeddings else token_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """A loaded drafter."""

    costs: Costs
    start: Callable[[SpecState], Drafter]  # the drafter of a request; computes nothing
    caches: tuple[CachedNetwork, ...] = ()  # of drafts that follow the base's prefix cache
    growth: Growth | None = None  # shapes of trees that the device builds


class LoadsDrafter(Protocol):
    """A module of `speculate.drafters` that has a network."""

    def open(self, order: DrafterContext) -> LoadedDrafter:
        """Load the drafter; raises as `Drafters`."""
        ...


def open_own(order: DrafterContext, name: str) -> tuple[Path, Engine]:
    """The draft engine in its base's folder, checked to be one of the drafter `name`.

    Raises:
        BrokenArtifactError: it is missing, or has another method.
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
    """Reject trees that the base engine was not built for.

    Raises:
        BrokenArtifactError: it was built for no trees.
        LimitError: names the flag and the engine's limit.
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
    """Reject a top-k above the draft's number of candidates; raises `LimitError`."""
    if limits.top_k > draft.max_candidates:
        maximum = draft.max_candidates
        what = f"{maximum} candidates" if draft.num_candidates else f"vocabulary of {maximum}"
        raise LimitError(
            f"--eagleDraftTopK {limits.top_k} exceeds the draft's {what}",
            hint=f"give {maximum} or less",
        )

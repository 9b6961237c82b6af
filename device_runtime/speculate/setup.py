"""From an engine folder and the user's flags to a drafter."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.artifact import require_pair, verify_files, verify_sizes
from edgellm.contract import (
    DRAFT_FOLDER,
    BrokenArtifactError,
    DraftEngineManifest,
    EngineManifest,
    LimitError,
    load_manifest,
)
from edgellm.device_runtime import backends
from edgellm.device_runtime.measure import draft_costs, pass_costs
from edgellm.device_runtime.session import DraftSession, Session
from edgellm.device_runtime.speculate.accept import accept_exactly, accept_typically
from edgellm.device_runtime.speculate.calibration import Calibration
from edgellm.device_runtime.speculate.committed import CommittedRows, ImageIds
from edgellm.device_runtime.speculate.eagle import EagleDrafter
from edgellm.device_runtime.speculate.loop import Accept
from edgellm.device_runtime.speculate.policy import (
    CostAwareTree,
    Costs,
    FixedTree,
    Policy,
    TreeLimits,
)


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """How to speculate."""

    limits: TreeLimits = field(default_factory=TreeLimits)
    tree: str = "cost"  # "cost": sized by measured costs; "fixed": always the limits' size
    ngram: bool = False  # merge prompt-lookup candidates into the tree
    typical_acceptance: float | None = None  # a threshold; None is exact

    @property
    def accept(self) -> Accept:
        """The acceptance rule."""
        if self.typical_acceptance is None:
            return accept_exactly
        return functools.partial(accept_typically, threshold=self.typical_acceptance)


class Drafters:
    """A loaded draft engine, and a drafter for greedy and for sampled requests.

    What was learned of acceptance rates lasts for all requests, but the two kinds differ.
    """

    def __init__(
        self,
        engine: Path,
        base: EngineManifest,
        base_session: Session,
        options: EagleOptions,
        *,
        verify: bool,
    ) -> None:
        """Load `engine`/draft; measures passes that no one has measured.

        Raises:
            BrokenArtifactError: no draft engine, a damaged one, or one for another base.
            LimitError: the flags exceed what the engines were built for.
        """
        self.options = options
        if not base.max_verify_tree_size:
            raise BrokenArtifactError(
                f"{engine} is no EAGLE base",
                hint="export with --is_eagle_base and build with --eagleBase",
            )
        folder = engine / DRAFT_FOLDER
        if not folder.is_dir():
            raise BrokenArtifactError(
                f"{engine} has no draft engine", hint="run llm_build --eagleDraft into the folder"
            )
        self.manifest = load_manifest(folder, DraftEngineManifest)
        require_pair(self.manifest.draft, base, str(engine))
        check_limits(options.limits, base, self.manifest)
        (verify_files if verify else verify_sizes)(folder, self.manifest.files)
        backend = backends.find(self.manifest.backend)
        session = backend.open_draft_session(folder, self.manifest)
        self._costs = _costs(base, self.manifest, base_session, session)
        image_ids = None
        if base.decoder.images is not None:
            reads_rows = self.manifest.draft.decoder.images is not None
            placeholder = None if reads_rows else base.decoder.images.token_id
            image_ids = ImageIds(base.decoder.vocab_size, placeholder)
        self.rows = CommittedRows(session, options.limits.steps + 1, image_ids)
        self._drafters: dict[bool, EagleDrafter] = {}

    def for_requests(self, *, greedy: bool) -> EagleDrafter:
        """The drafter for one kind of requests."""
        if greedy not in self._drafters:
            self._drafters[greedy] = EagleDrafter(
                self.rows,
                self._policy(),
                self.options.limits,
                self._costs,
                max_tree_rows=self.manifest.max_draft_tree_size,
                lookup_calibration=Calibration() if self.options.ngram else None,
            )
        return self._drafters[greedy]

    def _policy(self) -> Policy:
        if self.options.tree == "fixed":
            return FixedTree(self.options.limits)
        return CostAwareTree(self.options.limits, self._costs, Calibration())


def _costs(
    base: EngineManifest, draft: DraftEngineManifest, session: Session, drafting: DraftSession
) -> Costs:
    """What was measured when the engines were built, or is now: ahead of time no pass runs."""
    verify, most = base.pass_cost_ms, draft.max_draft_tree_size
    step, extend = draft.step_cost_ms, draft.extend_cost_ms
    if not verify:
        verify = pass_costs(session, base.decoder, base.max_verify_tree_size)
    if not step:
        step = draft_costs(drafting, draft.draft, fused=False, most_rows=most)
        extend = draft_costs(drafting, draft.draft, fused=True, most_rows=most)
    return Costs.of(verify, step, extend)


def check_limits(limits: TreeLimits, base: EngineManifest, draft: DraftEngineManifest) -> None:
    """Refuse flags beyond the built sizes.

    Raises:
        LimitError: says which flag, and what the engine takes.
    """
    if min(limits.top_k, limits.steps, limits.verify_size) < 1:
        raise LimitError("top-k, steps and tree size of a draft start at 1")
    if limits.verify_size > base.max_verify_tree_size:
        raise LimitError(
            f"--eagleVerifyTreeSize {limits.verify_size} exceeds the engine's "
            f"{base.max_verify_tree_size}",
            hint="give less, or build with a larger --maxVerifyTreeSize",
        )
    drafted = limits.top_k * limits.steps
    if drafted > draft.max_draft_tree_size:
        raise LimitError(
            f"--eagleDraftTopK {limits.top_k} x --eagleDraftStep {limits.steps} = {drafted} rows "
            f"exceed the draft engine's {draft.max_draft_tree_size}",
            hint="give less, or build with a larger --maxDraftTreeSize",
        )
    if limits.top_k > draft.draft.draft_vocab_size:
        raise LimitError(
            f"--eagleDraftTopK {limits.top_k} exceeds the draft's vocabulary of "
            f"{draft.draft.draft_vocab_size}"
        )
    if limits.verify_size >= base.max_kv_cache_capacity:
        raise LimitError(
            f"a KV cache of {base.max_kv_cache_capacity} tokens is too small for trees of "
            f"{limits.verify_size}",
            hint="give a smaller --eagleVerifyTreeSize, or build with --maxKVCacheCapacity",
        )

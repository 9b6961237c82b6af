"""From an engine folder and the user's options to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from edgellm.device_runtime.context import RowCache
from edgellm.device_runtime.speculate.calibration import Calibration
from edgellm.device_runtime.speculate.committed import CommittedRows, ImageIds
from edgellm.device_runtime.speculate.drafter import Drafter, TreeDrafter
from edgellm.device_runtime.speculate.eagle import EagleDrafter
from edgellm.device_runtime.speculate.lookup import Lookup, LookupSource
from edgellm.device_runtime.speculate.ngram import NgramLookup
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy import (
    CostAwareTree,
    Costs,
    FixedTree,
    Policy,
    TreeLimits,
)
from edgellm.device_runtime.speculate.static_tree import StaticTree
from edgellm.device_runtime.speculate.suffix import SuffixLookup

_Make = Callable[[Policy, Sequence[LookupSource]], Drafter]
_LOOKUPS: dict[str, Callable[[], Lookup]] = {"ngram": NgramLookup, "suffix": SuffixLookup}


@dataclass(frozen=True, slots=True)
class _Opened:
    """What drafts, loaded."""

    costs: Costs
    make: _Make
    caches: tuple[RowCache, ...] = ()  # of drafts; they outlast an answer


class Drafters:
    """What drafts for an engine, with a drafter for greedy and one for sampled requests.

    What was learned of acceptance rates lasts for all requests, but the two kinds differ.
    """

    def __init__(
        self, engine: Path, base: EngineManifest, options: SpecOptions, *, verify: bool
    ) -> None:
        """Load what the options ask for; of EAGLE that is `engine`/draft.

        Raises:
            BrokenArtifactError: no draft engine, a damaged one, or one for another base.
            LimitError: the options exceed what the engines were built for.
        """
        self.options, self._limits = options, options.limits(base.max_verify_tree_size)
        open_network = _open_eagle if options.network == "eagle" else _open_none
        opened = open_network(engine, base, self._limits, verify=verify)
        self._costs, self._make, self.caches = opened.costs, opened.make, opened.caches
        self._lookups = [_LOOKUPS[name]() for name in options.lookups]
        self._drafters: dict[bool, Drafter] = {}

    def for_requests(self, *, greedy: bool) -> Drafter:
        """The drafter for one kind of requests."""
        if greedy not in self._drafters:
            sources = [LookupSource(lookup) for lookup in self._lookups]
            self._drafters[greedy] = self._make(self._policy(), sources)
        return self._drafters[greedy]

    def _policy(self) -> Policy:
        if self.options.choices:
            return StaticTree(self.options.choices)
        if self.options.tree == "fixed":
            return FixedTree(self._limits)
        return CostAwareTree(self._limits, self._costs, Calibration())


def _open_none(engine: Path, base: EngineManifest, limits: TreeLimits, *, verify: bool) -> _Opened:
    """Text alone drafts."""
    del verify  # there is nothing to load
    if not base.max_verify_tree_size:
        raise BrokenArtifactError(
            f"{engine} was built for plain decoding",
            hint="build it with --maxVerifyTreeSize 16, say",
        )
    check_tree_size(limits, base)
    image_ids = None
    if base.decoder.images is not None:
        image_ids = ImageIds(base.decoder.vocab_size, None)

    def make(policy: Policy, lookups: Sequence[LookupSource]) -> Drafter:
        return TreeDrafter(policy, limits, lookups=lookups, image_ids=image_ids)

    return _Opened(Costs.of(base.pass_cost_ms), make)


def _open_eagle(engine: Path, base: EngineManifest, limits: TreeLimits, *, verify: bool) -> _Opened:
    """The draft engine in the folder of its base."""
    if not base.max_verify_tree_size or not base.hidden_taps:
        raise BrokenArtifactError(
            f"{engine} is no EAGLE base",
            hint="export with --is_eagle_base and build with --eagleBase",
        )
    folder = engine / DRAFT_FOLDER
    if not folder.is_dir():
        raise BrokenArtifactError(
            f"{engine} has no draft engine", hint="run llm_build --eagleDraft into the folder"
        )
    manifest = load_manifest(folder, DraftEngineManifest)
    require_pair(manifest.draft, base, str(engine))
    check_tree_size(limits, base)
    check_draft_rows(limits, manifest)
    (verify_files if verify else verify_sizes)(folder, manifest.files)
    session = backends.find(manifest.backend).open_draft_session(folder, manifest)
    costs = Costs.of(base.pass_cost_ms, manifest.step_cost_ms, manifest.extend_cost_ms)
    image_ids = None
    if base.decoder.images is not None:
        reads_rows = manifest.draft.decoder.images is not None
        placeholder = None if reads_rows else base.decoder.images.token_id
        image_ids = ImageIds(base.decoder.vocab_size, placeholder)

    rows = CommittedRows(session, limits.steps + 1, image_ids)

    def make(policy: Policy, lookups: Sequence[LookupSource]) -> Drafter:
        return EagleDrafter(
            rows, policy, limits, costs,
            max_tree_rows=manifest.max_draft_tree_size, lookups=lookups,
        )  # fmt: skip

    return _Opened(costs, make, (rows,))


def check_tree_size(limits: TreeLimits, base: EngineManifest) -> None:
    """Refuse trees that the base was not built for.

    Raises:
        LimitError: says which flag, and what the engine takes.
    """
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


def check_draft_rows(limits: TreeLimits, draft: DraftEngineManifest) -> None:
    """Refuse trees that the draft engine was not built for; raises as `check_tree_size`."""
    if limits.draft_rows > draft.max_draft_tree_size:
        product = f"--eagleDraftTopK {limits.top_k} x --eagleDraftStep {limits.steps} = "
        raise LimitError(
            f"{product if limits.static_rows is None else ''}{limits.draft_rows} drafted rows "
            f"exceed the draft engine's {draft.max_draft_tree_size}",
            hint="take less, or build with a larger --maxDraftTreeSize",
        )
    if limits.top_k > draft.draft.draft_vocab_size:
        raise LimitError(
            f"--eagleDraftTopK {limits.top_k} exceeds the draft's vocabulary of "
            f"{draft.draft.draft_vocab_size}"
        )

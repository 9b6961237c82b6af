"""From an engine folder and the user's options to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.artifact import require_pair
from edgellm.contract import (
    DRAFT_FOLDER,
    BrokenArtifactError,
    DraftEngineManifest,
    DraftSpec,
    EngineManifest,
    LimitError,
    load_manifest,
)
from edgellm.device_runtime import runners
from edgellm.device_runtime.engine.prefix_cache import RecordedSession, RowCache
from edgellm.device_runtime.pass_costs import draft_costs, heads_costs, pass_costs
from edgellm.device_runtime.session import DraftSession, ImageRows, Session
from edgellm.device_runtime.speculate.calibration import Calibration
from edgellm.device_runtime.speculate.draft_cache import CommittedRows, ImageIds
from edgellm.device_runtime.speculate.drafter import Drafter, TreeDrafter
from edgellm.device_runtime.speculate.drafters.draft import ModelDrafter
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.drafters.medusa import MedusaDrafter
from edgellm.device_runtime.speculate.drafters.ngram import NgramLookup
from edgellm.device_runtime.speculate.drafters.suffix import SuffixLookup
from edgellm.device_runtime.speculate.gate import NetworkGate
from edgellm.device_runtime.speculate.lookup import Lookup, LookupSource
from edgellm.device_runtime.speculate.options import AUTO, LOOKUPS, OWN, SpecOptions
from edgellm.device_runtime.speculate.policy import (
    CostAwareTree,
    Costs,
    FixedTree,
    Policy,
    TreeLimits,
)
from edgellm.device_runtime.speculate.static_tree import StaticTree
from edgellm.device_runtime.tokenizer import ChatTokenizer
from edgellm.integrity import FileCheck

_TOKENIZER = "tokenizer.json"
_Make = Callable[[Policy, Sequence[LookupSource], NetworkGate | None], Drafter]
_LOOKUPS: dict[str, Callable[[], Lookup]] = {"ngram": NgramLookup, "suffix": SuffixLookup}


@dataclass(frozen=True, slots=True)
class _Opened:
    """What drafts, loaded."""

    costs: Costs
    make: _Make
    caches: tuple[RowCache, ...] = ()  # of drafts; they outlast an answer


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be opened."""

    engine: Path
    base: EngineManifest
    session: Session  # of the base
    options: SpecOptions
    limits: TreeLimits
    verify: bool | None  # see `FileCheck`

    def pass_costs(self) -> Mapping[str, float]:
        """Of the base: what the build measured, or passes now if it was compiled ahead of time."""
        most = self.base.max_verify_tree_size
        return self.base.pass_cost_ms or pass_costs(self.session, self.base.decoder, most)

    def image_ids(self, *, reads_rows: bool) -> ImageIds | None:
        """Of a base that takes images, for a draft that takes their rows or does not."""
        images = self.base.decoder.images
        if images is None:
            return None
        return ImageIds(self.base.decoder.vocab_size, None if reads_rows else images.token_id)


def settled(options: SpecOptions, engine: Path, base: EngineManifest) -> SpecOptions | None:
    """The options with what "auto" means for an engine; None: it decodes plainly."""
    if options.network != AUTO:
        return options
    if not base.max_verify_tree_size:
        return None
    network = None
    if options.draft_engine_dir is not None:
        network = "draft"
    elif base.hidden_taps and (engine / DRAFT_FOLDER).is_dir():
        network = OWN
    lookups = options.lookups or LOOKUPS
    return replace(options, network=network, lookups=lookups, adapts=network is not None)


class Drafters:
    """What drafts for an engine, with a drafter for greedy and one for sampled requests.

    What was learned of acceptance rates lasts for all requests, but the two kinds differ.
    """

    def __init__(
        self,
        engine: Path,
        base: EngineManifest,
        session: Session,
        options: SpecOptions,
        *,
        verify: bool | None,
    ) -> None:
        """Load what the options ask for; of EAGLE and Medusa that is `engine`/draft.

        Passes that no one has measured are measured with `session`, the base.

        Raises:
            BrokenArtifactError: no draft engine, a damaged one, or one for another base.
            LimitError: the options exceed what the engines were built for.
        """
        self.options, self._limits = options, options.limits(base.max_verify_tree_size)
        opened = _OPENERS[options.network](
            _Order(engine, base, session, options, self._limits, verify)
        )
        self._costs, self._make, self.caches = opened.costs, opened.make, opened.caches
        self._lookups = [_LOOKUPS[name]() for name in options.lookups]
        self._drafters: dict[bool, Drafter] = {}

    def for_requests(self, *, greedy: bool) -> Drafter:
        """The drafter for one kind of requests."""
        if greedy not in self._drafters:
            sources = [LookupSource(lookup) for lookup in self._lookups]
            gate = NetworkGate(self._costs) if self.options.adapts else None
            self._drafters[greedy] = self._make(self._policy(), sources, gate)
        return self._drafters[greedy]

    def _policy(self) -> Policy:
        if self.options.choices:
            return StaticTree(self.options.choices)
        if self.options.tree == "fixed":
            return FixedTree(self._limits)
        return CostAwareTree(self._limits, self._costs, Calibration())


def _open_none(order: _Order) -> _Opened:
    """Text alone drafts."""
    check_tree_size(order.limits, order.base, order.engine)
    image_ids = order.image_ids(reads_rows=True)

    def make(policy: Policy, lookups: Sequence[LookupSource], gate: NetworkGate | None) -> Drafter:
        del gate  # there is no network
        return TreeDrafter(policy, order.limits, lookups=lookups, image_ids=image_ids)

    return _Opened(Costs.of(order.pass_costs()), make)


def _open_own(order: _Order) -> _Opened:
    """The draft engine in the folder of its base: an EAGLE network, or Medusa heads."""
    engine, base, folder = order.engine, order.base, order.engine / DRAFT_FOLDER
    if not base.max_verify_tree_size or not base.hidden_taps:
        raise BrokenArtifactError(
            f"{engine} is no EAGLE base",
            hint="export with --is_eagle_base or --draft_model_dir, and build with --eagleBase",
        )
    if not folder.is_dir():
        raise BrokenArtifactError(
            f"{engine} has no draft engine", hint="run llm_build --eagleDraft into the folder"
        )
    manifest = load_manifest(folder, DraftEngineManifest)
    name, open_draft = "eagle", _open_eagle
    if manifest.draft.num_heads:
        name, open_draft = "medusa", _open_medusa
    if order.options.network not in (OWN, name):
        raise BrokenArtifactError(
            f"--spec {order.options.network}: the draft of {engine} is of {manifest.draft.method}",
            hint=f"give --spec {name}, or --eagle for whatever draft an engine has",
        )
    require_pair(manifest.draft, base, str(engine))
    check_tree_size(order.limits, base, engine)
    return open_draft(order, folder, manifest)


def _open_eagle(order: _Order, folder: Path, manifest: DraftEngineManifest) -> _Opened:
    check_draft_rows(order.limits, manifest)
    with FileCheck(folder, manifest.files, order.verify):
        session = runners.find(manifest.backend).open_draft_session(folder, manifest)
    costs = _eagle_costs(order, session, manifest)
    image_ids = order.image_ids(reads_rows=manifest.draft.decoder.images is not None)
    round_rows = order.limits.round_rows
    most_rows = max(manifest.graphs[-1].max_rows, round_rows)
    rows = CommittedRows(session, round_rows, image_ids, most_rows=most_rows)

    def make(policy: Policy, lookups: Sequence[LookupSource], gate: NetworkGate | None) -> Drafter:
        return EagleDrafter(
            rows, policy, order.limits, costs,
            max_tree_rows=manifest.max_draft_tree_size, lookups=lookups, gate=gate,
        )  # fmt: skip

    return _Opened(costs, make, (rows,))


def _eagle_costs(order: _Order, session: DraftSession, draft: DraftEngineManifest) -> Costs:
    step, extend = draft.step_cost_ms, draft.extend_cost_ms
    if not step:
        most = draft.max_draft_tree_size
        step = draft_costs(session, draft.draft, fused=False, most_rows=most)
        extend = draft_costs(session, draft.draft, fused=True, most_rows=most)
    return Costs.of(order.pass_costs(), step, extend)


def _open_medusa(order: _Order, folder: Path, manifest: DraftEngineManifest) -> _Opened:
    limits = heads_limits(order.options, order.limits, manifest.draft)
    with FileCheck(folder, manifest.files, order.verify):
        session = runners.find(manifest.backend).open_heads(folder, manifest)
    heads_ms = manifest.extend_cost_ms or heads_costs(session, manifest.draft, limits.top_k)
    costs = Costs.of(order.pass_costs(), None, heads_ms)
    image_ids = order.image_ids(reads_rows=True)

    def make(policy: Policy, lookups: Sequence[LookupSource], gate: NetworkGate | None) -> Drafter:
        return MedusaDrafter(
            session, policy, limits, costs, lookups=lookups, gate=gate, image_ids=image_ids
        )

    return _Opened(costs, make)


def _open_model(order: _Order) -> _Opened:
    """Another engine of `llm_build`, whose model has the base's tokens."""
    base, folder = order.base, order.options.draft_engine_dir
    assert folder is not None
    check_tree_size(order.limits, base, order.engine)
    manifest = load_manifest(folder, EngineManifest)
    with FileCheck(folder, manifest.files, order.verify):
        if manifest.files.get(_TOKENIZER) != base.files.get(_TOKENIZER):
            require_same_tokens(order.engine, folder)
        session = RecordedSession(runners.find(manifest.backend).open_session(folder, manifest))
    if (images := manifest.decoder.images) is not None:
        session.set_images(ImageRows.none(manifest.decoder.hidden_size, images.num_deepstack))
    drafting = manifest.pass_cost_ms or pass_costs(session, manifest.decoder)
    costs = Costs.of(order.pass_costs(), drafting, drafting)

    def make(policy: Policy, lookups: Sequence[LookupSource], gate: NetworkGate | None) -> Drafter:
        return ModelDrafter(
            session, policy, order.limits, costs,
            num_candidates=base.decoder.vocab_size, num_readable=manifest.decoder.vocab_size,
            prefill_rows=manifest.prefill_rows, lookups=lookups, gate=gate,
            image_ids=order.image_ids(reads_rows=False),
        )  # fmt: skip

    return _Opened(costs, make)


_OPENERS = {
    None: _open_none, OWN: _open_own, "eagle": _open_own, "medusa": _open_own, "draft": _open_model
}  # fmt: skip


def require_same_tokens(engine: Path, draft: Path) -> None:
    """Refuse a draft model to which token ids mean something else.

    Raises:
        BrokenArtifactError: names a token that differs.
    """
    ours, theirs = (ChatTokenizer(folder).vocabulary() for folder in (engine, draft))
    differing = ours.items() ^ theirs.items()
    if not differing:
        return
    token_id = min(token_id for _, token_id in differing)
    here, there = (
        next((repr(token) for token, known in vocabulary.items() if known == token_id), "none")
        for vocabulary in (ours, theirs)
    )
    raise BrokenArtifactError(
        f"{draft} has other tokens than {engine}: {token_id} is {there} there, {here} here",
        hint="take a draft model of the same family, with the same tokenizer",
    )


def check_tree_size(limits: TreeLimits, base: EngineManifest, engine: Path) -> None:
    """Refuse trees that the base was not built for.

    Raises:
        BrokenArtifactError: it was built for none.
        LimitError: says which flag, and what the engine takes.
    """
    if not base.max_verify_tree_size:
        raise BrokenArtifactError(
            f"{engine} was built for plain decoding",
            hint="build it with --maxVerifyTreeSize 16, say",
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


def check_draft_rows(limits: TreeLimits, draft: DraftEngineManifest) -> None:
    """Refuse trees that the draft engine was not built for; raises as `check_tree_size`."""
    if limits.draft_rows > draft.max_draft_tree_size:
        product = f"--eagleDraftTopK {limits.top_k} x --eagleDraftStep {limits.steps} = "
        raise LimitError(
            f"{product if limits.static_rows is None else ''}{limits.draft_rows} drafted rows "
            f"exceed the draft engine's {draft.max_draft_tree_size}",
            hint="take less, or build with a larger --maxDraftTreeSize",
        )
    _check_candidates(limits, draft.draft)


def heads_limits(options: SpecOptions, limits: TreeLimits, draft: DraftSpec) -> TreeLimits:
    """The limits with as many levels as there are heads, unless the user wants fewer.

    Raises:
        LimitError: the user wants more.
    """
    _check_candidates(limits, draft)
    if limits.steps <= draft.num_heads:
        return limits
    if options.choices or options.steps is not None:
        what = "the choices are" if options.choices else "--eagleDraftStep is"
        raise LimitError(
            f"{what} {limits.steps} levels deep, the draft has {draft.num_heads} heads",
            hint="a head foresees one level; take fewer",
        )
    return replace(limits, steps=draft.num_heads)


def _check_candidates(limits: TreeLimits, draft: DraftSpec) -> None:
    if limits.top_k > draft.draft_vocab_size:
        raise LimitError(
            f"--eagleDraftTopK {limits.top_k} exceeds the draft's vocabulary of "
            f"{draft.draft_vocab_size}"
        )

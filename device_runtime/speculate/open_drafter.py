"""Opens the drafter of an engine folder by the user's options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from edgellm.core.manifest import DRAFT_FOLDER, Engine
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.speculate import drafter_registry
from edgellm.device_runtime.speculate.drafter import Drafter, SpecState, TextDrafter
from edgellm.device_runtime.speculate.drafter_loading import (
    DrafterContext,
    LoadedDrafter,
    LoadsDrafter,
    check_tree_size,
    find_own,
)
from edgellm.device_runtime.speculate.options import AUTO, OWN, SpecOptions
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.device_tree_size import (
    FixedSize,
    Sizes,
    WorthwhileSize,
)
from edgellm.device_runtime.speculate.policy.spec_budget import (
    GREEDY,
    GREEDY_LOOKUP,
    SAMPLED,
    SAMPLED_LOOKUP,
)
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.static_tree import StaticTree
from edgellm.device_runtime.speculate.policy.tree_policy import (
    CostAwareTree,
    FixedTree,
    Policy,
    TreeLimits,
)
from edgellm.device_runtime.speculate.text_lookup import LearnedLookup


def resolve_auto(options: SpecOptions, engine: Path, base: Engine) -> SpecOptions | None:
    """Resolve the network "auto" for an engine; None: plain decoding."""
    if options.network != AUTO:
        return options
    if not base.max_verify_tree_size:
        return None
    network = None
    if options.draft_engine_dir is not None:
        network = "draft"
    elif base.hidden_taps and (engine / DRAFT_FOLDER).is_dir():
        network = OWN
    lookups = options.lookups or drafter_registry.lookups()
    return replace(options, network=network, lookups=lookups, adapts=network is not None)


class Drafters:
    """The drafters of an engine, with learned state of greedy and of sampled requests."""

    def __init__(
        self,
        *,
        engine: Path,
        base: Engine,
        network: DecoderNetwork,
        options: SpecOptions,
        verify: bool | None,
    ) -> None:
        """Load the drafter; an engine's own draft is in `engine`/draft.

        `network`, the base, measures pass times that the manifest lacks.

        Raises:
            BrokenArtifactError: the draft engine is missing, damaged, or for another base.
            LimitError: the options exceed the limits of the engines.
        """
        self.options, limits = options, options.limits(base.max_verify_tree_size)
        order = DrafterContext(
            engine=engine, base=base, network=network, options=options, limits=limits, verify=verify
        )
        opened = _open(order)
        opened = replace(opened, costs=replace(opened.costs, together=order.shared_costs()))
        self._start, self.caches = opened.start, opened.caches
        starts = [drafter_registry.lookup(name).remember() for name in options.lookups]
        self._learned = {
            greedy: _new_state(
                options, limits, opened, [*map(LearnedLookup, starts)], greedy=greedy
            )
            for greedy in (True, False)
        }

    def start(self, *, greedy: bool) -> Drafter:
        """The drafter of a request; computes nothing."""
        return self._start(self._learned[greedy])


def _open(order: DrafterContext) -> LoadedDrafter:
    name = order.options.network
    if name == OWN:
        name = drafter_registry.own(find_own(order)[1])
    if name is not None:
        return cast(LoadsDrafter, drafter_registry.network(name)).open(order)
    check_tree_size(order)
    image_ids = order.image_ids(has_embeddings=True)
    return LoadedDrafter(
        costs=Costs.of(order.pass_costs(), None, None, *order.host_ms),
        start=lambda learned: TextDrafter(learned, order.limits, image_ids=image_ids),
    )


def _new_state(
    options: SpecOptions,
    limits: TreeLimits,
    opened: LoadedDrafter,
    lookups: list[LearnedLookup],
    *,
    greedy: bool,
) -> SpecState:
    sized_by_cost, costs = options.tree == "cost" and not options.choices, opened.costs
    network, lookup = (GREEDY, GREEDY_LOOKUP) if greedy else (SAMPLED, SAMPLED_LOOKUP)
    text = network if options.network is None else lookup
    pauses, adapts = sized_by_cost, options.adapts
    controller = SpecGate(costs=costs, pauses=pauses, adapts=adapts, network=network, text=text)
    policy: Policy = FixedTree(limits)
    if options.choices:
        policy = StaticTree(options.choices)
    elif sized_by_cost:
        policy = CostAwareTree(
            limits=limits, costs=costs, calibration=Calibration(), controller=controller
        )
    sizes: Sizes | None = None
    if opened.growth is not None:
        sizes = FixedSize(opened.growth)
        if sized_by_cost:
            sizes = WorthwhileSize(opened.growth, costs, controller)
    return SpecState(policy=policy, controller=controller, lookups=tuple(lookups), sizes=sizes)

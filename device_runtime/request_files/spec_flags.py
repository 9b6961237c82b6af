"""Flags for speculative decoding, shared by all commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.core.cli import with_flags
from edgellm.core.errors import EdgeLLMError, require_choice

if TYPE_CHECKING:
    from edgellm.device_runtime.speculate.acceptance import Typical
    from edgellm.device_runtime.speculate.options import SpecOptions

Spec = Annotated[
    str | None,
    typer.Option(
        "--spec",
        help="Choose the drafter. The engine has eagle, medusa, mtp or peagle, by the kind "
        "of its draft; draft is the model of --draftEngineDir. ngram copies the text "
        "after the same words in the request; suffix also finds it in earlier requests. "
        "auto chooses the fastest in each round; none decodes plainly. Default: none, "
        "unless another flag names a drafter.",
        rich_help_panel="Speculation",
    ),
]
Eagle = Annotated[
    bool,
    typer.Option(
        "--eagle",
        "--specDecode",
        help="Draft with the engine's own draft, whatever its kind.",
        rich_help_panel="Speculation",
    ),
]
Ngram = Annotated[
    bool,
    typer.Option(
        "--ngram",
        help="Also draft by n-gram matches in the request.",
        rich_help_panel="Speculation",
    ),
]
Suffix = Annotated[
    bool,
    typer.Option(
        "--suffix",
        help="Also draft by the longest suffix match in all requests.",
        rich_help_panel="Speculation",
    ),
]
DraftEngineDir = Annotated[
    Path | None,
    typer.Option(
        "--draftEngineDir",
        help="Draft with the engine in this folder, a smaller model with the same "
        "vocabulary. Default: no draft model.",
        rich_help_panel="Speculation",
    ),
]
DraftTopK = Annotated[
    int | None,
    typer.Option(
        "--eagleDraftTopK",
        "--specDraftTopK",
        min=1,
        help="Draft this many candidates for each tree node. Default: 10; 4 for a draft model.",
        rich_help_panel="Speculation",
    ),
]
DraftStep = Annotated[
    int | None,
    typer.Option(
        "--eagleDraftStep",
        "--specDraftStep",
        "--maxDraftLen",
        min=1,
        help="Limit draft trees to this many levels. Default: 6; 8 for a draft model or "
        "P-EAGLE; 16 for n-grams and suffixes.",
        rich_help_panel="Speculation",
    ),
]
VerifyTreeSize = Annotated[
    int | None,
    typer.Option(
        "--eagleVerifyTreeSize",
        "--specVerifyTreeSize",
        min=1,
        help="Verify at most this many nodes of a draft tree, root included. Default: the "
        "engine's limit, at most 60 nodes.",
        rich_help_panel="Speculation",
    ),
]
TreeKind = Annotated[
    str | None,
    typer.Option(
        "--eagleTree",
        help="Size draft trees by measured costs within the other limits (cost), or keep "
        "them constant (fixed). Default: cost.",
        rich_help_panel="Speculation",
    ),
]
UseDynamicTree = Annotated[
    bool,
    typer.Option(
        "--eagleUseDynamicTree",
        help="Keep draft trees constant, as --eagleTree fixed does (EAGLE-2).",
        rich_help_panel="Speculation",
    ),
]
DynamicTreeTopK = Annotated[
    int | None,
    typer.Option(
        "--eagleDynamicTreeMaxTopK",
        min=1,
        help="Set --eagleDraftTopK by its name in TensorRT-LLM. Default: that of --eagleDraftTopK.",
        rich_help_panel="Speculation",
    ),
]
Choices = Annotated[
    str | None,
    typer.Option(
        "--eagleChoices",
        "--medusaChoices",
        help="Draft a static tree with EAGLE-1 or Medusa: a JSON list of paths of ranks, "
        "such as [[0], [0, 0], [1]], or mc_sim_7b_63. Default: a tree by probabilities.",
        rich_help_panel="Speculation",
    ),
]
MaxNonLeaves = Annotated[
    int,
    typer.Option(
        "--maxNonLeavesPerLayer",
        min=1,
        help="Let at most this many nodes in a level of --eagleChoices have children. "
        "Default: {default} nodes.",
        rich_help_panel="Speculation",
    ),
]
PosteriorThreshold = Annotated[
    float | None,
    typer.Option(
        "--typicalAcceptance",
        "--posteriorThreshold",
        min=0,
        max=1,
        help="Accept probable tokens above this threshold, such as 0.09. It is faster, but "
        "NOT lossless. Default: exact acceptance.",
        rich_help_panel="Speculation",
    ),
]
PosteriorAlpha = Annotated[
    float | None,
    typer.Option(
        "--posteriorAlpha",
        min=0,
        help="Set the entropy scale of typical acceptance. Default: square root of the threshold.",
        rich_help_panel="Speculation",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFlags:
    """Values of the flags; a command receives them by `with_spec_flags`."""

    spec: Spec = None
    eagle: Eagle = False
    ngram: Ngram = False
    suffix: Suffix = False
    draft_engine_dir: DraftEngineDir = None
    draft_top_k: DraftTopK = None
    steps: DraftStep = None
    verify_size: VerifyTreeSize = None
    tree: TreeKind = None
    use_dynamic_tree: UseDynamicTree = False
    dynamic_top_k: DynamicTreeTopK = None
    choices: Choices = None
    max_non_leaves: MaxNonLeaves = 10
    posterior_threshold: PosteriorThreshold = None
    posterior_alpha: PosteriorAlpha = None

    def read(self) -> SpecOptions | None:
        """The options; None decodes plainly.

        Raises:
            EdgeLLMError: unknown values, or contradictory flags.
        """
        from edgellm.device_runtime.speculate import drafter_registry, options
        from edgellm.device_runtime.speculate.policy.static_tree import read_choices

        networks, lookups = drafter_registry.networks(), drafter_registry.lookups()
        methods = (*networks, *lookups, options.AUTO)
        wanted = self._wanted((*methods, "none"))
        if "none" in wanted and len(wanted) > 1:
            raise EdgeLLMError("--spec none decodes plainly", hint="remove the flags of drafters")
        if not wanted:
            self._refuse_details()
        if not wanted - {"none"}:
            return None
        if options.AUTO in wanted:
            wanted -= {"draft"}  # implied by its folder
        chosen = [name for name in (options.OWN, *networks, options.AUTO) if name in wanted]
        if len(chosen) > 1:
            names = ("--eagle" if name == options.OWN else name for name in chosen)
            raise EdgeLLMError(f"{' and '.join(names)} exclude each other", hint="give one")
        return options.SpecOptions(
            network=chosen[0] if chosen else None,
            draft_engine_dir=self.draft_engine_dir,
            lookups=tuple(name for name in lookups if name in wanted),
            top_k=self._top_k(),
            steps=self.steps,
            verify_size=self.verify_size,
            tree=self._tree(options.TREES),
            choices=read_choices(self.choices) if self.choices is not None else (),
            max_non_leaves=self.max_non_leaves,
            typical=self._typical(),
        )

    def _refuse_details(self) -> None:
        """Reject drafting options without a drafter."""
        details = {
            "--eagleDraftTopK": self.draft_top_k,
            "--eagleDraftStep": self.steps,
            "--eagleVerifyTreeSize": self.verify_size,
            "--eagleTree": self.tree,
            "--eagleUseDynamicTree": self.use_dynamic_tree or None,
            "--eagleDynamicTreeMaxTopK": self.dynamic_top_k,
            "--eagleChoices": self.choices,
            "--posteriorThreshold": self.posterior_threshold,
            "--posteriorAlpha": self.posterior_alpha,
        }
        if given := [flag for flag, value in details.items() if value is not None]:
            raise EdgeLLMError(
                f"{given[0]} needs speculation", hint="give --eagle or --spec as well"
            )

    def _wanted(self, known: tuple[str, ...]) -> set[str]:
        """The requested methods."""
        from edgellm.device_runtime.speculate import drafter_registry
        from edgellm.device_runtime.speculate.options import OWN

        if self.spec is not None:
            require_choice("--spec", self.spec, known)
        switches = {
            OWN: self.eagle and self.spec not in drafter_registry.owners(),
            "draft": self.draft_engine_dir is not None,
            "ngram": self.ngram,
            "suffix": self.suffix,
        }
        wanted = {name for name, is_on in switches.items() if is_on}
        return wanted if self.spec is None else {*wanted, self.spec}

    def _tree(self, known: tuple[str, ...]) -> str:
        if self.tree is not None:
            require_choice("--eagleTree", self.tree, known)
        given = {
            "--eagleTree": self.tree,
            "--eagleUseDynamicTree": self.use_dynamic_tree,
            "--eagleChoices": self.choices is not None,
        }
        both = [flag for flag, value in given.items() if value]
        if len(both) > 1:
            raise EdgeLLMError(f"{' and '.join(both)} exclude each other", hint="give one")
        return self.tree or ("fixed" if self.use_dynamic_tree else "cost")

    def _typical(self) -> Typical | None:
        from edgellm.device_runtime.speculate.acceptance import Typical

        if self.posterior_threshold is not None:
            return Typical(self.posterior_threshold, self.posterior_alpha)
        if self.posterior_alpha is not None:
            raise EdgeLLMError(
                "--posteriorAlpha requires typical acceptance",
                hint="give --posteriorThreshold as well",
            )
        return None

    def _top_k(self) -> int | None:
        if self.dynamic_top_k is None:
            return self.draft_top_k
        if not self.use_dynamic_tree or self.draft_top_k is not None:
            raise EdgeLLMError(
                "--eagleDynamicTreeMaxTopK is the --eagleDraftTopK of --eagleUseDynamicTree",
                hint="give --eagleDraftTopK alone",
            )
        return self.dynamic_top_k


with_spec_flags = with_flags("spec_flags", SpecFlags)

"""The flags of `llm_inference` that say how to speculate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.contract import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.device_runtime.speculate.options import SpecOptions

Spec = Annotated[
    str | None,
    typer.Option(
        "--spec",
        help="What drafts: eagle (the engine's draft), ngram (what followed the same words in the "
        "request), suffix (what followed the longest match in this and earlier requests) or none.",
    ),
]
Eagle = Annotated[bool, typer.Option("--eagle", "--specDecode", help="The same as --spec eagle.")]
Ngram = Annotated[
    bool, typer.Option("--ngram", help="Also draft what followed the same words before.")
]
Suffix = Annotated[
    bool,
    typer.Option("--suffix", help="Also draft what followed the longest match in all requests."),
]
DraftTopK = Annotated[
    int | None,
    typer.Option("--eagleDraftTopK", "--specDraftTopK", min=1, help="Children of a node; 10."),
]
DraftStep = Annotated[
    int | None,
    typer.Option(
        "--eagleDraftStep", "--specDraftStep", "--maxDraftLen", min=1,
        help="Levels of a tree; 6, without a network 16.",
    ),
]  # fmt: skip
VerifyTreeSize = Annotated[
    int | None,
    typer.Option(
        "--eagleVerifyTreeSize", "--specVerifyTreeSize", min=1,
        help="Nodes of a tree, root included; as many as the engine was built for, 60 at most.",
    ),
]  # fmt: skip
TreeKind = Annotated[
    str,
    typer.Option(
        "--eagleTree",
        help="cost: sized by measured costs, the flags above are bounds; fixed: always so.",
    ),
]
TypicalAcceptance = Annotated[
    float | None,
    typer.Option(
        "--typicalAcceptance",
        min=0,
        max=1,
        help="Posterior threshold (0.09, say); faster, but NOT the base's distribution.",
    ),
]


@dataclass(frozen=True, slots=True)
class SpecFlags:
    """The flags as they were given."""

    spec: str | None
    eagle: bool
    ngram: bool
    suffix: bool
    top_k: int | None
    steps: int | None
    verify_size: int | None
    tree: str
    typical_acceptance: float | None

    def read(self) -> SpecOptions | None:
        """What they mean; None decodes plainly.

        Raises:
            EdgeLLMError: unknown words, or flags that contradict each other.
        """
        from edgellm.device_runtime.speculate import options

        methods = (*options.NETWORKS, *options.LOOKUPS)
        wanted = {self.spec} if self.spec is not None else set()
        wanted |= {"eagle"} if self.eagle else set()
        if unknown := wanted - {*methods, "none"}:
            raise EdgeLLMError(f"--spec {unknown.pop()}: give {', '.join(methods)} or none")
        if self.tree not in options.TREES:
            raise EdgeLLMError(f"--eagleTree {self.tree}: give {' or '.join(options.TREES)}")
        wanted |= {name for name in options.LOOKUPS if getattr(self, name)}
        if "none" in wanted and len(wanted) > 1:
            raise EdgeLLMError(
                "--spec none decodes plainly", hint=f"leave --{(wanted - {'none'}).pop()} away"
            )
        if not wanted - {"none"}:
            return None
        networks = [name for name in options.NETWORKS if name in wanted]
        return options.SpecOptions(
            networks[0] if networks else None,
            tuple(name for name in options.LOOKUPS if name in wanted),
            self.top_k,
            self.steps,
            self.verify_size,
            self.tree,
            self.typical_acceptance,
        )

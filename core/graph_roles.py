"""Roles of graphs: facts that builders and the runtime share.

A new kind of graph is an entry of `ROLES`. If it is an engine's main graph, a module of its name
in `device_runtime.networks` runs and measures it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from edgellm.core.graph_io import (
    DRAFT_HIDDEN,
    HIDDEN_TAPS,
    TOP_K,
)

DECODER = "decoder"  # a language model
DRAFT = "draft"  # a draft network with a cache of its own
COMMIT = "commit"  # updates the states of a decoder's recurrent layers; reads no weights
FUSE = "fuse"  # makes a draft's hidden rows of a base's features
BLOCK = "block"  # a draft network with a KV cache; one forward pass predicts a block of tokens
HEADS = "heads"  # predict tokens from the newest committed hidden state, one for each head
ENCODER = "encoder"  # of images or audio, whose rows a decoder takes in place of embeddings
AUDIO_ENCODER = "audio_encoder"  # computes hidden states of a window of audio
CROSS_KV = "cross_kv"  # computes keys and values of them, which a decoder attends to

# Kinds of passes that are measured
PASS = "pass"  # of a decoder
HOST = "host"  # no pass: work of the host for a round of a decoder that verifies trees
STEP = "step"  # of a draft: nodes of one level
EXTEND = "extend"  # of a draft: tokens fused and committed
ALL_HEADS = "heads"  # of all of them
PREDICT = "foresee"  # of a block drafter: tokens fused and committed, then a block
_SHARED_BY = " x "  # after a kind: sequences that share such a pass


class Rows(Enum):
    """Meaning of the rows of a pass."""

    TEXT = "a prompt, the newest token, or a tree to verify"
    DRAFTED = "a prompt, what a round committed, or a level of a drafted tree"
    ONE = "one"
    ACCEPTED = "accepted tokens of a decoder's pass"
    ITEM = "the patches or tiles of an image, or the features of an audio clip, of any size"
    AUDIO = "the frames of a window of audio, or the encoder's positions of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The facts of a role."""

    rows: Rows
    has_cache: bool = False  # of keys and values; rows are tokens, some of them of images
    inputs: tuple[str, ...] = ()  # besides those of graphs with a cache or an encoder
    measured: Mapping[str, str] = field(default_factory=dict)  # kinds of passes, and their names


ROLES = {
    DECODER: Role(
        rows=Rows.TEXT,
        has_cache=True,
        measured={PASS: "a pass", HOST: "the host's part of a drafted round"},
    ),
    DRAFT: Role(
        rows=Rows.DRAFTED,
        has_cache=True,
        inputs=(DRAFT_HIDDEN, TOP_K),
        measured={STEP: "a draft step", EXTEND: "fusing and committing"},
    ),
    BLOCK: Role(
        rows=Rows.DRAFTED,
        has_cache=True,
        inputs=(DRAFT_HIDDEN, TOP_K),
        measured={PREDICT: "committing and drafting a block"},
    ),
    COMMIT: Role(rows=Rows.ACCEPTED),
    FUSE: Role(rows=Rows.DRAFTED, inputs=(HIDDEN_TAPS,)),
    HEADS: Role(
        rows=Rows.ONE, inputs=(HIDDEN_TAPS, TOP_K), measured={ALL_HEADS: "a pass of all heads"}
    ),
    ENCODER: Role(rows=Rows.ITEM),
    AUDIO_ENCODER: Role(rows=Rows.AUDIO),
    CROSS_KV: Role(rows=Rows.AUDIO),
}


def measured_name(kind: str) -> str:
    """Name of a kind of pass for users."""
    alone, _, sequences = kind.partition(_SHARED_BY)
    name = next(role.measured[alone] for role in ROLES.values() if alone in role.measured)
    return f"{name} of {sequences} sequences with as many tokens each" if sequences else name


def shared_kind(kind: str, sequences: int) -> str:
    """The kind of pass with this batch size; it is measured by the rows of each sequence."""
    return f"{kind}{_SHARED_BY}{sequences}"


def shared_kinds(kind: str, measured: Iterable[str]) -> dict[int, str]:
    """The measured kinds of batched passes, by batch size."""
    parts = [(each, *each.partition(_SHARED_BY)) for each in measured]
    return {int(count): each for each, alone, _, count in parts if alone == kind and count}

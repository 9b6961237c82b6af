"""Kinds of draft networks: the modules of `export.drafts`, found by method or by tensor names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import onnx_ir as ir

    from edgellm.core.model_spec import DraftSpec
    from edgellm.export.checkpoints.checkpoint import Checkpoint
    from edgellm.export.checkpoints.weights import Weights
    from edgellm.export.config.decoder import DecoderConfig
    from edgellm.export.layers.attention import PassState
    from edgellm.export.onnx.builder import Op

_PACKAGE = "edgellm.export.drafts"


class Network(Protocol):
    """A `Model` of hidden states [1, S, D] and tokens."""

    def forward(self, op: Op, input_ids: ir.Value, hidden: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] and hidden [1, S, D] -> [1, S, D]."""
        ...

    def head(self, op: Op, x: ir.Value) -> tuple[ir.Value, ...]:
        """X [1, R, D] -> logits [1, R, N], recycled hidden states [1, R, D].

        N is the draft's vocabulary. If rows have logits of different tokens, their ids follow,
        int64 [1, R, N].
        """
        ...


class OwnConfig(Protocol):
    """Config of a kind, with the facts that every export needs."""

    @property
    def method(self) -> str:
        """The module's name."""
        ...

    @property
    def exporter(self) -> str:
        """The exporter whose conventions the checkpoint follows."""
        ...

    @property
    def hidden_taps(self) -> tuple[int, ...]:
        """Hidden taps of the base, see `model_spec.DraftSpec`."""
        ...

    @property
    def taps_meaning(self) -> str:
        """Description of the taps."""
        ...


class Kind(Protocol):
    """Interface of a module of `export.drafts` with its own config and graph."""

    TITLE: str  # in messages
    ROLE: str  # of its graph
    FILES: tuple[str, ...]  # of its weights, if in a model's folder

    def own_names(self, names: Iterable[str]) -> list[str]:
        """Names of its tensors."""
        ...

    def read(
        self, checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()
    ) -> OwnConfig:
        """Its config, checked against the base's."""
        ...

    def build(
        self, draft: Checkpoint, base: Checkpoint, config: Any, dtype: ir.DataType
    ) -> tuple[ir.Model, Op, Weights]:
        """Its graph, recorded without reading weight data."""
        ...

    def spec(self, draft: Checkpoint, config: Any, op: Op) -> DraftSpec:
        """Its spec for the manifest."""
        ...

    # One that has its base's head may have `with_vocabulary(config, base, size)`: the facts of the
    # same network when it predicts only so many tokens. One with a `DraftHead` has
    # `with_low_rank(config, low_rank)`.


def find(method: str) -> ModuleType:
    """The module of a method that `config` detected."""
    return importlib.import_module(f"{_PACKAGE}.{method}")


def kind(method: str) -> Kind:
    """The module of a method that implements `Kind`."""
    return cast("Kind", find(method))


def kinds() -> Iterator[Kind]:
    """All modules that implement `Kind`."""
    for found in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__):
        if hasattr(find(found.name), "own_names"):
            yield kind(found.name)


def kind_of(names: Iterable[str]) -> Kind | None:
    """The kind whose tensors are among `names`, possibly with a model's."""
    names = list(names)
    return next((each for each in kinds() if each.own_names(names)), None)


def own_names(names: Iterable[str]) -> list[str]:
    """Names of draft tensors, which a model's export ignores."""
    names = list(names)
    return [name for each in kinds() for name in each.own_names(names)]

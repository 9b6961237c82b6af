"""What was found: one form for checkpoints, bundles and engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgellm.core.kv_cache_size import cache_bytes, held_bytes
from edgellm.core.manifest import FileRecord
from edgellm.core.model_spec import KVCacheSpec
from edgellm.tools.inspection.sources.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Weights that go together, and the graph that uses them; of a checkpoint they have none."""

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    operators: dict[str, int] = field(default_factory=dict)  # number of nodes by type
    opset: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured by a build, on the machine of the build."""

    what: str
    ms_by_rows: dict[int, float]
    estimated: tuple[int, ...] = ()  # rows that were extrapolated, not measured


@dataclass(frozen=True, slots=True)
class Fusion:
    """What a compiler made of one kind of pass."""

    name: str  # "decode"
    kernels: int
    attention: str
    products: dict[str, int]  # by type of the weights, after that of rounded inputs
    reformats: int  # copies of a tensor into another layout
    decoded_weights: int  # written to memory as floats in every pass


@dataclass(frozen=True, slots=True)
class Fusions:
    """Those of a compiled graph."""

    graph: str
    told_by: str
    passes: tuple[Fusion, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """One link of the chain from an engine back to the weights it began with."""

    what: str  # "engine", "bundle", "checkpoint"
    path: str
    state: str  # whether it still is what it was
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint, bundle or engine.

    A token of a language model costs a pass over the first graph; `None` and empty fields mean
    that there is no such thing.
    """

    path: str
    kind: str  # of the manifest, or "hf_checkpoint" or "gguf_file"
    title: str
    facts: dict[str, str]
    description: dict[str, Any]  # the manifest or config itself, flat
    graphs: tuple[Graph, ...]
    origins: tuple[Origin, ...]
    loads_as: str  # what `loaded_bytes` of the tensors assumes
    files: dict[str, FileRecord] = field(default_factory=dict)
    kv: KVCacheSpec | None = None
    capacity: int = 0  # tokens that the cache can hold: an engine's, or the model's positions
    num_sequences: int = 1  # for which it has room
    is_decoder: bool = False
    costs: tuple[Costs, ...] = ()
    fusions: tuple[Fusions, ...] = ()
    draft: Report | None = None

    @property
    def is_engine(self) -> bool:
        """Whether it runs as it is, on the machine that built it."""
        return self.kind.endswith("_engine")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of all graphs."""
        return tuple(tensor for graph in self.graphs for tensor in graph.tensors)

    @property
    def read_bytes(self) -> int:
        """Weights that a pass of one token reads."""
        tensors = (tensor for tensor in self.graphs[0].tensors if tensor.is_read_whole)
        return round(sum(tensor.loaded_bytes * tensor.token_share for tensor in tensors))

    @property
    def loaded_bytes(self) -> int:
        """Weights of all graphs, and the draft's."""
        own = sum(tensor.loaded_bytes for tensor in self.tensors)
        return own + (self.draft.loaded_bytes if self.draft is not None else 0)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the cache, and of the draft's."""
        own = self.kv.bytes_per_token if self.kv is not None else 0
        return own + (self.draft.kv_bytes_per_token if self.draft is not None else 0)

    @property
    def kv_bytes(self) -> int:
        """Of the whole cache, and of the draft's."""
        own = cache_bytes(self.kv, self.capacity, self.num_sequences) if self.kv is not None else 0
        return own + (self.draft.kv_bytes if self.draft is not None else 0)

    def held_kv_bytes(self, length: int) -> int:
        """Of a sequence of this length, in both."""
        own = held_bytes(self.kv, length) if self.kv is not None else 0
        return own + (self.draft.held_kv_bytes(length) if self.draft is not None else 0)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested JSON object as one of dotted keys; lists of anything but objects stay."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, dict) for v in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, item in value.items():
        result |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return result

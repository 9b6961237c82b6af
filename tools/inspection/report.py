"""The report of an inspection, common to checkpoints, bundles and engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgellm.core.manifest import FileRecord
from edgellm.core.model_spec import KVCacheSpec, cache_bytes, held_bytes
from edgellm.tools.inspection.sources.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A graph and its weights; checkpoints have weights only."""

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    operators: dict[str, int] = field(default_factory=dict)  # number of nodes by type
    opset: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of forward passes, measured on the machine of the build."""

    what: str
    ms_by_rows: dict[int, float]  # by number of tokens
    estimated: tuple[int, ...] = ()  # numbers of tokens that were extrapolated, not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Compiled kernels of one kind of forward pass."""

    name: str  # "decode"
    kernels: int
    attention: str
    products: dict[str, int]  # matrix products by type of weights and of quantized inputs
    reformats: int  # copies of a tensor into another layout
    decoded_weights: int  # weights dequantized to memory in every forward pass


@dataclass(frozen=True, slots=True)
class Fusions:
    """Compiled kernels of one graph."""

    graph: str
    told_by: str  # source of the report
    passes: tuple[Fusion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One artifact in the chain from an engine back to its original weights."""

    what: str  # "engine", "bundle", "checkpoint"
    path: str
    state: str  # whether it exists and is unchanged
    details: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of a checkpoint, bundle or engine.

    The first graph of a language model decodes. `None` and empty fields: not applicable.
    """

    path: str
    kind: str  # of the manifest, or "hf_checkpoint" or "gguf_file"
    title: str
    facts: dict[str, str]
    description: dict[str, Any]  # the manifest or config itself, flat
    graphs: tuple[Graph, ...]
    origins: tuple[Origin, ...]
    loads_as: str  # number formats that `loaded_bytes` of the tensors assumes
    files: dict[str, FileRecord] = field(default_factory=dict)
    kv: KVCacheSpec | None = None
    capacity: int = 0  # tokens of an engine's KV cache, or positions of the model
    num_sequences: int = 1  # of the KV cache
    is_decoder: bool = False
    costs: tuple[Costs, ...] = ()
    fusions: tuple[Fusions, ...] = ()
    draft: Report | None = None

    @property
    def is_engine(self) -> bool:
        """Whether this is an engine, which runs on the machine that built it."""
        return self.kind.endswith("_engine")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all graphs."""
        return tuple(tensor for graph in self.graphs for tensor in graph.tensors)

    @property
    def read_bytes(self) -> int:
        """Weight bytes that decoding one token reads."""
        tensors = (tensor for tensor in self.graphs[0].tensors if tensor.is_read_whole)
        return round(sum(tensor.loaded_bytes * tensor.token_share for tensor in tensors))

    @property
    def loaded_bytes(self) -> int:
        """Weight bytes of all graphs, including the draft's."""
        own = sum(tensor.loaded_bytes for tensor in self.tensors)
        return own + (self.draft.loaded_bytes if self.draft is not None else 0)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes of one token, including the draft's."""
        own = self.kv.bytes_per_token if self.kv is not None else 0
        return own + (self.draft.kv_bytes_per_token if self.draft is not None else 0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache, including the draft's."""
        own = cache_bytes(self.kv, self.capacity, self.num_sequences) if self.kv is not None else 0
        return own + (self.draft.kv_bytes if self.draft is not None else 0)

    def held_kv_bytes(self, length: int) -> int:
        """Return the KV cache bytes of a sequence of this length, including the draft's."""
        own = held_bytes(self.kv, length) if self.kv is not None else 0
        return own + (self.draft.held_kv_bytes(length) if self.draft is not None else 0)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested JSON object to dotted keys; only lists of objects are flattened."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, dict) for v in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, item in value.items():
        result |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return result

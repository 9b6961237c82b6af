"""Assistants of Gemma 4 and Gemma 4 12B: drafts that read keys and values of their base.

`gemma4_assistant` and `gemma4_unified_assistant` have the same layers, and different defaults.
An assistant's layers have no keys and values of their own: those in windows read the base's last
ones in windows, global layers its last global ones. All tokens that it drafts after a text have the
position of the text's newest token, and attend to the tokens before that one. Its input is the
base's embedding of a token, and the hidden state of the token before it.

So the graph projects keys and values again, and a cache of two layers holds them. The auxiliary
hidden states are the inputs of these two layers of the base and the output of its final norm.
Drafted tokens have no rows in the cache that count. A head with centroids multiplies the rows of
the clusters that it chooses, and proposes no other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.graph_roles import DRAFT
from edgellm.core.model_spec import DraftSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorSource
from edgellm.export.checkpoints.vlm import text_tower
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import AttentionKind, LayerKV
from edgellm.export.config.reader import ConfigReader
from edgellm.export.draft_checkpoints.tensors import DraftTensors
from edgellm.export.graph.bundle_files import decoder_spec, refuse_leftovers
from edgellm.export.graph.draft import record, target_names
from edgellm.export.layers.attention import PassState, Scores
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import gemma4_text, gemma4_unified_text
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call
from edgellm.export.onnx.functions.experts import router

TITLE, ROLE = "an assistant of Gemma 4", DRAFT
FILES = ()  # it has a folder of its own
_MARKS = {"pre_projection.weight", "post_projection.weight"}
_BASE = "base."  # prefix of the base's tensors
_TABLE, _LAYER = "model.embed_tokens", "model.layers"
_KV = ("input_layernorm", *(f"self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm")))
_KV_SCALES = (".k_scale", ".v_scale")  # of the base's cache
_SHARED = ("key", "value", "cos", "sin")
# By model type: the architecture of its layers and of the base, the base's name and hidden size
_TYPES: Mapping[str, tuple[ModuleType, str, int]] = {
    "gemma4_assistant": (gemma4_text, "Gemma 4", 1536),
    "gemma4_unified_assistant": (gemma4_unified_text, "Gemma 4 12B", 3840),
}
_HINT = "give the base that the assistant was trained for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """A head that multiplies the rows of a few clusters of tokens."""

    count: int
    top_k: int  # clusters that a row chooses
    size: int  # tokens of a cluster

    @classmethod
    def read(cls, reader: ConfigReader, vocab_size: int) -> Clusters | None:
        """The head's facts; None: a plain head.

        Raises:
            UnsupportedModelError: clusters of several sizes, or more chosen than there are.
        """
        if not reader.read("use_ordered_embeddings", bool, False):
            reader.skip("num_centroids", "centroid_intermediate_top_k")
            return None
        count = reader.positive("num_centroids", 2048)
        top_k = reader.positive("centroid_intermediate_top_k", 32)
        if vocab_size % count or top_k > count:
            raise UnsupportedModelError(
                f"config.json: num_centroids = {count} and centroid_intermediate_top_k = {top_k} "
                f"do not fit a vocabulary of {vocab_size} tokens",
                hint="use config.json as the assistant was published",
            )
        return cls(count=count, top_k=top_k, size=vocab_size // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """Facts of an assistant, and of the base whose keys and values it reads."""

    text: gemma4_text.Config  # its layers; the first of a type stands for the base's layer
    base: gemma4_text.Config
    sources: tuple[int, ...]  # the base's layers, by cache
    clusters: Clusters | None
    method: str = "gemma4_assistant"
    exporter: str = "Gemma"
    taps_meaning: str = "inputs of layers whose keys and values it reads, output of the final norm"

    @property
    def hidden_taps(self) -> tuple[int, ...]:
        """See `drafts.OwnConfig`."""
        return (*sorted(self.sources), self.base.num_hidden_layers)

    @property
    def num_predicted(self) -> int:
        """Tokens that it may propose at once."""
        clusters = self.clusters
        return self.text.vocab_size if clusters is None else clusters.top_k * clusters.size

    @property
    def decoder(self) -> DecoderConfig:
        """The layers, with the width of all hidden taps as hidden size."""
        return replace(self.text, hidden_size=len(self.hidden_taps) * self.base.hidden_size)


def own_names(names: Iterable[str]) -> list[str]:
    """Names of its tensors: all of a folder with its projections."""
    names = list(names)
    return names if {*names} >= _MARKS else []


def read(
    checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()
) -> AssistantConfig:
    """Read the facts, and check them against the base.

    Raises:
        UnsupportedModelError: unsupported keys, or another base.
    """
    reader = ConfigReader(checkpoint.config)
    module, title, usual_size = _TYPES[reader.choice("model_type", *_TYPES)]
    if not isinstance(base, module.Config):
        raise UnsupportedModelError(
            f"{checkpoint.label} is for a base of {title}, this base is another model", hint=_HINT
        )
    assert isinstance(base, gemma4_text.Config)
    text = _read_text(module, reader.read("text_config", dict), ignored)
    for what, found, wanted in (
        ("hidden size", reader.positive("backbone_hidden_size", usual_size), base.hidden_size),
        ("vocabulary", text.vocab_size, base.vocab_size),
    ):
        if found != wanted:
            raise UnsupportedModelError(
                f"the draft is for a base of {what} {found}, this base has {wanted}", hint=_HINT
            )
    tied = reader.read("tie_word_embeddings", bool, True)
    clusters = Clusters.read(reader, text.vocab_size)
    reader.finish(ignored)
    kinds, sources = _with_sources(text, base)
    return AssistantConfig(
        text=replace(text, layer_kinds=kinds, tie_word_embeddings=tied),
        base=base,
        sources=sources,
        clusters=clusters,
    )


def _read_text(
    module: ModuleType, given: Mapping[str, Any], ignored: tuple[str, ...]
) -> gemma4_text.Config:
    """The layers' config, read as if they had keys and values."""
    reader = ConfigReader(given)
    layers = reader.positive("num_hidden_layers")
    reader.expect("num_kv_shared_layers", 0, layers)
    reader.expect("hidden_size_per_layer_input", 0)
    reader.expect("vocab_size_per_layer_input", 0)
    for key in ("enable_moe_block", "use_double_wide_mlp"):
        reader.expect(key, False)
    plain = ConfigReader(
        {
            **given,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": reader.positive("vocab_size"),
        }
    )
    config = module.Config.from_hf(plain)
    plain.finish(ignored)
    assert isinstance(config, gemma4_text.Config)
    return config


def _with_sources(
    text: gemma4_text.Config, base: gemma4_text.Config
) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    """Kinds of the assistant's layers, and the base's layers whose keys and values they read.

    A layer's row holds the token before the one that asks, so a window is one wider.
    """
    kinds: list[AttentionKind] = []
    firsts: dict[bool, tuple[int, int]] = {}  # by type: its first layer, and the base's layer
    for layer, kind in enumerate(text.kinds):
        assert kind is not None
        windowed = kind.window is not None
        if windowed not in firsts:
            firsts[windowed] = layer, _last_source(base, windowed=windowed)
        first, source = firsts[windowed]
        _check_layer(text, layer, base, source)
        kv = LayerKV(*base.heads_of(source), None if layer == first else first)
        window = None if kind.window is None else kind.window + 1
        kinds.append(AttentionKind(kind.rope, window, kv))
    return tuple(kinds), tuple(source for _, source in firsts.values())


def _check_layer(
    text: gemma4_text.Config, layer: int, base: gemma4_text.Config, source: int
) -> None:
    """Reject keys and values of other sizes, or that are rotated otherwise than the queries."""
    if (own := text.heads_of(layer)) != (there := base.heads_of(source)):
        raise UnsupportedModelError(
            f"layer {layer} of the draft reads keys of {own[0]} heads of {own[1]} numbers, this "
            f"base has {there[0]} of {there[1]}",
            hint=_HINT,
        )
    kind, other = text.kinds[layer], base.kinds[source]
    assert kind is not None and kind.rope is not None  # noqa: PT018
    assert other is not None and other.rope is not None  # noqa: PT018
    if not np.array_equal(kind.rope.inv_freq, other.rope.inv_freq):
        raise UnsupportedModelError(
            "the draft's rope_parameters differ from those of this base", hint=_HINT
        )


def _last_source(base: gemma4_text.Config, *, windowed: bool) -> int:
    """The base's last layer of a type that has keys and values."""
    found = [
        layer
        for layer, kind in enumerate(base.kinds)
        if kind is not None and kind.source is None and (kind.window is not None) == windowed
    ]
    if not found:
        what = "in windows" if windowed else "over the whole text"
        raise UnsupportedModelError(
            f"the draft reads keys and values of attention {what}, which this base lacks",
            hint=_HINT,
        )
    return found[-1]


class Attention(gemma4_text.Attention):
    """Queries at the position after a row's, over keys and values of the base."""

    def __init__(self, config: gemma4_text.Config, weights: Weights, layer: int) -> None:
        super().__init__(config, weights, layer)
        kind = config.kinds[layer]
        assert kind is not None
        self.first = layer if kind.source is None else kind.source

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, D] -> [1, S, D]."""
        scores = Scores(scale=self.config.attention_scale)
        k, v, cos, sin = (state.shared[_name(part, self.first)] for part in _SHARED)
        q = state.rotate(layer, self.queries(op, x), self.num_heads, (cos, sin))
        if self.is_shared:
            y = state.attend_shared(layer, q, self.num_heads, scores=scores, is_rotated=True)
        else:
            y = state.attend(layer, q, k, v, self.num_heads, scores=scores, is_rotated=True)
        return self.o_proj(op, y)


def _name(part: str, layer: int) -> str:
    """Name of one of `_SHARED`, which the first layer of a type shares with the others."""
    return f"{part}.{layer}"


class Layer(gemma4_text.DecoderLayer):
    """Gemma 4's block with such attention."""

    attention = Attention


class KeysAndValues:
    """Projections of a layer of the base."""

    def __init__(self, config: gemma4_text.Config, weights: Weights, layer: int) -> None:
        self.norm = RMSNorm(weights / "input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = gemma4_text.Attention(config, weights / "self_attn", layer)

    def __call__(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The layer's input [1, S, H] -> keys without RoPE and values, [1, S, kv_heads*size]."""
        return self.attention.keys_and_values(op, self.norm(op, x))


class Model:
    """Projection of embedding and hidden state, layers, norm, head, and a projection back."""

    def __init__(self, config: AssistantConfig, weights: Weights) -> None:
        text, base, there = config.text, config.base, weights / _BASE.rstrip(".")
        size, width = text.hidden_size, base.hidden_size
        self.config, self.weights = config, weights
        self.embed_tokens = Embedding(
            weights=there / _TABLE,
            vocab_size=base.vocab_size,
            size=width,
            scale=base.embedding_scale,
        )
        self.sources = [
            KeysAndValues(base, there / f"{_LAYER}.{source}", source) for source in config.sources
        ]
        self.pre_projection = Linear(weights / "pre_projection", 2 * width, size, bias=False)
        self.post_projection = Linear(weights / "post_projection", size, width, bias=False)
        self.layers = [
            Layer(text, weights / f"{_LAYER}.{index}", index)
            for index in range(text.num_hidden_layers)
        ]
        self.norm = RMSNorm(weights / "model.norm", size, text.rms_norm_eps)
        head = "lm_head" if weights.info("lm_head.weight") is not None else _TABLE
        weights.drop(f"{_TABLE}.weight")  # an assistant looks up no embeddings of its own
        if config.clusters is None:
            self.lm_head = Linear(weights / head, size, text.vocab_size, bias=False)
        else:
            self.rows = Embedding(weights=weights / head, vocab_size=text.vocab_size, size=size)
            self.ordering = _ordering(weights / "masked_embedding", text.vocab_size)

    def forward(self, op: Op, input_ids: ir.Value, hidden: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] and hidden taps [1, S, T*H] -> [1, S, D] before the norm."""
        taps = self.config.hidden_taps
        parts = op.outputs(len(taps), "Split", hidden, axis=-1, num_outputs=len(taps))
        self._share(op, state, dict(zip(taps, parts, strict=True)))
        both = op.Concat(state.embed(self.embed_tokens, input_ids), parts[-1], axis=-1)
        x = self.pre_projection(op, both)  # [1, S, D]
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return x

    def _share(self, op: Op, state: PassState, taps: dict[int, ir.Value]) -> None:
        """Compute keys and values of each cache, and RoPE tables of the queries."""
        text, base = self.config.text, self.config.base
        asking = op.Add(state.position_ids, op.constant(np.int64(1)))
        places = zip(text.attending_layers, self.config.sources, self.sources, strict=True)
        for layer, source, project in places:
            kind = text.kinds[layer]
            assert kind is not None and kind.rope is not None  # noqa: PT018
            with op.scope(f"base.{source}"):
                k, v = project(op, taps[source])
                k = state.rotate(layer, k, base.heads_of(source)[0])
                found = k, v, *state.tables_at(kind.rope, asking)
            for part, value in zip(_SHARED, found, strict=True):
                state.shared[_name(part, layer)] = value

    def head(self, op: Op, x: ir.Value) -> tuple[ir.Value, ...]:
        """X [1, R, D] -> logits [1, R, N], the next hidden taps [1, R, T*H], ids [1, R, N]."""
        normed = self.norm(op, x)
        others = (len(self.config.hidden_taps) - 1) * self.config.base.hidden_size
        # A drafted token has no inputs of the base's layers.
        pads = op.constant(np.array([0, 0, others, 0, 0, 0]))
        recycled = op.Pad(self.post_projection(op, normed), pads)
        clusters = self.config.clusters
        if clusters is None:
            return self.lm_head(op, normed), recycled
        ids = self._chosen(op, normed, clusters)
        rows = self.rows(op, ids)  # [1, R, N, D]
        logits = op.MatMul(rows, op.Unsqueeze(normed, op.constant([3])))
        return op.Squeeze(logits, op.constant([3])), recycled, ids

    def _chosen(self, op: Op, x: ir.Value, clusters: Clusters) -> ir.Value:
        """Ids of the tokens of the chosen clusters, int64 [1, R, N]."""
        shape = clusters.count, self.config.text.hidden_size
        stored = self.weights.take("masked_embedding.centroids.weight", shape, op.dtype)
        scores = call(op, router(), x, op.parameter(stored))
        _, chosen = op.outputs(2, "TopK", scores, op.constant([clusters.top_k]), axis=-1)
        first = op.Mul(op.Unsqueeze(chosen, op.constant([3])), op.constant(clusters.size))
        places = op.Add(first, op.constant(np.arange(clusters.size)))
        return target_names(op, op.Reshape(places, op.constant([0, 0, -1])), self.ordering)


def _ordering(weights: Weights, vocab_size: int) -> NDArray[np.int64]:
    """Token ids by cluster, int64 [vocabulary]; raises `BrokenArtifactError` for other ids."""
    info = weights.info("token_ordering")
    dtype = "I32" if info is not None and info.dtype == "I32" else "I64"
    ids = weights.array("token_ordering", (vocab_size,), dtype)().astype(np.int64)
    if not np.array_equal(np.sort(ids), np.arange(vocab_size)):
        raise BrokenArtifactError(
            "masked_embedding.token_ordering does not name each token once",
            hint="the checkpoint is damaged; fetch it again",
        )
    return ids


def build(
    draft: Checkpoint, base: Checkpoint, config: AssistantConfig, dtype: ir.DataType
) -> tuple[ir.Model, Op, Weights]:
    """The graph, with an EAGLE draft's inputs and outputs."""
    tensors = all_tensors(draft, base, config)
    weights = Weights(source=tensors, quantization=draft.quant_config or base.quant_config)
    model, op = record(Model(config, weights), config.decoder, None, dtype)
    refuse_leftovers(weights.unused(), "draft")
    return model, op, weights


def all_tensors(draft: Checkpoint, base: Checkpoint, config: AssistantConfig) -> DraftTensors:
    """The assistant's tensors, and those of the base after `_BASE`."""
    there = text_tower(base).checkpoint.tensors
    begins = [
        f"{_TABLE}.",
        *(f"{_LAYER}.{source}.{part}." for source in config.sources for part in _KV),
    ]
    borrowed: dict[str, tuple[TensorSource, str]] = {
        f"{_BASE}{name}": (there, name)
        for name in there.infos()
        if name.startswith(tuple(begins)) and not name.endswith(_KV_SCALES)
    }
    return DraftTensors(draft.tensors, borrowed)


def spec(draft: Checkpoint, config: AssistantConfig, op: Op) -> DraftSpec:
    """The assistant's spec for the manifest; parameters without the base's."""
    return DraftSpec(
        method=config.method,
        decoder=decoder_spec(config.decoder, config.method, [op], draft.tensors),
        draft_vocab_size=config.num_predicted,
        base_hidden_size=config.base.hidden_size,
        base_num_layers=config.base.num_hidden_layers,
        hidden_taps=config.hidden_taps,
        fuses=False,
    )

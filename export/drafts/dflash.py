"""Drafts that predict a whole block of tokens in one pass: DFlash, JetSpec, DSpark, DFlash2.

The block is the newest token and mask tokens after it. Its rows pass through transformer layers;
what they attend to besides each other is the text, whose keys and values every layer makes of the
base's fused features. So a row of the text costs no more than these, and its features are all that
the draft reads of it. DSpark adds to a token's logit what the token before makes of it, a product
of two low-rank tables; DFlash2 does so for the likeliest tokens only, by tables and its own row,
and has short convolutions around attention and MLP.

S rows of a pass, R rows of its block, D hidden size of the draft, K candidates of a row, of which
L are linked to the L of the row before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.graph_io import (
    HEAD_ROWS,
    ROWS,
)
from edgellm.core.graph_roles import BLOCK
from edgellm.core.model_spec import DraftSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.vlm import text_tower
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.draft_checkpoints.block_config import (
    CONFIDENCE,
    MARKOV,
    SELECTOR,
    BlockConfig,
    read_block,
)
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.draft_checkpoints.low_rank_head import (
    LowRankHead,
    num_candidates,
    with_factors,
)
from edgellm.export.draft_checkpoints.tensors import complete, read_target_ids
from edgellm.export.graph.bundle_files import decoder_spec, refuse_leftovers
from edgellm.export.graph.decoder_io import (
    PassInputs,
    cache_shape,
    declare,
    finish,
    typed,
)
from edgellm.export.graph.draft import build_fuse as build_fuse_graph
from edgellm.export.graph.draft import likeliest, target_names
from edgellm.export.graph.draft_head import DraftHead
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.blocks import Block, Convolve
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama, qwen3
from edgellm.export.onnx.builder import Op

TITLE, ROLE = "a draft of blocks", BLOCK
FILES: tuple[str, ...] = ()
_WITNESSES = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"}


def own_names(names: Iterable[str]) -> list[str]:
    """All names, if they are a block drafter's, which is never in a model's folder."""
    names = list(names)
    return names if {*names} >= _WITNESSES else []


def read(checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()) -> BlockConfig:
    """See `read_block`."""
    return read_block(checkpoint, base, ignored)


class Fuse:
    """Hidden taps [1, S, T*H] to the context [1, S, D], the layers' source of keys and values."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        size = config.decoder.hidden_size
        width = len(config.hidden_taps) * config.base_hidden_size
        self.fc = Linear(weights / "fc", width, size, bias=config.fc_bias)
        self.hidden_norm = RMSNorm(weights / "hidden_norm", size, config.decoder.rms_norm_eps)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the graph."""
        return self.hidden_norm(op, self.fc(op, x))


class Layer:
    """A transformer layer over the block, which also attends to the text."""

    def __init__(self, config: BlockConfig, weights: Weights) -> None:
        decoder = config.draft.decoder
        size, epsilon = decoder.hidden_size, decoder.rms_norm_eps
        attention = qwen3.Attention if config.draft.qk_norm else llama.Attention
        self.input_layernorm = RMSNorm(weights / "input_layernorm", size, epsilon)
        self.self_attn = attention(decoder, weights / "self_attn")
        self.post_attention_layernorm = RMSNorm(weights / "post_attention_layernorm", size, epsilon)
        self.mlp = GatedMLP(
            weights=weights / "mlp",
            size=size,
            inner_size=decoder.intermediate_size,
            bias=decoder.mlp_bias,
        )
        self.convolutions = [
            Convolve(config.convolution, weights / name, size)
            for name in (("attention_conv", "mlp_conv") if config.convolution else ())
            if config.convolution is not None
        ]

    def forward(
        self, op: Op, x: ir.Value, context: ir.Value, block: Block, state: PassState, layer: int
    ) -> ir.Value:
        """X [1, R, D] and the text's context [1, S, D] -> [1, R, D]."""

        def attend(rows: ir.Value) -> ir.Value:
            return self._attend(op, block.among(context, rows), block, state, layer)

        x = op.Add(x, self._around(op, 0, self.input_layernorm(op, x), attend, block))
        read = self.post_attention_layernorm(op, x)
        return op.Add(x, self._around(op, 1, read, lambda rows: self.mlp(op, rows), block))

    def _attend(
        self, op: Op, rows: ir.Value, block: Block, state: PassState, layer: int
    ) -> ir.Value:
        attention = self.self_attn
        q, k, v = (
            each(op, rows) for each in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = attention.normalize(op, q, k)
        return attention.o_proj(op, block.of(attention.attend(op, state, layer, q, k, v)))

    def _around(
        self, op: Op, index: int, x: ir.Value, part: Callable[[ir.Value], ir.Value], block: Block
    ) -> ir.Value:
        """`part` of x, between the convolutions if any."""
        if not self.convolutions:
            return part(x)
        convolve = self.convolutions[index]
        first, second = convolve.kernels(op, x)
        return convolve(op, part(convolve(op, x, first, block)), second, block)


class Model:
    """Embedding, layers, norm and head, and tables of scores by previous candidate."""

    def __init__(self, config: BlockConfig, weights: Weights) -> None:
        draft, decoder = config.draft, config.draft.decoder
        size = decoder.hidden_size
        self.config, self.weights = config, weights
        self.embed_tokens = Embedding(
            weights=weights / "embed_tokens", vocab_size=decoder.vocab_size, size=size
        )
        self.layers = [
            Layer(config, weights / f"layers.{index}") for index in range(decoder.num_hidden_layers)
        ]
        self.norm = RMSNorm(weights / "norm", size, decoder.rms_norm_eps)
        self.lm_head = DraftHead(
            weights=weights, size=size, count=draft.draft_vocab_size, low_rank=draft.low_rank
        )

    def forward(self, op: Op, context: ir.Value, block: Block, state: PassState) -> ir.Value:
        """The text's context [1, S, D] -> normalized hidden states of the block [1, R, D]."""
        x = self.embed_tokens(op, block.ids)
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, context, block, state, index)
        return self.norm(op, x)

    def scores(self, op: Op, x: ir.Value, before: ir.Value, indices: ir.Value) -> ir.Value:
        """Scores of candidates by previous token, float32 [1, R, L, L].

        Args:
            op: the recorder.
            x: normalized hidden states [1, R, D].
            before: possible previous tokens of each position, ids of the base, int64 [1, R, L].
            indices: candidates of the position, ids of the draft, int64 [1, R, L].
        """
        draft, is_markov = self.config.draft, self.config.kind == "dspark"
        sizes = draft.decoder.vocab_size, draft.draft_vocab_size
        names = ("predecessor_codebook", "successor_codebook")
        weights = self.weights / (MARKOV if is_markov else SELECTOR)
        if is_markov:
            names = ("markov_w1.weight", "markov_w2.weight")
        left, right = (
            self._looked_up(op, weights, name, size, ids)
            for name, size, ids in zip(names, sizes, (before, indices), strict=True)
        )
        if not is_markov:
            width = draft.decoder.hidden_size
            projection = Linear(weights / "hidden_projection", width, self.config.rank, bias=False)
            left = op.Mul(left, op.Unsqueeze(projection(op, x), op.constant([2])))
        product = op.MatMul(left, op.Transpose(right, perm=[0, 1, 3, 2]))
        return op.Cast(product, to=int(ir.DataType.FLOAT))

    def _looked_up(
        self, op: Op, weights: Weights, name: str, count: int, ids: ir.Value
    ) -> ir.Value:
        stored = weights.take(name, (count, self.config.rank), op.dtype)
        rows = op.Gather(op.parameter(stored), ids, axis=0)
        return rows if stored.dtype == op.dtype else op.Cast(rows, to=int(op.dtype))


def build(
    draft: Checkpoint, base: Checkpoint, config: BlockConfig, dtype: ir.DataType
) -> tuple[ir.Model, Op, Weights]:
    """The graph of a pass, recorded without reading weight data.

    Tokens at LOGITS_INDEX are the block. Others are text: their DRAFT_HIDDEN only updates the
    caches.
    """
    tensors = complete(draft.tensors, text_tower(base).checkpoint.tensors, config.draft)
    tensors = with_factors(tensors, "lm_head.weight", config.draft.low_rank)
    weights = Weights(source=tensors, quantization=draft.quant_config or base.quant_config)
    decoder = config.draft.decoder
    target_ids = read_target_ids(weights, config.draft, decoder)
    op = Op(dtype)
    inputs = PassInputs.declare(decoder, dtype, mask_columns="mask_columns")
    hidden = declare(graph_io.DRAFT_HIDDEN, dtype, [1, ROWS, decoder.hidden_size])
    top_k = declare(graph_io.TOP_K, ir.DataType.INT64, [1])
    state = inputs.begin(op, decoder)
    rows = inputs.logits_index
    block = Block(
        op=op,
        ids=op.Gather(inputs.input_ids, rows, axis=1),
        rows=rows,
        mask_id=config.block.mask_token_id,
    )
    model = Model(config, weights)
    x = model.forward(op, hidden, block, state)
    with op.scope("head"):
        found = _candidates(op, model, x, block, top_k, target_ids)
    caches = [typed(value, dtype, cache_shape(decoder)) for value in state.present.values()]
    own = [
        inputs.input_ids,
        hidden,
        inputs.position_ids,
        inputs.write_index,
        inputs.tree_mask,
        rows,
        top_k,
    ]
    return finish(op, "block", [*own, *inputs.past.values()], [*found, *caches]), op, weights


def _candidates(
    op: Op,
    model: Model,
    x: ir.Value,
    block: Block,
    top_k: ir.Value,
    target_ids: NDArray[np.int64] | None,
) -> list[ir.Value]:
    """Ids and log-probabilities [1, R, K], and the links [1, R, L, L] if any."""
    logits, *retrieved = model.lm_head(op, x)
    log_probs, indices = likeliest(op, logits, top_k)
    if retrieved:
        indices = target_names(op, indices, retrieved[0])
    ids = target_names(op, indices, target_ids)
    shape = [1, HEAD_ROWS, graph_io.CANDIDATES]
    outputs = [
        typed(ids, ir.DataType.INT64, shape, graph_io.CANDIDATE_IDS),
        typed(log_probs, ir.DataType.FLOAT, shape, graph_io.CANDIDATE_LOG_PROBS),
    ]
    if not model.config.block.links:
        return outputs
    zero, axis = op.constant([0]), op.constant([2])
    maximum = op.constant([graph_io.MAX_LINKED])
    chosen, places, likely = (
        op.Slice(each, zero, maximum, axis) for each in (ids, indices, log_probs)
    )
    # The previous token is known if it is the newest; else it is one of the candidates there.
    given, known = block.ids, op.Not(block.is_mask)
    if not model.config.block.from_newest:
        given, known = block.before(given), block.before(op.Cast(known, to=int(ir.DataType.INT64)))
        known = op.Cast(known, to=int(ir.DataType.BOOL))
    before = op.Where(op.Unsqueeze(known, axis), op.Unsqueeze(given, axis), block.before(chosen))
    scores = op.Add(model.scores(op, x, before, places), op.Unsqueeze(likely, axis))
    links = _normalized(op, scores, likely)
    linked = [1, HEAD_ROWS, graph_io.LINKED, graph_io.LINKED]
    return [*outputs, typed(links, ir.DataType.FLOAT, linked, graph_io.CANDIDATE_LINKS)]


def _normalized(op: Op, scores: ir.Value, likely: ir.Value) -> ir.Value:
    """Scores [1, R, L, L] as log-probabilities; other tokens keep their probability mass."""
    chances = op.ReduceSum(op.Exp(likely), op.constant([2]), keepdims=1)  # [1, R, 1]
    rest = op.Max(op.Sub(op.constant(np.float32(1)), chances), op.constant(np.float32(1e-9)))
    column = op.Unsqueeze(op.Log(rest), op.constant([3]))  # [1, R, 1, 1]
    first = op.Slice(scores, op.constant([0]), op.constant([1]), op.constant([3]))
    column = op.Add(op.Mul(first, op.constant(np.float32(0))), column)  # [1, R, L, 1]
    all_of = op.LogSoftmax(op.Concat(scores, column, axis=3), axis=-1)
    return op.Slice(all_of, op.constant([0]), op.constant([-1]), op.constant([3]))


def with_low_rank(config: BlockConfig, low_rank: LowRankHead) -> BlockConfig:
    """The same with a low-rank head."""
    return replace(config, draft=replace(config.draft, low_rank=low_rank))


def build_fuse(config: BlockConfig, weights: Weights, dtype: ir.DataType) -> tuple[ir.Model, Op]:
    """The graph of `Fuse`; after it nothing of the checkpoint may be left.

    Confidence heads are not needed: the runtime measures acceptance for all drafts.
    """
    built = build_fuse_graph(config.draft, weights, dtype)
    left = [name for name in weights.unused() if not name.startswith(f"{CONFIDENCE}.")]
    refuse_leftovers(left, "draft")
    return built


def spec(draft: Checkpoint, config: BlockConfig, op: Op) -> DraftSpec:
    """The draft's spec for the manifest."""
    facts, size = config.draft, config.draft.decoder.hidden_size
    decoder = decoder_spec(facts.decoder, config.kind, [op], draft.tensors)
    fused = size * (len(facts.hidden_taps) * facts.base_hidden_size + 1)
    return DraftSpec(
        method=config.kind,
        decoder=replace(decoder, num_parameters=decoder.num_parameters + fused),
        draft_vocab_size=facts.draft_vocab_size,
        base_hidden_size=facts.base_hidden_size,
        base_num_layers=facts.base_num_layers,
        hidden_taps=facts.hidden_taps,
        fuses=True,
        block=config.block,
        num_candidates=num_candidates(facts.low_rank),
    )

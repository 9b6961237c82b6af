"""Multi-token prediction (MTP) layer of a base.

`mtp.*` of Qwen3-Next and Qwen3.5, `model.mtp_*` of ERNIE 4.5. As EAGLE-1, it continues the feature
that the base gives to its head, the next one from a token's embedding and the feature before it.
Both are normed before they are joined; the layer is one of the base's that attend, with experts
where they have some; what it gives is normed once more, for the head, which is the base's, and for
the step after. vLLM 0.32 (`qwen3_5_mtp.py`) reads Qwen's so.

ERNIE's was trained (PaddleFormers 0.4, `ernie4_5_moe/modeling.py`) with the stream before the
base's final norm, and that norm stands before the head here, too. Servers read it in other ways
(FastDeploy norms the feature, vLLM and SGLang leave the norm before the head out): what was trained
counts. A norm takes no notice of its input's size, so that the normed feature divided by the norm's
weight serves as well.

S rows of a pass, R rows of the head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_roles import DRAFT
from edgellm.core.model_spec import DraftSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed, TensorSource
from edgellm.export.checkpoints.residual_rotation import refuse_rotated
from edgellm.export.checkpoints.vlm import text_tower
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.draft_checkpoints.lm_head_pruning import HeadRows, commonest
from edgellm.export.draft_checkpoints.low_rank_head import (
    LowRankHead,
    num_candidates,
    with_factors,
)
from edgellm.export.draft_checkpoints.tensors import DraftTensors
from edgellm.export.graph.architecture import (
    ExportOptions,
    end_ids,
    read_architecture,
)
from edgellm.export.graph.bundle_files import decoder_spec, refuse_leftovers
from edgellm.export.graph.draft import record
from edgellm.export.graph.draft_head import DraftHead
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.models import ernie4_5_moe, qwen2_moe, qwen3_5_text
from edgellm.export.onnx.builder import Op

TITLE, ROLE = "multi-token prediction", DRAFT
FILES = ()  # its tensors are in the model's files
_TABLE, _HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Tensor names of the parts."""

    prefix: str  # of all tensors that are not the model's
    embedding_norm: str
    hidden_norm: str
    fc: str
    layer: str
    norm: str

    @property
    def shares_norm(self) -> bool:
        """Whether the last norm is the base's; hidden states are then from before this norm."""
        return not self.norm.startswith(self.prefix)


_QWEN = Names(
    prefix="mtp.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    fc="mtp.fc",
    layer="mtp.layers.0",
    norm="mtp.norm",
)
_ERNIE = Names(
    prefix="model.mtp_",
    embedding_norm="model.mtp_emb_norm.0",
    hidden_norm="model.mtp_hidden_norm.0",
    fc="model.mtp_linear_proj.0",
    layer="model.mtp_block.0",
    norm="model.norm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Facts of the layer, from the config of its model."""

    architecture: ModuleType  # of the model
    decoder: DecoderConfig  # the layer alone
    base_num_layers: int
    names: Names = _QWEN
    target_ids: tuple[int, ...] | None = None  # that it predicts, ascending; None: all
    low_rank: LowRankHead | None = None
    method: str = "mtp"
    taps_meaning: str = "multi-token prediction: output of the final norm"

    @property
    def exporter(self) -> str:
        """See `drafts.OwnConfig`."""
        return "Qwen" if self.names is _QWEN else "ERNIE"

    @property
    def hidden_taps(self) -> tuple[int, ...]:
        """The output of the base's final norm, see `model_spec.DraftSpec`."""
        return (self.base_num_layers,)

    @property
    def num_predicted(self) -> int:
        """Tokens that it may propose."""
        return self.decoder.vocab_size if self.target_ids is None else len(self.target_ids)


def own_names(names: Iterable[str]) -> list[str]:
    """Names of its tensors, among a model's."""
    return [name for name in names if name.startswith((_QWEN.prefix, _ERNIE.prefix))]


def read(checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()) -> MtpConfig:
    """Read the facts from the config of the layer's model.

    Raises:
        UnsupportedModelError: an unsupported architecture, several layers, an own embedding, or
            other sizes than the base's.
    """
    refuse_rotated(checkpoint, TITLE)
    options = ExportOptions(ignore_config_keys=ignored)
    tower, architecture, config = read_architecture(checkpoint, options)
    if not issubclass(architecture.Model, qwen3_5_text.Model | ernie4_5_moe.Model):
        raise UnsupportedModelError(
            f"{checkpoint.label}: {TITLE} of {tower.config['model_type']} is not supported",
            hint="supported: those of Qwen3-Next, Qwen3.5 and ERNIE 4.5 with experts",
        )
    reader = ConfigReader(tower.config)
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        reader.expect(key, 1)
    reader.expect("mtp_use_dedicated_embeddings", False)
    _check_against(base, config)
    if isinstance(config, ernie4_5_moe.Config):
        own = replace(config, num_hidden_layers=1, layer_kinds=config.layer_kinds[:1])
        return MtpConfig(
            architecture=architecture,
            decoder=own,
            base_num_layers=base.num_hidden_layers,
            names=_ERNIE,
        )
    assert isinstance(config, qwen2_moe.Config)
    attends = next(kind for kind in config.layer_kinds if kind is not None)
    has_experts = any(".experts." in name for name in own_names(checkpoint.tensors.infos()))
    layer = replace(
        config,
        num_hidden_layers=1,
        layer_kinds=(attends,),
        is_recurrent=False,
        every=1,
        dense_layers=() if has_experts else (0,),
    )
    return MtpConfig(
        architecture=architecture, decoder=layer, base_num_layers=base.num_hidden_layers
    )


def with_vocabulary(config: MtpConfig, base: Checkpoint, size: int) -> MtpConfig:
    """The same that predicts only `size` of the base's tokens; raises `UnsupportedModelError`."""
    ids = commonest(size, config.decoder.vocab_size, end_ids(base))
    return replace(config, target_ids=tuple(ids.tolist()))


def with_low_rank(config: MtpConfig, low_rank: LowRankHead) -> MtpConfig:
    """The same with a low-rank head."""
    return replace(config, low_rank=low_rank)


def _check_against(base: DecoderConfig, own: DecoderConfig) -> None:
    for what, found, wanted in (
        ("architecture", type(own).__module__, type(base).__module__),
        ("layers", own.num_hidden_layers, base.num_hidden_layers),
        ("vocabulary", own.vocab_size, base.vocab_size),
        ("hidden size", own.hidden_size, base.hidden_size),
    ):
        if found != wanted:
            raise UnsupportedModelError(
                f"the draft is for a base of {what} {found}, this base has {wanted}",
                hint="give the base that it came with, or a version of it",
            )


class Model:
    """Embedding, two norms, fc, the layer, its norm, and the base's lm_head."""

    def __init__(self, config: MtpConfig, weights: Weights) -> None:
        decoder, model, names = config.decoder, config.architecture.Model, config.names
        size, epsilon = decoder.hidden_size, decoder.rms_norm_eps
        self.embed_tokens = Embedding(
            weights=weights / _TABLE, vocab_size=decoder.vocab_size, size=size
        )
        self.divisor = _divisor(weights, names.norm, size) if names.shares_norm else None
        self.embedding_norm, self.hidden_norm, self.norm = (
            model.final_norm(weights / name, size, epsilon)
            for name in (names.embedding_norm, names.hidden_norm, names.norm)
        )
        self.fc = Linear(weights / names.fc, 2 * size, size, bias=False)
        _, attending = getattr(model, "layers_of", (None, model.layer))
        self.layer = attending(decoder, weights / names.layer)
        has_head = any(name.startswith(_HEAD) for name in weights.unused())
        self.lm_head = DraftHead(
            weights=weights,
            size=size,
            count=config.num_predicted,
            low_rank=config.low_rank,
            name=_HEAD if has_head else _TABLE,
        )

    def forward(self, op: Op, input_ids: ir.Value, hidden: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] and hidden states [1, S, H] -> [1, S, H] before the norm."""
        embedded = self.embedding_norm(op, state.embed(self.embed_tokens, input_ids))
        if self.divisor is not None:
            hidden = op.Div(hidden, op.constant(self.divisor.astype(op.dtype.numpy())))
        both = op.Concat(embedded, self.hidden_norm(op, hidden), axis=-1)  # [1, S, 2H]
        x = self.fc(op, both)
        with op.scope("layers.0"):
            return self.layer.forward(op, x, state, 0)

    def head(self, op: Op, x: ir.Value) -> tuple[ir.Value, ...]:
        """X [1, R, H] -> logits, the next hidden states [1, R, H], and ids of `DraftHead`."""
        normed = self.norm(op, x)
        logits, *ids = self.lm_head(op, normed)
        return logits, normed, *ids


def _divisor(weights: Weights, name: str, size: int) -> NDArray[Any]:
    """The weight of the base's final norm, [H]; raises `UnsupportedModelError` for a zero."""
    info = (weights / name).info("weight")
    values = (weights / name).array("weight", (size,), "F32" if info is None else info.dtype)()
    if not np.all(values):
        raise UnsupportedModelError(
            f"{name}.weight has zeros: its inputs, which {TITLE} reads, cannot be computed from "
            "its outputs"
        )
    return values


def build(
    draft: Checkpoint, base: Checkpoint, config: MtpConfig, dtype: ir.DataType
) -> tuple[ir.Model, Op, Weights]:
    """The graph, with an EAGLE draft's inputs and outputs."""
    shared = all_tensors(draft, base, config, dtype)
    has_head = any(name.startswith(_HEAD) for name in shared.infos())
    name = f"{_HEAD if has_head else _TABLE}.weight"
    tensors = with_factors(shared, name, config.low_rank)
    weights = Weights(source=tensors, quantization=draft.quant_config or base.quant_config)
    ids = None if config.target_ids is None else np.array(config.target_ids)
    model, op = record(Model(config, weights), config.decoder, ids, dtype)
    refuse_leftovers(weights.unused(), "draft")
    return model, op, weights


def all_tensors(
    draft: Checkpoint, base: Checkpoint, config: MtpConfig, dtype: ir.DataType = ir.DataType.FLOAT
) -> DraftTensors:
    """Tensors of the layer, and the base's embedding and head."""
    tower = text_tower(base).checkpoint
    there = _stored(tower, dtype)
    parts = (_TABLE, _HEAD, *([config.names.norm] if config.names.shares_norm else ()))
    begins = tuple(f"{part}." for part in parts)
    shared = [name for name in there.infos() if name.startswith(begins)]
    borrowed: dict[str, tuple[TensorSource, str]] = {name: (there, name) for name in shared}
    if config.target_ids is not None:
        head, ids = f"{_HEAD}.weight", np.array(config.target_ids)
        name = head if any(name.startswith(_HEAD) for name in shared) else f"{_TABLE}.weight"
        borrowed[head] = HeadRows(source=tower.tensors, name=name, rows=ids, head=head), head
    return DraftTensors(own_tensors(_stored(draft, dtype)), borrowed)


def _stored(checkpoint: Checkpoint, dtype: ir.DataType) -> TensorSource:
    """Keep a GGUF file's blocks, unless float32 is requested, as for a base."""
    blocks = checkpoint.blocks if dtype == ir.DataType.FLOAT16 else None
    return checkpoint.tensors if blocks is None else blocks


def own_tensors(tensors: TensorSource) -> Renamed:
    """Tensors of the layer only."""
    return Renamed(tensors, {name: name for name in own_names(tensors.infos())})


def spec(draft: Checkpoint, config: MtpConfig, op: Op) -> DraftSpec:
    """The layer's spec for the manifest; parameters without the base's."""
    decoder = config.decoder
    return DraftSpec(
        method=config.method,
        decoder=decoder_spec(decoder, config.method, [op], own_tensors(draft.tensors)),
        draft_vocab_size=config.num_predicted,
        base_hidden_size=decoder.hidden_size,
        base_num_layers=config.base_num_layers,
        hidden_taps=config.hidden_taps,
        fuses=False,
        num_candidates=num_candidates(config.low_rank),
    )

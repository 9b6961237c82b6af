"""Medusa (arXiv 2401.10774): heads over the base's hidden state; head d predicts d tokens further.

A head is residual blocks, `x + swish(linear(x))`, and a linear layer over the vocabulary:
`{head}.{block}.linear.weight`, `{head}.{block}.linear.bias`, then `{head}.{blocks}.weight`. Names
and shapes determine all sizes. The Medusa project uses these names, or the prefix `medusa_head.`
in a whole model; NVIDIA Model-Optimizer uses `medusa_heads.`. H hidden size of the base, V
vocabulary, N heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.graph_roles import HEADS
from edgellm.core.model_spec import DecoderSpec, DraftSpec, KVCacheSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.bundle_files import count_parameters, refuse_leftovers
from edgellm.export.graph.decoder_io import declare, finish
from edgellm.export.graph.draft import candidate_outputs
from edgellm.export.layers.linear import Linear
from edgellm.export.onnx.builder import Op

TITLE, ROLE = "Medusa heads", HEADS
FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # possibly in a model's folder
_NAME = re.compile(r"(medusa_heads?\.|)(\d+)\.(\d+)\.(weight|linear\.weight|linear\.bias)")
_PROJECTS = {"": "FasterDecoding", "medusa_head.": "FasterDecoding", "medusa_heads.": "ModelOpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Facts of Medusa heads, and of the base that they were trained for."""

    exporter: str
    prefix: str  # of all tensors, with its dot
    num_heads: int
    num_blocks: int  # residual blocks of a head
    hidden_size: int  # of the base
    vocab_size: int
    base_num_layers: int
    max_positions: int  # of the base
    taps_meaning: str
    method: str = "medusa"

    @property
    def hidden_taps(self) -> tuple[int, ...]:
        """The output of the base's final norm, see `model_spec.DraftSpec`."""
        return (self.base_num_layers,)


def own_names(names: Iterable[str]) -> list[str]:
    """Names of the heads' tensors, possibly among a model's."""
    return [name for name in names if _NAME.fullmatch(name)]


def read(
    checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()
) -> MedusaConfig:
    """Read the heads' config and check it against the base.

    Raises:
        UnsupportedModelError: config and tensors contradict each other, or another base.
        BrokenArtifactError: heads or blocks are missing.
    """
    infos = checkpoint.tensors.infos()
    prefix, num_heads, num_blocks = _sizes(own_names(infos))
    reader = ConfigReader(checkpoint.config)
    stated = reader.optional("medusa_num_heads", int)
    reader.expect("medusa_num_layers", num_blocks)
    reader.expect("version", "1", "2")
    reader.expect("hidden_size", base.hidden_size)
    reader.expect("vocab_size", base.vocab_size)
    if "num_hidden_layers" not in checkpoint.config:  # a whole model's config is read with the base
        reader.finish(ignored)
    # Public configs state fewer heads than their files have; more would be missing.
    if stated is not None and stated > num_heads:
        raise UnsupportedModelError(
            f"config.json: medusa_num_heads = {stated}, but the weights hold {num_heads} heads",
            hint="the download is incomplete, or the config is of other weights",
        )
    _check_against(base, infos[f"{prefix}0.{num_blocks}.weight"].shape)
    meaning = "Medusa: output of the final norm"
    if stated is not None and stated < num_heads:
        meaning += f"; all {num_heads} heads that the weights hold, config.json says {stated}"
    return MedusaConfig(
        exporter=_PROJECTS[prefix],
        prefix=prefix,
        num_heads=num_heads,
        num_blocks=num_blocks,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        base_num_layers=base.num_hidden_layers,
        max_positions=base.max_position_embeddings,
        taps_meaning=meaning,
    )


def _sizes(names: list[str]) -> tuple[str, int, int]:
    """Prefix, heads and blocks of a head."""
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    prefixes = {match[1] for match in matches}
    if len(prefixes) > 1:
        raise UnsupportedModelError(
            f"Medusa heads have several prefixes: {', '.join(sorted(map(repr, prefixes)))}"
        )
    outputs = {int(match[2]): int(match[3]) for match in matches if match[4] == "weight"}
    heads = {int(match[2]) for match in matches}
    if heads != set(range(len(heads))) or outputs.keys() != heads:
        raise BrokenArtifactError(
            f"of {1 + max(heads)} Medusa heads, {len(outputs.keys() & heads)} have an output layer",
            hint="every head needs {head}.{blocks}.weight of [vocabulary, hidden size]",
        )
    if len(set(outputs.values())) > 1:
        raise UnsupportedModelError("the Medusa heads have different numbers of blocks")
    return prefixes.pop(), len(heads), outputs[0]


def _check_against(base: DecoderConfig, shape: tuple[int, ...]) -> None:
    """Reject heads that were trained for another base."""
    hint = "give the base that the heads were trained for"
    for what, found, wanted in (
        ("vocabulary", shape[0], base.vocab_size),
        ("hidden size", shape[-1], base.hidden_size),
    ):
        if found != wanted:
            raise UnsupportedModelError(
                f"the Medusa heads are for a base of {what} {found}, this base has {wanted}",
                hint=hint,
            )


class Head:
    """A Medusa head."""

    def __init__(self, config: MedusaConfig, weights: Weights) -> None:
        size, blocks = config.hidden_size, range(config.num_blocks)
        self.blocks = [
            Linear(weights / f"{block}.linear", size, size, bias=True) for block in blocks
        ]
        output = weights / str(config.num_blocks)
        self.output = Linear(output, size, config.vocab_size, bias=False)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, 1, H] -> logits [1, 1, V]."""
        for linear in self.blocks:
            x = op.Add(x, op.Swish(linear(op, x)))
        return self.output(op, x)


class Model:
    """All heads, with the same input."""

    def __init__(self, config: MedusaConfig, weights: Weights) -> None:
        name = config.prefix
        self.heads = [Head(config, weights / f"{name}{index}") for index in range(config.num_heads)]

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, 1, H] -> logits [1, N, V]."""
        return op.Concat(*(head(op, x) for head in self.heads), axis=1)


def build(
    draft: Checkpoint, base: Checkpoint, config: MedusaConfig, dtype: ir.DataType
) -> tuple[ir.Model, Op, Weights]:
    """The graph from HIDDEN_TAPS [1, 1, H] to candidates [1, N, K], a row for each head."""
    op, weights = Op(dtype), Weights(source=draft.tensors, quantization=draft.quant_config)
    feature = declare(graph_io.HIDDEN_TAPS, dtype, [1, 1, config.hidden_size])
    top_k = declare(graph_io.TOP_K, ir.DataType.INT64, [1])
    logits = Model(config, weights)(op, feature)
    outputs = candidate_outputs(op, logits, top_k, None, config.num_heads)
    model = finish(op, "heads", [feature, top_k], outputs)
    left = weights.unused()
    if len(own_names(draft.tensors.infos())) < len(draft.tensors.infos()):
        # In a model's folder. Heads are trained with its weights, which may differ from the base's.
        if draft.label != base.label:
            raise UnsupportedModelError(
                f"{draft.label} holds more than {TITLE}: {left[0]}",
                hint="if it is the model that they were trained with, export the base from the "
                "same folder, and give it as --base_model_dir, too",
            )
        left = own_names(left)
    refuse_leftovers(left, "draft")
    return model, op, weights


def spec(draft: Checkpoint, config: MedusaConfig, op: Op) -> DraftSpec:
    """The heads' spec for the manifest."""
    decoder = DecoderSpec(
        model_type=config.method,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_positions=config.max_positions,
        num_parameters=count_parameters([op], draft.tensors),
        kv=KVCacheSpec(num_layers=0, num_kv_heads=0, head_dim=0, dtype=op.dtype.numpy().name),
    )
    return DraftSpec(
        method=config.method,
        decoder=decoder,
        draft_vocab_size=config.vocab_size,
        base_hidden_size=config.hidden_size,
        base_num_layers=config.base_num_layers,
        hidden_taps=config.hidden_taps,
        fuses=False,
        num_heads=config.num_heads,
    )

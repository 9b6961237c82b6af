"""Writing the bundle of a draft: its graphs, weights and manifest; all or nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgellm.artifact import check_output, publish, temporary_folder
from edgellm.contract import EdgeLLMError, UnsupportedModelError
from edgellm.export.bundle import ExportOptions, read_architecture
from edgellm.export.checkpoint import Checkpoint, TensorSource
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.draft_config import DraftConfig, read_draft
from edgellm.export.draft_decoder import build_draft, build_fuse, build_heads
from edgellm.export.draft_tensors import complete, read_target_ids
from edgellm.export.graph_files import (
    DTYPES,
    Graphs,
    Progress,
    count_parameters,
    decoder_spec,
    file_names,
    refuse_leftovers,
    versions,
    write_graphs,
)
from edgellm.export.medusa_config import MedusaConfig, head_names, is_medusa
from edgellm.export.op import OPSET, Op
from edgellm.export.stated import judge
from edgellm.export.weights import Weights
from edgellm.manifest import DRAFT_BUNDLE, Bundle, DecoderSpec, DraftSpec, GraphSpec, KVCacheSpec
from edgellm.roles import DRAFT, FUSE, HEADS

_MODEL, _FUSE = "model", "fuse"


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What the user chose."""

    dtype: str = "fp16"
    ignore_config_keys: tuple[str, ...] = ()


def export_draft(
    draft: Checkpoint,
    base: Checkpoint,
    output: Path,
    options: DraftOptions,
    progress: Progress | None = None,
) -> Bundle:
    """Export a draft to `output`, which afterwards holds a whole bundle or what it held before.

    Args:
        draft: checkpoint of an EAGLE-1, 2 or 3 draft or of Medusa heads in any public layout.
        base: the model that it drafts for; gives its sizes, the embedding, perhaps the head.
        output: the bundle's folder.
        options: what the user chose.
        progress: told the bytes written and the bytes in all.

    Raises:
        UnsupportedModelError: a layout that is not understood, or a draft for another base.
        BrokenArtifactError: missing, superfluous, damaged or contradicting tensors.
        EdgeLLMError: one of the folders holds something else, or `output` cannot be written.
    """
    check_output(output, DRAFT_BUNDLE, file_names((_MODEL, _FUSE)))
    config, tensors, graphs, layouts = _build(draft, base, options)
    ops = [op for _, op in graphs.values()]
    quantization, contradiction = judge(draft, layouts, options.ignore_config_keys)
    with temporary_folder(output) as folder:
        records = write_graphs(folder, graphs, progress)
        main = HEADS if isinstance(config, MedusaConfig) else DRAFT
        manifest = Bundle(
            kind=DRAFT_BUNDLE,
            spec=_spec(config, ops, tensors),
            graphs={main if name == _MODEL else FUSE: GraphSpec(f"{name}.onnx") for name in graphs},
            dtype=DTYPES[options.dtype].numpy().name,
            quantization=quantization,
            opset=OPSET,
            options=dataclasses.asdict(options),
            provenance={**_provenance(draft, base, config), **contradiction},
            files=records,
        )
        return publish(folder, output, manifest)


def understand_draft(
    draft: Checkpoint, base: Checkpoint, options: DraftOptions
) -> DraftConfig | MedusaConfig:
    """The facts of a draft that `export_draft` takes; stops where it would, reads no weights.

    Raises:
        EdgeLLMError: as `export_draft`.
    """
    return _build(draft, base, options)[0]


def _build(
    draft: Checkpoint, base: Checkpoint, options: DraftOptions
) -> tuple[DraftConfig | MedusaConfig, TensorSource, Graphs, set[str]]:
    """Check both checkpoints and record the graphs; nothing is written yet.

    Returns:
        The draft's facts, its tensors with those of the base, the graphs, and the layouts of its
        quantized layers.
    """
    names = base.tensors.infos()
    if "fc.weight" in names or (is_medusa(base) and len(head_names(names)) == len(names)):
        raise EdgeLLMError(
            f"{base.label} is a draft, not a base",
            hint="give the model that it drafts for as --base_model_dir",
        )
    keys = options.ignore_config_keys
    tower, _, base_config = read_architecture(base, ExportOptions(ignore_config_keys=keys))
    config = read_draft(draft, base_config, keys)
    dtype = DTYPES[options.dtype]
    if isinstance(config, MedusaConfig):
        heads = Weights(draft.tensors, draft.quant_config)
        graphs: Graphs = {_MODEL: _build_heads(draft, base, config, heads, dtype)}
        return config, draft.tensors, graphs, heads.layouts
    config = _seeing(config, base_config)
    tensors = complete(draft.tensors, tower.tensors, config)
    weights = Weights(tensors, draft.quant_config or base.quant_config)
    target_ids = read_target_ids(weights, config, base_config)
    graphs = {_MODEL: build_draft(config, weights, target_ids, dtype)}
    if config.fuses:
        graphs[_FUSE] = build_fuse(config, weights, dtype)
    refuse_leftovers(weights.unused(), "draft")
    return config, tensors, graphs, weights.layouts


def _build_heads(
    draft: Checkpoint,
    base: Checkpoint,
    config: MedusaConfig,
    weights: Weights,
    dtype: ir.DataType,
) -> tuple[ir.Model, Op]:
    graph = build_heads(config, weights, dtype)
    left = weights.unused()
    if len(head_names(draft.tensors.infos())) < len(draft.tensors.infos()):
        # Beside a model. Heads are trained with its weights, which may differ from the base's.
        if draft.label != base.label:
            raise UnsupportedModelError(
                f"{draft.label} holds more than Medusa heads: {left[0]}",
                hint="if it is the model that they were trained with, export the base from the "
                "same folder, and give it as --base_model_dir, too",
            )
        left = head_names(left)
    refuse_leftovers(left, "draft")
    return graph


def _spec(config: DraftConfig | MedusaConfig, ops: list[Op], tensors: TensorSource) -> DraftSpec:
    if isinstance(config, MedusaConfig):
        return _heads_spec(config, ops[0], tensors)
    return DraftSpec(
        method=config.method,
        decoder=decoder_spec(config.decoder, config.method, ops, tensors),
        draft_vocab_size=config.draft_vocab_size,
        base_hidden_size=config.base_hidden_size,
        base_num_layers=config.base_num_layers,
        hidden_taps=config.hidden_taps,
        fuses=config.fuses,
    )


def _heads_spec(config: MedusaConfig, op: Op, tensors: TensorSource) -> DraftSpec:
    decoder = DecoderSpec(
        model_type=config.method,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_positions=config.max_positions,
        num_parameters=count_parameters([op], tensors),
        kv=KVCacheSpec(0, 0, 0, op.dtype.numpy().name),
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


def _seeing(config: DraftConfig, base: DecoderConfig) -> DraftConfig:
    """The draft of a vision-language base reads image features where its embedding is as wide.

    One of another width reads the placeholder's embedding, as in text.
    """
    decoder = config.decoder
    if base.images is None or decoder.hidden_size != base.hidden_size:
        return config
    images = dataclasses.replace(base.images, num_deepstack=0)
    return dataclasses.replace(config, decoder=dataclasses.replace(decoder, images=images))


def _provenance(
    draft: Checkpoint, base: Checkpoint, config: DraftConfig | MedusaConfig
) -> dict[str, str]:
    return {
        "checkpoint": draft.label,
        "base": base.label,
        "exporter": config.exporter,
        "hidden_taps": config.taps_meaning,
        **versions(),
    }

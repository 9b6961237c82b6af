"""Writing the bundle of a draft: its graphs, weights and manifest; all or nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from edgellm.artifact import check_output, publish, temporary_folder
from edgellm.contract import DraftBundleManifest, DraftSpec, EdgeLLMError
from edgellm.export.bundle import ExportOptions, read_architecture
from edgellm.export.checkpoint import Checkpoint
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.draft_config import DraftConfig, read_draft
from edgellm.export.draft_decoder import build_draft, build_fuse
from edgellm.export.draft_tensors import DraftTensors, complete, read_target_ids
from edgellm.export.graph_files import (
    DTYPES,
    Graphs,
    Progress,
    decoder_spec,
    file_names,
    refuse_leftovers,
    versions,
    write_graphs,
)
from edgellm.export.op import OPSET
from edgellm.export.weights import Weights

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
) -> DraftBundleManifest:
    """Export a draft to `output`, which afterwards holds a whole bundle or what it held before.

    Args:
        draft: checkpoint of an EAGLE-1, 2 or 3 draft in any public layout.
        base: the model that it drafts for; gives its sizes, the embedding, perhaps the head.
        output: the bundle's folder.
        options: what the user chose.
        progress: told the bytes written and the bytes in all.

    Raises:
        UnsupportedModelError: a layout that is not understood, or a draft for another base.
        BrokenArtifactError: missing, superfluous, damaged or contradicting tensors.
        EdgeLLMError: one of the folders holds something else, or `output` cannot be written.
    """
    check_output(output, "draft_bundle", file_names((_MODEL, _FUSE)))
    config, tensors, graphs = _build(draft, base, options)
    ops = [op for _, op in graphs.values()]
    with temporary_folder(output) as folder:
        records = write_graphs(folder, graphs, progress)
        spec = DraftSpec(
            method=config.method,
            decoder=decoder_spec(config.decoder, config.method, ops, tensors),
            draft_vocab_size=config.draft_vocab_size,
            base_hidden_size=config.base_hidden_size,
            base_num_layers=config.base_num_layers,
            hidden_taps=config.hidden_taps,
            fuses=config.fuses,
        )
        manifest = DraftBundleManifest(
            draft=spec,
            dtype=DTYPES[options.dtype].numpy().name,
            quantization=draft.quantization,
            opset=OPSET,
            options=dataclasses.asdict(options),
            provenance=_provenance(draft, base, config),
            files=records,
        )
        return publish(folder, output, manifest)


def understand_draft(draft: Checkpoint, base: Checkpoint, options: DraftOptions) -> DraftConfig:
    """The facts of a draft that `export_draft` takes; stops where it would, reads no weights.

    Raises:
        EdgeLLMError: as `export_draft`.
    """
    return _build(draft, base, options)[0]


def _build(
    draft: Checkpoint, base: Checkpoint, options: DraftOptions
) -> tuple[DraftConfig, DraftTensors, Graphs]:
    """Check both checkpoints and record the graphs; nothing is written yet."""
    if "fc.weight" in base.tensors.infos():
        raise EdgeLLMError(
            f"{base.label} is a draft, not a base",
            hint="give the model that it drafts for as --base_model_dir",
        )
    keys = options.ignore_config_keys
    tower, _, base_config = read_architecture(base, ExportOptions(ignore_config_keys=keys))
    config = _seeing(read_draft(draft, base_config, keys), base_config)
    tensors = complete(draft.tensors, tower.tensors, config)
    weights = Weights(tensors, draft.quant_config or base.quant_config)
    target_ids = read_target_ids(weights, config, base_config)
    dtype = DTYPES[options.dtype]
    graphs = {_MODEL: build_draft(config, weights, target_ids, dtype)}
    if config.fuses:
        graphs[_FUSE] = build_fuse(config, weights, dtype)
    refuse_leftovers(weights.unused(), "draft")
    return config, tensors, graphs


def _seeing(config: DraftConfig, base: DecoderConfig) -> DraftConfig:
    """The draft of a vision-language base reads image features where its embedding is as wide.

    One of another width reads the placeholder's embedding, as in text.
    """
    decoder = config.decoder
    if base.images is None or decoder.hidden_size != base.hidden_size:
        return config
    images = dataclasses.replace(base.images, num_deepstack=0)
    return dataclasses.replace(config, decoder=dataclasses.replace(decoder, images=images))


def _provenance(draft: Checkpoint, base: Checkpoint, config: DraftConfig) -> dict[str, str]:
    return {
        "checkpoint": draft.label,
        "base": base.label,
        "exporter": config.exporter,
        "hidden_taps": config.taps_meaning,
        **versions(),
    }

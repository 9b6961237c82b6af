"""Atomic export of a draft's bundle: graphs, weights and manifest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.artifact import check_output, publish, temporary_folder
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.graph_roles import DRAFT, FUSE
from edgellm.core.manifest import DRAFT_BUNDLE, Bundle, GraphSpec
from edgellm.core.model_spec import DraftSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorSource
from edgellm.export.checkpoints.quantization_config import judge
from edgellm.export.checkpoints.residual_rotation import refuse_rotated, rotation_name
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.draft_checkpoints import kinds
from edgellm.export.draft_checkpoints.block_config import BlockConfig
from edgellm.export.draft_checkpoints.config import DraftConfig, read_draft
from edgellm.export.draft_checkpoints.kinds import OwnConfig
from edgellm.export.draft_checkpoints.low_rank_head import (
    NUM_CANDIDATES,
    LowRankHead,
    num_candidates,
    with_factors,
)
from edgellm.export.draft_checkpoints.tensors import complete, read_target_ids
from edgellm.export.draft_checkpoints.unrotate import facing, missing_rotation
from edgellm.export.drafts.mtp import MtpConfig
from edgellm.export.graph.architecture import (
    ExportOptions,
    read_architecture,
)
from edgellm.export.graph.bundle_files import (
    DTYPES,
    Graphs,
    Progress,
    decoder_spec,
    file_names,
    refuse_leftovers,
    versions,
    write_graphs,
)
from edgellm.export.graph.draft import build_draft, build_fuse
from edgellm.export.onnx.builder import OPSET, Op

_MODEL, _FUSE = "model", "fuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Options of a draft's head; None: as in the checkpoint."""

    vocab_size: int | None = None  # tokens that a draft with its base's head predicts
    rank: int | None = None  # of a low-rank head, the SVD of the head
    num_candidates: int | None = None  # tokens that a low-rank head retrieves


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of a draft's export."""

    dtype: str = "fp16"
    ignore_config_keys: tuple[str, ...] = ()
    head: HeadOptions = HeadOptions()


def export_draft(
    draft: Checkpoint,
    base: Checkpoint,
    output: Path,
    options: DraftOptions,
    progress: Progress | None = None,
    facts: dict[str, Any] | None = None,
) -> Bundle:
    """Export a draft to `output` atomically: after an error `output` is unchanged.

    Args:
        draft: checkpoint of an EAGLE-1, 2 or 3 draft in any public layout, or of another kind.
        base: the model that it drafts for; has its sizes, the embedding, perhaps the head.
        output: the bundle's folder.
        options: what the user chose.
        progress: called with the bytes written and the bytes in all.
        facts: see `edgellm.core.artifact.publish`.

    Raises:
        UnsupportedModelError: an unsupported layout, or a draft for another base.
        BrokenArtifactError: missing, unexpected, damaged or contradicting tensors.
        EdgeLLMError: a folder has other contents, or `output` cannot be written.
    """
    check_output(output, DRAFT_BUNDLE, file_names((_MODEL, _FUSE)), facts)
    recorded = _record(draft, base, options)
    quantization, contradiction = judge(draft, recorded.layouts, options.ignore_config_keys)
    with temporary_folder(output) as folder:
        records = write_graphs(folder, recorded.graphs, progress)
        roles = {_MODEL: recorded.role, _FUSE: FUSE}
        manifest = Bundle(
            kind=DRAFT_BUNDLE,
            spec=recorded.spec,
            graphs={roles[name]: GraphSpec(f"{name}.onnx") for name in recorded.graphs},
            dtype=DTYPES[options.dtype].numpy().name,
            quantization=quantization,
            opset=OPSET,
            options=dataclasses.asdict(options),
            provenance={**_provenance(draft, base, recorded.config), **contradiction},
            files=records,
        )
        return publish(folder, output, manifest, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A recorded draft, before it is written."""

    config: DraftConfig | OwnConfig
    role: str  # of its main graph
    graphs: Graphs
    layouts: set[str]  # of its quantized layers
    spec: DraftSpec


def understand_draft(
    draft: Checkpoint, base: Checkpoint, options: DraftOptions
) -> DraftConfig | OwnConfig:
    """Facts of a draft, with all checks of `export_draft` that need no weights.

    Raises:
        EdgeLLMError: as `export_draft`.
    """
    return _record(draft, base, options).config


def _record(draft: Checkpoint, base: Checkpoint, options: DraftOptions) -> _Recorded:
    """Check both checkpoints and record the graphs."""
    names = base.tensors.infos()
    if "fc.weight" in names or (names and len(kinds.own_names(names)) == len(names)):
        raise EdgeLLMError(
            f"{base.label} is a draft, not a base",
            hint="give the model that it drafts for as --base_model_dir",
        )
    keys, dtype = options.ignore_config_keys, DTYPES[options.dtype]
    tower, _, base_config = read_architecture(base, ExportOptions(ignore_config_keys=keys))
    config = read_draft(draft, base_config, keys)
    if options.head.vocab_size is not None:
        config = _with_vocabulary(config, base, options.head.vocab_size)
    if (options.head.rank, options.head.num_candidates) != (None, None):
        config = _with_low_rank(config, options.head)
    rotation = missing_rotation(base, draft)
    if not isinstance(config, DraftConfig):
        if rotation is not None:
            refuse_rotated(base, f"a {config.method} draft")
        kind = kinds.kind(config.method)
        model, op, weights = kind.build(draft, base, config, dtype)
        graphs: Graphs = {_MODEL: (model, op)}
        if (build_fuse_graph := getattr(kind, "build_fuse", None)) is not None:
            graphs = {**graphs, _FUSE: build_fuse_graph(config, weights, dtype)}
        facts = kind.spec(draft, config, op)
        facts = dataclasses.replace(facts, base_rotation=rotation_name(base.config))
        return _Recorded(
            config=config, role=kind.ROLE, graphs=graphs, layouts=weights.layouts, spec=facts
        )
    config = _seeing(config, base_config)
    tensors: TensorSource = complete(draft.tensors, tower.tensors, config)
    if rotation is not None:
        tensors = facing(tensors, draft, config, rotation)
    tensors = with_factors(tensors, "lm_head.weight", config.low_rank)
    weights = Weights(source=tensors, quantization=draft.quant_config or base.quant_config)
    target_ids = read_target_ids(weights, config, base_config)
    graphs = {_MODEL: build_draft(config, weights, target_ids, dtype)}
    if config.fuses:
        graphs[_FUSE] = build_fuse(config, weights, dtype)
    refuse_leftovers(weights.unused(), "draft")
    ops = [op for _, op in graphs.values()]
    spec = _spec(config, ops, tensors, rotation_name(base.config))
    return _Recorded(config=config, role=DRAFT, graphs=graphs, layouts=weights.layouts, spec=spec)


def _with_vocabulary(
    config: DraftConfig | OwnConfig, base: Checkpoint, size: int
) -> DraftConfig | OwnConfig:
    kind = kinds.find(config.method)
    if not hasattr(kind, "with_vocabulary"):
        raise UnsupportedModelError(
            f"--draft_vocab_size: training has fixed what a draft of {config.method} predicts",
            hint="leave it out; it is for multi-token prediction, which has its base's head",
        )
    return kind.with_vocabulary(config, base, size)


def _with_low_rank(
    config: DraftConfig | OwnConfig, options: HeadOptions
) -> DraftConfig | OwnConfig:
    """The same with the low-rank head of the options.

    Raises:
        UnsupportedModelError: the method takes no such head, the draft has one already, or it has
            none, and only the number of candidates is given.
    """
    facts = config.draft if isinstance(config, BlockConfig) else config
    if not isinstance(facts, DraftConfig | MtpConfig):
        raise UnsupportedModelError(
            f"--draft_head_rank: a draft of {config.method} takes no low-rank head",
            hint="leave it out; it is for EAGLE, MTP and block drafts",
        )
    own, rank = facts.low_rank, options.rank
    if own is not None and rank is not None:
        raise UnsupportedModelError(
            f"--draft_head_rank {rank}: the draft has a low-rank head of rank {own.rank}",
            hint="leave it out; --draft_head_candidates sets the number of retrieved tokens",
        )
    if own is None:
        if rank is None:
            raise UnsupportedModelError(
                "--draft_head_candidates: the draft has no low-rank head",
                hint="give --draft_head_rank, too",
            )
        own = LowRankHead(rank=rank, num_candidates=NUM_CANDIDATES)
    is_eagle = isinstance(facts, DraftConfig)
    size = facts.draft_vocab_size if is_eagle else facts.num_predicted
    count = options.num_candidates or own.num_candidates
    low_rank = dataclasses.replace(own, num_candidates=min(count, size))
    if isinstance(config, DraftConfig):
        return dataclasses.replace(config, low_rank=low_rank)
    return kinds.find(config.method).with_low_rank(config, low_rank)


def _spec(
    config: DraftConfig, ops: list[Op], tensors: TensorSource, base_rotation: str
) -> DraftSpec:
    return DraftSpec(
        method=config.method,
        decoder=decoder_spec(config.decoder, config.method, ops, tensors),
        draft_vocab_size=config.draft_vocab_size,
        base_hidden_size=config.base_hidden_size,
        base_num_layers=config.base_num_layers,
        hidden_taps=config.hidden_taps,
        fuses=config.fuses,
        num_heads=0 if config.mask_rows is None else config.mask_rows.depth,
        mask_token_id=None if config.mask_rows is None else config.mask_rows.token_id,
        base_rotation=base_rotation,
        num_candidates=num_candidates(config.low_rank),
    )


def _seeing(config: DraftConfig, base: DecoderConfig) -> DraftConfig:
    """Let the draft of a vision-language base use image embeddings, if its embedding is as wide.

    With another width it uses the placeholder's embedding, as in text.
    """
    decoder = config.decoder
    if base.images is None or decoder.hidden_size != base.hidden_size:
        return config
    images = dataclasses.replace(base.images, num_deepstack=0, bidirectional_tokens=0)
    return dataclasses.replace(config, decoder=dataclasses.replace(decoder, images=images))


def _provenance(
    draft: Checkpoint, base: Checkpoint, config: DraftConfig | OwnConfig
) -> dict[str, str]:
    return {
        "checkpoint": draft.label,
        "base": base.label,
        "exporter": config.exporter,
        "hidden_taps": config.taps_meaning,
        **versions(),
    }

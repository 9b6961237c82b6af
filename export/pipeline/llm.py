"""Atomic export of a language model's bundle: graph, weights, tokenizer, manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core.artifact import check_output, publish, temporary_folder
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.graph_roles import AUDIO_ENCODER, COMMIT, CROSS_KV, DECODER
from edgellm.core.manifest import LLM_BUNDLE, Bundle, GraphSpec
from edgellm.core.model_spec import POOLER_FILE, POOLINGS, DecoderSpec, PoolerSpec, RecurrentSpec
from edgellm.export import encoders
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.encoder_hash import encoder_hash
from edgellm.export.checkpoints.kv_scales import read_ranges
from edgellm.export.checkpoints.lora_merge import merged
from edgellm.export.checkpoints.quantization_config import judge
from edgellm.export.checkpoints.residual_rotation import refuse_rotated, rotation_name
from edgellm.export.checkpoints.tokenizer import CHAT_TEMPLATE, last_token, without_tokens
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.generation_defaults import generation_defaults
from edgellm.export.config.hidden_taps import check_taps, default_taps
from edgellm.export.config.reader import ConfigReader
from edgellm.export.draft_checkpoints import kinds
from edgellm.export.draft_checkpoints.config import read_draft
from edgellm.export.graph.architecture import ExportOptions, end_ids, read_architecture
from edgellm.export.graph.audio_encoder import build_audio_encoder, build_cross_kv
from edgellm.export.graph.bundle_files import (
    DTYPES,
    Progress,
    decoder_spec,
    file_names,
    refuse_leftovers,
    versions,
    write_graphs,
)
from edgellm.export.graph.decoder import build_commit, build_decoder
from edgellm.export.onnx.builder import OPSET, Op
from edgellm.export.pipeline.open_checkpoint import open_draft
from edgellm.export.pooling.classifiers import classifier_pooler, is_classifier
from edgellm.export.pooling.pooler import Pooler, write_pooler
from edgellm.export.pooling.rerankers import yes_no_pooler

_GRAPH = "model"
_ROLES = {_GRAPH: DECODER, **{role: role for role in (COMMIT, AUDIO_ENCODER, CROSS_KV)}}  # by name
_JSON_FILES = "config.json", "generation_config.json"
# Tensors of encoders that embeddings do not need: heads, and BERT's pooler
_HEADS = (
    "lm_head.",
    "cls.",
    "decoder.",
    "head.",
    "classifier.",
    "model.pooler.",
    "model.embeddings.position_ids",
)
_TIED_HEADS = "lm_head.weight", "proj_out.weight"
DROPPED_TOKENS = "tokens_without_embedding"  # of the provenance
Check = Callable[[Path, Bundle], None]  # of a finished folder before it is published


def export_llm(
    checkpoint: Checkpoint,
    output: Path,
    options: ExportOptions,
    progress: Progress | None = None,
    check: Check | None = None,
    facts: dict[str, Any] | None = None,
) -> Bundle:
    """Export a decoder to `output` atomically: after an error `output` is unchanged.

    `check` raises an error for a bundle that must not be published. `facts`: see
    `edgellm.core.artifact.publish`.

    Raises:
        EdgeLLMError: an unknown architecture, config key or quantization; missing, unexpected or
            damaged tensors; `output` cannot be written.
    """
    names = [*file_names((*_ROLES,)), *_JSON_FILES, *checkpoint.tokenizer_files, POOLER_FILE]
    check_output(output, LLM_BUNDLE, names, facts)
    tower, architecture, config = read_architecture(checkpoint, options)
    tower = _merged(tower, config, options)
    options, pooler = _with_pooler(options, checkpoint, tower, config)
    taps, tap_source = _choose_taps(checkpoint, config, options)
    weights = _weights(tower, options)
    dtype = DTYPES[options.dtype]
    graphs, recurrent = _record(architecture, config, weights, dtype, taps)
    ranges = read_ranges(weights, config.attending_layers)
    _refuse_unused(weights, config)
    quantization, contradiction = judge(checkpoint, weights.layouts, options.ignore_config_keys)
    if ranges is not None:
        contradiction = {}  # the quantization config is about the cache
    checkpoint, dropped = _fit_tokenizer(checkpoint, config.vocab_size)
    eos_token_ids = _eos_token_ids(end_ids(checkpoint), config.vocab_size)
    defaults = generation_defaults(checkpoint.generation_config)
    spec = _spec(checkpoint, tower, config, [op for _, op in graphs.values()])
    with temporary_folder(output) as folder:
        records = write_graphs(folder, graphs, progress)
        _write_texts(folder, checkpoint, pooler)
        manifest = Bundle(
            kind=LLM_BUNDLE,
            spec=replace(spec, kv=replace(spec.kv, ranges=ranges), recurrent=recurrent),
            graphs={_ROLES[name]: GraphSpec(f"{name}.onnx") for name in graphs},
            dtype=dtype.numpy().name,
            quantization=quantization,
            opset=OPSET,
            eos_token_ids=eos_token_ids,
            options=asdict(replace(options, hidden_taps=taps)),
            provenance=_provenance(checkpoint, tower, config)
            | tap_source
            | contradiction
            | dropped,
            hidden_taps=taps,
            pooling=options.pooling,
            pooler=None if pooler is None else pooler.spec,
            generation_defaults=defaults,
            files=records,
        )
        if check is not None:
            check(folder, manifest)
        return publish(folder, output, manifest, facts=facts)


def _record(
    architecture: ModuleType,
    config: DecoderConfig,
    weights: Weights,
    dtype: ir.DataType,
    taps: tuple[int, ...] = (),
) -> tuple[dict[str, tuple[ir.Model, Op]], RecurrentSpec | None]:
    """All graphs of a model by name, and the states of its recurrent layers."""
    model, op, recurrences = build_decoder(architecture, config, weights, dtype, taps)
    graphs = {_GRAPH: (model, op)}
    if config.audio is not None:
        graphs[AUDIO_ENCODER] = build_audio_encoder(architecture, config, weights, dtype)
        graphs[CROSS_KV] = build_cross_kv(architecture, config, weights, dtype)
    if recurrences is None:
        return graphs, None
    graphs[COMMIT] = build_commit(recurrences)
    return graphs, recurrences.spec


def _merged(tower: Checkpoint, config: DecoderConfig, options: ExportOptions) -> Checkpoint:
    """The language model with the adapter of the options, if there is one."""
    if options.lora_dir is None:
        return tower
    if not config.is_causal:
        raise UnsupportedModelError(
            "--lora_dir: adapters of encoders are not supported",
            hint="merge it with PEFT: model.merge_and_unload().save_pretrained(...)",
        )
    return merged(tower, options.lora_dir)


def _provenance(checkpoint: Checkpoint, tower: Checkpoint, config: DecoderConfig) -> dict[str, str]:
    # An adapter may change the encoder of a speech model, which is in the tower
    encoded_by = checkpoint if config.audio is None else tower
    return {"checkpoint": checkpoint.label, **encoder_hash(encoded_by), **versions()}


def _spec(
    checkpoint: Checkpoint, tower: Checkpoint, config: DecoderConfig, ops: list[Op]
) -> DecoderSpec:
    """Facts of the decoder from a checkpoint's config and tensors."""
    spec = decoder_spec(config, tower.config["model_type"], ops, tower.tensors)
    return replace(spec, rotation=rotation_name(checkpoint.config))


def _with_pooler(
    options: ExportOptions, checkpoint: Checkpoint, tower: Checkpoint, config: DecoderConfig
) -> tuple[ExportOptions, Pooler | None]:
    """The options with their pooling, and the pooler of an embedding model or reranker.

    The pooling is that of the checkpoint's files, unless the user chose one.
    """
    if not config.is_causal:
        return _encoder_pooler(options, checkpoint, tower, config)
    is_base = options.hidden_taps or options.draft_model_dir or options.is_eagle_base
    if options.reranker:
        if options.pooling:
            raise UnsupportedModelError(
                "--reranker pools the last token", hint="leave out --pooling"
            )
        found = yes_no_pooler(tower.tensors, checkpoint.tokenizer_files, config.hidden_size)
        return replace(options, pooling=found.pooling), found
    pooling = options.pooling or ("" if is_base else checkpoint.pooling)
    if not pooling:
        return options, None
    found = _text_pooler(pooling, checkpoint, config.hidden_size)
    return replace(options, pooling=pooling), found


def _text_pooler(pooling: str, checkpoint: Checkpoint, size: int) -> Pooler:
    """The pooler of an embedding model with hidden states of this size."""
    spec = checkpoint.pooler or PoolerSpec()
    if spec.dense and spec.dense[0].in_features != size:
        raise BrokenArtifactError(
            f"{checkpoint.label}: dense layers of {spec.dense[0].in_features} numbers follow "
            f"hidden states of {size}",
            hint="the modules and the model are of different saves",
        )
    return Pooler(pooling=pooling, spec=spec, tensors=checkpoint.pooler_tensors)


def _encoder_pooler(
    options: ExportOptions, checkpoint: Checkpoint, tower: Checkpoint, config: DecoderConfig
) -> tuple[ExportOptions, Pooler]:
    """As `_with_pooler`, for encoders: models of embeddings, or cross-encoders."""
    encoder, size = encoders.find(tower.config.get("model_type")), config.hidden_size
    if options.reranker:
        raise UnsupportedModelError(
            "--reranker is for models that generate; this one is an encoder",
            hint="leave it out: a classification head is found by itself",
        )
    if encoder is not None and is_classifier(tower.config):
        head = encoder.classifier(ConfigReader(tower.config), size)
        found = classifier_pooler(head, tower, size)
        return replace(options, pooling=found.pooling), found
    pooling = options.pooling or checkpoint.pooling
    if not pooling:
        raise UnsupportedModelError(
            f"{checkpoint.label} is an encoder without modules.json, which names its pooling",
            hint="give --pooling cls or --pooling mean, as its model card says",
        )
    return replace(options, pooling=pooling), _text_pooler(pooling, checkpoint, size)


def _write_texts(folder: Path, checkpoint: Checkpoint, pooler: Pooler | None) -> None:
    write_pooler(folder, {} if pooler is None else pooler.tensors)
    for name, content in checkpoint.tokenizer_files.items():
        (folder / name).write_bytes(content)
    contents = checkpoint.config, checkpoint.generation_config
    for name, content in zip(_JSON_FILES, contents, strict=True):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def understand(checkpoint: Checkpoint, options: ExportOptions) -> DecoderConfig:
    """Facts of a checkpoint, with all checks of `export_llm` that need no weights.

    Raises:
        UnsupportedModelError: an unknown architecture, config key or quantization.
        BrokenArtifactError: missing or unexpected tensors, or wrong shapes.
    """
    tower, architecture, config = read_architecture(checkpoint, options)
    weights = _weights(tower, options)
    _record(architecture, config, weights, DTYPES[options.dtype])
    read_ranges(weights, config.attending_layers)
    _refuse_unused(weights, config)
    judge(checkpoint, weights.layouts, options.ignore_config_keys)
    return config


def quantized_layers(
    checkpoint: Checkpoint, options: ExportOptions
) -> tuple[Checkpoint, dict[str, tuple[int, int]]]:
    """The language model, and [out, in] of its quantized layers by name; reads no weights."""
    tower, architecture, config = read_architecture(checkpoint, options)
    weights = Weights(source=tower.tensors, quantization=tower.quant_config)
    build_decoder(architecture, config, weights, DTYPES[options.dtype])
    return tower, weights.quantized


def _weights(tower: Checkpoint, options: ExportOptions) -> Weights:
    """Keep block-quantized weights, unless float32 is requested."""
    blocks = tower.blocks if options.dtype == "fp16" else None
    return Weights(
        source=tower.tensors if blocks is None else blocks, quantization=tower.quant_config
    )


def _choose_taps(
    checkpoint: Checkpoint, config: DecoderConfig, options: ExportOptions
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The taps of the options, and their source for the provenance."""
    num_layers = config.num_hidden_layers
    if options.pooling:
        refuse_rotated(checkpoint, "--pooling")
        if options.pooling not in POOLINGS:
            raise UnsupportedModelError(
                f"--pooling {options.pooling}: give {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}"
            )
        if options.hidden_taps or options.draft_model_dir is not None or options.is_eagle_base:
            raise UnsupportedModelError(
                "--pooling: a model that embeds texts is no base of a draft",
                hint="give --pooling, or the flags of an EAGLE base",
            )
        return (num_layers,), {"hidden_taps": "--pooling"}
    if options.hidden_taps:
        return check_taps(options.hidden_taps, num_layers, "--hidden_taps"), {
            "hidden_taps": "--hidden_taps"
        }
    if options.draft_model_dir is not None:
        draft = open_draft(options.draft_model_dir)
        facts = read_draft(draft, config, options.ignore_config_keys)
        return facts.hidden_taps, {"hidden_taps": f"{draft.label}: {facts.taps_meaning}"}
    if options.is_eagle_base:
        return default_taps(num_layers), {"hidden_taps": "default"}
    return (), {}


def _refuse_unused(weights: Weights, config: DecoderConfig) -> None:
    """Reject unused tensors, except of cut layers, a tied head's copy, and drafts."""
    layers = len(config.layer_kinds)
    cut = tuple(
        f"model.{place}.{index}."
        for index in range(config.num_hidden_layers, layers)
        for place in ("layers", "encoder.layer", "decoder.layers")
    )
    unused = weights.unused()
    others = {*kinds.own_names(unused)}
    left = [
        name
        for name in unused
        if name not in others
        and not name.startswith(cut)
        and not (name in _TIED_HEADS and config.tie_word_embeddings)
        and not (not config.is_causal and name.startswith(_HEADS))
    ]
    hint = ""
    if any(name.startswith(f"model.layers.{layers}.") for name in left):
        hint = (
            f"config.json says num_hidden_layers {layers}, the weights have more; to export the "
            f"first ones on purpose, correct it and give --num_layers {layers}"
        )
    refuse_leftovers(left, "checkpoint", hint)


def _fit_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> tuple[Checkpoint, dict[str, str]]:
    """Remove added tokens beyond the embedding's `vocab_size` rows, with a note for the provenance.

    Raises:
        BrokenArtifactError: other tokens are beyond the rows, or the chat template writes one of
            the removed tokens.
    """
    token, token_id = checkpoint.last_token
    if token_id < vocab_size:
        return checkpoint, {}
    files, removed = without_tokens(checkpoint.tokenizer_files, vocab_size)
    token, token_id = last_token(files) if removed else (token, token_id)
    template = files.get(CHAT_TEMPLATE, b"").decode("utf-8")
    written = next((text for text in removed if text in template), None)
    if token_id >= vocab_size or written is not None:
        name, place = (token, f"id {token_id}") if written is None else (written, "no row")
        reason = "" if written is None else ", which the chat template writes,"
        raise BrokenArtifactError(
            f"the tokenizer's token {name!r}{reason} has {place}, the embedding has "
            f"{vocab_size} rows",
            hint="it is another model's tokenizer, or tokens were added without room for them: "
            "model.resize_token_embeddings(len(tokenizer)) in transformers makes it",
        )
    found = replace(checkpoint, tokenizer_files=files, last_token=(token, token_id))
    return found, {DROPPED_TOKENS: ", ".join(map(repr, removed))}


def _eos_token_ids(found: set[Any], vocab_size: int) -> tuple[int, ...]:
    """All end-of-sequence ids, each a token of the model."""
    for token_id in found:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise UnsupportedModelError(
                f"eos_token_id {token_id!r} is not a token of the model",
                hint="correct it in generation_config.json or config.json (and its text_config)",
            )
    return tuple(sorted(found))

"""Writes the checkpoint in ModelOpt's unified layout, atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.core.artifact import move_files, own_files, temporary_folder
from edgellm.core.errors import (
    BrokenArtifactError,
)
from edgellm.core.resources import require_space
from edgellm.core.strict_json import parse
from edgellm.export.checkpoints.checkpoint import Renamed, TensorSource, write_safetensors
from edgellm.quantize.algorithms.mixed_precision.search import quantized_modules
from edgellm.quantize.algorithms.modelopt import hf_config
from edgellm.quantize.formats import compressed_tensors
from edgellm.quantize.formats.tensors import Joined, split_shards
from edgellm.quantize.models.checks import EMBEDDING, linear_shapes
from edgellm.quantize.plan import Plan
from edgellm.quantize.report.html_report import PAGE, render
from edgellm.quantize.report.report import Report, as_json
from edgellm.quantize.work_folder import HEAD_PART, layer_part

SIDE_FILE = "edgellm_quant.json"
_QUANT_CONFIG = "hf_quant_config.json"
_SHARD_BYTES = 5 * 10**9
_EVERY_FORMAT = ("quant_algo", "kv_cache_quant_algo", "exclude_modules")


def write_folder(plan: Plan, report: Report) -> None:
    """Join all parts, check them with the exporter, and move them to the output folder.

    Raises:
        EdgeLLMError: the exporter rejects the folder, or it cannot be written.
    """
    output = plan.job.output_dir
    with temporary_folder(output) as folder:
        _write_tensors(plan, folder)
        is_modelopt = plan.job.format != compressed_tensors.NAME
        described = _described(plan) if is_modelopt else {}
        checkpoint = plan.subject.whole
        own_head = plan.head is not None and not plan.head.scheme.is_table
        quantization = hf_config(described) if is_modelopt else _compressed(plan)
        config = plan.subject.new_config(quantization, own_head=own_head)
        _write_json(folder / "config.json", config)
        if checkpoint.generation_config:
            _write_json(folder / "generation_config.json", checkpoint.generation_config)
        if is_modelopt:
            _write_json(folder / _QUANT_CONFIG, described)
        for name, content in (checkpoint.processor_files | checkpoint.tokenizer_files).items():
            (folder / name).write_bytes(content)
        plan.subject.check_result(folder, plan.job.ignore_config_keys)
        (folder / PAGE).write_text(render(report), "utf-8")
        names = sorted([SIDE_FILE, *(path.name for path in folder.iterdir())])
        _write_json(folder / SIDE_FILE, {**as_json(report), "files": names})
        publish(folder, output, plan.job.key().facts())


def publish(folder: Path, output: Path, facts: dict[str, Any]) -> None:
    """Move a finished folder to `output`; its files are those that `SIDE_FILE` lists.

    `facts`: see `edgellm.core.artifact.move_files`.
    """
    names = parse((folder / SIDE_FILE).read_text("utf-8"))["files"]
    move_files(folder, output, names, own_files(output), facts)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _write_tensors(plan: Plan, folder: Path) -> None:
    """Write all tensors, in one file or in shards with an index."""
    parts: list[TensorSource] = [
        plan.task.work.tensors(layer_part(index)) for index in range(len(plan.subject.layers))
    ]
    parts += [] if plan.head is None else [plan.task.work.tensors(HEAD_PART)]
    source = Joined([plan.subject.checkpoint.tensors, *parts])
    named = [sorted(part.infos()) for part in parts]
    # A packed layer stores its weight under another name.
    new = {name.removesuffix("_packed") for names in named for name in names} | _replaced(plan)
    kept = [
        name
        for name in sorted(plan.subject.checkpoint.tensors.infos())
        if not {name, _written_name(plan, name)} & new and not name.endswith("inv_freq")
    ]
    stored = plan.subject.stored_name
    places = {stored(name): name for name in (*kept, *(n for names in named for n in names))}
    own = {stored(name) for name in plan.subject.checkpoint.tensors.infos()}
    whole = plan.subject.whole.tensors
    others = [name for name in sorted(whole.infos()) if name not in own]
    source = Joined([whole, Renamed(source, places)])
    names = [*others, *places]
    size = sum(source.infos()[name].num_bytes for name in names)
    require_space(folder, size)
    shards = split_shards(source, names, _SHARD_BYTES)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", source, names)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, source, part)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)


def _written_name(plan: Plan, name: str) -> str:
    """Return the name that a tensor of the checkpoint has if its layer is quantized."""
    family = plan.subject.family
    layer = next((each for each in plan.subject.layers if name.startswith(each)), "")
    return layer + family.stored_name(family.canonical(name.removeprefix(layer)))


def _described(plan: Plan) -> dict[str, Any]:
    """Return the content of hf_quant_config.json.

    Raises:
        BrokenArtifactError: the layers' exports contradict each other.
    """
    work = plan.task.work
    indices = [each for each in range(len(plan.subject.layers)) if each not in plan.job.keep_layers]
    facts = [work.facts(layer_part(index)) for index in indices]
    if plan.recipe.scheme.is_mixed:
        return _described_mixture(plan, facts[0]["producer"])
    for index, fact in zip(indices, facts, strict=True):
        if _format(fact["quantization"]) != _format(facts[0]["quantization"]):
            raise BrokenArtifactError(
                f"layers {index} and {indices[0]} were quantized with different formats",
                hint=f"remove {work.path} and run it again",
            )
    body = dict(facts[0]["quantization"])
    if plan.recipe.kv_cache is not None:
        body["kv_cache_quant_algo"] = plan.recipe.kv_cache.upper()
    described = {"producer": facts[0]["producer"], "quantization": body}
    body["exclude_modules"] = _excluded(plan)
    if plan.head is None:
        return described
    head = work.facts(HEAD_PART)["quantization"]
    if _format(head) == _format(body):
        return described
    layers = {
        name.removesuffix(".weight_scale"): _format(body)
        for index in indices
        for name in work.tensors(layer_part(index)).infos()
        if name.endswith(".weight_scale")
    }
    mixed = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": body.get("kv_cache_quant_algo"),
        "quantized_layers": {
            plan.subject.stored_name(name): value
            for name, value in {**layers, _head_module(plan): _format(head)}.items()
        },
    }
    return {**described, "quantization": mixed}


def _described_mixture(plan: Plan, producer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of hf_quant_config.json for mixed precision."""
    layers = quantized_modules(plan)
    if plan.head is not None:
        layers[_head_module(plan)] = _format(plan.task.work.facts(HEAD_PART)["quantization"])
    stored = plan.subject.stored_name
    mixed = {
        "quant_algo": plan.recipe.scheme.algorithm,
        "kv_cache_quant_algo": plan.recipe.kv_cache and plan.recipe.kv_cache.upper(),
        "quantized_layers": {stored(name): form for name, form in layers.items()},
    }
    return {"producer": producer, "quantization": mixed}


def _head_module(plan: Plan) -> str:
    assert plan.head is not None
    return EMBEDDING.removesuffix(".weight") if plan.head.scheme.is_table else "lm_head"


def _compressed(plan: Plan) -> dict[str, Any]:
    """Return the quantization config of compressed-tensors in config.json."""
    recipe = plan.recipe
    return compressed_tensors.describe(
        recipe.scheme, recipe.block_size, _excluded(plan), recipe.kv_cache
    )


def _excluded(plan: Plan) -> list[str]:
    """Return the names of float modules."""
    subject = plan.subject
    head = None if plan.head is None else subject.stored_name(_head_module(plan))
    around = [name for name in subject.float_modules if name != head]
    own = [*_float_modules(plan), *_router_modules(plan)]
    return [*around, *(subject.stored_name(name) for name in own)]


def _float_modules(plan: Plan) -> list[str]:
    """Return the names of float linear layers within decoder layers."""
    kept = tuple(plan.subject.layers[index] for index in plan.job.keep_layers)
    subject = plan.subject
    return sorted(linear_shapes(subject.tensors.infos(), kept, subject.family)) if kept else []


def _quantized_layers(plan: Plan) -> list[str]:
    """Return the name prefixes of the quantized decoder layers."""
    kept = plan.job.keep_layers
    return [name for index, name in enumerate(plan.subject.layers) if index not in kept]


def _replaced(plan: Plan) -> set[str]:
    """Return names of fused expert tensors, which tensors of each expert replace."""
    experts = plan.subject.family.experts
    joined = () if experts is None else experts.joined
    return {layer + name for layer in _quantized_layers(plan) for name in joined}


def _router_modules(plan: Plan) -> list[str]:
    """Return the float matrices of quantized layers: routers, and gates of shared experts."""
    family, infos = plan.subject.family, plan.subject.tensors.infos()
    layers = tuple(_quantized_layers(plan))
    matrices = {name.removesuffix(".weight") for name, info in infos.items()
                if name.startswith(layers) and len(info.shape) == 2}  # fmt: skip
    return sorted(matrices - linear_shapes(infos, layers, family).keys())


def _format(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format fields of one layer."""
    own = {key: value for key, value in quantization.items() if key not in _EVERY_FORMAT}
    return {"quant_algo": quantization["quant_algo"], **own}

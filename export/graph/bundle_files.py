"""Writes graphs and weights of a bundle, and facts of its manifest."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import FileRecord
from edgellm.core.model_spec import DecoderSpec, KVCacheSpec, RecurrentSpec
from edgellm.core.resources import require_space
from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.export.checkpoints.weights import write_weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.onnx.builder import Op

DTYPES = {"fp16": ir.DataType.FLOAT16, "fp32": ir.DataType.FLOAT}

_NOT_COUNTED = ("_scale", "_scales", "_scale_inv", "_zero_point")
_PAIRS = "_blocks"  # of MXFP4: two codes in a byte

Progress = Callable[[int, int], None]  # bytes written, bytes in all
Graphs = Mapping[str, tuple[ir.Model, Op]]  # by file name without suffix


def file_names(graphs: Graphs | tuple[str, ...]) -> list[str]:
    """File names of graphs with these names."""
    return [f"{name}.{ending}" for name in graphs for ending in ("onnx", "weights")]


def write_graphs(folder: Path, graphs: Graphs, progress: Progress | None) -> dict[str, FileRecord]:
    """Write `name.onnx` and `name.weights` (if it has weights) of all graphs into `folder`.

    Returns:
        Records of the weight files, hashed during the write.

    Raises:
        NoSpaceError: the disk is too small.
    """
    total = sum(
        stored.num_bytes for _, op in graphs.values() for _, stored in op.parameters.values()
    )
    require_space(folder, total)
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        if progress is not None:
            progress(written, total)

    records = {}
    for name, (model, op) in graphs.items():
        if op.parameters:
            file = f"{name}.weights"
            records[file] = write_weights(folder / file, op.parameters.values(), advance)
        ir.save(model, folder / f"{name}.onnx")
    return records


def versions() -> dict[str, str]:
    """Versions of the exporter's packages."""
    return {
        "edgellm": version("edgellm"),
        "onnx_ir": version("onnx-ir"),
        "python": platform.python_version(),
    }


def decoder_spec(
    config: DecoderConfig,
    model_type: str,
    ops: list[Op],
    tensors: TensorSource,
    *,
    recurrent: RecurrentSpec | None = None,
) -> DecoderSpec:
    """The spec of a decoder; parameters are those of all its graphs in the checkpoint."""
    heads = tuple(map(config.heads_of, config.attending_layers))
    return DecoderSpec(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_positions=config.max_position_embeddings,
        num_parameters=count_parameters(ops, tensors),
        kv=KVCacheSpec(
            num_layers=len(config.attending_layers),
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=ops[0].dtype.numpy().name,
            heads=heads if {*heads} - {(config.num_key_value_heads, config.head_dim)} else (),
        ),
        sliding_window=config.sliding_window,
        position_axes=config.position_axes,
        images=config.images,
        audio=config.audio,
        recurrent=recurrent,
        num_layers=config.num_hidden_layers,
        is_causal=config.is_causal,
        token_types=config.token_types,
    )


def count_parameters(ops: list[Op], tensors: TensorSource) -> int:
    """Parameters of all graphs in the checkpoint, packed or not, without scales."""
    infos = tensors.infos()
    stored = {name: stored for op in ops for name, (_, stored) in op.parameters.items()}
    held = ((_one_expert(name), tensor) for name, tensor in stored.items())
    return sum(
        math.prod(tensor.shape) * (2 if name.endswith(_PAIRS) else 1)
        for name, tensor in held
        if not name.endswith(_NOT_COUNTED) and any(held in infos for held in _held_names(name))
    )


def _one_expert(name: str) -> str:
    """Checkpoint name of the first expert's weight, for a graph's tensor of all experts."""
    return name.replace("*", "0").removesuffix(".gate").removesuffix(".up")


def _held_names(name: str) -> Iterator[str]:
    """Possible checkpoint names of a graph's parameter, packed ones included."""
    yield name
    if name.endswith("weight"):
        stem = name.removesuffix("weight")
        yield from (f"{stem}qweight", f"{stem}weight_packed")


def refuse_leftovers(left: list[str], owner: str, hint: str = "") -> None:
    """Reject unused tensors: the model would differ from the exported one.

    Args:
        left: their names.
        owner: of the tensors.
        hint: for the error, if the cause is known.

    Raises:
        BrokenArtifactError: `left` is not empty.
    """
    left = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise BrokenArtifactError(
            f"the {owner} has tensors that the architecture does not use: {shown}",
            hint=hint or "config.json does not describe these weights",
        )

"""GGUF files as checkpoints.

Source: the GGUF specification (version 3) and llama.cpp's tensor names. A checkpoint has the
tensors twice: dequantized to floats while they are read, and as stored blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.model_spec import DenseSpec, PoolerSpec
from edgellm.export.checkpoints.checkpoint import CHUNK_BYTES, Checkpoint, TensorInfo
from edgellm.export.checkpoints.gguf.facts import Facts, Family
from edgellm.export.checkpoints.gguf.families import FAMILIES, read_config
from edgellm.export.checkpoints.gguf.reader import GGUFFile, GGUFTensor, decoded, read_gguf
from edgellm.export.checkpoints.gguf.tokenizer import convert_tokenizer, end_ids
from edgellm.export.checkpoints.gguf.visual.projector import (
    ENCODER,
    NO_ENCODER,
    Text,
    find_encoder,
    with_encoder,
)
from edgellm.export.checkpoints.quantized.gguf import FORMS, MXFP4
from edgellm.export.checkpoints.weights import as_bytes

_ROPES = ("rope_freqs", "rope_factors_")
# Stored types that a bundle has, too, as safetensors spell them.
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_NUMPY = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}  # to move values of
_DAMAGED = (ValueError, IndexError, KeyError, TypeError, AttributeError, ZeroDivisionError)
_LAYER, _FILE_NAME = re.compile(r"blk\.(\d+)\.(.+)"), re.compile(r"^blk\.\d+\.|\.(weight|bias)$")
_POOLINGS = {0: "", 1: "mean", 2: "cls", 3: "last"}  # by llama.cpp's enum
_FIRST_POSITION, _RANK = 2, 4
_REFUSED_POOLINGS = {_FIRST_POSITION: "the first position", _RANK: "a classifier, which ranks"}
_JOINED = ".ffn_gate_up_exps"
_SAMPLING = {  # generation_config.json's names of `general.sampling.*`
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_RATES, _UNSHIFTED_NORM = "ssm_a", "ssm_norm"  # -exp(A_log); the norm without a shift of 1
# Of a layer of multi-token prediction.
_PREDICTS = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


class GGUFTensors:
    """Tensors of a GGUF file under Hugging Face names, floats as they stream."""

    def __init__(
        self, *, file: GGUFFile, family: Family, config: Mapping[str, Any], keeps_blocks: bool
    ) -> None:
        """Args as follows.

        Args:
            file: with the tensors.
            family: maps names, and has the changes of converters.
            config: of the model, as config.json.
            keeps_blocks: keep blocks that a bundle supports (`export.checkpoints.quantized.gguf`),
                with llama.cpp's names of types; others are dequantized. A permutation of columns is
                a further tensor, `input_order`.
        """
        layers = config["num_hidden_layers"]
        self._tensors = {
            _hf_name(part.name, family, layers): part
            for tensor in (*file.tensors, *_numbers(file.metadata, family, layers))
            if not tensor.name.startswith((*_ROPES, *family.dense))
            for part in _apart(tensor, family)
        }
        self._orders, self._shift = family.orders(config), family.norm_shift
        self._swapped = family.swapped
        kept = (*FORMS, MXFP4) if keeps_blocks else ()
        self._infos = {
            name: TensorInfo(self._dtype(tensor, kept), self._shape(name, tensor))
            for name, tensor in self._tensors.items()
        }
        self._input_orders = {
            f"{name.removesuffix('weight')}input_order": self._orders.columns[_stem(tensor)]
            for name, tensor in self._tensors.items()
            if self._infos[name].dtype in kept and _stem(tensor) in self._orders.columns
        }
        for name in self._input_orders:
            weight = self._infos[f"{name.removesuffix('input_order')}weight"]
            self._infos[name] = TensorInfo("I64", weight.shape[-1:])

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major data, some whole rows at a time."""
        if name in self._input_orders:
            yield as_bytes(np.argsort(self._input_orders[name]()))
            return
        tensor, dtype = self._tensors[name], self._infos[name].dtype
        rows, find = len(tensor.data), self._orders.rows.get(_stem(tensor))
        order = None if find is None else find()
        row_bytes = max(4 * math.prod(tensor.shape) // max(rows, 1), 1)  # of float32
        step = max(CHUNK_BYTES // row_bytes, 1)
        if _stem(tensor) in self._swapped:
            step = tensor.shape[-2]  # a whole matrix
        for begin in range(0, rows, step):
            taken = slice(begin, begin + step)
            piece = tensor.data[taken if order is None else order[taken]]
            yield as_bytes(self._values(tensor, dtype, piece) if dtype in _PLAIN else piece)

    def _shape(self, name: str, tensor: GGUFTensor) -> tuple[int, ...]:
        shape = tensor.shape
        if _stem(tensor) in self._swapped:
            *outer, rows, columns = shape
            shape = (*outer, columns, rows)
        return _own_shape(name, shape)

    def _dtype(self, tensor: GGUFTensor, kept: tuple[str, ...]) -> str:
        if self._is_changed(tensor) or (
            _stem(tensor) in self._swapped and tensor.kind not in _PLAIN
        ):
            return "F32"
        return tensor.kind if tensor.kind in kept else _PLAIN.get(tensor.kind, "F32")

    def _is_changed(self, tensor: GGUFTensor) -> bool:
        """Whether a converter changed the values."""
        stem = _stem(tensor)
        return stem == _RATES or bool(
            self._shift and stem.endswith("norm") and stem != _UNSHIFTED_NORM
        )

    def _values(self, tensor: GGUFTensor, dtype: str, rows: NDArray[np.uint8]) -> NDArray[Any]:
        """Rows of floats with the converter's changes reverted."""
        values: NDArray[Any] = rows
        if dtype != tensor.kind:
            values = decoded(rows, tensor.kind)
        if (find := self._orders.columns.get(_stem(tensor))) is not None:
            values = values.view(_NUMPY[dtype])[:, find()]
        if _stem(tensor) in self._swapped:
            return values.view(_NUMPY[dtype]).T
        if not self._is_changed(tensor):
            return values
        floats = values.view(np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):  # rejected when they are written
            return np.log(-floats) if _stem(tensor) == _RATES else floats - np.float32(self._shift)


def _numbers(metadata: Mapping[str, Any], family: Family, layers: int) -> Iterator[GGUFTensor]:
    """Numbers of the metadata that are tensors of layers elsewhere."""
    for key, shape in family.numbers.items():
        found = metadata[key]
        values = found if isinstance(found, list) else [found] * layers
        for layer, value in zip(range(layers), values, strict=True):
            data = np.array([[value]], np.float32).view(np.uint8)
            yield GGUFTensor(name=f"blk.{layer}.{key}", kind="F32", shape=shape, data=data)


def _apart(tensor: GGUFTensor, family: Family) -> Iterator[GGUFTensor]:
    """Split a tensor of several linear layers.

    Newer files may join gates and ups of experts in one tensor, gates first.
    """
    if (module := family.stacks.get(tensor.name)) is not None:
        count, *shape = tensor.shape
        for index, data in enumerate(tensor.data.reshape(count, -1, tensor.data.shape[-1])):
            name = f"{module}.{index}.weight"
            yield GGUFTensor(name=name, kind=tensor.kind, shape=tuple(shape), data=data)
        return
    if _JOINED not in tensor.name:
        yield tensor
        return
    experts, both, *width = tensor.shape
    inner = both // 2
    place = (inner, tensor.data.shape[-1]) if width else (-1,)
    halves = tensor.data.reshape(experts, 2, *place)
    for index, part in enumerate((".ffn_gate_exps", ".ffn_up_exps")):
        name, shape = tensor.name.replace(_JOINED, part), (experts, inner, *width)
        yield GGUFTensor(name=name, kind=tensor.kind, shape=shape, data=halves[:, index])


def _stem(tensor: GGUFTensor) -> str:
    """llama.cpp's name without its layer: `blk.3.attn_q.weight` -> `attn_q`."""
    return _FILE_NAME.sub("", tensor.name)


def _own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's shape, which differs for tensors of width 1."""
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return (math.prod(shape[:-1]), 1, shape[-1])
    if name.endswith(("k_b_proj.weight", "v_b_proj.weight")) and len(shape) == 3:
        return (shape[0] * shape[1], shape[2])  # of all heads
    if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")) and (
        len(shape) == 1
    ):
        return (1, *shape)
    is_vector = name.endswith((".A_log", ".D", "norm.weight"))
    return (math.prod(shape),) if is_vector else shape


def open_gguf(path: Path, mmproj: str = "") -> Checkpoint:
    """Read a GGUF file, and the visual encoder's file if there is one.

    Args:
        path: of the language model.
        mmproj: path of the encoder; "": the one next to the model, if any; "none": none.

    Raises:
        BrokenArtifactError: not a GGUF file, truncated, or without required metadata.
        UnsupportedModelError: another architecture or tokenizer, or an encoder of another model.
    """
    file = _read(path)
    checkpoint = _language_model(path, file)
    if mmproj == NO_ENCODER:
        return checkpoint
    architecture = file.metadata["general.architecture"]
    text = Text(path=path, architecture=architecture, metadata=file.metadata, checkpoint=checkpoint)
    encoder = Path(mmproj).expanduser() if mmproj else find_encoder(text)
    return checkpoint if encoder is None else with_encoder(text, encoder)


def _read(path: Path) -> GGUFFile:
    try:
        return read_gguf(path)
    except (ValueError, OverflowError) as error:
        raise BrokenArtifactError(
            f"{path} is not a whole GGUF file ({error})", hint="download or copy it again"
        ) from None


def _language_model(path: Path, file: GGUFFile) -> Checkpoint:
    metadata = file.metadata
    if metadata.get("general.architecture") == ENCODER:
        raise UnsupportedModelError(
            f"{path} is a visual encoder without its language model",
            hint="give the language model's .gguf file; the encoder is found next to it",
        )
    try:
        facts = Facts(
            metadata=metadata,
            vectors=_rope_tensors(file),
            names={t.name for t in file.tensors},
            families=FAMILIES,
        )
        pooling = _pooling(facts)
        pooler, pooler_tensors = _pooler(file, facts.family)
        config = read_config(facts)
        tokenizer_files, ends = convert_tokenizer(metadata.get), sorted(end_ids(metadata.get))
        tensors, blocks = (
            GGUFTensors(file=file, family=facts.family, config=config, keeps_blocks=keeps)
            for keeps in (False, True)
        )
    except _DAMAGED as error:
        raise BrokenArtifactError(
            f"{path} holds damaged metadata ({error})", hint="download or copy it again"
        ) from None
    return Checkpoint(
        label=str(path),
        config=config,
        generation_config={"eos_token_id": ends, **_sampling(metadata)},
        tensors=tensors,
        tokenizer_files=tokenizer_files,
        blocks=blocks,
        pooling=pooling,
        pooler=pooler,
        pooler_tensors=pooler_tensors,
    )


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options of the file, by their names in generation_config.json."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {name: _short(value) for name, value in found.items() if value is not None}


def _short(value: Any) -> Any:
    """The decimal number that a float32 was written from."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _pooling(facts: Facts) -> str:
    """Pooling of an embedding model; "": the file has none."""
    kind = facts.get("pooling_type", 0)
    if facts.family.ranks:
        return ""
    if kind not in _POOLINGS or (kind == _FIRST_POSITION and facts.family.is_causal):
        name = _REFUSED_POOLINGS.get(kind, "an unknown rule")
        raise UnsupportedModelError(
            f"GGUF {facts.architecture}.pooling_type = {kind}: texts are embedded by {name}",
            hint="edgellm embeds by the mean of all positions (1), by the last one (3), and in "
            "encoders by the first one (2)",
        )
    return _POOLINGS[kind]


def _pooler(
    file: GGUFFile, family: Family
) -> tuple[PoolerSpec | None, dict[str, NDArray[np.float32]]]:
    """Linear layers after the pooling, with their weights; None: the file has none."""
    held = {tensor.name: tensor for tensor in file.tensors}
    layers = [held[f"{name}.weight"] for name in family.dense if f"{name}.weight" in held]
    weights: list[NDArray[np.float32]] = [
        decoded(each.data, each.kind).reshape(each.shape) for each in layers
    ]
    specs = [DenseSpec(in_features=each.shape[1], out_features=each.shape[0]) for each in weights]
    for first, second in pairwise(specs):
        if second.in_features != first.out_features:
            raise BrokenArtifactError(
                f"the GGUF file has a dense layer for {second.in_features} numbers after one that "
                f"gives {first.out_features}",
                hint="convert the model again with a current llama.cpp",
            )
    named = {f"{index}.weight": each for index, each in enumerate(weights)}
    return PoolerSpec(dense=tuple(specs)) if specs else None, named


def _rope_tensors(file: GGUFFile) -> dict[str, list[float]]:
    """`rope_freqs`, `rope_factors_long` and similar tensors by name."""
    return {
        tensor.name.removesuffix(".weight"): tensor.data.view(np.float32).reshape(-1).tolist()
        for tensor in file.tensors
        if tensor.name.startswith(_ROPES)
    }


def _hf_name(name: str, family: Family, layers: int) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Layers after the last are those of multi-token prediction.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return family.name_of(name)
    layer, own = int(match[1]), match[2]
    if layer < layers:
        return f"{family.layers}.{layer}.{family.name_of(own)}"
    if (module := _PREDICTS.get(own.removesuffix(".weight"))) is not None:
        return f"mtp.{module}.weight"
    return f"mtp.layers.{layer - layers}.{family.name_of(own)}"

"""Opens checkpoints: a local folder, a GGUF file, or a model in the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.resources import require_regular_files
from edgellm.core.strict_json import parse
from edgellm.export.checkpoints.checkpoint import Checkpoint, Safetensors, TensorSource
from edgellm.export.checkpoints.tokenizer import TokenizerFiles, read_tokenizer
from edgellm.export.draft_checkpoints import kinds
from edgellm.export.draft_checkpoints.muse_glimmer import as_dflash
from edgellm.export.pipeline.qwen3_asr_checkpoint import as_transformers
from edgellm.export.pooling.sentence_transformers import read_modules, score_activation

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_TOKENS = "tokenizer_config.json"
_WHOLE = "model.safetensors", "pytorch_model.bin"  # safetensors take precedence over torch's format
_SHARD = re.compile(r"(.+)-\d+-of-(\d+\.\w+)")
_ADAPTER = "adapter_config.json"  # of PEFT
_REMEDY = "copy or download the file again"


def find_path(model_dir: str) -> Path:
    """The folder or file of a checkpoint, which may be the id of a model in the hub cache.

    Raises:
        EdgeLLMError: no such path, and no such id in the cache.
    """
    path = Path(model_dir).expanduser()
    return path if path.exists() else _cached_snapshot(model_dir)


def open_draft(model_dir: str) -> Checkpoint:
    """Open a draft's checkpoint, which may be in the folder of its base model.

    Raises:
        EdgeLLMError: as `open_checkpoint`.
    """
    path = Path(model_dir).expanduser()
    if path.is_file():
        return open_checkpoint(model_dir, tokenizer=False)
    folder = path if path.is_dir() else _cached_snapshot(model_dir)
    return _open_folder(folder, tokenizer=False, is_draft=True)


def open_checkpoint(model_dir: str, *, tokenizer: bool = True, mmproj: str = "") -> Checkpoint:
    """Open a local folder, a GGUF file, or the id of a model that the hub cache already holds.

    Args:
        model_dir: folder, file or id.
        tokenizer: false for a checkpoint that needs none.
        mmproj: see `open_gguf`.

    Raises:
        EdgeLLMError: missing, not a checkpoint, or damaged; an encoder's file for a folder.
    """
    path = Path(model_dir).expanduser()
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if mmproj and not is_gguf:
        raise EdgeLLMError(
            f"--mmproj goes with a .gguf file, not with {model_dir}",
            hint="leave it out: a folder has its own encoder",
        )
    if is_gguf:
        from edgellm.export.checkpoints.gguf.gguf_checkpoint import (
            open_gguf,  # imports the optional package gguf
        )

        return open_gguf(path, mmproj)
    if path.is_dir():
        return _open_folder(path, tokenizer=tokenizer)
    if path.exists():
        raise EdgeLLMError(
            f"{path} is neither a folder nor a .gguf file",
            hint="give the folder that holds config.json and *.safetensors",
        )
    return _open_folder(_cached_snapshot(model_dir), tokenizer=tokenizer)


def _cached_snapshot(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, local_files_only=True))
    except HFValidationError:  # no hub has such an id
        raise EdgeLLMError(f"no such folder or file: {model_id}", hint="check the path") from None
    except LocalEntryNotFoundError:
        raise EdgeLLMError(
            f"no such folder, and not in the local hub cache: {model_id}",
            hint=f"check the path, or fetch it first: hf download {model_id}",
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file."""
    try:
        value = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise BrokenArtifactError(f"{path} is not valid JSON: {error}", hint=_REMEDY) from None
    if not isinstance(value, dict):
        raise BrokenArtifactError(f"{path} does not hold a JSON object", hint=_REMEDY)
    return value


def _open_folder(folder: Path, *, tokenizer: bool, is_draft: bool = False) -> Checkpoint:
    """Open a folder; a draft's weights take precedence over its base's in the same folder."""
    require_regular_files(folder)
    refuse_adapter(folder)
    own = tuple(name for kind in kinds.kinds() for name in kind.FILES)
    weights = (*own, *_WHOLE) if is_draft else (*_WHOLE, *own)
    config = read_json(folder / "config.json")
    if not config:
        raise EdgeLLMError(
            f"{folder} is not a checkpoint: it has no config.json, or an empty one",
            hint="give the folder that holds config.json and *.safetensors",
        )
    if not isinstance(config.get("model_type", ""), str):
        raise BrokenArtifactError(
            f"{folder}: the model_type of config.json is not a text", hint=_REMEDY
        )
    found = read_tokenizer(folder) if tokenizer else TokenizerFiles({})
    pooler = read_modules(folder, lambda module: _open_tensors(module, _WHOLE))
    checkpoint = Checkpoint(
        label=str(folder),
        config=config,
        generation_config=read_json(folder / "generation_config.json"),
        tensors=_open_tensors(folder, weights),
        tokenizer_files=found.files,
        quant_config=_quantization(folder, config),
        processor_files=_processor_files(folder),
        last_token=found.last_token,
        eos_token_id=found.eos_token_id,
        pooling=pooler.pooling if pooler is not None else "",
        pooler=pooler.spec if pooler is not None else None,
        pooler_tensors=pooler.tensors if pooler is not None else {},
        score_activation=score_activation(folder),
    )
    return as_transformers(as_dflash(checkpoint))


def refuse_adapter(folder: Path) -> None:
    """Reject adapters of PEFT, which must be merged into a model first.

    Raises:
        UnsupportedModelError: the folder has an adapter, alone or with weights.
    """
    adapter = read_json(folder / _ADAPTER)
    if not adapter:
        return
    kind = str(adapter.get("peft_type", "PEFT"))
    kind = {"LORA": "a LoRA"}.get(kind.upper(), f"a {kind}")
    if any(_weight_files(folder, name) for name in _WHOLE):
        raise UnsupportedModelError(
            f"{folder} has both {kind} adapter and a model: it is ambiguous",
            hint=f"move {_ADAPTER} away if the weights are merged already; else {_merging(kind)}",
        )
    base = adapter.get("base_model_name_or_path") or "an unnamed base"
    raise UnsupportedModelError(
        f"{folder} is {kind} adapter of {base}, not a whole model",
        hint=_merging(kind),
    )


def _merging(kind: str) -> str:
    if kind == "a LoRA":
        return "give its base as --model_dir and the adapter's folder as --lora_dir"
    return "merge it with PEFT: model.merge_and_unload().save_pretrained(...)"


def _processor_files(folder: Path) -> dict[str, bytes]:
    """Processor configs of images, for models that take images."""
    found = [name for name in PROCESSOR_FILES if read_json(folder / name)]
    names = [*found, _TOKENS] if found and (folder / _TOKENS).exists() else found
    return {name: (folder / name).read_bytes() for name in names}


# Where AutoGPTQ, GPTQModel and AutoAWQ say how weights are stored if config.json does not.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """How the weights are stored; ModelOpt's own file knows more than its config.json."""
    found = read_json(folder / "hf_quant_config.json").get("quantization")
    found = config.get("quantization_config") if found is None else found
    for name, maker in _OWN_FILES.items():
        if found is None and (said := read_json(folder / name)):
            found = {"quant_method": maker, **said}
    if found is not None and not isinstance(found, dict):
        raise BrokenArtifactError(f"{folder}: the quantization config is not a JSON object")
    return found or {}


def _open_tensors(folder: Path, names: tuple[str, ...]) -> TensorSource:
    """Open the first of these weight files that the folder has."""
    for name in names:
        if paths := _weight_files(folder, name):
            if name.endswith(".safetensors"):
                return Safetensors(paths)
            from edgellm.export.checkpoints.torch_bin import TorchFiles  # imports torch

            return TorchFiles(paths)
    raise EdgeLLMError(
        f"{folder} has no model.safetensors and no pytorch_model.bin (nor a sharded one)",
        hint="give the folder that holds config.json and the weights",
    )


def _weight_files(folder: Path, name: str) -> list[Path]:
    """The files of the weights `name`: one, all shards of an index, or none.

    A whole file takes precedence over an index without shards, as in transformers.

    Raises:
        BrokenArtifactError: a damaged index, or ambiguous files of two saves.
    """
    index, whole = folder / f"{name}.index.json", folder / name
    if not index.exists():
        return [whole] if whole.exists() else []
    shards = _shards(index)
    others = [shard for shard in shards if shard != name and (folder / shard).exists()]
    if not whole.exists() or (name in shards and len(shards) > 1):
        _refuse_other_save(folder, index, shards)
        return [folder / shard for shard in shards]
    if others:
        raise BrokenArtifactError(
            f"{whole} and {folder / others[0]}, which {index.name} names, are from different saves",
            hint=f"move {name} away if the shards are meant, or {index.name} if it is; "
            "transformers takes the whole file",
        )
    return [whole]


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise BrokenArtifactError(f"{index} has no weight_map, or one that names no files")
    if outside := [name for name in named.values() if not _is_inside(name)]:
        raise BrokenArtifactError(
            f"{index} names {outside[0]!r}, which is no file of its folder", hint=_REMEDY
        )
    return sorted(set(named.values()))


def _is_inside(name: str) -> bool:
    path = Path(name)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts


def _refuse_other_save(folder: Path, index: Path, shards: list[str]) -> None:
    """Reject shards whose names count to another number than those of the index."""
    counts = {match[1]: match[2] for shard in shards if (match := _SHARD.fullmatch(shard))}
    for path in sorted(folder.iterdir()):
        match = _SHARD.fullmatch(path.name)
        if match and path.name not in shards and counts.get(match[1], match[2]) != match[2]:
            raise BrokenArtifactError(
                f"{path} is from another save than {folder / shards[0]}, which {index.name} names",
                hint="move the wrong files away",
            )

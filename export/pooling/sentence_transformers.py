"""Folders of sentence-transformers: the modules of modules.json, prompts, and what they compute.

A model is Transformer, Pooling, any number of Dense, and Normalize, in this order; the last two may
be absent. Any other module is rejected by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.model_spec import DenseSpec, PoolerSpec
from edgellm.core.strict_json import parse
from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.export.pooling.pooler import F32, Pooler, read_floats

_SUPPORTED = "docs/how-to/embed.md lists the supported modules and settings"

MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_PACKAGE = "sentence_transformers."
_LOGITS = "LogitScore"  # of generative rerankers
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODE = "pooling_mode_"  # prefix of one flag for each mode, before version 5.3
_OLD_MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
# Settings of the Transformer module, and values that change nothing
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "do_lower_case": (),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "unpad_inputs": (True,),
}
_REMEDY = "copy or download the file again"
Open = Callable[[Path], TensorSource]


@dataclass(frozen=True, slots=True)
class _Module:
    """One entry of modules.json."""

    name: str  # of its class
    folder: Path

    def config(self) -> dict[str, Any]:
        """Its config.json; {} without one."""
        return _read(self.folder / "config.json", dict)

    def refuse(self, left: dict[str, Any]) -> None:
        """Raise `UnsupportedModelError` for config keys that are left."""
        if left:
            raise UnsupportedModelError(
                f"{self.folder}: {self.name} has the unknown setting "
                + ", ".join(f"{key} = {value!r}" for key, value in sorted(left.items())),
                hint=_SUPPORTED,
            )


def read_modules(folder: Path, open_tensors: Open) -> Pooler | None:
    """The modules of a sentence-transformers folder after its Transformer; None: there are none.

    Args:
        folder: of the model.
        open_tensors: opens the weights of a module's folder.

    Raises:
        UnsupportedModelError: an unknown module, setting, activation or order of modules.
        BrokenArtifactError: a file is missing or damaged, or a weight has another shape.
    """
    modules = _modules(folder) if (folder / MODULES).exists() else []
    if [module.name for module in modules] in ([], ["Transformer"]):
        return None
    transformer, pooling, *others = modules
    mode, pools_prompt, size = _pooling(pooling)
    dense, tensors = list[DenseSpec](), dict[str, F32]()
    for module in others:
        if module.name == "Dense":
            spec, own = _dense(module, size, open_tensors)
            tensors |= {f"{len(dense)}.{name}": tensor for name, tensor in own.items()}
            dense.append(spec)
            size = spec.out_features
    settings = _read(folder / _PROMPTS, dict)
    prompts, default = _prompts(settings)
    spec = PoolerSpec(
        dense=tuple(dense),
        normalize=any(module.name == "Normalize" for module in others),
        dimensions=_dimensions(settings, size),
        prompts=prompts,
        default_prompt=default,
        pools_prompt=pools_prompt,
        max_tokens=_max_tokens(transformer.folder / _TRANSFORMER),
    )
    return Pooler(pooling=mode, spec=spec, tensors=tensors)


def score_activation(folder: Path) -> str | None:
    """The activation of a cross-encoder's scores, by its class; None: not stated.

    Raises:
        UnsupportedModelError: queries get a prompt.
    """
    settings = _read(folder / _PROMPTS, dict)
    if (found := settings.get("activation_fn")) is None:
        return None
    if settings.get("default_prompt_name") is not None:
        raise UnsupportedModelError(
            f"{folder / _PROMPTS}: prompts of cross-encoders are not supported", hint=_SUPPORTED
        )
    return str(found)


def _read(path: Path, kind: type) -> Any:
    """A JSON file; an empty value without one. Raises `BrokenArtifactError` if damaged."""
    try:
        value = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return kind()
    except (ValueError, RecursionError) as error:
        raise BrokenArtifactError(f"{path} is not valid JSON: {error}", hint=_REMEDY) from None
    if not isinstance(value, kind):
        raise BrokenArtifactError(f"{path} does not hold a JSON {kind.__name__}", hint=_REMEDY)
    return value


def _modules(folder: Path) -> list[_Module]:
    """The modules in order; raises `UnsupportedModelError` for another order or name."""
    found: list[_Module] = []
    for entry in _read(folder / MODULES, list):
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else ("", "")
        place = Path(path) if isinstance(path, str) else Path("..")
        if not isinstance(kind, str) or place.is_absolute() or ".." in place.parts:
            raise BrokenArtifactError(
                f"{folder / MODULES}: {json.dumps(entry)} names no module", hint=_SUPPORTED
            )
        name = kind.rpartition(".")[2] if kind.startswith(_PACKAGE) else kind
        found.append(_Module(name, folder / place))
    names = [module.name for module in found]
    known = ("Transformer", "Pooling", "Dense", "Normalize")
    if unknown := [name for name in names if name not in known]:
        hint = f"supported: {', '.join(known)}"
        if unknown == [_LOGITS]:
            hint = f"if it is like Qwen3-Reranker, remove {MODULES}, and export with --reranker"
        raise UnsupportedModelError(
            f"{folder / MODULES} has the module {unknown[0]}, which edgellm does not support",
            hint=hint,
        )
    count = names.count("Dense")
    tail = ["Dense"] * count + ["Normalize"] * names.count("Normalize")
    if names == ["Transformer"]:  # a cross-encoder, whose head is in its weights
        return found
    if names != ["Transformer", "Pooling", *tail] or names.count("Normalize") > 1:
        raise UnsupportedModelError(
            f"{folder / MODULES} has the modules {', '.join(names)}",
            hint="supported: Transformer, Pooling, then Dense layers, then Normalize",
        )
    for module in found[2:]:
        _require_vectors(module)
    return found


def _require_vectors(module: _Module) -> None:
    """Reject modules that change the hidden states of tokens, as ColBERT's do."""
    config = module.config()
    for key in ("module_input_name", "module_output_name"):
        if (value := config.get(key)) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(
                f"{module.folder}: {module.name} has {key} {value!r}, which is no pooled vector",
                hint=_SUPPORTED,
            )


def _pooling(module: _Module) -> tuple[str, bool, int]:
    """Pooling, whether prompts are pooled, and the width; raises `UnsupportedModelError`."""
    config = module.config()
    size = config.pop("embedding_dimension", None) or config.pop("word_embedding_dimension", None)
    config.pop("word_embedding_dimension", None)
    flags = {key: config.pop(key) for key in [*config] if key.startswith(_OLD_MODE)}
    names = [key.removeprefix(_OLD_MODE) for key, is_on in flags.items() if is_on]
    given: Any = config.pop("pooling_mode", None) or [_OLD_MODES.get(each, each) for each in names]
    modes = [given] if isinstance(given, str) else list(given) or ["mean"]
    pools_prompt = bool(config.pop("include_prompt", True))
    module.refuse(config)
    if len(modes) > 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{module.folder}: pooling by {' and '.join(map(str, modes))} is not supported",
            hint=f"supported: one of {', '.join(_MODES)}",
        )
    if type(size) is not int or size < 1:
        raise BrokenArtifactError(
            f"{module.folder}: Pooling has no embedding_dimension", hint=_SUPPORTED
        )
    return _MODES[modes[0]], pools_prompt, size


def _dense(module: _Module, size: int, open_tensors: Open) -> tuple[DenseSpec, dict[str, F32]]:
    """A dense layer of vectors of this size, with its weights."""
    config = module.config()
    inputs, outputs = (config.pop(key, None) for key in ("in_features", "out_features"))
    has_bias = config.pop("bias", True)
    name = config.pop("activation_function", "torch.nn.modules.activation.Tanh")
    for key in ("module_input_name", "module_output_name"):
        config.pop(key, None)
    module.refuse({key: value for key, value in config.items() if value not in (None, False)})
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{module.folder}: the activation {name} is not supported",
            hint=f"supported: {', '.join(_ACTIVATIONS)}",
        )
    if inputs != size or type(outputs) is not int or outputs < 1:
        raise BrokenArtifactError(
            f"{module.folder}: Dense maps {inputs} to {outputs} numbers, its input has {size}",
            hint=_SUPPORTED,
        )
    source, owner = open_tensors(module.folder), str(module.folder)
    tensors = {"weight": read_floats(source, "linear.weight", (outputs, inputs), owner)}
    if has_bias:
        tensors["bias"] = read_floats(source, "linear.bias", (outputs,), owner)
    return (
        DenseSpec(in_features=inputs, out_features=outputs, activation=_ACTIVATIONS[name]),
        tensors,
    )


def _prompts(settings: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the default one."""
    given = settings.get("prompts") or {}
    prompts = {name: text or "" for name, text in given.items()}
    default = settings.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise BrokenArtifactError(f"{_PROMPTS}: prompts are not texts", hint=_REMEDY)
    if default is not None and default not in prompts:
        raise BrokenArtifactError(
            f"{_PROMPTS}: default_prompt_name {default!r} is none of the prompts", hint=_REMEDY
        )
    return prompts, default


def _dimensions(settings: dict[str, Any], size: int) -> int:
    """`truncate_dim`; 0: the whole vector."""
    found = settings.get("truncate_dim")
    if found is None:
        return 0
    if type(found) is not int or not 1 <= found <= size:
        raise BrokenArtifactError(
            f"{_PROMPTS}: truncate_dim {found!r} is not 1 to {size}", hint=_SUPPORTED
        )
    return found


def _max_tokens(path: Path) -> int:
    """Maximum tokens of a text, as sentence-transformers truncates it; 0: not stated.

    Raises:
        UnsupportedModelError: texts become something else than tokens of the tokenizer.
    """
    config = _read(path, dict)
    forms: dict[str, Any] = config.pop("modality_config", None) or {}
    if "message" in forms:
        raise UnsupportedModelError(
            f"{path}: texts go through the chat template (modality_config has message)",
            hint="if the model was trained without it, delete the entry message",
        )
    text = (config.pop("processing_kwargs", None) or {}).get("text") or {}
    limits = (config.pop("max_seq_length", None), text.get("max_length"))
    for key, allowed in _SETTINGS.items():
        if (value := config.pop(key, None)) not in (*allowed, None, False, {}):
            raise UnsupportedModelError(
                f"{path}: {key} = {value!r} is not supported", hint=_SUPPORTED
            )
    if left := {key: value for key, value in config.items() if value not in (None, False, {})}:
        raise UnsupportedModelError(
            f"{path} has the unknown settings {', '.join(sorted(left))}", hint=_SUPPORTED
        )
    return next((each for each in limits if type(each) is int and each > 0), 0)

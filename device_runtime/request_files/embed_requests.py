"""Requests of a file that embed a text, or rank documents: no tokens are generated."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.api.pooler import Embedding, EmbeddingInput, RerankInput
from edgellm.device_runtime.request_files.request_file import convert

_EMBED, _RERANK = "embed", "rerank"
_Count = Annotated[int, msgspec.Meta(ge=1)]


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text to embed."""

    embed: str
    dimensions: _Count | None = None
    prompt_name: str | None = None  # of the model's prompts; None: its default
    truncate: bool = False  # cut a text that is too long
    lora_name: str | None = None


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A query, and documents to rank by it."""

    rerank: str
    documents: Annotated[list[str | RerankDocument], msgspec.Meta(min_length=1)]
    top_n: _Count | None = None
    instruction: str | None = None  # what the query asks for; of rerankers that take one
    truncate: bool = True  # cut documents that are too long
    lora_name: str | None = None


def is_pooled(raw: Any) -> bool:
    """Whether a request embeds or ranks."""
    return isinstance(raw, dict) and (_EMBED in raw or _RERANK in raw)


def respond(llm: LLM, raw: dict[str, Any], index: int) -> dict[str, Any]:
    """The fields of the response to such a request.

    Args:
        llm: the engine.
        raw: the request as parsed JSON.
        index: its index in the file.

    Raises:
        RequestError: it is malformed, or the engine does not embed or rank.
    """
    place = f"$.requests[{index}]"
    if _EMBED in raw:
        wanted: EmbedRequest = convert(raw, EmbedRequest, place)
        found = llm.embed_input(
            EmbeddingInput(
                text=wanted.embed,
                dimensions=wanted.dimensions,
                prompt_name=wanted.prompt_name,
                truncate=wanted.truncate,
                lora=wanted.lora_name,
            )
        )
        return {**_head([found]), "embedding": found.vector.tolist()}
    asked: RerankRequest = convert(raw, RerankRequest, place)
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    results, outputs = llm.rank(
        RerankInput(
            query=asked.rerank,
            document="",
            instruction=asked.instruction,
            truncate=asked.truncate,
            lora=asked.lora_name,
        ),
        texts,
    )
    scores = [{"index": one.index, "relevance_score": one.score} for one in results]
    return {**_head(outputs), "results": scores[: asked.top_n]}


def _head(outputs: list[Embedding]) -> dict[str, Any]:
    count = sum(one.prompt_tokens for one in outputs)
    return {"finish_reason": "stop", "prompt_token_count": count, "generated_token_count": 0}

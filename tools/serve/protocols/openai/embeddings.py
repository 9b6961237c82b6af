"""`/v1/embeddings`, and `/rerank` by cosine similarity of embeddings."""

from __future__ import annotations

import base64
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgellm.device_runtime.api.llm import LLM, Step
from edgellm.device_runtime.api.pooler import EmbeddingInput, Pooler, RerankInput
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.output.streams import EVENTS, OneText
from edgellm.tools.serve.schemas.openai import MAX_PROMPTS
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.sampling import TokenId

_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Event = dict[str, Any]


class EmbeddingRequest(Body):
    """Texts or token ids."""

    model: str | None = None
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | _Ids
        | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    prompt_name: str | None = None  # of the model's prompts; of texts only
    truncate: bool = False  # texts that are longer than the engine takes

    def asks(self, llm: LLM, lora: str | None) -> list[EmbeddingInput]:
        """The inputs of the engine.

        Raises:
            ApiError: more dimensions than the model has.
        """
        if (self.dimensions or 0) > (maximum := llm.pooler.size):
            raise ApiError(400, f"dimensions: the model has {maximum}", param="dimensions")
        return [
            EmbeddingInput(
                text=text,
                prompt_name=self.prompt_name,
                dimensions=self.dimensions,
                truncate=self.truncate,
                lora=lora,
            )
            for text in self._texts()
        ]

    def _texts(self) -> list[str | tuple[int, ...]]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [tuple(one for one in self.input if isinstance(one, int))]
        texts = [one for one in self.input if not isinstance(one, int)]
        return [one if isinstance(one, str) else tuple(one) for one in texts]


class RerankText(Body):
    """A document."""

    text: str


class RerankRequest(Body):
    """A query and documents to rank, in Jina's and Cohere's form."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankText], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    instruction: str | None = None  # what the query asks for; of rerankers that take one
    truncate: bool = True  # documents that are longer than the engine takes

    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def asks(self, llm: LLM, lora: str | None) -> list[RerankInput] | list[EmbeddingInput]:
        """The inputs of the engine; see `Pooler.rank_inputs`."""
        wanted = RerankInput(
            query=self.query,
            document="",
            instruction=self.instruction,
            truncate=self.truncate,
            lora=lora,
        )
        return llm.pooler.rank_inputs(wanted, self.texts())


class VectorWriter(OneText):
    """Collects embeddings; never streams."""

    framing, last = EVENTS, b""

    def __init__(self, model: str) -> None:
        self._model, self._found = model, list[Finished]()

    def begin(self, started: Started) -> list[_Event]:
        """Nothing comes of it."""
        del started
        return []

    def step(self, step: Step) -> list[_Event]:
        """Nothing comes of it."""
        del step
        return []

    def end(self, figures: Finished) -> list[_Event]:
        """Nothing comes of it."""
        del figures
        return []

    def _add(self, figures: Finished) -> list[NDArray[np.float32]]:
        self._found.append(figures)
        return [one.embedding for one in self._found if one.embedding is not None]

    def _usage(self) -> _Event:
        count = sum(one.prompt_tokens for one in self._found)
        return {"prompt_tokens": count, "total_tokens": count}


class EmbeddingWriter(VectorWriter):
    """Vectors in OpenAI's form."""

    def __init__(self, body: EmbeddingRequest, model: str) -> None:
        super().__init__(model)
        self._body = body

    def whole(self, figures: Finished) -> _Event:
        """The body with all embeddings so far."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(self._add(figures))
        ]
        return {"object": "list", "data": data, "model": self._model, "usage": self._usage()}

    def _encoded(self, vector: NDArray[np.float32]) -> list[float] | str:
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()


class RerankWriter(VectorWriter):
    """Writes documents by their score, best first; of embeddings it is the cosine to the query."""

    def __init__(self, body: RerankRequest, pooler: Pooler, model: str) -> None:
        super().__init__(model)
        self._body, self._pooler = body, pooler

    def whole(self, figures: Finished) -> _Event:
        """The body with all documents so far."""
        texts = self._body.texts()
        results = [
            {"index": each.index, "relevance_score": each.score}
            | ({"document": {"text": texts[each.index]}} if self._body.return_documents else {})
            for each in self._pooler.ranked(self._add(figures))[: self._body.top_n]
        ]
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": self._model}
        return {**head, "results": results, "usage": self._usage()}

"""Embeddings and scores of texts from pooled hidden states: prompts, dense layers, dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    BrokenArtifactError,
    PromptLengthError,
    RequestError,
    suggestion,
)
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import POOLER_FILE, DenseSpec, PoolerSpec
from edgellm.core.safetensors_io import Safetensors
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.engine.prompt import refuse_long
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

F64 = NDArray[np.float64]
_SIDES = ("query",), ("document", "passage", "corpus")  # names of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInput:
    """A text to embed, with its options."""

    text: str | Sequence[int]  # or its token ids, which get no prompt and no special tokens
    prompt_name: str | None = None  # of the model's prompts; None: its default
    prompt: str | None = None  # text before the input, in place of the model's prompts
    dimensions: int | None = None  # first elements of the vector that are kept; None: the model's
    truncate: bool = False  # cut a text that is too long
    lora: str | None = None  # name of a loaded adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankInput:
    """A document to score for a query."""

    query: str
    document: str
    instruction: str | None = None  # what the query asks for; None: the model's
    truncate: bool = True  # cut a document that is too long
    lora: str | None = None  # name of a loaded adapter


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document with its score."""

    index: int  # among the documents of the request
    score: float


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a text, or the score [1] of a document."""

    vector: F32
    prompt_tokens: int  # of the text, with its prompt and special tokens


class Pooler:
    """What follows the pooling of an engine's hidden states; see `PoolerSpec`."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        """Read the weights of the dense layers.

        Raises:
            BrokenArtifactError: a weight is missing or has another shape.
        """
        self.spec = engine.pooler or PoolerSpec()
        self._engine = engine
        self._layers: list[Callable[[F64], F64]] = []
        self._size = engine.decoder.hidden_size
        source = Safetensors([folder / POOLER_FILE]) if self.spec.dense else None
        for at, dense in enumerate(self.spec.dense):
            assert source is not None
            self._layers.append(_layer(source, at, dense, engine))
            self._size = dense.out_features

    @property
    def size(self) -> int:
        """Numbers of the whole vector."""
        return self._size

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a text."""
        engine, own = self._engine, self.spec.max_tokens
        limit = min(engine.max_input_len, engine.max_kv_cache_capacity)
        return min(limit, own) if own else limit

    @property
    def scores(self) -> bool:
        """Whether the engine is a reranker."""
        return self.spec.rerank is not None

    def tokens(
        self, wanted: EmbeddingInput | RerankInput, tokenizer: ChatTokenizer
    ) -> tuple[list[int], int]:
        """Token ids of an input with its prompt, and the number of first ones that are not pooled.

        Raises:
            RequestError: an unknown prompt or option, an empty or too long text, or the engine
                computes something else.
        """
        if isinstance(wanted, RerankInput):
            ids = self._pair_tokens(wanted, tokenizer)
            self.require_fit(len(ids))
            return ids, 0
        if self.scores:
            raise RequestError(
                "this engine scores documents and does not embed", hint="use /v1/rerank or rerank()"
            )
        return self._text_tokens(wanted, tokenizer)

    def _pair_tokens(self, wanted: RerankInput, tokenizer: ChatTokenizer) -> list[int]:
        """Token ids of a query and a document."""
        spec = self.spec.rerank
        if spec is None:
            raise RequestError("this engine embeds texts and scores no pairs")
        if wanted.instruction is not None and "{instruction}" not in spec.body:
            raise RequestError("the reranker takes no instruction", hint="put it into the query")
        texts = [tokenizer.as_text(each) for each in (wanted.query, wanted.document)]
        limit = self.max_tokens
        if not spec.body:
            return self._joined(
                (wanted.query, wanted.document), tokenizer, limit if wanted.truncate else None
            )
        for text in texts if not wanted.truncate else ():
            refuse_long(text, tokenizer, self._engine)
        instruction = spec.instruction if wanted.instruction is None else wanted.instruction
        prefix, suffix = (
            tokenizer.encode(each, add_special_tokens=False) for each in (spec.prefix, spec.suffix)
        )
        body = spec.body.format(instruction=instruction, query=texts[0], document=texts[1])
        ids = tokenizer.encode(body, add_special_tokens=False)
        room = max(limit - len(prefix) - len(suffix), 0)
        return [*prefix, *(ids[:room] if wanted.truncate else ids), *suffix]

    def _joined(
        self, texts: Sequence[str], tokenizer: ChatTokenizer, limit: int | None
    ) -> list[int]:
        """Token ids of a pair; those of the second text are shifted if texts have embeddings."""
        query, document = texts
        ids, types = tokenizer.encode_pair(query, document, limit)
        decoder = self._engine.decoder
        shift = decoder.vocab_size if decoder.token_types > 1 else 0
        return [token_id + shift * kind for token_id, kind in zip(ids, types, strict=True)]

    def _text_tokens(
        self, wanted: EmbeddingInput, tokenizer: ChatTokenizer
    ) -> tuple[list[int], int]:
        """See `tokens`."""
        limit, skipped = self.max_tokens, 0
        if not isinstance(wanted.text, str):
            if wanted.prompt or wanted.prompt_name:
                raise RequestError("token ids take no prompt", hint="give a text, or no prompt")
            ids = [*wanted.text][: limit if wanted.truncate else None]
            size = self._engine.decoder.vocab_size
            if unknown := [each for each in ids if not 0 <= each < size]:
                raise RequestError(f"the model has no token {unknown[0]}")
        else:
            prompt = self._prompt(wanted)
            text = prompt + wanted.text
            if not wanted.truncate:
                refuse_long(text, tokenizer, self._engine)
            ids = tokenizer.encode(text, add_special_tokens=True)
            if wanted.truncate and len(ids) > limit:
                ids = tokenizer.encode_truncated(text, limit)
            if prompt and not self.spec.pools_prompt:
                skipped = _num_shared(tokenizer.encode(prompt, add_special_tokens=True), ids)
        self.require_fit(len(ids))
        return ids, min(skipped, len(ids) - 1)

    def rank_inputs(
        self, wanted: RerankInput, documents: Sequence[str]
    ) -> list[RerankInput] | list[EmbeddingInput]:
        """Inputs that rank documents: pairs, or of an embedding model the query and documents.

        Embedding models get the prompts that sentence-transformers takes for both.
        """
        if self.scores:
            return [replace(wanted, document=each) for each in documents]
        prompts = self.spec.prompts
        names = [next((each for each in some if each in prompts), None) for some in _SIDES]
        texts = [(wanted.query, names[0]), *((each, names[1]) for each in documents)]
        return [
            EmbeddingInput(text=text, prompt_name=name, truncate=wanted.truncate, lora=wanted.lora)
            for text, name in texts
        ]

    def ranked(self, vectors: Sequence[F32]) -> list[Ranked]:
        """Documents by the outputs of `rank_inputs`, best first, equal ones in their order."""
        if self.scores:
            scores = [float(vector[0]) for vector in vectors]
        else:
            query, *others = vectors
            scores = [_cosine(query, vector) for vector in others]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [Ranked(index, scores[index]) for index in order]

    def require_fit(self, count: int) -> None:
        """Raise `RequestError` for a text without tokens, or with more than the engine takes."""
        if not count:
            raise RequestError("the prompt is empty")
        if count > self.max_tokens:
            raise PromptLengthError(
                f"the text has {count} tokens, the engine takes {self.max_tokens}",
                hint="shorten it, or let it be truncated",
            )

    def _prompt(self, wanted: EmbeddingInput) -> str:
        if wanted.prompt is not None:
            return wanted.prompt
        name = self.spec.default_prompt if wanted.prompt_name is None else wanted.prompt_name
        if name is None:
            return ""
        if name not in self.spec.prompts:
            known = [*self.spec.prompts]
            words = suggestion(name, known), f"prompts: {', '.join(known) or 'none'}"
            raise RequestError(
                f"the model has no prompt {name!r}", hint=" ".join(filter(None, words))
            )
        return self.spec.prompts[name]

    def vector(self, pooled: F64, dimensions: int | None = None) -> F32:
        """The embedding [dimensions] of pooled hidden states [H].

        Raises:
            RequestError: it is not finite, or zero; or it has fewer dimensions.
        """
        self.require_dimensions(dimensions)
        for layer in self._layers:
            pooled = layer(pooled)
        pooled = pooled[: dimensions or self.spec.dimensions or None]
        length = float(np.linalg.norm(pooled))
        if not np.isfinite(length) or not length:
            raise RequestError("the embedding of this text is not finite, or zero")
        return (pooled / length if self.spec.normalize else pooled).astype(np.float32)

    def require_dimensions(self, dimensions: int | None) -> None:
        """Raise `RequestError` unless the vector has this number of elements."""
        if dimensions is None:
            return
        if type(dimensions) is not int or not 1 <= dimensions <= self._size:
            raise RequestError(f"dimensions: the model has {self._size}, {dimensions} were wanted")


def open_pooler(folder: Path, engine: Engine) -> Pooler | None:
    """The pooler of an engine; None: the engine only generates. Raises as `Pooler`."""
    return Pooler(folder, engine) if engine.pooling else None


def _cosine(one: F32, other: F32) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def _num_shared(prompt: list[int], ids: list[int]) -> int:
    """Tokens of a prompt that begin a text; an end token of the prompt alone is none."""
    pairs = zip(prompt, ids, strict=False)
    return next((at for at, (own, other) in enumerate(pairs) if own != other), len(prompt))


# ---------------------------------------------------------------------------- dense layers
def _layer(source: Safetensors, at: int, dense: DenseSpec, engine: Engine) -> Callable[[F64], F64]:
    """The function of a dense layer."""

    def take(name: str, *shape: int, default: float | None = None) -> F64:
        info = source.infos().get(full := f"{at}.{name}")
        if info is None and default is not None:
            return np.full(shape, default)
        if info is None or info.shape != shape or info.dtype != "F32":
            raise BrokenArtifactError(
                f"{POOLER_FILE} has no tensor {full} of the shape {list(shape)}",
                hint=f"run {engine.builder} again",
            )
        data = b"".join(bytes(piece) for piece in source.stream(full))
        return np.frombuffer(data, "<f4").reshape(shape).astype(np.float64)

    size = dense.out_features
    weight, bias = take("weight", size, dense.in_features), take("bias", size, default=0.0)
    gamma, beta = take("norm_weight", size, default=1.0), take("norm_bias", size, default=0.0)
    if dense.activation and dense.activation not in _ACTIVATIONS:
        raise BrokenArtifactError(
            f"the pooler has the unknown activation {dense.activation!r}", hint="update edgellm"
        )
    activate = _ACTIVATIONS.get(dense.activation)

    def apply(x: F64) -> F64:
        y = weight @ x + bias
        y = y if activate is None else activate(y)
        if dense.norm_epsilon:
            y = (y - y.mean()) / np.sqrt(y.var() + dense.norm_epsilon) * gamma + beta
        return y

    return apply


def _sigmoid(x: F64) -> F64:
    return 0.5 * (1 + np.tanh(0.5 * x))


_ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x]),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
}

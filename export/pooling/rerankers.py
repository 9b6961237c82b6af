"""Generative rerankers: a decoder is asked whether a document answers a query, yes or no.

The score is the probability of "yes" among both tokens after the prompt. The difference of two rows
of the head is a dense layer of the pooled last token, so the engine computes no further logits.
The prompt is that of Qwen3-Reranker (arXiv 2506.05176).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tokenizers import Tokenizer

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import DenseSpec, PoolerSpec, RerankSpec
from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.export.checkpoints.tokenizer import TOKENIZER
from edgellm.export.pooling.pooler import F32, Pooler, read_rows

_YES, _NO = "yes", "no"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_PROMPT = RerankSpec(
    prefix=f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n",
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
_HEADS = "lm_head.weight", "model.embed_tokens.weight"  # the second if they are tied


def yes_no_pooler(
    tensors: TensorSource, tokenizer_files: Mapping[str, bytes], hidden_size: int
) -> Pooler:
    """The pooler of a reranker like Qwen3-Reranker.

    Args:
        tensors: of the language model.
        tokenizer_files: of the checkpoint.
        hidden_size: of the model.

    Raises:
        UnsupportedModelError: a word of the prompt is no token, or the head is quantized.
    """
    tokenizer = Tokenizer.from_buffer(tokenizer_files[TOKENIZER])
    ids: list[int] = []
    for word in (_YES, _NO, "<|im_start|>", "<|im_end|>"):
        token_id = tokenizer.token_to_id(word)
        if token_id is None:
            raise UnsupportedModelError(
                f"--reranker: the tokenizer has no token {word!r}",
                hint="rerankers like Qwen3-Reranker have it; others are not supported",
            )
        ids.append(token_id)
    name = next((each for each in _HEADS if each in tensors.infos()), _HEADS[0])
    yes, no = read_rows(tensors, name, ids[:2], hidden_size)
    weight: F32 = (yes.astype(np.float64) - no).astype(np.float32)
    return Pooler(
        pooling="last",
        spec=PoolerSpec(
            dense=(DenseSpec(in_features=hidden_size, out_features=1, activation="sigmoid"),),
            normalize=False,
            rerank=_PROMPT,
        ),
        tensors={"0.weight": weight[None]},
    )

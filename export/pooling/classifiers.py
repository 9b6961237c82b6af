"""Cross-encoders: rerankers that are encoders with a classification head of one label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import DenseSpec, PoolerSpec, RerankSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.pooling.pooler import F32, Pooler, read_floats

_REMEDY = "docs/how-to/embed.md lists the supported models"

_OLD_ACTIVATION = "sbert_ce_default_activation_function"  # before version 4
_KIND = "ForSequenceClassification"
# Activations of the score in config.json of sentence-transformers; scores are sigmoids by default.
_SCORES = {
    "torch.nn.modules.linear.Identity": "",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A dense layer of a classification head, by the names of its tensors."""

    name: str
    out: int
    bias: bool = True
    activation: str = ""
    norm: str = ""  # of a layer norm after it; "": none
    norm_epsilon: float = 0.0
    norm_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A classification head: pooling and dense layers."""

    pooling: str
    heads: tuple[Head, ...]


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model with a classification head."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_KIND) for name in names)


def classifier_pooler(classifier: Classifier, checkpoint: Checkpoint, size: int) -> Pooler:
    """The pooler of a cross-encoder.

    Args:
        classifier: its head.
        checkpoint: of the encoder.
        size: of its hidden states.

    Raises:
        UnsupportedModelError: it has several labels, or an unknown activation of scores.
    """
    config = checkpoint.config
    labels = config.get("num_labels", len(config.get("id2label") or {}) or 2)
    if labels != 1:
        raise UnsupportedModelError(
            f"config.json: the classifier has {labels} labels, a reranker has one",
            hint="classifiers of texts are not supported",
        )
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    stated = checkpoint.score_activation or own or config.get(_OLD_ACTIVATION)
    if stated is not None and stated not in _SCORES:
        raise UnsupportedModelError(
            f"the activation of scores {stated!r} is not supported", hint=_REMEDY
        )
    dense, found = list[DenseSpec](), dict[str, F32]()
    for at, head in enumerate(classifier.heads):
        is_last = at == len(classifier.heads) - 1
        activation = (_SCORES[stated] if stated else "sigmoid") if is_last else head.activation
        names: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight": (f"{head.name}.weight", (head.out, size))
        }
        if head.bias:
            names["bias"] = f"{head.name}.bias", (head.out,)
        if head.norm:
            names["norm_weight"] = f"{head.norm}.weight", (head.out,)
        if head.norm and head.norm_bias:
            names["norm_bias"] = f"{head.norm}.bias", (head.out,)
        for own, (name, shape) in names.items():
            found[f"{at}.{own}"] = read_floats(checkpoint.tensors, name, shape, checkpoint.label)
        dense.append(
            DenseSpec(
                in_features=size,
                out_features=head.out,
                activation=activation,
                norm_epsilon=head.norm_epsilon,
            )
        )
        size = head.out
    spec = PoolerSpec(dense=tuple(dense), normalize=False, rerank=RerankSpec())
    return Pooler(pooling=classifier.pooling, spec=spec, tensors=found)

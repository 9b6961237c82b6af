"""XLM-RoBERTa (arXiv 1911.02116): BERT whose positions begin after that of padding; bge-m3, e5."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.encoders import bert
from edgellm.export.pooling.classifiers import Classifier, Head

TINY = {
    **bert.TINY,
    "model_type": "xlm-roberta",
    "type_vocab_size": 1,
    "pad_token_id": 5,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 66,
}
PREFIX = "roberta."


class Config(bert.Config):
    """XLM-RoBERTa's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        padding = reader.read("pad_token_id", int, 1)
        return cls.encoder(reader, first_position=padding + 1)


Model = bert.Model


def classifier(config: ConfigReader, size: int) -> Classifier:
    """The head of XLMRobertaForSequenceClassification."""
    del config
    return Classifier(
        pooling="cls",
        heads=(
            Head(name="classifier.dense", out=size, activation="tanh"),
            Head(name="classifier.out_proj", out=1),
        ),
    )

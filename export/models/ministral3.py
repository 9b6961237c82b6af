"""Ministral 3: Mistral with YaRN and queries scaled by position, as in Llama 4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits, read_parameters
from edgellm.export.layers.attention import PassState
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "ministral3", "head_dim": 32, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE = RopeTraits(others=(_BETA,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Ministral 3's config."""

    beta: float = 0.0  # factor of queries at position p: 1 + beta * log(1 + floor(p / stretch))
    stretch: int = 1

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        parameters = ConfigReader(read_parameters(reader))
        for key in (_BETA, _ORIGINAL):
            if parameters.optional(key, float) is None:
                raise UnsupportedModelError(f"config.json: rope_parameters without {key}")
        stretch = parameters.positive(_ORIGINAL)
        reader.expect(_ORIGINAL, stretch)  # outside of rope_parameters it would take precedence
        return cls.read(
            reader,
            rope=_ROPE,
            window=reader.optional("sliding_window", int),
            beta=parameters.read(_BETA, float),
            stretch=stretch,
        )


class Attention(llama.Attention):
    """Self-attention with scaled queries."""

    config: Config

    def attend(
        self, op: Op, state: PassState, layer: int, q: ir.Value, k: ir.Value, v: ir.Value
    ) -> ir.Value:
        """See `llama.Attention`; a factor commutes with RoPE."""
        factors = state.once("query_scale", lambda: self._factors(op, state))
        return super().attend(op, state, layer, op.Mul(q, factors), k, v)

    def _factors(self, op: Op, state: PassState) -> ir.Value:
        """Factors of queries [1, S, 1], computed in float32."""
        config = self.config

        def number(value: float) -> ir.Value:
            return op.constant(np.float32(value))

        stretches = op.Div(state.position_ids, op.constant(np.int64(config.stretch)))
        passes = op.Cast(stretches, to=int(ir.DataType.FLOAT))
        growth = op.Mul(op.Log(op.Add(passes, number(1))), number(config.beta))
        rows = op.Unsqueeze(op.Add(growth, number(1)), op.constant([2]))
        return rows if op.dtype == ir.DataType.FLOAT else op.Cast(rows, to=int(op.dtype))


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with Ministral's attention."""

    attention = Attention


class Model(llama.Model):
    """Llama's model with Ministral's blocks."""

    layer = DecoderLayer

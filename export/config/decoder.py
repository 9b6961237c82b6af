"""Config of decoders of the Llama family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import AudioSpec, ImageSpec
from edgellm.export.config.activations import ACTIVATIONS
from edgellm.export.config.layer_types import AttentionKind
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import PLAIN_ROPE, RopeTraits, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Typed facts of decoders like Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float  # or epsilon of layer norms
    max_position_embeddings: int
    tie_word_embeddings: bool
    activation: str
    layer_kinds: tuple[AttentionKind | None, ...]  # None: not an attention layer
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float | None = None  # factor of the first layer's input
    normalizes_embeddings: bool = False  # by RMS, without weights
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # of the scores; None: none
    images: ImageSpec | None = None  # of the text tower of a vision-language model
    audio: AudioSpec | None = None  # of a speech model
    is_recurrent: bool = False  # some layers have states
    is_causal: bool = True  # False: tokens attend to all of a text, which one pass computes
    token_types: int = 1  # texts of a pair that have embeddings of their own

    @property
    def kinds(self) -> tuple[AttentionKind | None, ...]:
        """Attention kind of each exported layer."""
        return self.layer_kinds[: self.num_hidden_layers]

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Indices of layers with a KV cache of their own."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind and kind.source is None)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of an attention layer, and their size."""
        kind = self.layer_kinds[layer]
        if kind is None or kind.kv is None:
            return self.num_key_value_heads, self.head_dim
        return kind.kv.num_heads, kind.kv.head_dim

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one."""
        return next((kind.window for kind in self.kinds if kind and kind.window is not None), None)

    @property
    def position_axes(self) -> int:
        """Positions of a token: 1, or 3 for M-RoPE."""
        return 3 if any(kind and kind.rope and kind.rope.axes for kind in self.kinds) else 1

    @classmethod
    def read(
        cls,
        reader: ConfigReader,
        *,
        rope: RopeTraits | None = PLAIN_ROPE,
        window: int | None = None,
        activation_key: str = "hidden_act",
        activations: Sequence[str] = ACTIVATIONS,
        inner_key: str = "intermediate_size",
        epsilon_key: str = "rms_norm_eps",
        **traits: Any,
    ) -> DecoderConfig:
        """Read the keys that all decoders share.

        Args:
            reader: of config.json.
            rope: traits of the architecture; None: layers have several, see `attending`.
            window: of all layers.
            activation_key: config key of the activation.
            activations: that the architecture computes.
            inner_key: config key of the intermediate size.
            epsilon_key: config key of the norms' epsilon.
            traits: facts of the architecture.
        """
        heads = reader.positive("num_attention_heads")
        hidden = reader.positive("hidden_size")
        head_dim = reader.positive("head_dim", hidden // heads)
        layers, longest = (
            reader.positive(key) for key in ("num_hidden_layers", "max_position_embeddings")
        )
        config = cls(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.positive(inner_key),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=reader.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=reader.read(epsilon_key, float),
            max_position_embeddings=longest,
            tie_word_embeddings=reader.read("tie_word_embeddings", bool, False),
            activation=reader.choice(activation_key, *activations),
            layer_kinds=(),
            **traits,
        )
        if not 0 < config.rms_norm_eps < 1:
            raise UnsupportedModelError(f"config.json: {epsilon_key} = {config.rms_norm_eps}")
        if heads % config.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: {heads} attention heads cannot share "
                f"{config.num_key_value_heads} key/value heads"
            )
        if rope is None:
            return config
        kind = AttentionKind(read_rope(reader, head_dim, longest, rope), window)
        return config.attending((kind,) * layers)

    def attending(self, kinds: tuple[AttentionKind | None, ...]) -> DecoderConfig:
        """The same with layers of these kinds."""
        for window in {kind.window for kind in kinds if kind} - {None}:
            if window < 1:  # type: ignore[operator]
                raise UnsupportedModelError(
                    f"config.json: sliding_window = {window}",
                    hint="give the number of tokens that a token attends to, itself included",
                )
        return replace(self, layer_kinds=kinds)

"""Metadata of a GGUF file's architecture, and tensor names of its family in llama.cpp.

Source: the GGUF specification and llama.cpp's naming of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.gguf.permutations import Orders, as_stored
from edgellm.export.config.layer_types import FULL, SLIDING

_REMEDY = "convert the model again with a current llama.cpp"

LOCAL_ROPE = "local rope"  # of layers with a window, moved into rope_parameters later
LAYER_NORM = "attention.layer_norm_epsilon"  # epsilon of norms that subtract the mean
_REQUIRED: Any = object()
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Keys that tensors imply, that a loader may assume, or that describe the file's conversion.
_UNREAD = (
    "vocab_size",
    "rope.scaling.finetuned",
    "expert_used_count",
    "rope.scaling.yarn_log_multiplier",
)

Config = dict[str, Any]


class Facts:
    """The metadata of a file's architecture; records which keys were read."""

    def __init__(
        self,
        *,
        metadata: Mapping[str, Any],
        vectors: Mapping[str, list[float]],
        names: set[str],
        families: Mapping[str, Family],
    ) -> None:
        """Facts of a file.

        Args:
            metadata: all of it.
            vectors: tensors of the rope.
            names: of all tensors.
            families: by llama.cpp's names of architectures.

        Raises:
            BrokenArtifactError: the architecture is missing.
            UnsupportedModelError: an architecture without a family.
        """
        if (architecture := metadata.get("general.architecture")) is None:
            raise BrokenArtifactError("the GGUF file has no general.architecture")
        if architecture not in families:
            raise UnsupportedModelError(
                f"GGUF architecture {architecture!r} is not supported",
                hint=f"supported: {', '.join(families)}; docs/reference/models.md says more",
            )
        self.architecture: str = architecture
        self.metadata, self.vectors, self.names = metadata, vectors, names
        self._used: set[str] = set()
        self.family = families[architecture].of(self)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `<architecture>.<key>`.

        Raises:
            BrokenArtifactError: missing without a default.
        """
        name = f"{self.architecture}.{key}"
        self._used.add(name)
        value = self.metadata.get(name)
        if value is None and default is _REQUIRED:
            raise BrokenArtifactError(f"the GGUF file has no {name}")
        return default if value is None else value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A number stored as float32, rounded to its shortest decimal form."""
        value = self.get(key, default)
        return value if value is None else float(f"{value:.7g}")

    def expect(self, key: str, *allowed: object) -> None:
        """Accept a key only if absent or one of `allowed`.

        Raises:
            UnsupportedModelError: another value.
        """
        if (found := self.get(key, allowed[0])) not in allowed:
            raise UnsupportedModelError(f"GGUF {self.architecture}.{key} = {found} is unsupported")

    def has(self, ending: str) -> bool:
        """Whether a tensor's name ends so."""
        return any(name.endswith(ending) for name in self.names)

    def epsilon(self) -> float:
        """Epsilon of the norms."""
        return float(f"{self.get(self.family.epsilon):.6g}")

    def skip(self, *keys: str) -> None:
        """Ignore these keys: they do not affect the computation."""
        self._used.update(f"{self.architecture}.{key}" for key in keys)

    def left(self) -> Config:
        """Unread keys of the architecture."""
        used = self._used | {f"{self.architecture}.{key}" for key in _UNREAD}
        return {
            key: value
            for key, value in self.metadata.items()
            if key.startswith(f"{self.architecture}.") and key not in used
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture of llama.cpp."""

    read: Callable[[Facts], Config]  # its own keys of config.json
    names: Mapping[str, str] = field(default_factory=dict)  # of modules, if not in `_NAMES`
    tensors: Mapping[str, str] = field(default_factory=dict)  # whole names, if not of modules
    # Tensors of several linear layers [n, out, in], by llama.cpp's names; Hugging Face's modules.
    stacks: Mapping[str, str] = field(default_factory=dict)
    orders: Callable[[Mapping[str, Any]], Orders] = as_stored
    norm_shift: float = 0.0  # added to the weights of norms
    epsilon: str = "attention.layer_norm_rms_epsilon"
    # Names of tensors whose last two axes converters swapped
    swapped: frozenset[str] = frozenset()
    turns_in_part: bool = False
    is_latent: bool = False  # keys and values of files are those of latent vectors
    has_experts: bool = False
    is_causal: bool = True  # False: an encoder of texts
    ranks: bool = False  # an encoder with a classification head of one label
    layers: str = "model.layers"  # Hugging Face's name before a layer's index
    dense: tuple[str, ...] = ()  # linear layers after the pooling, by llama.cpp's names
    # Keys with a number for each layer, or one for all, that are tensors elsewhere; their shapes.
    numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Another family of the same architecture, if the file has it.
    variant: Callable[[Facts], Family | None] = lambda _: None

    def of(self, facts: Facts) -> Family:
        """This family, or its variant in the file."""
        return self.variant(facts) or self

    def name_of(self, own: str) -> str:
        """Hugging Face's name of a tensor; unchanged if there is none.

        Args:
            own: without a layer, `attn_q.weight`.
        """
        if (whole := self.tensors.get(own)) is not None:
            return whole
        stem, _, kind = own.rpartition(".")
        module = self.names.get(stem) or _NAMES.get(stem)
        return own if module is None or kind not in ("weight", "bias") else f"{module}.{kind}"


def experts(facts: Facts, count: str, size: str) -> Config:
    """Keys of config.json for the number of experts, experts per token, and their width."""
    width = facts.get("expert_feed_forward_length", 0) or facts.get("feed_forward_length")
    taken = facts.get("expert_used_count")
    return {count: facts.get("expert_count"), "num_experts_per_tok": taken, size: width}


def windows(facts: Facts, period: int, default: int = 0) -> tuple[int | None, list[str]]:
    """The window, None if all layers have full attention, and the type of each layer.

    Args:
        facts: of the file.
        period: assumed by llama.cpp; the last layer of each has full attention.
        default: of the window; 0: none.
    """
    layers, window = facts.get("block_count"), facts.get("attention.sliding_window", default)
    pattern = facts.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        pattern = [not pattern or index % pattern < pattern - 1 for index in range(layers)]
    types = [SLIDING if window and slides else FULL for slides in pattern]
    return window or None, types


def long_rope(facts: Facts) -> Config:
    """RoPE parameters of a file with `rope_factors_short` and `rope_factors_long`, else {}."""
    short, long = (facts.vectors.get(f"rope_factors_{kind}") for kind in ("short", "long"))
    scale = facts.number("rope.scaling.attn_factor", None)
    if not short or not long:
        return {}
    found: Config = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    return found if scale is None else {**found, "attention_factor": scale}


def three_axes(facts: Facts) -> Config:
    """M-RoPE parameters; files list four sections, and the last is empty.

    Raises:
        BrokenArtifactError: missing, or not such a list.
    """
    sections = facts.get("rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) < 3 or any(sections[3:]):
        raise BrokenArtifactError(
            f"GGUF {facts.architecture}.rope.dimension_sections = {sections} are not three "
            "sections",
            hint=_REMEDY,
        )
    return {"mrope_section": sections[:3]}


def of_type(model_type: str) -> Callable[[Facts], Config]:
    """The reader of a family without further keys."""
    return lambda _: {"model_type": model_type}

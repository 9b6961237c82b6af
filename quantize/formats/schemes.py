"""Quantization schemes, and their requirements.

Names of configs and algorithms are those of nvidia-modelopt 0.47.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
    suggestion,
)
from edgellm.quantize.formats.modelopt import NVFP4_BLOCK

INT4_BLOCKS = (128, 64, 32)
TABLE_BLOCKS = (64, 32)  # group sizes of INT8 embeddings
MIXED_BLOCK = 32  # default
GPTQ = "gptq"  # value of `--algo`


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to store linear layers."""

    name: str
    config: str  # of ModelOpt
    algorithm: str  # ModelOpt's `quant_algo`
    rounds_input: bool  # with a calibrated scale
    is_awq: bool = False  # searches smoothing scales: a dozen forward passes
    is_int4: bool = False
    is_nvfp4: bool = False
    form: str = ""  # of GPTQ, see `gptq/forms.py`
    is_smoothed: bool = False  # by edgellm's SmoothQuant
    is_table: bool = False  # the embedding, tied to the head
    is_mixed: bool = False  # a form for each linear layer
    rounds_tokens: bool = False  # INT8 inputs, with a dynamic scale for each token
    is_autoround: bool = False  # learns to round: a hundred passes with gradients

    @property
    def follows_rounded(self) -> bool:
        """Whether a layer is fitted to the hidden states after quantized layers."""
        return self.is_autoround or bool(self.form)

    @property
    def layer_copies(self) -> int:
        """Peak number of float32 copies of a layer's weights in memory."""
        return 8 if self.is_autoround else 4


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="fp8", config="FP8_DEFAULT_CFG", algorithm="FP8", rounds_input=True),
        Scheme(
            name="int8_sq",
            config="",
            algorithm="W8A8_SQ_PER_CHANNEL",
            rounds_input=True,
            is_smoothed=True,
        ),
        Scheme(
            name="int4_awq",
            config="INT4_AWQ_CFG",
            algorithm="W4A16_AWQ",
            rounds_input=False,
            is_awq=True,
            is_int4=True,
        ),
        Scheme(
            name="nvfp4",
            config="NVFP4_DEFAULT_CFG",
            algorithm="NVFP4",
            rounds_input=True,
            is_nvfp4=True,
        ),
        Scheme(
            name="nvfp4_awq",
            config="NVFP4_AWQ_LITE_CFG",
            algorithm="NVFP4_AWQ",
            rounds_input=True,
            is_awq=True,
            is_nvfp4=True,
        ),
    )
}
MIXED = Scheme(
    name="mixed",
    config="",
    algorithm="MIXED_PRECISION",
    rounds_input=False,
    is_int4=True,
    is_mixed=True,
    form="int4",
)
AUTOROUND = Scheme(
    name="int4_autoround",
    config="",
    algorithm=SCHEMES["int4_awq"].algorithm,
    rounds_input=False,
    is_int4=True,
    is_autoround=True,
)
FEEDBACK = replace(AUTOROUND, name="int4_gptq", is_autoround=False, form="int4")
# Algorithms with ModelOpt's; "auto" tries the others, and has their requirements.
ALGORITHMS = {
    "int4_awq": {
        "awq": SCHEMES["int4_awq"], "gptq": FEEDBACK, "autoround": AUTOROUND, "auto": FEEDBACK,
    },
    "fp8": {
        "gptq": replace(SCHEMES["fp8"], name="fp8_gptq", config="", form="fp8"),
        "max": SCHEMES["fp8"],
    },
    "nvfp4": {
        "gptq": replace(SCHEMES["nvfp4"], name="nvfp4_gptq", config="", form="nvfp4"),
        "max": SCHEMES["nvfp4"],
    },
}  # fmt: skip
HEAD_SCHEMES = {
    "fp8": SCHEMES["fp8"],
    "nvfp4": SCHEMES["nvfp4"],
    "int8": Scheme(
        name="int8", config="INT8_WEIGHT_ONLY_CFG", algorithm="W8A16", rounds_input=False
    ),
    "int4": SCHEMES["int4_awq"],
    "int8_tied": Scheme(
        name="int8_tied", config="", algorithm="W8A16", rounds_input=False, is_table=True
    ),
}
TARGETS = ("cpu", "gpu")
RESIDUAL, VALUES = ("residual", "all"), ("values", "all")  # values of `--rotate`
ROTATIONS = ("residual", "values", "all")
COMPRESSED_TENSORS = "compressed-tensors"
FORMATS = ("modelopt", COMPRESSED_TENSORS)
KV_SCHEMES = {"fp8": "FP8_KV_CFG", "int8": ""}  # int8: not exported by ModelOpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How linear layers are quantized."""

    scheme: Scheme
    block_size: int  # 0 where the scheme has none
    alpha_step: float  # of AWQ's search
    kv_cache: str | None = None
    target: str = "gpu"  # "cpu": INT8 inputs have dynamic scales
    has_signs: bool = False  # GPTQ may give negative INT4 scales; some readers reject them


def choose(flag: str, name: str, known: Collection[str]) -> str:
    """Return `name` if it is known; else raise `EdgeLLMError` that lists the choices."""
    if name in known:
        return name
    words = (suggestion(name, known), f"choices: {', '.join(known)}")
    raise EdgeLLMError(f"{flag} {name}: no such choice", hint=" ".join(filter(None, words)))


def choose_scheme(quantization: str, algo: str | None) -> Scheme:
    """Return the scheme of an algorithm; raise `EdgeLLMError` for an invalid combination."""
    known = {**SCHEMES, MIXED.name: MIXED}
    scheme = known[choose("--quantization", quantization, known)]
    if algo is None:
        return scheme
    own = ALGORITHMS.get(quantization)
    if own is None:
        raise EdgeLLMError(
            f"--algo {algo}: --quantization {quantization} has no choice of algorithms",
            hint=f"--algo is for {', '.join(ALGORITHMS)}",
        )
    return own[choose(f"--quantization {quantization} --algo", algo, own)]


def check_targets(
    scheme: Scheme, bits: float | None, divergence: float | None, *, is_draft: bool
) -> None:
    """Raise `EdgeLLMError` unless mixed precision has one target, and other schemes none."""
    given = [value for value in (bits, divergence) if value is not None]
    if not scheme.is_mixed and given:
        raise EdgeLLMError(
            "--target_bits and --target_kl are for mixed precision",
            hint="choose --quantization mixed, or leave them out",
        )
    if scheme.is_mixed and len(given) != 1:
        raise EdgeLLMError(
            "--quantization mixed needs one target",
            hint="give --target_bits 5.5 (of a weight) or --target_kl 0.05 (nats a token)",
        )
    if scheme.is_mixed and is_draft:
        raise EdgeLLMError(
            "--quantization mixed does not support drafts", hint="choose fp8, int8_sq or int4_awq"
        )


def smallest_bits(block: int) -> float:
    """Return the minimum bits a weight, the 16 bits of each block's scale included."""
    return 4 + 16 / block


def check_format(name: str, scheme: Scheme, head: str | None, cache: str | None) -> None:
    """Raise `EdgeLLMError` for an unknown format, or one that cannot store the schemes."""
    choose("--format", name, FORMATS)
    if name != COMPRESSED_TENSORS:
        return
    if scheme.is_nvfp4 and scheme.is_awq:
        raise EdgeLLMError(
            f"--format {name} cannot store the smoothing scales of {scheme.name}",
            hint="choose --quantization nvfp4, int4_awq, int8_sq or fp8",
        )
    if scheme.is_mixed:
        raise EdgeLLMError(
            f"--format {name} does not support mixed precision", hint="leave out --format"
        )
    if head is not None:
        raise EdgeLLMError(
            f"--format {name} requires a float head, as its engines do",
            hint="leave out --lm_head_quantization",
        )
    if cache == "int8":
        raise EdgeLLMError(
            f"--format {name} does not support an int8 KV cache",
            hint="choose --kv_cache_quantization fp8",
        )


def check_block_size(wanted: int | None, *schemes: Scheme | None) -> None:
    """Raise `EdgeLLMError` for an unsupported group size, or if no layer becomes INT4."""
    if wanted is None:
        return
    if wanted not in INT4_BLOCKS:
        raise EdgeLLMError(
            f"--block_size {wanted}: unsupported group size of INT4",
            hint=f"choices: {', '.join(map(str, INT4_BLOCKS))}",
        )
    if not any(scheme is not None and scheme.is_int4 for scheme in schemes):
        raise EdgeLLMError(
            f"--block_size {wanted} is for INT4, and no layer becomes INT4",
            hint="leave it out, or choose --quantization int4_awq or --lm_head_quantization int4",
        )


def block_size(
    scheme: Scheme, shapes: Mapping[str, tuple[int, int]], wanted: int | None = None
) -> int:
    """Return the group size for linear layers [out, in]; 0 if the scheme has none.

    Args:
        scheme: of the layers.
        shapes: by name.
        wanted: group size of INT4; None: the largest that divides all inputs.

    Raises:
        UnsupportedModelError: the scheme cannot store the shape of a layer.
    """
    if scheme.is_nvfp4:
        return _dividing(scheme, shapes, (NVFP4_BLOCK,))
    if not scheme.is_int4:
        return 0
    for name, (out, _) in shapes.items():
        if out % 2:
            raise UnsupportedModelError(f"{name} has {out} outputs: INT4 is packed in pairs")
    default = (MIXED_BLOCK,) if scheme.is_mixed else INT4_BLOCKS
    return _dividing(scheme, shapes, default if wanted is None else (wanted,))


def _dividing(scheme: Scheme, shapes: Mapping[str, tuple[int, int]], sizes: tuple[int, ...]) -> int:
    """Return the largest size that divides the inputs of all layers."""
    for size in sizes:
        if all(width % size == 0 for _, width in shapes.values()):
            return size
    name, width = next((n, w) for n, (_, w) in shapes.items() if w % sizes[-1])
    smaller = "leave out --block_size; " if scheme.is_int4 and sizes[-1] > 32 else ""
    raise UnsupportedModelError(
        f"{name} has {width} inputs, not a multiple of {scheme.name}'s block of {sizes[-1]}",
        hint=f"{smaller}fp8 and int8_sq have no blocks",
    )

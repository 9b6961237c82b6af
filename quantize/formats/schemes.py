"""The precisions on offer, and what each asks of a model.

Names of configs and algorithms are those of nvidia-modelopt 0.47.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.quantize.formats.modelopt import NVFP4_BLOCK

INT4_BLOCKS = (128, 64, 32)
TABLE_BLOCKS = (64, 32)  # of embeddings in INT8
MIXED_BLOCK = 32  # unless the user says otherwise


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store linear layers."""

    name: str
    config: str  # of ModelOpt
    algorithm: str  # ModelOpt's `quant_algo`
    rounds_input: bool  # with a scale found by calibration
    is_awq: bool = False  # searches a smoothing, which costs a dozen forward passes
    is_int4: bool = False
    is_nvfp4: bool = False
    form: str = ""  # of error feedback of ours, which rounds it (see `forms`)
    is_smoothed: bool = False  # by a search of ours
    is_table: bool = False  # the embedding, which is the head
    is_mixed: bool = False  # each linear layer in a form of its own
    rounds_tokens: bool = False  # to int8, with a scale of each token found at run time
    is_autoround: bool = False  # learns how to round, which costs a hundred passes and gradients

    @property
    def follows_rounded(self) -> bool:
        """Whether a layer is fitted to what the rounded layers before it give."""
        return self.is_autoround or bool(self.form)

    @property
    def layer_copies(self) -> int:
        """How often a layer's weights are in memory as float32 at worst."""
        return 8 if self.is_autoround else 4


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "FP8_DEFAULT_CFG", "FP8", True),
        Scheme("int8_sq", "", "W8A8_SQ_PER_CHANNEL", True, is_smoothed=True),
        Scheme("int4_awq", "INT4_AWQ_CFG", "W4A16_AWQ", False, is_awq=True, is_int4=True),
        Scheme("nvfp4", "NVFP4_DEFAULT_CFG", "NVFP4", True, is_nvfp4=True),
        Scheme("nvfp4_awq", "NVFP4_AWQ_LITE_CFG", "NVFP4_AWQ", True, is_awq=True, is_nvfp4=True),
    )
}
MIXED = Scheme("mixed", "", "MIXED_PRECISION", False, is_int4=True, is_mixed=True, form="int4")
AUTOROUND = Scheme(
    "int4_autoround", "", SCHEMES["int4_awq"].algorithm, False, is_int4=True, is_autoround=True
)
FEEDBACK = replace(AUTOROUND, name="int4_gptq", is_autoround=False, form="int4")
# Beside ModelOpt's own; "auto" tries the others, so that what it asks of a model is theirs.
ALGORITHMS = {
    "int4_awq": {
        "awq": SCHEMES["int4_awq"], "gptq": FEEDBACK, "autoround": AUTOROUND, "auto": FEEDBACK,
    },
    "fp8": {"gptq": replace(SCHEMES["fp8"], name="fp8_gptq", config="", form="fp8")},
    "nvfp4": {"gptq": replace(SCHEMES["nvfp4"], name="nvfp4_gptq", config="", form="nvfp4")},
}  # fmt: skip
HEAD_SCHEMES = {
    "fp8": SCHEMES["fp8"],
    "nvfp4": SCHEMES["nvfp4"],
    "int8": Scheme("int8", "INT8_WEIGHT_ONLY_CFG", "W8A16", False),
    "int4": SCHEMES["int4_awq"],
    "int8_tied": Scheme("int8_tied", "", "W8A16", False, is_table=True),
}
TARGETS = ("cpu", "gpu")
RESIDUAL, VALUES = ("residual", "all"), ("values", "all")  # what `--rotate` may turn
ROTATIONS = ("residual", "values", "all")
COMPRESSED_TENSORS = "compressed-tensors"
FORMATS = ("modelopt", COMPRESSED_TENSORS)
KV_SCHEMES = {"fp8": "FP8_KV_CFG", "int8": ""}  # int8: ModelOpt exports no scales, ours do


@dataclass(frozen=True, slots=True)
class Recipe:
    """How linear layers are quantized."""

    scheme: Scheme
    block_size: int  # 0 where the scheme has none
    alpha_step: float  # of AWQ's search
    kv_cache: str | None = None
    target: str = "gpu"  # "cpu": scales of INT8 inputs are found at run time
    has_signs: bool = False  # of INT4's scales under error feedback, which not all readers take


def choose(flag: str, name: str, known: Collection[str]) -> str:
    """`name` if it is on offer; raises `EdgeLLMError` that lists the choices."""
    if name in known:
        return name
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise EdgeLLMError(
        f"{flag} {name}: no such choice",
        hint=f"{f'did you mean {match[0]}? ' if match else ''}choices: {', '.join(known)}",
    )


def choose_scheme(quantization: str, algo: str | None) -> Scheme:
    """The scheme of those names; raises `EdgeLLMError` where they do not go together."""
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
    """Raise `EdgeLLMError` unless mixed precision has one target, and nothing else has any."""
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
            "--quantization mixed does not do drafts", hint="choose fp8, int8_sq or int4_awq"
        )


def smallest_bits(block: int) -> float:
    """A weight of mixed precision has at least, the 16 bits of its block's scale included."""
    return 4 + 16 / block


def check_format(name: str, scheme: Scheme, head: str | None, cache: str | None) -> None:
    """Raise `EdgeLLMError` for a format that is not on offer, or that cannot hold all of it."""
    choose("--format", name, FORMATS)
    if name != COMPRESSED_TENSORS:
        return
    if scheme.is_nvfp4 and scheme.is_awq:
        raise EdgeLLMError(
            f"--format {name} has no place for the smoothing of {scheme.name}",
            hint="choose --quantization nvfp4, int4_awq, int8_sq or fp8",
        )
    if scheme.is_mixed:
        raise EdgeLLMError(
            f"--format {name} does not hold mixed precision", hint="leave out --format"
        )
    if head is not None:
        raise EdgeLLMError(
            f"--format {name} keeps the head in floats, as the engines read it that it is for",
            hint="leave out --lm_head_quantization",
        )
    if cache == "int8":
        raise EdgeLLMError(
            f"--format {name} has no int8 cache", hint="choose --kv_cache_quantization fp8"
        )


def check_block_size(wanted: int | None, *schemes: Scheme | None) -> None:
    """Raise `EdgeLLMError` for a size that is not on offer, or that nothing would take."""
    if wanted is None:
        return
    if wanted not in INT4_BLOCKS:
        raise EdgeLLMError(
            f"--block_size {wanted}: no such block of INT4",
            hint=f"choices: {', '.join(map(str, INT4_BLOCKS))}",
        )
    if not any(scheme is not None and scheme.is_int4 for scheme in schemes):
        raise EdgeLLMError(
            f"--block_size {wanted} is for INT4, and nothing here becomes that",
            hint="leave it out, or choose --quantization int4_awq or --lm_head_quantization int4",
        )


def block_size(
    scheme: Scheme, shapes: Mapping[str, tuple[int, int]], wanted: int | None = None
) -> int:
    """The block for these linear layers [out, in]; 0 where the scheme has none.

    Args:
        scheme: asks for blocks.
        shapes: by name.
        wanted: of INT4; None takes the largest that divides all inputs.

    Raises:
        UnsupportedModelError: a layer has a shape that the scheme cannot store.
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
    """The largest size that divides every layer's inputs."""
    for size in sizes:
        if all(width % size == 0 for _, width in shapes.values()):
            return size
    name, width = next((n, w) for n, (_, w) in shapes.items() if w % sizes[-1])
    smaller = "leave out --block_size; " if scheme.is_int4 and sizes[-1] > 32 else ""
    raise UnsupportedModelError(
        f"{name} has {width} inputs, not a multiple of {scheme.name}'s block of {sizes[-1]}",
        hint=f"{smaller}fp8 and int8_sq have no blocks",
    )

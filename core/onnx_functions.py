"""Names of the model-local functions that portable graphs call.

Their domain is `FUNCTIONS`; their bodies are plain ONNX
(`edgellm.export.onnx.functions`). A backend replaces calls by its kernels, or inlines the bodies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FUNCTIONS = "edgellm"
ATTENTION = "CachedAttention"
UNROTATED_ATTENTION = "UnrotatedCachedAttention"  # without RoPE, or with RoPE already applied
SINK_ATTENTION = "CachedAttentionWithSinks"  # the same, with a score for each head
CROSS_ATTENTION = "CrossAttention"  # q, keys and values of audio
ROTARY_TABLES = "RotaryTables"  # of all positions
VISIBLE_SLOTS = "VisibleSlots"  # attended to by each token: earlier ones, tree ancestors
VISIBLE_IN_WINDOW = "VisibleSlotsInWindow"
VISIBLE_BEFORE = "VisibleSlotsBefore"  # as VISIBLE_SLOTS, but no later tokens, whatever the mask
VISIBLE_BOTH_WAYS = "VisibleSlotsBothWays"  # of encoders: earlier and later ones of the text
VISIBLE_AROUND = "VisibleSlotsAround"  # the same, in a window before and after a token
CONVOLUTION = "RecurrentConvolution"  # of each token with its ancestors
DELTA_RULE = "GatedDeltaRule"  # of each token with its ancestors
CHANNEL_DELTA_RULE = "ChannelDeltaRule"  # the same with a decay for each channel of keys
DECAYING_RULE = "DecayingRule"  # without the delta term
DELTA_UPDATE = "GatedDeltaUpdate"  # of a state by accepted tokens
LINEAR = "Linear"  # x, weight [out, in]
QUANTIZED_LINEAR = "QuantizedLinear"  # x, codes [in, out], scales
SHIFTED_LINEAR = "ShiftedLinear"  # the same, and zero points
BLOCK_LINEAR = "BlockLinear"  # x, codes [out, in], scales [out, in / block]
OFFSET_LINEAR = "OffsetLinear"  # the same, and minima [out, in / block]
BLOCK_ROWS = "BlockRows"  # row numbers, and what BLOCK_LINEAR has after x
OFFSET_ROWS = "OffsetRows"  # row numbers, and what OFFSET_LINEAR has after x
BLOCK_FACTORS = "BlockFactors"  # scales or minima that are codes themselves: codes, scales
FP4_LINEAR = "Fp4Linear"  # x, codes [out, in], scales, global scale
ROUND_INPUT = "RoundInput"  # x, scale, zero point
ROUND_INPUT_FP4 = "RoundInputFp4"  # x, global scale
SMOOTH_INPUT = "SmoothInput"  # x, factors [in]
ROUTER = "Router"  # x, weight [experts, in]; never rounded
ROUTING = "Routing"  # logits and K to experts and their shares, see RoutingForm
# x, ids and weights of the chosen experts, then gate, up and down projections of all experts (as
# in the four kinds of linear layers, with the experts as first axis), and their biases.
EXPERTS = "Experts"
QUANTIZED_EXPERTS = "QuantizedExperts"
SHIFTED_EXPERTS = "ShiftedExperts"
FP4_EXPERTS = "Fp4Experts"  # pairs of codes uint8 [experts, out, in / 2], scales of 32 inputs
# Codes [experts, out, in], scales and minima of blocks, or a single minimum of zero.
BLOCK_EXPERTS = "BlockExperts"
NVFP4_EXPERTS = "Nvfp4Experts"  # the same, FP8 scales of 16 inputs, and for each expert theirs
MXFP4_BLOCK = 32  # inputs that share a scale in FP4_EXPERTS

# Values of the sixteen codes of IQ4.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Codes of 2 to 6 bits in planes of bytes, for lookups and where ONNX has no type.

    A plane has some bits of each code, the lowest in the first plane. A byte has the bits of 8, 4
    or 2 neighbours, the first lowest.

    Attributes:
        bits: of a code.
        is_signed: a code minus half of the range is meant, as INT8; else the code, as UINT8.
        by_table: an entry of `IQ4` is meant, as INT8.
    """

    bits: int
    is_signed: bool = False
    by_table: bool = False

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of a code in each plane."""
        return _PLANES[self.bits]

    @property
    def function(self) -> str:
        """The model-local function of the planes that returns codes [..., in]."""
        kind = "Iq" if self.by_table else "Signed" if self.is_signed else ""
        return f"{kind}Codes{self.bits}"

    def rows(self, *, has_minima: bool) -> str:
        """The function of a lookup: row numbers, planes, scales and minima."""
        return f"{OFFSET_ROWS if has_minima else BLOCK_ROWS}Of{self.function}"

    @property
    def has_4_bits(self) -> bool:
        """Whether INT4 or UINT4 have all values."""
        return self.bits <= 4 and not self.by_table

    @property
    def has_signs(self) -> bool:
        """Whether the values are INT8, not UINT8."""
        return self.is_signed or self.by_table


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingForm:
    """Steps of ROUTING, in their order.

    Attributes:
        offset: a number of each expert is added to its logit.
        capped: a soft cap of the logits, tanh(logit / cap) * cap.
        sigmoid: shares are the sigmoid of the logits, else their softmax.
        biased: experts are chosen by their shares plus a bias, else by their shares.
        normalized: the shares of chosen experts are divided by their sum.
        bounded: the sum is at least `smallest_sum`.
        padded: `added` is added to the sum.
        scaled: shares are multiplied by `scale`.
        cast: shares get the type `to`, else they stay float32.
        weighted: shares are multiplied by a factor of each expert.
    """

    offset: bool = False
    capped: bool = False
    sigmoid: bool = False
    biased: bool = False
    normalized: bool = False
    bounded: bool = False
    padded: bool = False
    scaled: bool = False
    cast: bool = False
    weighted: bool = False

    @classmethod
    def of(cls, function: str) -> RoutingForm | None:
        """The form of a function; None: it has unknown steps, or is none of ROUTING."""
        steps = {step.capitalize(): step for step in cls.__slots__}
        words = re.findall("[A-Z][a-z]+", function.removeprefix(ROUTING))
        form = cls(**{steps[word]: True for word in words if word in steps})
        return form if form.function == function else None

    @property
    def function(self) -> str:
        """The model-local function with these steps."""
        steps = (step for step in self.__slots__ if getattr(self, step))
        return ROUTING + "".join(step.capitalize() for step in steps)

    @property
    def operands(self) -> tuple[str, ...]:
        """Inputs after the logits and K, float32 [experts]; factors have the type of shares."""
        found = {"offsets": self.offset, "bias": self.biased, "factors": self.weighted}
        return tuple(name for name, is_given in found.items() if is_given)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Attributes with floats."""
        found = {"cap": self.capped, "smallest_sum": self.bounded}
        found |= {"added": self.padded, "scale": self.scaled}
        return tuple(name for name, is_given in found.items() if is_given)


_ALL = [
    PackedCodes(4, by_table=True),
    *(PackedCodes(bits, is_signed) for bits in _PLANES for is_signed in (False, True)),
]
FUNCTIONS_OF_CODES = {each.function: each for each in _ALL}
# The format of the table, None: of whole bytes.
FUNCTIONS_OF_ROWS: dict[str, PackedCodes | None] = {
    BLOCK_ROWS: None,
    OFFSET_ROWS: None,
    **{each.rows(has_minima=minima): each for each in _ALL for minima in (False, True)},
}

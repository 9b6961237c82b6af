"""Names of the model-local functions that portable graphs call.

Their domain is `FUNCTIONS`; their bodies are plain ONNX
(`edgellm.export.onnx.functions`). A backend replaces calls by its kernels, or inlines the bodies.
"""

from __future__ import annotations

FUNCTIONS = "edgellm"
ATTENTION = "CachedAttention"
UNROTATED_ATTENTION = "UnrotatedCachedAttention"  # without RoPE, or with RoPE already applied
SINK_ATTENTION = "CachedAttentionWithSinks"  # the same, with a score for each head
ROTARY_TABLES = "RotaryTables"  # of all positions
VISIBLE_SLOTS = "VisibleSlots"  # attended to by each token: earlier ones, tree ancestors
VISIBLE_IN_WINDOW = "VisibleSlotsInWindow"
CONVOLUTION = "RecurrentConvolution"  # of each token with its ancestors
DELTA_RULE = "GatedDeltaRule"  # of each token with its ancestors
DECAYING_RULE = "DecayingRule"  # the same without the delta term
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

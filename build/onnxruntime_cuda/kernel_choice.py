"""Choice among ONNX Runtime's CUDA kernels for an engine, and its requirements."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.onnxruntime_cuda.attention import Form, forms_of
from edgellm.build.onnxruntime_cuda.experts import EXPERTS_VERSION
from edgellm.build.onnxruntime_cuda.integer_experts import INTEGER_EXPERTS_VERSION, integer_form
from edgellm.build.onnxruntime_cuda.linears import takes_int_gemm
from edgellm.build.onnxruntime_cuda.options import AUTO, FUSED, OFF, ON, PLAIN, options_of
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.onnxruntime_cuda import FUSED_VERSION
from edgellm.device_runtime.runners.onnxruntime_cuda.engine_options import (
    INT_GEMM,
    MINIMUM_VERSION,
)

GEMV_ROWS = 16  # maximum that MatMulNBits multiplies without dequantizing the weights
ROUNDED_BITS = {"int4": 4, "int8": 8}  # of rounded floats
_FLOAT_EXPERTS = "experts have the activations' type, also where the checkpoint has fewer bits"
_INTEGER_EXPERTS = (
    "experts are integers in ONNX Runtime's operator QMoE; one graph is for prompts, tokens and "
    "trees, for another would hold the experts once more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Choices of a build."""

    forms: tuple[Form, ...] = (Form.PLAIN,)  # a graph each
    int_gemm: bool = False  # see `CudaKernel`
    is_one_graph: bool = False  # a second graph would duplicate experts
    options: dict[str, str] = field(default_factory=dict)  # of the engine
    notes: tuple[str, ...] = ()


def choose(
    graph: ir.Graph,
    dtype: ir.DataType,
    plan: Plan,
    quantize: str,
    *,
    has_cache: bool,
    is_causal: bool,
) -> Choices:
    """Choose kernels for the main graph of a bundle.

    Args:
        graph: portable.
        dtype: of activations.
        plan: of the engine.
        quantize: type of rounded float weights, if any.
        has_cache: of keys and values.
        is_causal: whether no token attends to later ones, also inside images.

    Raises:
        EdgeLLMError: ONNX Runtime does not support a flag.
    """
    forms, said = (Form.PLAIN,), ""
    if has_cache:
        forms, said = _forms(graph, dtype, plan, is_causal=is_causal)
    gemms, gemm_said = _int_gemm(graph, dtype, plan, quantize)
    experts = ExpertLayer.all_of(graph)
    bits = ROUNDED_BITS.get(quantize, 0)
    has_integers = any(integer_form(layer, dtype, bits) is not None for layer in experts)
    is_fused = Form.CAUSAL in forms
    if has_integers:
        forms = forms[:1]
    options = {"attention": FUSED if is_fused else PLAIN} if has_cache else {}
    if gemms:
        options[INT_GEMM] = "1"
    if is_fused or has_integers:
        options[MINIMUM_VERSION] = max(FUSED_VERSION, INTEGER_EXPERTS_VERSION)
    elif experts:
        options[MINIMUM_VERSION] = EXPERTS_VERSION
    expert_note = _INTEGER_EXPERTS if has_integers else _FLOAT_EXPERTS if experts else ""
    notes = tuple(note for note in (said, gemm_said, expert_note) if note)
    return Choices(
        forms=forms, int_gemm=gemms, is_one_graph=has_integers, options=options, notes=notes
    )


def _forms(
    graph: ir.Graph, dtype: ir.DataType, plan: Plan, *, is_causal: bool
) -> tuple[tuple[Form, ...], str]:
    """The graphs, and notes on them for users."""
    wanted = options_of(plan).attention
    if wanted == PLAIN:
        return (Form.PLAIN,), ""
    by_products = plan.max_batch_size > 1 or not is_causal
    forms, against = forms_of(graph, dtype, masks_by_products=by_products)
    if against and wanted == FUSED:
        raise EdgeLLMError(f"--attention fused: {against}", hint="give --attention plain")
    return forms, f"attention is not fused: {against}" if against else ""


def _int_gemm(graph: ir.Graph, dtype: ir.DataType, plan: Plan, quantize: str) -> tuple[bool, str]:
    """Whether integer tensor-core GEMMs are used, and a note for users."""
    wanted = options_of(plan).int_gemm
    layers = [weight for _, weight in linear_layers(graph)]
    some = [weight for weight in layers if weight.kind != "dense" or quantize in ("int4", "int8")]
    is_half = dtype == ir.DataType.FLOAT16
    fitting = [weight for weight in some if is_half and takes_int_gemm(weight)]
    if wanted == OFF or (wanted == AUTO and plan.max_verify_tree_size <= GEMV_ROWS):
        return False, ""
    if not fitting:
        if wanted == ON:
            raise EdgeLLMError(
                "--intGemm on: no layer has int4 or int8 weights for it: float16 activations, "
                "blocks of 32 or a multiple, no zero points, outputs in multiples of 64",
                hint="leave out --intGemm",
            )
        return False, ""
    return True, (
        f"{len(fitting)} of {len(layers)} linear layers go to tensor cores without being decoded "
        "(fpA_intB, from compute capability 7.5 on), in blocks of 32; two graphs hold integer "
        "weights apart, --intGemm off shares them"
    )

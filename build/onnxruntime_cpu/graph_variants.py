"""Graphs of an engine for the CPU, by the role of a portable graph and its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer, refuse_experts
from edgellm.build.lowering.function_calls import find_calls
from edgellm.build.lowering.linears.groups import RoundingKernel
from edgellm.build.lowering.linears.round_int4 import check_quantize
from edgellm.build.lowering.linears.weights import linear_layers, weight_keys, weight_kinds
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears
from edgellm.build.onnxruntime_cpu.linears import (
    ALL_INPUTS,
    COARSE_INPUTS,
    RowInt8Kernel,
    StoredKernel,
)
from edgellm.build.onnxruntime_cpu.options import kernels_of
from edgellm.build.plan import Plan, max_rows
from edgellm.core.errors import EdgeLLMError, UnsupportedModelError
from edgellm.core.graph_roles import AUDIO_ENCODER, CROSS_KV, DECODER, DRAFT, ENCODER
from edgellm.core.manifest import Bundle
from edgellm.core.onnx_functions import ROUND_INPUT
from edgellm.device_runtime.runners.onnxruntime_cpu import EDGELLM
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8
from edgellm.device_runtime.runners.pass_timing import MEASURED_ROWS

_BYTES = {"int4": 0.5, "int8": 1.0}  # of a weight, by rounded type
_ALONE_BYTES = 12 << 20  # drafts of 5 and of 10 MB were no faster on two threads
_HALVES = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One graph of the engine."""

    name: str
    precision: str
    kernel: RoundingKernel
    prepacks: bool  # ONNX Runtime 1.31 saves MatMulNBits' packed weights without their scales
    max_rows: int
    needs_mask: bool = True


def resolve_auto(source: Path, bundle: Bundle, plan: Plan) -> Plan:
    """The plan with "auto" resolved for a float EAGLE draft on edgellm's kernels.

    A pass of the base evicts the draft from CPU caches, so each round reads it from memory. INT4
    halves that and costs 1 to 2 % of the accepted tokens, so "auto" is INT4. (Medusa heads were not
    measured.) Small drafts run on one core, before other threads wake up.
    """
    if DRAFT not in bundle.graphs or kernels_of(plan) != EDGELLM:
        return plan
    models = [ir.load(source / graph.path) for graph in bundle.graphs.values()]
    if any(weight_kinds(model) != {"dense"} for model in models):
        return plan
    if plan.quantize == "auto" and has_fast_int8():
        plan = dataclasses.replace(plan, quantize="int4")
    layers = (weight for model in models for _, weight in linear_layers(model.graph))
    weights = sum(weight.in_features * sum(weight.widths) for weight in layers)
    if weights * _BYTES.get(plan.quantize, 4) < _ALONE_BYTES:
        plan = dataclasses.replace(plan, threads=1)
    return plan


def variants_of(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """The graphs of a role, in ascending order of `max_rows`.

    Raises:
        EdgeLLMError: flags contradict the bundle's weights.
    """
    choose = {
        DECODER: _decoder_variants,
        ENCODER: _encoder_variants,
        AUDIO_ENCODER: _audio_variants,
        CROSS_KV: _audio_variants,
    }
    return choose.get(role, _draft_variants)(role, model, bundle, plan)


def _decoder_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """Graphs for a bundle's precision on this processor."""
    largest = max(max_rows(role, plan), *MEASURED_ROWS)
    kinds = weight_kinds(model)
    is_own = kernels_of(plan) == EDGELLM
    check_quantize(kinds, plan.quantize, takes_fp8=is_own)
    if is_own:
        return [_own_variant(role, model, plan.quantize, largest)]
    label = "--kernels onnxruntime"
    hint = "leave out --kernels; edgellm's own need a C++ compiler or its wheel"
    refuse_experts(model.graph, label, hint)
    if bundle.decoder.min_chunk > 1:
        raise UnsupportedModelError(
            f"{label} is causal, but the tokens of an image attend to each other in "
            f"{bundle.decoder.model_type}",
            hint=hint,
        )
    if plan.quantize == "int4":
        kinds = {"int4"}
    if kinds == {"dense"}:
        if plan.prefill == "int8":
            raise EdgeLLMError(
                "--prefill int8 is for quantized bundles; this one holds floats",
                hint="leave out --prefill; --quantize int8 rounds all of it",
            )
        kernel = RowInt8Kernel() if plan.quantize == "int8" else StoredKernel()
        precision = "int8" if plan.quantize == "int8" else "fp32"
        return [
            Variant(
                name="decode", precision=precision, kernel=kernel, prepacks=True, max_rows=largest
            )
        ]
    if _rounds_inputs_to_int8(model):
        kernel = RowInt8Kernel(COARSE_INPUTS)
        return [
            Variant(name="decode", precision="int8", kernel=kernel, prepacks=True, max_rows=largest)
        ]
    precision = "+".join(sorted(kinds - {"dense"}))
    decode = Variant(
        name="decode", precision=precision, kernel=StoredKernel(), prepacks=False, max_rows=largest
    )
    if plan.prefill == "same" or (plan.prefill == "auto" and not has_fast_int8()):
        return [decode]
    needs_mask = bundle.decoder.sliding_window is not None
    return [
        dataclasses.replace(decode, max_rows=1, needs_mask=needs_mask),
        Variant(
            name="prefill",
            precision="int8",
            kernel=RowInt8Kernel(COARSE_INPUTS),
            prepacks=True,
            max_rows=largest,
        ),
    ]


def _own_variant(role: str, model: ir.Model, quantize: str, max_rows: int) -> Variant:
    """One graph for any number of tokens."""
    kinds = weight_kinds(model) | {each.gate.kind for each in ExpertLayer.all_of(model.graph)}
    if quantize in ("int8", "int4"):
        kinds = {quantize if kind in ("dense", "fp8") else kind for kind in kinds}
    precision = "+".join(sorted(kinds - {"dense"})) or _float_types(model)
    one_term = COARSE_INPUTS if role in (DECODER, AUDIO_ENCODER, CROSS_KV) else ALL_INPUTS
    kernel = OwnLinears(rounds=quantize, one_term=one_term)
    name = "decode" if role == DECODER else role
    return Variant(name=name, precision=precision, kernel=kernel, prepacks=True, max_rows=max_rows)


def _float_types(model: ir.Model) -> str:
    """Types of dense weights in edgellm's kernels."""
    types = {weight.parts[0].stored[0].dtype for _, weight in linear_layers(model.graph)}
    return "+".join(sorted(_HALVES.get(dtype, "fp32") for dtype in types))


def _rounds_inputs_to_int8(model: ir.Model) -> bool:
    """Whether the checkpoint was quantized for int8 x int8 products (SmoothQuant)."""
    zero_points = [call.inputs[2] for call in find_calls(model.graph, ROUND_INPUT)]
    return any(zero is not None and zero.dtype == ir.DataType.INT8 for zero in zero_points)


def _draft_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """A draft's precision changes the acceptance length, never the output.

    So int8 is the default if the processor has int8 dot products, unless `resolve_auto` chose INT4.
    """
    del bundle
    kinds = weight_kinds(model)
    is_own = kernels_of(plan) == EDGELLM
    check_quantize(kinds, plan.quantize, takes_fp8=is_own)
    rows = max_rows(role, plan)
    if is_own:
        rounds = plan.quantize == "auto" and has_fast_int8()
        return [_own_variant(role, model, "int8" if rounds else plan.quantize, rows)]
    if plan.quantize == "int8" or (plan.quantize == "auto" and has_fast_int8()):
        # A draft needs no exact bits, and has many steps.
        kernel = RowInt8Kernel(ALL_INPUTS)
        return [Variant(name=role, precision="int8", kernel=kernel, prepacks=True, max_rows=rows)]
    if plan.quantize == "int4":
        kinds = {"int4"}
    precision = "+".join(sorted(kinds - {"dense"})) or "fp32"
    prepacks = kinds <= {"dense"}
    return [
        Variant(
            name=role, precision=precision, kernel=StoredKernel(), prepacks=prepacks, max_rows=rows
        )
    ]


def _audio_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """A graph of a speech model's audio, with the kernels of its decoder."""
    if kernels_of(plan) != EDGELLM:
        return _encoder_variants(role, model, bundle, plan)
    check_quantize(weight_kinds(model), plan.quantize, takes_fp8=True)
    return [_own_variant(role, model, plan.quantize, 0)]


def _encoder_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """Graphs of an encoder: an image has many rows.

    Weights in int8 with one scale per column use int8 GEMM; other quantized weights use the block
    kernel, as for single tokens of a language model.
    """
    del bundle
    keys = weight_keys(model)
    check_quantize({kind for kind, _ in keys}, plan.quantize)
    if plan.quantize == "int8":
        return [
            Variant(name=role, precision="int8", kernel=RowInt8Kernel(), prepacks=True, max_rows=0)
        ]
    quantized = {key for key in keys if key[0] != "dense"}
    if quantized == {("int8", 0)}:
        kernel = StoredKernel(RowInt8Kernel())
        return [Variant(name=role, precision="int8", kernel=kernel, prepacks=True, max_rows=0)]
    precision = "+".join(sorted({kind for kind, _ in quantized})) or "fp32"
    return [
        Variant(
            name=role,
            precision=precision,
            kernel=StoredKernel(),
            prepacks=not quantized,
            max_rows=0,
        )
    ]

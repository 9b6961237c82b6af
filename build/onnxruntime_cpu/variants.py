"""Which graphs an engine for the CPU has, by the role of a portable graph and its weights."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from edgellm.build.lowering.linear_groups import LinearKernel
from edgellm.build.lowering.linear_weights import weight_keys, weight_kinds
from edgellm.build.lowering.round_int4 import check_quantize
from edgellm.build.onnxruntime_cpu.linears import (
    ALL_INPUTS,
    COARSE_INPUTS,
    RowInt8Kernel,
    StoredKernel,
)
from edgellm.build.plan import Plan, most_rows
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.pass_costs import MEASURED_ROWS
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8
from edgellm.manifest import DECODER, ENCODER, Bundle


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One graph of the engine."""

    name: str
    precision: str
    kernel: LinearKernel
    prepacks: bool  # ONNX Runtime 1.31 saves MatMulNBits' packed weights without their scales
    max_rows: int
    needs_mask: bool = True


def variants_of(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """The graphs of a role, in ascending order of `max_rows`.

    Raises:
        EdgeLLMError: flags that do not suit the bundle's weights.
    """
    choose = {DECODER: _decoder_variants, ENCODER: _encoder_variants}.get(role, _draft_variants)
    return choose(role, model, bundle, plan)


def _decoder_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """The graphs that a bundle's precision asks for on this processor."""
    largest = max(most_rows(role, plan), *MEASURED_ROWS)
    kinds = weight_kinds(model)
    check_quantize(kinds, plan.quantize)
    if plan.quantize == "int4":
        kinds = {"int4"}
    if kinds == {"dense"}:
        if plan.prefill == "int8":
            raise EdgeLLMError(
                "--prefill int8 is for quantized bundles; this one holds floats",
                hint="leave --prefill away; --quantize int8 rounds all of it",
            )
        kernel = RowInt8Kernel() if plan.quantize == "int8" else StoredKernel()
        precision = "int8" if plan.quantize == "int8" else "fp32"
        return [Variant("decode", precision, kernel, prepacks=True, max_rows=largest)]
    if _rounds_inputs_to_int8(model):
        kernel = RowInt8Kernel(COARSE_INPUTS)
        return [Variant("decode", "int8", kernel, prepacks=True, max_rows=largest)]
    precision = "+".join(sorted(kinds - {"dense"}))
    decode = Variant("decode", precision, StoredKernel(), prepacks=False, max_rows=largest)
    if plan.prefill == "same" or (plan.prefill == "auto" and not has_fast_int8()):
        return [decode]
    needs_mask = bundle.decoder.sliding_window is not None
    return [
        dataclasses.replace(decode, max_rows=1, needs_mask=needs_mask),
        Variant("prefill", "int8", RowInt8Kernel(COARSE_INPUTS), prepacks=True, max_rows=largest),
    ]


def _rounds_inputs_to_int8(model: ir.Model) -> bool:
    """Whether the checkpoint was made for products of int8 with int8 (SmoothQuant)."""
    types = [
        node.inputs[2].dtype if len(node.inputs) > 2 and node.inputs[2] is not None else None
        for node in model.graph
        if node.op_type == "QuantizeLinear"
    ]
    return ir.DataType.INT8 in types


def _draft_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """A draft's precision changes how many tokens are accepted, never which.

    So int8 is the default where the processor has int8 dot products.
    """
    del bundle
    kinds = weight_kinds(model)
    check_quantize(kinds, plan.quantize)
    rows = most_rows(role, plan)
    if plan.quantize == "int8" or (plan.quantize == "auto" and has_fast_int8()):
        # A draft's last bits decide nothing, its steps are many.
        kernel = RowInt8Kernel(ALL_INPUTS)
        return [Variant(role, "int8", kernel, prepacks=True, max_rows=rows)]
    if plan.quantize == "int4":
        kinds = {"int4"}
    precision = "+".join(sorted(kinds - {"dense"})) or "fp32"
    prepacks = kinds <= {"dense"}
    return [Variant(role, precision, StoredKernel(), prepacks=prepacks, max_rows=rows)]


def _encoder_variants(role: str, model: ir.Model, bundle: Bundle, plan: Plan) -> list[Variant]:
    """An image has many rows.

    What is stored as int8 with a scale for each column is multiplied as such, other quantized
    weights in the blocks that a language model's single tokens take.
    """
    del bundle
    keys = weight_keys(model)
    check_quantize({kind for kind, _ in keys}, plan.quantize)
    if plan.quantize == "int8":
        return [Variant(role, "int8", RowInt8Kernel(), prepacks=True, max_rows=0)]
    quantized = {key for key in keys if key[0] != "dense"}
    if quantized == {("int8", 0)}:
        kernel = StoredKernel(RowInt8Kernel())
        return [Variant(role, "int8", kernel, prepacks=True, max_rows=0)]
    precision = "+".join(sorted({kind for kind, _ in quantized})) or "fp32"
    return [Variant(role, precision, StoredKernel(), prepacks=not quantized, max_rows=0)]

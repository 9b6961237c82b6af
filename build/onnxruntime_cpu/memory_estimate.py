"""What an engine for the CPU will weigh."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.calls import find_calls
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.linear_groups import RoundingKernel
from edgellm.build.lowering.linear_weights import layer_name, linear_layers
from edgellm.build.lowering.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.tables import table_of
from edgellm.build.onnxruntime_cpu.own_embedding import packed_table
from edgellm.build.onnxruntime_cpu.own_experts import forms_of
from edgellm.build.onnxruntime_cpu.own_linears import OwnLinears
from edgellm.build.onnxruntime_cpu.variants import variants_of
from edgellm.build.plan import RUNTIME_BYTES, Estimate, Plan
from edgellm.cache_sizes import cache_bytes
from edgellm.contract import ROUTER
from edgellm.manifest import Bundle
from edgellm.roles import COMMIT, DECODER
from edgellm.specs import KVCacheSpec


def estimate_graphs(
    source: Path, bundle: Bundle, plan: Plan, cache: KVCacheSpec | None
) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    sizes: list[int] = []
    read = largest = 0
    for role, graph in bundle.graphs.items():
        if role == COMMIT:
            continue
        model = ir.load(source / graph.path)
        linears = _linear_sizes(model, plan.quantize)
        variants = variants_of(role, model, bundle, plan)
        kernel = variants[0].kernel
        table = _table_bytes(model, kernel)
        if isinstance(kernel, OwnLinears):
            packed, doubled = _packed_sizes(model, kernel)
            experts, taken = _expert_sizes(model, kernel)
            sizes.append(table + packed + experts + 2 * doubled)
            read = read or packed + doubled + taken
            held = () if kernel.rounds_floats else linears["dense"].values()
            largest = max([largest, *held])
            continue
        # A prepacked file holds the weights twice: as they were, and as the kernels read them.
        for variant in variants:
            weights = linears["int8" if variant.precision == "int8" else "decode"]
            sizes.append(table + (2 if variant.prepacks else 1) * sum(weights.values()))
        if not read:  # the role that the engine is for comes first
            kind = "decode" if role == DECODER or variants[0].precision != "int8" else "int8"
            read = sum(linears[kind].values())
        largest = max(largest, *linears["dense"].values())
    # Graphs that are done stay loaded while the next one is made.
    loaded = 2 * sum(sizes[:-1]) if DECODER in bundle.graphs else sum(sizes)
    return Estimate(
        engine_bytes=sum(sizes),
        kv_bytes=_cached_bytes(bundle, cache, plan),
        peak_build_bytes=RUNTIME_BYTES + loaded + max(sizes[-1], 3 * largest),
        decode_bytes=read,
    )


def _cached_bytes(bundle: Bundle, cache: KVCacheSpec | None, plan: Plan) -> int:
    """Of keys and values, and of states, of which one is what the next commit writes."""
    if cache is None:
        return 0
    recurrent = bundle.decoder.recurrent
    states = sum(map(math.prod, recurrent.states.values())) if recurrent is not None else 0
    return (
        cache_bytes(cache, plan.kv_capacity, plan.max_batch_size)
        + (plan.max_batch_size + 1) * 4 * states
    )


def _packed_sizes(model: ir.Model, kernel: OwnLinears) -> tuple[int, int]:
    """Bytes of weights for edgellm's kernels, and of those that stay floats of 32 bits."""
    packed = floats = 0
    for node, weight in linear_layers(model.graph):
        form = kernel.form(weight, layer_name(node))
        packed += form.num_bytes if form is not None else 0
        floats += 4 * weight.count if form is None else 0
    return packed, floats


def _expert_sizes(model: ir.Model, kernel: OwnLinears) -> tuple[int, int]:
    """Bytes of all experts with their routers, and of what one token takes of them."""
    experts = taken = 0
    for layer in ExpertLayer.all_of(model.graph):
        one = sum(form.num_bytes for form in forms_of(layer, kernel))
        experts, taken = experts + layer.count * one, taken + layer.top_k * one
    routers = sum(
        call.inputs[1].const_value.nbytes  # type: ignore[union-attr]
        for call in find_calls(model.graph, ROUTER)
    )
    return experts + routers, taken + routers


def _table_bytes(model: ir.Model, kernel: RoundingKernel) -> int:
    """The embedding in every graph, unless it is looked up in the packed head."""
    heads = {layer_name(node) for node, _ in linear_layers(model.graph)}
    sizes = [0]
    for node in model.graph:
        value = table_of(node)
        table = value.const_value if value is not None else None
        if table is None:
            continue
        own = kernel if isinstance(kernel, OwnLinears) and node.op_type == "Gather" else None
        found = None if own is None else packed_table(node, own)
        size = min(table.nbytes, 4 * table.size) if found is None else found[0].num_bytes
        sizes.append(0 if found is not None and found[1] in heads else size)
    return max(sizes)


def _linear_sizes(model: ir.Model, quantize: str) -> dict[str, dict[str, int]]:
    """Bytes of each linear weight by node name: as decoded, as int8, and as a float32 copy."""
    sizes: dict[str, dict[str, int]] = {"decode": {}, "int8": {}, "dense": {}}
    for node, weight in linear_layers(model.graph):
        name = str(node.name)
        sizes["decode"][name] = (
            weight.count // 2 + 4 * weight.count // INT4_BLOCK
            if quantize == "int4"
            else weight.decode_bytes
        )
        sizes["int8"][name] = weight.count
        sizes["dense"][name] = 4 * weight.count
    return sizes

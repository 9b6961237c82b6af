"""Estimated sizes of an engine for the CPU, and memory of its build."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.embeddings import BlockTable, table_of
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.function_calls import find_calls
from edgellm.build.lowering.linears.block_factors import Joined
from edgellm.build.lowering.linears.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.linears.weights import LinearWeight, layer_name, linear_layers
from edgellm.build.lowering.linears.widened import notes_of_widened
from edgellm.build.onnxruntime_cpu.edgellm_kernels.embedding import has_own_factors, packed_table
from edgellm.build.onnxruntime_cpu.edgellm_kernels.experts import forms_of
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears
from edgellm.build.onnxruntime_cpu.graph_variants import variants_of
from edgellm.build.plan import Estimate, Plan
from edgellm.build.verify.streamed_eval import PIECE, SLICE
from edgellm.core.graph_roles import COMMIT, DECODER
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import KVCacheSpec, cache_bytes
from edgellm.core.onnx_functions import ROUTER
from edgellm.device_runtime.engine import spec_overhead

_BUILDER_BYTES = 85 << 20  # interpreter, libraries, the graph's nodes
_SESSION_BYTES = 55 << 20  # sessions, kernels, activations of a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Anonymous memory of a role's graphs, beyond that of any build."""

    checked: int  # while the portable graph is computed
    copied: int  # while a layer is written for ONNX Runtime
    saved: int  # while ONNX Runtime packs and writes
    loaded: int  # after loading


def estimate_graphs(
    source: Path, bundle: Bundle, plan: Plan, cache: KVCacheSpec | None
) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    sizes: list[int] = []
    read = 0
    held: list[_Held] = []
    models: list[ir.Model] = []
    has_own = False  # edgellm's kernels
    for role, graph in bundle.graphs.items():
        if role == COMMIT:
            continue
        model = ir.load(source / graph.path)
        models.append(model)
        variants = variants_of(role, model, bundle, plan)
        checked = _checked_bytes(model, plan) if plan.checks else 0
        if isinstance(variants[0].kernel, OwnLinears):
            has_own, own = True, _own_sizes(model, variants[0].kernel)
            sizes.append(own.engine)
            read = read or own.read
            packed = max(own.largest, own.floats)
            held.append(_Held(checked=checked, copied=0, saved=packed, loaded=0))
            continue
        linears, table = _linear_sizes(model, plan.quantize), sum(_table_sizes(model, None))
        float_table = table if _has_float_table(model) else 0  # a session copies it
        copied = saved = loaded = 0
        for variant in variants:
            weights = linears["int8" if variant.precision == "int8" else "decode"]
            # A prepacked file holds them twice: original, and packed.
            packed = sum(weights.values())
            sizes.append(table + (2 if variant.prepacks else 1) * packed)
            saved = max(saved, loaded + packed + float_table)
            copies = linears["int8" if variant.precision == "int8" else "copied"]
            copied = max(copied, loaded + max(copies.values(), default=0))
            loaded += 0 if variant.prepacks else packed
        if not read:  # the main role comes first
            kind = "decode" if role == DECODER or variants[0].precision != "int8" else "int8"
            read = sum(linears[kind].values())
        held.append(_Held(checked=checked, copied=copied, saved=saved, loaded=loaded))
    kv_bytes = _cached_bytes(bundle, cache, plan)
    rounded = _rounded_bytes(source, bundle) if plan.quantize == "int4" else 0
    return Estimate(
        engine_bytes=sum(sizes),
        kv_bytes=kv_bytes,
        peak_build_bytes=_BUILDER_BYTES
        + max(rounded, _peak_bytes(held, kv_bytes + _timing_bytes(bundle, plan))),
        decode_bytes=read,
        notes=tuple(notes_of_widened(models, few_bits=has_own)),
    )


def _timing_bytes(bundle: Bundle, plan: Plan) -> int:
    """Memory that the timing of speculative rounds takes."""
    if not plan.max_verify_tree_size or bundle.main_role != DECODER:
        return 0
    return spec_overhead.memory_bytes(bundle.decoder.num_parameters // 2)


def _peak_bytes(held: Sequence[_Held], timed_bytes: int) -> int:
    """Peak memory of building roles in order; finished graphs stay loaded.

    `timed_bytes`: of the KV cache, and what else the timing takes.
    """
    peak = before = 0
    for each in held:
        peak = max(peak, before + max(each.checked, each.copied, _SESSION_BYTES + each.saved))
        before += each.loaded
    return max(peak, before + _SESSION_BYTES + timed_bytes)


# ------------------------------------------------------------------------------------ checks
def _checked_bytes(model: ir.Model, plan: Plan) -> int:
    """Bytes of decoded weights of a piece of the graph, and one copy; see `verify`."""
    maximum = copies = piece = decoded = 0
    for numbers, steps in _read(model, is_rounded=plan.quantize == "int4"):
        if piece + numbers > PIECE:
            piece = decoded = 0
        piece, decoded = piece + numbers, decoded + (numbers if steps else 0)
        maximum, copies = max(maximum, decoded), max(copies, numbers * (steps - 1))
    return 4 * (maximum + copies)


def _read(model: ir.Model, *, is_rounded: bool) -> Iterator[tuple[int, int]]:
    """Weight sizes that a check reads at once, in order, and copies to float32; 0: none."""
    layers = {layer.call: layer for layer in ExpertLayer.all_of(model.graph)}
    for node in model.graph:
        if (table := table_of(node)) is not None:
            yield table[1].size, 0
        elif (weight := LinearWeight.of(node)) is not None:
            steps = _steps(weight, is_rounded=is_rounded)
            for first in range(0, weight.count, SLICE):
                yield min(SLICE, weight.count - first), steps
        elif node in layers:
            yield from _experts_read(layers[node], is_rounded=is_rounded)


def _steps(weight: LinearWeight, *, is_rounded: bool) -> int:
    part = weight.parts[0]
    is_kept = part.kind == "dense" and part.stored[0].dtype == ir.DataType.FLOAT
    if part.has_minima:
        return 3
    return 2 if isinstance(part.stored[0], Joined) else int(is_rounded or not is_kept)


def _experts_read(layer: ExpertLayer, *, is_rounded: bool) -> Iterator[tuple[int, int]]:
    for stack in layer.stacks:
        count, width, out = stack.shape
        steps = 4 if is_rounded else {"dense": 2, "fp4": 6}.get(stack.kind, 3)
        at_once = min(count, max(1, SLICE // (width * out)))
        for first in range(0, count, at_once):
            yield width * out * min(at_once, count - first), steps


def _rounded_bytes(source: Path, bundle: Bundle) -> int:
    """Codes and scales of the largest weight, before they are written."""
    models = [ir.load(source / graph.path) for graph in bundle.graphs.values()]
    counts = [weight.count for model in models for _, weight in linear_layers(model.graph)]
    largest = max(counts, default=0)
    return largest // 2 + 4 * largest // INT4_BLOCK


# ----------------------------------------------------------------------------------- engines
@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnSizes:
    """Bytes of a graph with edgellm's kernels."""

    engine: int
    read: int  # for a token
    floats: int  # float32, which ONNX Runtime packs
    largest: int  # largest weight, which is copied when it is written


def _own_sizes(model: ir.Model, kernel: OwnLinears) -> _OwnSizes:
    tables = _table_sizes(model, kernel)
    packed, doubled, largest = _packed_sizes(model, kernel)
    experts, taken, stack = _expert_sizes(model, kernel)
    return _OwnSizes(
        engine=sum(tables) + packed + experts + 2 * doubled,
        read=packed + doubled + taken,
        floats=doubled,
        largest=max(*tables, largest, stack),
    )


def _cached_bytes(bundle: Bundle, cache: KVCacheSpec | None, plan: Plan) -> int:
    """Bytes of keys and values, and of states; one state is the output of the next commit."""
    if cache is None:
        return 0
    recurrent = bundle.decoder.recurrent
    states = sum(map(math.prod, recurrent.states.values())) if recurrent is not None else 0
    return (
        cache_bytes(cache, plan.kv_capacity, plan.max_batch_size)
        + (plan.max_batch_size + 1) * 4 * states
    )


def _packed_sizes(model: ir.Model, kernel: OwnLinears) -> tuple[int, int, int]:
    """Bytes of weights for edgellm's kernels, of float ones, and of the largest."""
    packed = floats = largest = 0
    for node, weight in linear_layers(model.graph):
        form = kernel.form(weight, layer_name(node))
        packed += form.num_bytes if form is not None else 0
        floats += 4 * weight.count if form is None else 0
        largest = max(largest, form.num_bytes if form is not None else 0)
    return packed, floats, largest


def _expert_sizes(model: ir.Model, kernel: OwnLinears) -> tuple[int, int, int]:
    """Bytes of all experts with routers, of those for a token, and of the largest stack."""
    experts = taken = largest = 0
    for layer in ExpertLayer.all_of(model.graph):
        forms = [form.num_bytes for form in forms_of(layer, kernel)]
        largest = max(largest, *(layer.count * size for size in forms))
        one = sum(forms)
        experts, taken = experts + layer.count * one, taken + layer.top_k * one
    routers = sum(
        call.inputs[1].const_value.nbytes  # type: ignore[union-attr]
        for call in find_calls(model.graph, ROUTER)
    )
    return experts + routers, taken + routers, largest


def _table_sizes(model: ir.Model, kernel: OwnLinears | None) -> list[int]:
    """Bytes of each embedding, 0 if it shares the packed head."""
    heads = {layer_name(node) for node, _ in linear_layers(model.graph)}
    sizes = {"": 0}
    for node in model.graph:
        if (table := table_of(node)) is None:
            continue
        blocks = BlockTable.of(node)
        factors = sum(each.nbytes for each in blocks.stored_factors) if blocks is not None else 0
        found = packed_table(node, kernel) if kernel is not None else None
        if found is None:
            sizes[table[0]] = min(table[1].nbytes, 4 * table[1].size) + factors
            continue
        own = factors if blocks is not None and has_own_factors(blocks, found[0]) else 0
        sizes[table[0]] = own + (0 if found[1] in heads else found[0].num_bytes)
    return [*sizes.values()]


def _has_float_table(model: ir.Model) -> bool:
    """Whether a graph has an embedding of floats."""
    tables = (table_of(node) for node in model.graph)
    return any(table[1].dtype.is_floating_point() for table in tables if table is not None)


def _linear_sizes(model: ir.Model, quantize: str) -> dict[str, dict[str, int]]:
    """Bytes of each linear weight by node name: decoded, int8, and copies while it is written.

    Floats are copied as float32. Blocks of codes are joined from slices, which doubles them.
    """
    sizes: dict[str, dict[str, int]] = {"decode": {}, "int8": {}, "copied": {}}
    for node, weight in linear_layers(model.graph):
        name = str(node.name)
        sizes["decode"][name] = (
            weight.count // 2 + 4 * weight.count // INT4_BLOCK
            if quantize == "int4"
            else weight.decode_bytes
        )
        sizes["int8"][name] = weight.count
        is_float = weight.kind == "dense" and quantize != "int4"
        sizes["copied"][name] = 4 * weight.count if is_float else 2 * sizes["decode"][name]
    return sizes

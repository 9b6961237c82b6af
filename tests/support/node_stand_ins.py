"""Functions in the place of plugin nodes, for TensorRT-RTX, which supports no plugins."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import NAMESPACE, PARTIAL_ROWS

_FINISH = f"""\
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    finish <given, plugin_namespace, plugin_version, aot>
    (q, tree, positions, write_index, table, parts, stats, sinks) => (y) {{
        nodes = Cast<to = 10>(tree)
        node = ReduceMax<keepdims = 0>(nodes)
        places = Cast<to = 10>(positions)
        place = ReduceMax<keepdims = 0>(places)
        wide_index = Cast<to = 10>(write_index)
        at = ReduceMax<keepdims = 0>(wide_index)
        entries = Cast<to = 10>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        top_part = ReduceMax<keepdims = 0>(parts)
        part = Cast<to = 10>(top_part)
        top_stat = ReduceMax<keepdims = 0>(stats)
        stat = Cast<to = 10>(top_stat)
        top_sink = ReduceMax<keepdims = 0>(sinks)
        sink = Cast<to = 10>(top_sink)
        y = Sum(q, node, place, at, entry, part, stat, sink)
    }}"""


def stand_ins(heads: int, size: int) -> list[ir.Function]:
    """Functions with the shapes and types of attention's nodes."""
    text = f"""<ir_version: 10, opset_import: ["" : 24, "{NAMESPACE}" : 1]>
    g (float16[1, n, {heads * size}] q) => (float16[1, n, {heads * size}] y) {{ y = Identity(q) }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    store_rows <given, plugin_namespace, plugin_version, aot>
    (q, k, v, cos, sin, positions, write_index, table) => (y) {{
        axis = Constant<value = int64[1] {{2}}>()
        rows = ReduceMean(k, axis)
        values = ReduceMean(v, axis)
        turned = ReduceMax<keepdims = 0>(cos)
        back = ReduceMax<keepdims = 0>(sin)
        wide = Cast<to = 10>(positions)
        place = ReduceMax<keepdims = 0>(wide)
        wide_index = Cast<to = 10>(write_index)
        at = ReduceMax<keepdims = 0>(wide_index)
        entries = Cast<to = 10>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        y = Sum(q, rows, values, turned, back, place, at, entry)
    }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    attend <given, plugin_namespace, plugin_version, aot>
    (q, tree, positions, write_index, table) => (parts, stats) {{
        axis = Constant<value = int64[1] {{1}}>()
        wide = Cast<to = 1>(q)
        mean = ReduceMean<keepdims = 0>(wide, axis)
        shape = Constant<value = int64[3] {{1, {heads}, {size}}}>()
        apart = Reshape(mean, shape)
        nodes = Cast<to = 1>(tree)
        node = ReduceMax<keepdims = 0>(nodes)
        places = Cast<to = 1>(positions)
        place = ReduceMax<keepdims = 0>(places)
        wide_index = Cast<to = 1>(write_index)
        at = ReduceMax<keepdims = 0>(wide_index)
        entries = Cast<to = 1>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        one = Sum(apart, node, place, at, entry)
        rows = Constant<value = int64[3] {{{PARTIAL_ROWS}, 1, 1}}>()
        parts = Tile(one, rows)
        last = Constant<value = int64[1] {{2}}>()
        top = ReduceMax(parts, last)
        twice = Constant<value = int64[3] {{1, 1, 2}}>()
        stats = Tile(top, twice)
    }}
{_FINISH}"""
    return list(ir.from_onnx_text(text).functions.values())


def _routing(top_k: int) -> str:
    """A function for `route_rows`, without its domain."""
    return f"""
    route_rows <given, plugin_namespace, plugin_version, aot>
    (logits, offsets, bias, factors) => (ids, shares) {{
        offset = ReduceMax<keepdims = 0>(offsets)
        other = ReduceMax<keepdims = 0>(bias)
        factor = ReduceMax<keepdims = 0>(factors)
        rank = Sum(logits, offset, other, factor)
        count = Constant<value = int64[1] {{{top_k}}}>()
        values, ids = TopK(rank, count)
        shares = Cast<to = 10>(values)
    }}"""


def expert_stand_ins(hidden: int, inner: int, top_k: int, experts: int) -> list[ir.Function]:
    """Functions with the shapes and types of the nodes of experts."""
    given = "given, plugin_namespace, plugin_version, aot"
    text = f"""<ir_version: 10, opset_import: ["" : 24, "{NAMESPACE}" : 1]>
    g (float16[1, n, 8] q) => (float16[1, n, 8] y) {{ y = Identity(q) }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    {_routing(top_k)}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    group_rows <{given}> (ids) => (order, begins) {{
        order = Cast<to = 6>(ids)
        axes = Constant<value = int64[2] {{1, 2}}>()
        wide = Cast<to = 1>(ids)
        largest = ReduceMax(wide, axes)
        least = Squeeze(largest, axes)
        axis = Constant<value = int64[1] {{1}}>()
        one = Unsqueeze(least, axis)
        times = Constant<value = int64[2] {{1, {experts + 1}}}>()
        each = Tile(one, times)
        begins = Cast<to = 6>(each)
    }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    expert_gates <{given}> (x, order, begins, table) => (y) {{
        entries = Cast<to = 10>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        places = Cast<to = 10>(order)
        place = ReduceMax<keepdims = 0>(places)
        firsts = Cast<to = 10>(begins)
        first = ReduceMax<keepdims = 0>(firsts)
        axis = Constant<value = int64[1] {{2}}>()
        mean = ReduceMean(x, axis)
        sum = Sum(mean, entry, place, first)
        times = Constant<value = int64[3] {{1, 1, {top_k * inner}}}>()
        y = Tile(sum, times)
    }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    expert_downs <{given}> (x, shares, order, begins, table) => (y) {{
        entries = Cast<to = 10>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        places = Cast<to = 10>(order)
        place = ReduceMax<keepdims = 0>(places)
        firsts = Cast<to = 10>(begins)
        first = ReduceMax<keepdims = 0>(firsts)
        axis = Constant<value = int64[1] {{2}}>()
        mean = ReduceMean(x, axis)
        share = ReduceMean(shares, axis)
        sum = Sum(mean, share, entry, place, first)
        times = Constant<value = int64[3] {{1, 1, {top_k * hidden}}}>()
        y = Tile(sum, times)
    }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    sum_experts <{given}> (parts) => (y) {{
        shape = Constant<value = int64[4] {{1, -1, {top_k}, {hidden}}}>()
        apart = Reshape(parts, shape)
        axis = Constant<value = int64[1] {{2}}>()
        y = ReduceSum<keepdims = 0>(apart, axis)
    }}"""
    return list(ir.from_onnx_text(text).functions.values())


def recurrent_stand_ins() -> list[ir.Function]:
    """Functions with the shapes and types of the nodes of recurrent layers."""
    text = f"""<ir_version: 10, opset_import: ["" : 24, "{NAMESPACE}" : 1]>
    g (float16[1, n, 8] q) => (float16[1, n, 8] y) {{ y = Identity(q) }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    convolve_rows <given, plugin_namespace, plugin_version, aot>
    (x, taps, parents, table) => (y) {{
        tap = ReduceMax<keepdims = 0>(taps)
        above = Cast<to = 10>(parents)
        parent = ReduceMax<keepdims = 0>(above)
        entries = Cast<to = 10>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        y = Sum(x, tap, parent, entry)
    }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    delta_rows <given, plugin_namespace, plugin_version, aot>
    (q, k, v, g, b, tree, table) => (y) {{
        axis = Constant<value = int64[1] {{2}}>()
        query = ReduceMean(q, axis)
        key = ReduceMean(k, axis)
        decay = ReduceMean(g, axis)
        rate = ReduceMean(b, axis)
        nodes = Cast<to = 1>(tree)
        node = ReduceMax<keepdims = 0>(nodes)
        entries = Cast<to = 1>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        y = Sum(v, query, key, decay, rate, node, entry)
    }}"""
    return list(ir.from_onnx_text(text).functions.values())


def vocabulary_stand_ins(hidden: int, vocab: int) -> list[ir.Function]:
    """Functions with the shapes and types of the nodes of embeddings and heads."""
    given = "given, plugin_namespace, plugin_version, aot"
    text = f"""<ir_version: 10, opset_import: ["" : 24, "{NAMESPACE}" : 1]>
    g (float16[1, n, 8] q) => (float16[1, n, 8] y) {{ y = Identity(q) }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    look_up_rows <{given}> (ids, table) => (y) {{
        axis = Constant<value = int64[1] {{2}}>()
        wide = Cast<to = 10>(ids)
        id = Unsqueeze(wide, axis)
        entries = Cast<to = 10>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        sum = Add(id, entry)
        times = Constant<value = int64[3] {{1, 1, {hidden}}}>()
        y = Tile(sum, times)
    }}
    <domain: "{NAMESPACE}", opset_import: ["" : 24]>
    head_rows <{given}> (x, table) => (y) {{
        axis = Constant<value = int64[1] {{2}}>()
        wide = Cast<to = 1>(x)
        mean = ReduceMean(wide, axis)
        entries = Cast<to = 1>(table)
        entry = ReduceMax<keepdims = 0>(entries)
        sum = Add(mean, entry)
        times = Constant<value = int64[3] {{1, 1, {vocab}}}>()
        y = Tile(sum, times)
    }}"""
    return list(ir.from_onnx_text(text).functions.values())

"""Tables of a report, for terminal and page."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from edgellm.core.resources import available_memory_bytes
from edgellm.tools.inspection.report import Costs, Fusions, Graph, Origin, Port, Report
from edgellm.tools.inspection.roofline import FORMULA, predict
from edgellm.tools.inspection.sources.tensors import PARTS, by_dtype, bytes_by_layer, bytes_by_part
from edgellm.tools.tables import Table

PARTS_TITLE, LAYERS_TITLE = "Weights by part", "Layers"
PREDICTED_TITLE = "PREDICTED, not measured, for other boards"
DRAFT_TITLE = "Draft: "
_FUSED_TITLE = "Compiled kernels"


def tables(report: Report, context: int) -> list[Table]:
    """Return all tables of a report and its draft.

    Args:
        report: the report.
        context: tokens in the KV cache, for memory and predictions.
    """
    found = [_facts(report), *_weights(report), *_layers(report)]
    found += [_interface(graph) for graph in report.graphs if graph.inputs]
    found += [_fused(each) for each in report.fusions]
    found += [*_memory(report, context), *_costs(report), *_predictions(report, context)]
    found += _origins(report.origins)
    if report.draft is not None:
        found += [_of_draft(table) for table in tables(report.draft, context)]
    return found


def size(num_bytes: float) -> str:
    """Format bytes in a fitting unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{num_bytes:.0f} B"


def _of_draft(table: Table) -> Table:
    return dataclasses.replace(table, title=DRAFT_TITLE + table.title)


def _facts(report: Report) -> Table:
    return Table(
        title="Facts", columns=("", ""), rows=tuple(report.facts.items()), is_numeric=False
    )


def _weights(report: Report) -> Iterator[Table]:
    """Yield tables of bytes by part and by type, with a column per graph."""
    graphs = [graph for graph in report.graphs if graph.tensors]
    names = tuple(graph.name for graph in graphs)
    if not graphs:
        return
    parts = [bytes_by_part(graph.tensors) for graph in graphs]
    types = [by_dtype(graph.tensors) for graph in graphs]
    head = next((t for t in graphs[0].tensors if t.part == "embedding" and t.is_read_whole), None)
    rows = [
        (part, *(_share(found.get(part, 0), sum(found.values())) for found in parts))
        for part in PARTS
        if any(part in found for found in parts)
    ]
    yield Table(
        title=PARTS_TITLE,
        columns=("part", *names),
        rows=(*rows, ("all", *(size(sum(found.values())) for found in parts))),
        note="the head shares the embedding table"
        if head is not None and report.is_decoder
        else "",
    )
    yield Table(
        title="Weights by type",
        columns=("type", *names),
        rows=tuple(
            (kind, *(_tensors_of(*found.get(kind, (0, 0))) for found in types))
            for kind in dict.fromkeys(kind for found in types for kind in found)
        ),
    )


def _share(part: int, whole: int) -> str:
    return f"{size(part)} ({part / whole:.1%})" if part else "-"


def _tensors_of(count: int, num_bytes: int) -> str:
    return f"{count} tensors, {size(num_bytes)}" if count else "-"


def _layers(report: Report) -> Iterator[Table]:
    """Yield the table of layers; consecutive equal layers share a row."""
    layers = bytes_by_layer(report.graphs[0].tensors)
    if not layers:
        return
    parts = [part for part in PARTS if any(part in found for found in layers.values())]
    runs: list[tuple[list[int], tuple[str, ...]]] = []
    for layer, found in layers.items():
        row = (*(size(found.get(part, 0)) for part in parts), size(sum(found.values())))
        if runs and runs[-1][1] == row:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], row))
    yield Table(
        title=LAYERS_TITLE,
        columns=("layer", *parts, "all"),
        rows=tuple((_run(numbers), *row) for numbers, row in runs),
        note="bytes of each layer"
        + (f" in {report.graphs[0].name}" if len(report.graphs) > 1 else ""),
    )


def _run(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _interface(graph: Graph) -> Table:
    operators = [f"{name} {count}" for name, count in graph.operators.items()]
    more = f" and {len(operators) - 12} more kinds" if len(operators) > 12 else ""
    return Table(
        title=f"Inputs and outputs of {graph.name}",
        columns=("", "name", "type", "shape"),
        rows=(
            *(("input", *row) for row in _ports(graph.inputs)),
            *(("output", *row) for row in _ports(graph.outputs)),
        ),
        note=f"opset {graph.opset}; operators: {', '.join(operators[:12])}{more}",
        is_numeric=False,
    )


def _ports(ports: Iterable[Port]) -> list[tuple[str, str, str]]:
    """Merge equal ports of several layers, such as KV caches, to one row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for port in ports:
        shape = "[" + ", ".join(map(str, port.dims)) + "]"
        key = without_numbers(port.name), port.dtype.lower(), shape
        groups.setdefault(key, []).append(port.name)
    return [
        (names[0] if len(names) == 1 else counted(name, len(names)), dtype, shape)
        for (name, dtype, shape), names in groups.items()
    ]


def without_numbers(name: str) -> str:
    """Replace the number of the layer in a name by N."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", name)


def counted(name: str, count: int) -> str:
    """Return a name with the number of its instances."""
    return f"{name} ({count} of them)"


def _memory(report: Report, context: int) -> Iterator[Table]:
    if report.kv is None:
        return
    per_token = report.kv_bytes_per_token
    whole = report.kv_bytes
    several = f" of {report.num_sequences} sequences" if report.num_sequences > 1 else ""
    rows = [
        ("weights", size(report.loaded_bytes)),
        ("KV cache, per token", size(per_token)),
        (f"KV cache, {context} tokens", size(report.held_kv_bytes(context))),
        (f"KV cache, {report.capacity} tokens{several} (all)", size(whole)),
        ("weights and whole KV cache", size(report.loaded_bytes + whole)),
    ]
    rows += [("weights read per token", size(report.read_bytes))] if report.is_decoder else []
    note = f"weights: {report.loads_as}"
    note += "; includes the draft" if report.draft is not None else ""
    if report.is_engine:
        note += f"; available on this machine now: {size(available_memory_bytes())}"
    elif report.files and report.is_decoder:
        note += "; llm_build --dry-run estimates the engine's memory on this machine"
    yield Table(title="Memory", columns=("", "bytes"), rows=tuple(rows), note=note)


def _costs(report: Report) -> Iterator[Table]:
    for costs in report.costs:
        one = costs.ms_by_rows.get(1, 0.0)
        yield Table(
            title=costs_title(costs),
            columns=("tokens", "ms", "x one token"),
            rows=tuple(
                (
                    str(rows),
                    f"{ms:.2f}{' (estimated)' if rows in costs.estimated else ''}",
                    f"{ms / one:.2f}" if one else "-",
                )
                for rows, ms in costs.ms_by_rows.items()
            ),
            note=_measured_speed(report, costs) if report.is_decoder and one else "",
        )


def costs_title(costs: Costs) -> str:
    """Return the title of the table of these costs."""
    return f"Measured at build time: {costs.what}"


def _measured_speed(report: Report, costs: Costs) -> str:
    """Return decode and prefill speed from the measurements."""
    one = costs.ms_by_rows[1]
    maximum = max(rows for rows in costs.ms_by_rows if rows not in costs.estimated)
    bandwidth = report.read_bytes / one * 1e3
    prompts = maximum / costs.ms_by_rows[maximum] * 1e3
    moved = f", {bandwidth / 1e9:.1f} GB/s of weights" if bandwidth else ""
    return (
        f"decode {1e3 / one:.1f} tokens/s{moved}; "
        f"prefill in chunks of {maximum} tokens {prompts:.0f} tokens/s"
    )


def _predictions(report: Report, context: int) -> Iterator[Table]:
    found = predict(report, context)
    if not found:
        return
    elsewhere = "; bytes of this engine, a board's own may need less" if report.is_engine else ""
    sources = "; ".join(dict.fromkeys(one.board.source for one in found))
    yield Table(
        title=PREDICTED_TITLE,
        columns=("board", "GB/s", "decode, at most", "weights and cache"),
        rows=tuple(
            (
                one.board.name,
                f"{one.board.bandwidth_bytes_per_s / 1e9:g}",
                f"{one.tokens_per_s:.1f} tokens/s",
                size(one.needed_bytes) + (", fits" if one.fits else ", DOES NOT FIT"),
            )
            for one in found
        ),
        note=f"{FORMULA}, {context} tokens of context; plain decoding{elsewhere}. "
        f"Bandwidths: {sources}",
    )


def _fused(found: Fusions) -> Table:
    rows = tuple(
        (
            each.name,
            str(each.kernels),
            each.attention,
            ", ".join(f"{count} {kind}" for kind, count in each.products.items()) or "-",
            str(each.decoded_weights),
            str(each.reformats),
        )
        for each in found.passes
    )
    columns = ("pass", "kernels", "attention", "products", "dequantized weights", "reformats")
    note = f"from {found.told_by}; products by type of weights and of quantized inputs"
    return Table(title=f"{_FUSED_TITLE}: {found.graph}", columns=columns, rows=rows, note=note)


def _origins(origins: Sequence[Origin]) -> list[Table]:
    rows = tuple(
        (
            f"from {origin.what}",
            f"{origin.path} ({origin.state})",
            "; ".join(f"{name} {_shortened(value)}" for name, value in origin.details.items()),
        )
        for origin in origins
    )
    return [Table(title="Origin", columns=("", "path", "made with"), rows=rows, is_numeric=False)]


def _shortened(value: str) -> str:
    """Shorten hashes."""
    return f"{value[:16]}…" if re.fullmatch("[0-9a-f]{64}", value) else value

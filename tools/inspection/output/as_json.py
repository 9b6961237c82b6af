"""JSON of a report."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from edgellm.tools.inspection.report import Graph, Report
from edgellm.tools.inspection.roofline import FORMULA, predict
from edgellm.tools.inspection.sources.tensors import (
    Tensor,
    by_dtype,
    bytes_by_layer,
    bytes_by_part,
)


def report_json(report: Report, context: int) -> dict[str, Any]:
    """Return all of a report; sizes in bytes, times in milliseconds.

    Args:
        report: the report.
        context: tokens in the KV cache, for the predictions.
    """
    content = {
        "path": report.path,
        "kind": report.kind,
        "title": report.title,
        "facts": report.facts,
        "description": report.description,
        "bytes_by_part": bytes_by_part(report.tensors),
        "bytes_by_type": {kind: size for kind, (_, size) in by_dtype(report.tensors).items()},
        "bytes_by_layer": bytes_by_layer(report.graphs[0].tensors),
        "graphs": [_graph(graph) for graph in report.graphs],
        "memory": {
            "weights": report.loaded_bytes,
            "weights_are": report.loads_as,
            "read_for_one_token": report.read_bytes if report.is_decoder else None,
            "kv_cache_per_token": report.kv_bytes_per_token,
            "kv_cache_capacity_tokens": report.capacity,
            "kv_cache": report.kv_bytes,
        },
        "measured": [dataclasses.asdict(costs) for costs in report.costs],
        "compiled": [dataclasses.asdict(each) for each in report.fusions],
        "predictions": {
            "formula": FORMULA,
            "context": context,
            "boards": [
                {
                    "board": one.board.name,
                    "bandwidth_bytes_per_s": one.board.bandwidth_bytes_per_s,
                    "bandwidth_source": one.board.source,
                    "decode_tokens_per_s_at_most": one.tokens_per_s,
                    "weights_and_cache": one.needed_bytes,
                    "fits": one.fits,
                }
                for one in predict(report, context)
            ],
        },
        "origins": [dataclasses.asdict(origin) for origin in report.origins],
        "files": {name: dataclasses.asdict(record) for name, record in report.files.items()},
        "draft": None if report.draft is None else report_json(report.draft, context),
    }
    return json.loads(json.dumps(content))  # with JSON's types: lists, string keys


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "opset": graph.opset,
        "inputs": [dataclasses.asdict(port) for port in graph.inputs],
        "outputs": [dataclasses.asdict(port) for port in graph.outputs],
        "operators": graph.operators,
        "tensors": [_tensor(tensor) for tensor in graph.tensors],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(tensor) if field.name != "contents"]
    return {name: getattr(tensor, name) for name in names}

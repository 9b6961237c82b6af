"""The fields of manifests and request files, as the code declares them."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import tokenize
from typing import Any

import msgspec

from edgellm.core import manifest, model_spec
from edgellm.device_runtime.request_files.embed_requests import EmbedRequest, RerankRequest
from edgellm.device_runtime.request_files.request_file import ContentItem, Message, Options, Request
from edgellm.device_runtime.sampling.params import OPTIONS
from edgellm.tools.tables import Table, markdown

_MANIFESTS = (manifest.Bundle, manifest.Engine)
_PARTS = (
    *(
        manifest.GraphSpec,
        model_spec.DecoderSpec,
        model_spec.KVCacheSpec,
        model_spec.PageSpec,
        model_spec.CacheRanges,
    ),
    *(
        model_spec.RecurrentSpec,
        model_spec.ImageSpec,
        model_spec.DraftSpec,
        model_spec.BlockSpec,
        model_spec.VisionSpec,
        model_spec.AudioEncoderSpec,
    ),
    *(model_spec.PoolerSpec, model_spec.DenseSpec, model_spec.RerankSpec),
    manifest.FileRecord,
)


def manifest_page() -> str:
    """Return Markdown of the fields of `manifest.json`."""
    head = (
        "# Manifests\n\n`manifest.json` of a bundle or engine lists all of its files. The "
        f"contract version is {manifest.CONTRACT_VERSION}, {manifest.ENGINE_VERSION} for engines; "
        "other versions are rejected.\n"
    )
    return "\n".join([head, *(_dataclass(one) for one in (*_MANIFESTS, *_PARTS))])


def request_page() -> str:
    """Return Markdown of the fields of request files."""
    head = (
        "# Request files\n\n`llm_inference --inputFile` reads the fields of `Options`, and "
        "`requests`, a list of `Request`, `EmbedRequest` or `RerankRequest`. Unknown fields are "
        "rejected; "
        "[answers](answers.md) describes the output.\n"
    )
    kinds = (Options, Request, Message, ContentItem, EmbedRequest, RerankRequest)
    return "\n".join([head, *map(_struct, kinds)])


def _dataclass(kind: type) -> str:
    notes = comments(kind)
    rows = tuple(
        (one.name, f"`{one.type}`", notes.get(one.name, "")) for one in dataclasses.fields(kind)
    )
    return _section(kind, ("field", "type", ""), rows)


def _struct(kind: type[msgspec.Struct]) -> str:
    notes = {one.name: one.doc for one in OPTIONS.values()} | comments(kind)
    declared = msgspec.json.schema(kind)["$defs"][kind.__name__]
    rows = tuple(
        (name, f"`{_schema(field)}`", _default(kind, name, field), notes.get(name, ""))
        for name, field in declared["properties"].items()
    )
    return _section(kind, ("field", "type", "default", ""), rows)


def _schema(field: dict[str, Any]) -> str:
    """Describe a field of a JSON schema."""
    if "anyOf" in field:
        return " or ".join(_schema(one) for one in field["anyOf"])
    if "enum" in field:
        return " or ".join(f'"{value}"' for value in field["enum"])
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field["type"] == "array":
        return f"list of {_schema(field['items'])}"
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}
    limits = [f" {sign} {field[key]}" for key, sign in words.items() if key in field]
    return field["type"] + ",".join(limits)


def _default(kind: type[msgspec.Struct], name: str, field: dict[str, Any]) -> str:
    """Describe the default of a field; options of sampling may have the model's."""
    default = field.get("default")
    if kind is Options and name in OPTIONS:
        own = OPTIONS[name].default
        return "random" if own is None else f"the model's, else `{json.dumps(own)}`"
    return f"`{json.dumps(default)}`" if default is not None else ""


def comments(kind: type) -> dict[str, str]:
    """Return the comments after the fields of a class, by field."""
    found: dict[str, str] = {}
    line: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        if token.type == tokenize.COMMENT and line:
            found[line[0]] = token.string.removeprefix("#").strip()
        elif token.type in (tokenize.NEWLINE, tokenize.NL):
            line = []
        elif token.type == tokenize.NAME:
            line.append(token.string)
    return found


def _section(kind: type, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> str:
    about = inspect.cleandoc(kind.__doc__ or "")
    table = markdown(Table(title="", columns=columns, rows=rows, is_numeric=False)).partition(
        "\n\n"
    )[2]
    return f"## {kind.__name__}\n\n{about}\n\n{table}"

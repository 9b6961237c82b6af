"""Differences between two reports of one kind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.inspection.output.tables import counted, size, without_numbers
from edgellm.tools.inspection.report import Report
from edgellm.tools.inspection.sources.tensors import Tensor
from edgellm.tools.tables import Table

_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Change:
    """A field, file or tensor that differs between both sides."""

    name: str
    left: str
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All changes between two reports."""

    left: str  # path
    right: str
    fields: tuple[Change, ...]  # of manifest or config
    files: tuple[Change, ...]  # of manifests, compared by hash
    tensors: tuple[Change, ...]
    equal_tensors: int  # by name, type and shape; if compared, also by contents
    has_compared_contents: bool

    @property
    def is_empty(self) -> bool:
        """Whether there are no changes."""
        return not (self.fields or self.files or self.tensors)


def compare(left: Report, right: Report, *, contents: bool) -> Difference:
    """Compare two reports, including the drafts of engines.

    Args:
        left: one side.
        right: the other.
        contents: also compare the contents of tensors with equal types and shapes.

    Raises:
        EdgeLLMError: their kinds differ.
    """
    if left.kind != right.kind:
        raise EdgeLLMError(
            f"{left.path} is of kind {left.kind}, {right.path} of kind {right.kind}",
            hint="compare two of the same kind",
        )
    tensors = list(_tensors(left, right, contents=contents))
    found = Difference(
        left=left.path,
        right=right.path,
        fields=tuple(_changes(_words(left.description), _words(right.description))),
        files=tuple(_changes(_hashes(left), _hashes(right))),
        tensors=tuple(change for change in tensors if change.left != change.right),
        equal_tensors=sum(change.left == change.right for change in tensors),
        has_compared_contents=contents,
    )
    return _with_drafts(found, left.draft, right.draft)


def _with_drafts(found: Difference, left: Report | None, right: Report | None) -> Difference:
    if left is None and right is None:
        return found
    if left is None or right is None:
        sides = (_ABSENT if side is None else side.title for side in (left, right))
        fields, files, tensors, equal = (Change("draft", *sides),), (), (), 0
    else:
        inner = compare(left, right, contents=found.has_compared_contents)
        fields, files, tensors = (
            tuple(Change(f"draft: {c.name}", c.left, c.right) for c in changes)
            for changes in (inner.fields, inner.files, inner.tensors)
        )
        equal = inner.equal_tensors
    return Difference(
        left=found.left,
        right=found.right,
        fields=found.fields + fields,
        files=found.files + files,
        tensors=found.tensors + tensors,
        equal_tensors=found.equal_tensors + equal,
        has_compared_contents=found.has_compared_contents,
    )


def _words(description: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in description.items()}


def _hashes(report: Report) -> dict[str, str]:
    return {
        name: f"{size(record.num_bytes)}, sha256 {record.sha256[:16]}"
        for name, record in report.files.items()
    }


def _changes(left: dict[str, str], right: dict[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys([*left, *right]):
        sides = left.get(name, _ABSENT), right.get(name, _ABSENT)
        if sides[0] != sides[1]:
            yield Change(name, *sides)


def _tensors(left: Report, right: Report, *, contents: bool) -> Iterator[Change]:
    """Yield each tensor of both sides, with its type and shape on each."""
    sides = [_by_name(report) for report in (left, right)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(name) for side in sides]
        words = [_ABSENT if tensor is None else _described(tensor) for tensor in pair]
        if contents and words[0] == words[1]:
            hashes = {_hash(tensor) for tensor in pair if tensor is not None}
            words[1] += ", other contents" if len(hashes) > 1 else ""
        yield Change(name, *words)


def _by_name(report: Report) -> dict[str, Tensor]:
    """Return tensors by name; with several graphs, the graph's name comes first."""
    several = len(report.graphs) > 1
    return {
        f"{graph.name}: {tensor.name}" if several else tensor.name: tensor
        for graph in report.graphs
        for tensor in graph.tensors
    }


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, {size(tensor.num_bytes)}"


def _hash(tensor: Tensor) -> bytes:
    digest = hashlib.sha256()
    for piece in tensor.contents():
        digest.update(piece)
    return digest.digest()


def tables_of(found: Difference) -> list[Table]:
    """Return tables of a difference, with a summary."""
    kinds = (("Fields", found.fields), ("Files", found.files), ("Tensors", found.tensors))
    tables = [
        Table(
            title=f"{title} that differ",
            columns=("", found.left, found.right),
            rows=tuple(_grouped(changes)),
            is_numeric=False,
        )
        for title, changes in kinds
        if changes
    ]
    how = "type, shape and contents" if found.has_compared_contents else "type and shape"
    more = "" if found.has_compared_contents else "; --verify compares contents"
    summary = (("equal tensors", f"{found.equal_tensors} by name, {how}{more}"),)
    if found.is_empty:
        summary = (("differences", "none"), *summary)
    return [*tables, Table(title="Summary", columns=("", ""), rows=summary, is_numeric=False)]


def _grouped(changes: tuple[Change, ...]) -> Iterator[tuple[str, str, str]]:
    """Merge equal changes of several layers, whose names differ only in numbers, to one row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in changes:
        key = without_numbers(change.name), change.left, change.right
        groups.setdefault(key, []).append(change.name)
    for (name, left, right), names in groups.items():
        yield names[0] if len(names) == 1 else counted(name, len(names)), left, right

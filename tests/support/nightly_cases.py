"""Which cases of a test run for each change; the others are marked `nightly`.

`@pytest.mark.each_change("case", ...)` names them by the ids of `parametrize`, with `*` for any
part. A sweep over model types without this mark keeps those of `REPRESENTATIVES`, if it has some.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable

import pytest

from edgellm.export import models, visual

# Dense; windows; shared keys and values; recurrent layers; a mixture. Images: fixed and free sizes.
REPRESENTATIVES = {
    "llama",
    "gemma3_text",
    "gemma4_text",
    "qwen3_5_text",
    "qwen3_moe",
    "gemma3",
    "qwen2_5_vl",
    "qwen3_5",
}
_TYPES = {*models.supported(), *visual.supported()}


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that do not run for each change.

    Raises:
        pytest.UsageError: a mark names a case that the test does not have.
    """
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for test, cases in tests.items():
        for case in _left_out(test, cases):
            case.add_marker(pytest.mark.nightly)


def _left_out(test: str, cases: list[pytest.Function]) -> list[pytest.Function]:
    if (mark := cases[0].get_closest_marker("each_change")) is not None:
        kept = {
            each: fnmatch.filter([case.callspec.id for case in cases], each) for each in mark.args
        }
        if len(cases) > 1 and (unknown := [each for each, found in kept.items() if not found]):
            raise pytest.UsageError(f"{test}: each_change names no case: {unknown}")
        named = {name for found in kept.values() for name in found}
        return [case for case in cases if case.callspec.id not in named]
    types = [_type_of(case) for case in cases]
    if not REPRESENTATIVES & {found for found in types if found}:
        return []
    return [
        case
        for case, found in zip(cases, types, strict=True)
        if found and found not in REPRESENTATIVES
    ]


def _type_of(case: pytest.Function) -> str | None:
    """The model type that the case's id has, without which the ids of a sweep would be equal."""
    return next((part for part in case.callspec.id.split("-") if part in _TYPES), None)

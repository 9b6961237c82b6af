"""With `pytest --quick`, leaves out tests that need torch, real weights or a GPU.

Nothing is marked by hand. A module that cannot be imported without one of the packages is not
collected, a test whose fixture or body asks for one is skipped, with its name as the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

_PACKAGES = (
    "torch", "transformers", "modelopt", "auto_round", "safetensors", "playwright", "openai",
    "schemathesis", "mkdocs", "tensorrt_rtx", "jsonschema_rs",
)  # fmt: skip
_MARKERS = ("real", "gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out tests of real weights and GPUs."""
    left_out = [item for item in items if any(map(item.get_closest_marker, _MARKERS))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Modules, and folders with a conftest.py, that import one of the packages hold no tests."""
    report = yield
    if (failure := report.call.excinfo) is not None and _absent(failure.value):
        report.outcome, report.longrepr, report.result = "passed", None, []
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip what imports one of the packages while it runs."""
    report = yield
    if call.excinfo is not None and (package := _absent(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: needs {package}")
    return report


def _absent(error: BaseException | None) -> str:
    """The package whose absence caused the error, or ""."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in _PACKAGES:
            return error.name
        error = error.__cause__
    return ""

"""Style rules beyond the linter's, and contents of the wheel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from installed import SCRIPTS

ROOT = Path(__file__).parent.parent
IN_A_CLONE = ("scripts", "benchmarks")
FOLDERS = (
    "quantize",
    "export",
    "build",
    "core",
    "device_runtime",
    "multimodal",
    "tools",
    *IN_A_CLONE,
)
FILES = [*ROOT.glob("*.py"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))]
TESTS = [*(ROOT / "tests").rglob("*.py")]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FORMATTED_BY_HAND = 800, 60, 430


def _faults(path: Path) -> list[str]:
    """Files and functions that are too long, and meaningless file names."""
    source, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    lines = len(source.splitlines())
    found = [f"{name} has {lines} lines"] if lines > MAX_FILE_LINES else []
    found += [name] if path.stem in ("utils", "helpers", "common", "misc") else []
    return found + [
        f"{name}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def test_sizes_and_names():
    assert [fault for path in (*FILES, *TESTS) for fault in _faults(path)] == []


def test_lines_that_the_formatter_may_not_touch():
    """Their number must not increase."""
    marks = sum(path.read_text("utf-8").count(f"# fmt: {'skip'}") for path in (*FILES, *TESTS))
    assert marks <= MAX_FORMATTED_BY_HAND


def test_the_wheel_holds_every_package(tmp_path):
    """`build/` in a .gitignore would silently drop edgellm.build; scripts stay in the clone."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, ROOT], check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    shipped = [path for path in FILES if path.relative_to(ROOT).parts[0] not in IN_A_CLONE]
    missing = {f"edgellm/{p.relative_to(ROOT).as_posix()}" for p in shipped} - set(names)
    assert not missing
    assert {
        "edgellm/tools/trees.html",
        "edgellm/tools/inspection/output/page.html",
        *(f"edgellm/tools/serve/page/{name}" for name in ("index.html", "app.js", "style.css")),
        "edgellm/tools/bench/requests.json",
    } <= set(names)
    ptx = "edgellm/device_runtime/kernels/triton/ptx"
    assert {f"{ptx}/sm_87.zip", f"{ptx}/sm_110.zip"} <= set(names)
    assert {
        "edgellm/quantize/calibration/calibration.jsonl",
        "edgellm/quantize/report/report.html",
    } <= set(names)
    assert all(name.startswith(("edgellm/", "edgellm-")) for name in names)
    assert not [
        name for name in names if name.startswith(("edgellm/scripts", "edgellm/benchmarks"))
    ]


def test_hooks_and_quick_checks_have_one_ruff():
    hooks = re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    (pinned,) = re.findall(r"ruff==[\d.]+", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(hooks) == {pinned}


def _loaded(modules: list[str], unwanted: list[str]) -> str:
    """The first of `modules` after whose import an unwanted one is there, and which."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    if found := {set(unwanted)} & set(sys.modules):\n"
        "        sys.exit(f'{name}: {found}')"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stderr


def test_the_device_side_imports_no_training_framework():
    places = ["build.cli", "device_runtime.cli", "device_runtime.api.llm"]
    modules = [f"edgellm.{place}" for place in places]
    assert _loaded(modules, ["torch", "transformers", "modelopt"]) == ""
    assert _loaded(["edgellm.core.errors", "json"], ["json"]) == "json: {'json'}\n"


def test_help_loads_nothing_heavy():
    """Keep `--help` below a third of a second."""
    modules = [place.partition(":")[0] for place in SCRIPTS.values()]
    heavy = ["onnx", "onnx_ir", "onnxruntime", "numpy", "rich", "tokenizers", "jinja2", "torch"]
    heavy += ["fastapi", "prompt_toolkit"]
    assert _loaded([*modules, "edgellm.scripts.synthetic_vlm.cli"], heavy) == ""

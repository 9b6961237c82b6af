"""The house style that no linter measures, and what a wheel must hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IN_A_CLONE = ("scripts", "benchmarks")
FOLDERS = ("quantize", "export", "build", "device_runtime", "multimodal", "tools", *IN_A_CLONE)
FILES = [*ROOT.glob("*.py"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_sizes_and_names(path):
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert path.stem not in ("utils", "helpers", "common", "misc")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


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
        "edgellm/tools/inspection/page.html",
        *(f"edgellm/tools/serve/page/{name}" for name in ("index.html", "app.js", "style.css")),
        "edgellm/tools/bench/requests.json",
    } <= set(names)
    ptx = "edgellm/device_runtime/kernels/triton/ptx"
    assert {f"{ptx}/manifest.json", f"{ptx}/sm_110.zip"} <= set(names)
    assert {"edgellm/quantize/calibration.jsonl", "edgellm/quantize/report.html"} <= set(names)
    assert all(name.startswith(("edgellm/", "edgellm-")) for name in names)
    assert not [
        name for name in names if name.startswith(("edgellm/scripts", "edgellm/benchmarks"))
    ]


def test_hooks_and_quick_checks_have_one_ruff():
    hooks = re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    (pinned,) = re.findall(r"ruff==[\d.]+", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(hooks) == {pinned}


@pytest.mark.parametrize(
    "module",
    ["edgellm.build.cli", "edgellm.device_runtime.cli", "edgellm.device_runtime.engine.llm"],
)
def test_the_device_side_imports_no_training_framework(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'transformers', 'modelopt') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    ["edgellm.export.cli", "edgellm.build.cli", "edgellm.device_runtime.cli", "edgellm.tools.trees",
     "edgellm.tools.train_draft.cli", "edgellm.scripts.synthetic_vlm.cli", "edgellm.quantize.cli",
     "edgellm.tools.inspection.cli", "edgellm.tools.serve.cli", "edgellm.tools.bench.cli",
      "edgellm.tools.transfer.cli", "edgellm.tools.chat.cli", "edgellm.tools.evaluate.cli",
      "edgellm.tools.doctor.cli"],
)  # fmt: skip
def test_help_loads_nothing_heavy(module):
    """What keeps `--help` below a third of a second."""
    heavy = (
        "onnx",
        "onnx_ir",
        "onnxruntime",
        "numpy",
        "rich",
        "tokenizers",
        "jinja2",
        "torch",
        "fastapi",
        "prompt_toolkit",
    )
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

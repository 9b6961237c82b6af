"""Style rules beyond the linter's, and contents of the wheel."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from edgellm.core.commands.entry_points import MODULES

_Node = TypeVar("_Node", ast.FunctionDef, ast.ClassDef)
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
MAX_MODULES, MAX_PARAMETERS, MAX_POSITIONAL = 15, 8, 3
# Packages whose signatures are checked
SIGNATURES = (
    "core", "export", "quantize", "build", "device_runtime", "multimodal", "tools", "scripts",
)  # fmt: skip
BY_POSITION = {
    "export/layers/linear.py: Linear",  # takes its sizes as torch.nn.Linear does
    "device_runtime/api/llm.py: LLM",  # takes its folder as vllm.LLM takes its model
}
KERNELS = "device_runtime/kernels/triton/"  # a kernel takes addresses and sizes, no objects
# One file for each architecture, and for each family's format of tool calls.
CROWDED = {"export/models", "export/visual", "tools/serve/tool_calls/formats"}


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _faults(path: Path) -> list[str]:
    """Files and functions that are too long, and meaningless file names."""
    source, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    lines = len(source.splitlines())
    found = [f"{name} has {lines} lines"] if lines > MAX_FILE_LINES else []
    found += [name] if path.stem in ("utils", "helpers", "common", "misc") else []
    return found + [
        f"{name}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def test_sizes_and_names():
    assert [fault for path in (*FILES, *TESTS) for fault in _faults(path)] == []


def _modules(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]


def test_no_folder_has_more_modules_than_a_reader_takes_in():
    """Not for benchmarks/, a file for each published figure, and tests/, which may follow."""
    folders = {path.parent for path in FILES if path.relative_to(ROOT).parts[0] != "benchmarks"}
    full = {each for each in folders if len(_modules(each)) > MAX_MODULES}
    assert {each.relative_to(ROOT).as_posix() for each in full} == CROWDED


def _checked(kind: type[_Node]) -> Iterator[tuple[str, _Node]]:
    """Public functions and methods, or classes, of the checked packages, with their places."""
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.partition("/")[0] in SIGNATURES and not name.startswith(KERNELS):
            module = _parsed(path)
            classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
            bodies = [module.body, *(each.body for each in classes)]
            yield from (
                (f"{name}: {node.name}", node)
                for node in (node for body in bodies for node in body)
                if isinstance(node, kind)
            )


def test_functions_of_many_parameters_take_a_dataclass():
    """Commands declare all of their flags; what they call takes them at once."""
    crowded = []
    for place, node in _checked(ast.FunctionDef):
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len([each for each in names if each not in ("self", "cls")])
        is_command = any("app.command" in ast.unparse(each) for each in node.decorator_list)
        is_public = not node.name.startswith("_")
        if is_public and not is_command and count > MAX_PARAMETERS:
            crowded.append(f"{place} has {count} parameters")
    assert crowded == []


def _constructor(node: ast.ClassDef) -> tuple[int, int]:
    """Number of arguments of a class's own constructor, and of those that may be positional."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            positional = len(each.args.posonlyargs) + len(each.args.args) - 1
            return positional + len(each.args.kwonlyargs), positional
    marks = [ast.unparse(each) for each in node.decorator_list]
    mark = next((each for each in marks if "dataclass" in each), None)
    if mark is None:  # a NamedTuple, if any, is of coordinates
        return 0, 0
    lines = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    sentinel = next((index for index, line in enumerate(lines) if "KW_ONLY" in line), len(lines))
    fields = [line for line in lines if not re.search(r"ClassVar\[|init=False|KW_ONLY", line)]
    positional = [line for line in lines[:sentinel] if line in fields and "kw_only=" not in line]
    return len(fields), 0 if "kw_only=True" in mark else len(positional)


def test_constructors_of_many_arguments_are_keyword_only():
    positional = set()
    for place, node in _checked(ast.ClassDef):
        is_error = any(ast.unparse(each).endswith(("Error", "Exception")) for each in node.bases)
        total, by_position = _constructor(node)
        if total > MAX_POSITIONAL and by_position and not is_error:
            positional.add(place)
    assert positional == BY_POSITION


def test_lines_that_the_formatter_may_not_touch():
    """Their number must not increase."""
    marks = sum(path.read_text("utf-8").count(f"# fmt: {'skip'}") for path in (*FILES, *TESTS))
    assert marks <= MAX_FORMATTED_BY_HAND


def test_the_wheel_holds_every_package(tmp_path):
    """`build/` in a .gitignore would silently drop edgellm.build; scripts stay in the clone."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    fast = {**os.environ, "EDGELLM_KERNELS": "0"}  # the kernels of wheels have their own test
    subprocess.run([*pip, "--wheel-dir", tmp_path, ROOT], check=True, capture_output=True, env=fast)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    shipped = [path for path in FILES if path.relative_to(ROOT).parts[0] not in IN_A_CLONE]
    missing = {f"edgellm/{p.relative_to(ROOT).as_posix()}" for p in shipped} - set(names)
    assert not missing
    served = (ROOT / "tools/serve/page").rglob("*")
    assert {
        "edgellm/tools/trees.html",
        "edgellm/tools/inspection/output/page.html",
        *(f"edgellm/{file.relative_to(ROOT).as_posix()}" for file in served if file.is_file()),
        "edgellm/tools/bench/requests.json",
    } <= set(names)
    licences = "edgellm-0.1.0.dist-info/licenses"
    vendored = (ROOT / "tools/serve/page/vendor").glob("*.js")
    assert {
        f"{licences}/tools/serve/page/vendor/{library.stem}.LICENSE" for library in vendored
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
    modules = [*MODULES.values()]
    heavy = ["onnx", "onnx_ir", "onnxruntime", "numpy", "rich", "tokenizers", "jinja2", "torch"]
    heavy += ["fastapi", "prompt_toolkit"]
    assert _loaded([*modules, "edgellm.scripts.synthetic_vlm.cli"], heavy) == ""

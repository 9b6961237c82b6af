"""`python -m edgellm.scripts.proof_folder OUT`: the proof on a GPU as a folder to copy."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.artifact import temporary_folder
from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.scripts.proof_folder.wheels import (
    DEFAULT,
    build_wheel,
    download_wheels,
    read_platforms,
    requirements_of,
)

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_MODEL, _DRAFT = (_ROOT / "examples" / name for name in ("synthetic-vlm", "synthetic-vlm-eagle3"))
_MAX_BYTES = 400 * 10**6
_SOURCES = ("benchmarks/gpu.py", "benchmarks/gpu_proof.py", "benchmarks/harness", "tests/support")
_LIMIT_S = 600
_CAPABILITY = {"fp8": 89, "nvfp4": 100}  # the least that has the precision
LORA = "lora"  # the bundle whose outputs are with an adapter
_ENGINE = "proof/engine_step.py"
_BACKENDS = {"tensorrt": "TensorRT", "onnxruntime_cuda": "ONNX Runtime on CUDA"}
_BATCHED = ("fp16", "recurrent")
_UNSUPPORTED = {("onnxruntime_cuda", "recurrent")}
_PLATFORMS = ",".join(DEFAULT)

app = App()


@app.command()
def proof_folder(
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    platforms: Annotated[
        str, typer.Option("--platforms", help=f"Machines and Pythons. Default: {_PLATFORMS}.")
    ] = _PLATFORMS,
    bundles: Annotated[
        str, typer.Option("--bundles", help="Tiny bundles to make. Default: all.")
    ] = "",
    no_wheels: Annotated[
        bool, typer.Option("--no_wheels", help="Leave out all wheels. Default: off.")
    ] = False,
) -> None:
    """Make a folder that proves edgellm on a machine without network, torch and compiler."""
    from edgellm.scripts.proof_folder.bundles import NAMES

    if out.exists():
        raise EdgeLLMError(f"{out} exists", hint="give a new folder, or delete it")
    chosen = () if no_wheels else read_platforms(platforms)
    names = tuple(filter(None, bundles.split(","))) or NAMES
    for name in names:
        if name not in NAMES:
            raise EdgeLLMError(f"--bundles: {name} is unknown", hint=f"known: {', '.join(NAMES)}")
    with temporary_folder(out) as folder:
        size = make_folder(folder, chosen, names)
        folder.rename(out)
    print(f"{out}: {size / 1e6:.1f} MB; copy it, and run ./prove there")


def make_folder(folder: Path, platforms: tuple[str, ...], names: tuple[str, ...]) -> int:
    """Fill an empty folder; return its size in bytes.

    Raises:
        EdgeLLMError: wheels cannot be made, or the folder is larger than 400 MB.
    """
    _copy_sources(folder)
    steps = _make_bundles(folder, names)
    if platforms:
        (folder / "wheels").mkdir()
        wheel = build_wheel(_ROOT, folder / "wheels")
        for platform in platforms:
            download_wheels(platform, wheel)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in paths)
    if size > _MAX_BYTES:
        raise EdgeLLMError(
            f"the folder has {size / 1e6:.0f} MB, more than {_MAX_BYTES / 1e6:.0f}",
            hint="give fewer --platforms",
        )
    contents = {
        "platforms": platforms,
        "requirements": {platform: requirements_of(platform) for platform in platforms},
        "steps": steps,
        "files": {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in paths
        },
    }
    (folder / "contents.json").write_text(json.dumps(contents, indent=1), "utf-8")
    return size


def _copy_sources(folder: Path) -> None:
    """Copy the programs of the proof."""
    shutil.copy(_HERE / "prove.py", folder / "prove")
    (folder / "prove").chmod(0o755)
    shutil.copy(_HERE / "README.md", folder / "README.md")
    for name in _SOURCES:
        target = folder / "proof" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(_ROOT / name, target)
    shutil.copy(_HERE / "engine_step.py", folder / "proof" / "engine_step.py")
    shutil.copy(_HERE / "requests.json", folder / "proof" / "requests.json")


def _make_bundles(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Make the tiny bundles; return all steps in their order."""
    from edgellm.scripts.proof_folder.bundles import make_bundle, make_pair

    bundles, expected, adapter = folder / "bundles", folder / "expected", folder / "adapter"
    bundles.mkdir()
    expected.mkdir()
    for name in names:
        own = adapter if name == LORA else None
        make_bundle(bundles / name, expected / f"{name}.npz", name, _MODEL, own)
    make_pair(bundles / "base", bundles / "draft", (_MODEL, _DRAFT))
    steps = [
        _step("machine", [_ENGINE, "machine"]),
        _step("runtime and kernels", ["proof/benchmarks/gpu_proof.py", "--runtime"], "gpu"),
    ]
    pair = ["bundles/base", "bundles/draft", "proof/requests.json"]
    for backend, label in _BACKENDS.items():
        for name in names:
            if (backend, name) not in _UNSUPPORTED:
                steps += _engine_steps(name, backend, label)
        trees = [_ENGINE, "trees", *pair, backend]
        steps.append(_step(f"EAGLE3 trees, {label}", trees, backend))
    return steps


def _engine_steps(name: str, backend: str, label: str) -> list[dict[str, Any]]:
    """The steps of a tiny bundle on a backend."""
    words = [_ENGINE, "outputs", f"bundles/{name}", f"expected/{name}.npz", backend]
    if name == LORA:
        return [_step(f"{name}, {label}", [*words, "--adapter", "adapter"], backend, "kernels")]
    if backend == "tensorrt" and name in _CAPABILITY:
        words += ["--capability", str(_CAPABILITY[name])]
    steps = [_step(f"{name}, {label}", words, backend)]
    if name in _BATCHED:
        batch = [*words, "--sequences", "2"]
        steps.append(_step(f"{name}, {label}, a batch of 2", batch, backend, "kernels"))
    return steps


def _step(name: str, words: list[str], *needs: str) -> dict[str, Any]:
    """A step as `prove` reads it."""
    return {"name": name, "words": words, "needs": needs, "limit_s": _LIMIT_S}


def main() -> None:
    """Run the command."""
    run_command(app)

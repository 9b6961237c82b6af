"""`python -m edgellm.scripts.proof_folder OUT`: the proof on a GPU as a folder to copy."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.artifact import temporary_folder
from edgellm.core.cli import App, run_command
from edgellm.core.commands.extras import install
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
_PROGRAMS = (
    "benchmarks/gpu.py",
    "benchmarks/gpu_proof.py",
    "benchmarks/harness",
    "tests/support",
)
_STEPS = ("scripts/__init__.py", "scripts/proof_folder/__init__.py", "scripts/proof_folder/steps")
_SOURCE = (
    *("core", "quantize", "export", "build", "device_runtime", "multimodal", "tools"),
    *("scripts", "tests", "benchmarks", "docs", "deploy", "docker", "Makefile", "mkdocs.yml"),
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
)
_NOT_COPIED = ("__pycache__", "*.so", "*.pyc")
_LIMIT_S, _LONG_S = 600, 1200  # of a step; of one that builds a large engine
_CAPABILITY = {"fp8": 89, "nvfp4": 100}  # the least that has the precision
PAIR = "eagle3"  # the bundles of `examples/`, with pictures
_ENGINE = ["-m", "edgellm.scripts.proof_folder.steps"]
_ADAPTER = "adapter"
_BACKENDS = {"tensorrt": "TensorRT", "onnxruntime_cuda": "ONNX Runtime on CUDA"}
_BATCHED = ("fp16", "experts-int4")
_SHAPES = {"1b": "1B", "8b": "8B"}
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
    from edgellm.scripts.proof_folder.checkpoints import MODELS

    if out.exists():
        raise EdgeLLMError(f"{out} exists", hint="give a new folder, or delete it")
    chosen = () if no_wheels else read_platforms(platforms)
    known = (*MODELS, PAIR)
    names = tuple(filter(None, bundles.split(","))) or known
    for name in names:
        if name not in known:
            raise EdgeLLMError(f"--bundles: {name} is unknown", hint=f"known: {', '.join(known)}")
    if missing := [each for each in ("torch", "transformers") if find_spec(each) is None]:
        raise EdgeLLMError(f"expected outputs need {missing[0]}", hint=install("host"))
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
    """Copy the programs of the proof, edgellm's source, and the small models of `examples/`."""
    shutil.copy(_HERE / "prove.py", folder / "prove")
    (folder / "prove").chmod(0o755)
    shutil.copy(_HERE / "README.md", folder / "README.md")
    for name in _PROGRAMS:
        _copy(_ROOT / name, folder / "proof" / name)
    for name in _STEPS:  # the wheel's package edgellm has no scripts
        _copy(_ROOT / name, folder / "proof" / "edgellm" / name)
    for checkpoint in (_MODEL, _DRAFT):
        _copy(checkpoint, folder / "examples" / checkpoint.name)
    shutil.copy(_HERE / "requests.json", folder / "proof" / "requests.json")
    with tarfile.open(folder / "source.tar.gz", "w:gz", compresslevel=6) as archive:
        for name in _SOURCE:
            archive.add(_ROOT / name, f"edgellm/{name}", filter=_kept)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    else:
        shutil.copy(source, target)


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = member.name.rpartition("/")[2]
    return None if any(fnmatch(name, pattern) for pattern in _NOT_COPIED) else member


def _make_bundles(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Make the tiny bundles; return all steps in their order."""
    from edgellm.scripts.proof_folder.bundles import make_bundle, make_pair, make_pictures
    from edgellm.scripts.proof_folder.checkpoints import MODELS

    bundles, expected, adapter = folder / "bundles", folder / "expected", folder / _ADAPTER
    bundles.mkdir()
    expected.mkdir()
    models = [name for name in names if name != PAIR]
    for name in models:
        own = adapter if MODELS[name].has_adapter else None
        make_bundle(bundles / name, expected / f"{name}.npz", name, _MODEL, own)
    if PAIR in names:
        make_pair(bundles / "base", bundles / "draft", (_MODEL, _DRAFT))
        make_pictures(bundles / "visual", expected / "pictures", _MODEL)
    steps = [
        _step("machine", [*_ENGINE, "machine"]),
        _step("runtime and kernels", ["proof/benchmarks/gpu_proof.py", "--runtime"], "gpu"),
    ]
    for backend, label in _BACKENDS.items():
        for name in models:
            steps += _engine_steps(name, backend, label)
        steps += _pair_steps(backend, label) if PAIR in names else []
    for backend, label in _BACKENDS.items():
        for shape, size in _SHAPES.items():
            words = ["proof/benchmarks/gpu.py", "shape", shape, "--backend", backend]
            steps.append(_step(f"speed of {size}, {label}", words, backend, limit_s=_LONG_S))
    return steps


def _engine_steps(name: str, backend: str, label: str) -> list[dict[str, Any]]:
    """The steps of a tiny bundle on a backend."""
    from edgellm.scripts.proof_folder.checkpoints import MODELS

    if MODELS[name].is_recurrent and backend != "tensorrt":
        return []
    words = [*_ENGINE, "outputs", backend, f"bundles/{name}", f"expected/{name}.npz"]
    if MODELS[name].has_adapter:
        words += ["--adapter", _ADAPTER]
    if backend == "tensorrt" and name in _CAPABILITY:
        words += ["--capability", str(_CAPABILITY[name])]
    steps = [_step(f"{name}, {label}", words, backend)]
    if name in _BATCHED:
        batch = [*words, "--sequences", "2"]
        steps.append(_step(f"{name}, {label}, a batch of 2", batch, backend))
    return steps


def _pair_steps(backend: str, label: str) -> list[dict[str, Any]]:
    """The steps of the models of `examples/` on a backend."""
    base, draft, visual = (f"bundles/{name}" for name in ("base", "draft", "visual"))
    words = {
        "EAGLE3 trees": ["trees", backend, base, draft, "proof/requests.json"],
        "pictures": ["pictures", backend, base, visual, "expected/pictures"],
        "memory of a long run": ["memory", backend, base, draft],
    }
    return [_step(f"{name}, {label}", [*_ENGINE, *each], backend) for name, each in words.items()]


def _step(name: str, words: list[str], *needs: str, limit_s: int = _LIMIT_S) -> dict[str, Any]:
    """A step as `prove` reads it."""
    return {"name": name, "words": words, "needs": needs, "limit_s": limit_s}


def main() -> None:
    """Run the command."""
    run_command(app)

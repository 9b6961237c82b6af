"""Run the device part on aarch64, under an emulator where the processor is another.

make arm, or python tests/arm/device_on_arm.py --only install --only outputs --root FOLDER

* install: a wheel that a cross compiler made, without a compiler on the board; `edgellm-doctor`.
* outputs: tiny engines in fp32, fp16, int8 and int4 with EAGLE-3, an image, a server. Outputs are
  those of this machine. Quantized and 16-bit engines have its weight files, but for tables of RoPE,
  and on equal tables the bits of its logits.
* compile: `pip install .` in a clone, with the board's compiler.
* tests: the device tests of the suite, with the kernels that `install` compiled last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path = [str(HERE), *sys.path]

import numpy as np  # noqa: E402 - the path comes first
import onnx  # noqa: E402 - the path comes first
from userland import CACHE, Userland, UserlandError, open_userland  # noqa: E402

CROSS = "aarch64-linux-gnu-g++"
PYTHON, GLIBC = (3, 11), range(17, 37)  # of the userland: Debian 12
ENVIRONMENT, COMPILED = "/opt/edgellm", "/opt/compiled"  # virtual environments
EXTRAS = "device,serve"  # of a board
TEST_PACKAGES = ("edgellm[export,serve,chat]", "pytest>=8", "hypothesis>=6.100")
RELATIVE_ERROR = 2e-5  # of float32 logits, whose sums have another order
ROUNDED_ERROR = 5e-2  # of others: by another last bit, an activation is rounded to its next step
TABLES = {"Cos", "Sin"}  # of RoPE, which ONNX Runtime computes in a build
UNKNOWN = "cpuid_info", "cpuinfo"  # what ONNX Runtime prints of an unknown processor
TESTS = ("kernels", "engine", "speculate", "sampling", "runners", "scheduler", "api", "networks")
# It compiles the kernels again and again; CI runs its part for aarch64.
LEFT_OUT = "tests/device_runtime/kernels/test_library.py"


class StepError(Exception):
    """A step failed; the message is what it printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, help="A root of Debian for arm64. [one in the cache]")
    parser.add_argument("--only", choices=STEPS, action="append", help="This step. [all]")
    parser.add_argument("tests", nargs="*", help="What pytest runs. [device tests]")
    given = parser.parse_args()
    work = CACHE / "work"
    for name in ("wheels", "source", "data"):
        (work / name).mkdir(parents=True, exist_ok=True)
    folders = {f"/{name}": work / name for name in ("wheels", "source", "data")}
    try:
        with _timed("userland"):
            userland = open_userland(given.root, folders)
        for name in given.only or STEPS:
            with _timed(name):
                STEPS[name](userland, given.tests)
    except (StepError, UserlandError) as error:
        sys.exit(f"FAILED: {error}")


@contextmanager
def _timed(name: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    sys.stdout.write(f"{name}: {time.monotonic() - begun:.0f} s\n")
    sys.stdout.flush()


def _here(words: list[object], **environment: str) -> None:
    """Run a command on this machine."""
    made = subprocess.run(
        [*map(str, words)], cwd=ROOT, env={**os.environ, **environment}, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if made.returncode:
        raise StepError(made.stdout)


def _there(userland: Userland, words: list[str], **environment: str) -> str:
    """Run a command in the userland; returns what it printed."""
    made = userland.run(words, **environment)
    if made.returncode:
        raise StepError(made.stdout)
    return made.stdout


def install(userland: Userland, _: list[str]) -> None:
    """As the README says, of a wheel with kernels; there is no compiler."""
    wheels = userland.folders["/wheels"]
    _make_wheels(wheels)
    (wheel,) = wheels.glob("edgellm-*.whl")
    _install(userland, ENVIRONMENT, f"/wheels/{wheel.name}[{EXTRAS}]")
    said = _there(userland, [f"{ENVIRONMENT}/bin/edgellm-doctor"], CXX="none")
    if "--kernels edgellm: edgellm's kernels, neon_i8mm" not in said:
        raise StepError(f"edgellm-doctor does not find the kernels:\n{said}")
    if found := [line for line in said.splitlines() if any(each in line for each in UNKNOWN)]:
        raise StepError(f"ONNX Runtime prints: {found}")


def _make_wheels(wheels: Path) -> None:
    """One of edgellm, by the cross compiler, and those that it needs."""
    for old in wheels.glob("edgellm-*.whl"):
        old.unlink()
    if shutil.which(CROSS) is None:
        raise StepError(f"{CROSS} is missing: apt-get install g++-aarch64-linux-gnu")
    pip = sys.executable, "-m", "pip"
    _here([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT], CXX=CROSS)
    (wheel,) = wheels.glob("edgellm-*.whl")
    version = ".".join(map(str, PYTHON))
    abis = f"cp{version.replace('.', '')}", "abi3", "none"
    versions = (f"manylinux_2_{at}_aarch64" for at in GLIBC)
    platforms = "any", "linux_aarch64", "manylinux2014_aarch64", *versions
    wanted = f"{wheel}[export,chat,{EXTRAS}]", *TEST_PACKAGES[1:], "hatchling>=1.27"
    _here(
        [
            *pip, "download", "--quiet", "--only-binary=:all:", "--dest", wheels,
            "--find-links", wheels, "--python-version", version, "--implementation", "cp",
            *(word for each in abis for word in ("--abi", each)),
            *(word for each in platforms for word in ("--platform", each)), *wanted,
        ]
    )  # fmt: skip


def _install(userland: Userland, environment: str, *wanted: str, **variables: str) -> None:
    """Install packages into a new virtual environment."""
    shutil.rmtree(userland.root / environment[1:], ignore_errors=True)
    _there(userland, ["python3", "-m", "venv", environment])
    _add(userland, environment, *wanted, **variables)


def _add(userland: Userland, environment: str, *wanted: str, **variables: str) -> None:
    pip = [f"{environment}/bin/pip", "install", "--quiet", "--no-compile"]
    pip += ["--no-index", "--find-links", "/wheels"]
    _there(userland, [*pip, *wanted], **{"CXX": "none", **variables})


def outputs(userland: Userland, _: list[str]) -> None:
    """Tiny engines, made and run on both machines from the same bundles."""
    data = userland.folders["/data"]
    shutil.rmtree(data)
    data.mkdir()
    shutil.copy(HERE / "outputs.py", data)
    _here([sys.executable, HERE / "models.py", data / "bundles"])
    folders = [data / "bundles", data / "engines_here", data / "here"]
    _here([sys.executable, data / "outputs.py", *folders], OMP_NUM_THREADS="1")
    there = ["/data/bundles", "/data/engines_there", "/data/there", "/data/engines_here"]
    said = _there(userland, [f"{ENVIRONMENT}/bin/python", "/data/outputs.py", *there])
    sys.stdout.write("".join(f"  {line}\n" for line in said.splitlines() if line.endswith(" s")))
    faults = compare(data / "bundles", data / "here", data / "there")
    for each in json.loads((data / "bundles/engines.json").read_text()):
        if each["is_exact"]:
            folders = (data / f"engines_{side}" / each["engine"] for side in ("here", "there"))
            differ = differing_weights(*folders)
            faults += [f"{each['engine']}: {name} differs" for name in differ - TABLES]
    if faults:
        raise StepError("\n".join(faults))


def differing_weights(here: Path, there: Path) -> set[str]:
    """Names of the weights whose bytes differ between two machines' engines of one bundle."""
    found: list[dict[str, bytes]] = []
    for folder in (here, there):
        found.append({})
        for path in folder.glob("*.onnx"):
            for weight in onnx.load(path).graph.initializer:
                found[-1][f"{path.stem}: {weight.name}"] = weight.raw_data
    ours, theirs = found
    names = ours.keys() | theirs.keys()
    return {name.split(": ")[1] for name in names if ours.get(name) != theirs.get(name)}


def compare(bundles: Path, here: Path, there: Path) -> list[str]:
    """What differs between two machines' outputs."""
    faults: list[str] = []
    for each in json.loads((bundles / "engines.json").read_text()):
        name = each["engine"]
        ours, theirs = (np.load(folder / f"{name}.npy") for folder in (here, there))
        error = float(np.abs(ours - theirs).max() / np.abs(ours).max())
        said = f"  {name}: relative error {error:.1e}"
        if not error <= (ROUNDED_ERROR if each["is_exact"] else RELATIVE_ERROR):
            faults.append(f"{name}: logits differ by {error:.1e}")
        if each["is_exact"]:
            shared = np.load(there / f"{name}_shared.npy")
            same = bool((ours.view(np.uint32) == shared.view(np.uint32)).all())
            said += f"; on equal tables {'equal' if same else 'other'} bits"
            faults += [] if same else [f"{name}: bits differ on equal tables"]
        sys.stdout.write(f"{said}\n")
    for path in sorted(here.glob("*.json")):
        ours, theirs = (json.loads((folder / path.name).read_text()) for folder in (here, there))
        if ours != theirs:
            faults.append(f"{path.stem}: {json.dumps(theirs)} is not {json.dumps(ours)}")
    return faults


def compile_there(userland: Userland, _: list[str]) -> None:
    """In a clone, with the board's compiler."""
    _copy_source(userland.folders["/source"])
    _install(userland, COMPILED, "/source[device]", CXX="g++")
    said = _there(userland, [f"{COMPILED}/bin/edgellm-doctor"], CXX="none")
    if "--kernels edgellm: edgellm's kernels, neon_i8mm" not in said:
        raise StepError(f"edgellm-doctor does not find the kernels:\n{said}")


def run_tests(userland: Userland, tests: list[str]) -> None:
    """The suite's, from a copy of the tracked files with the compiled kernels of the wheel."""
    source = userland.folders["/source"]
    _copy_source(source)
    kernels = Path("device_runtime/kernels/prebuilt")
    (installed,) = (userland.root / ENVIRONMENT[1:]).glob("lib/*/site-packages/edgellm")
    shutil.copytree(installed / kernels, source / kernels, dirs_exist_ok=True)
    _add(userland, ENVIRONMENT, *TEST_PACKAGES)
    wanted = tests or [f"tests/device_runtime/{name}" for name in TESTS]
    command = ["-m", "pytest", "--quick", "-q", "-p", "no:cacheprovider", f"--ignore={LEFT_OUT}"]
    words = userland.command(
        ["sh", "-c", 'cd /source && exec "$@"', "sh", f"{ENVIRONMENT}/bin/python", *command,
         *wanted],
    )  # fmt: skip
    if subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode:
        raise StepError("device tests fail")


def _copy_source(folder: Path) -> None:
    """The tracked files, and the link by which they are imported."""
    shutil.rmtree(folder)
    folder.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target, follow_symlinks=False)


STEPS: dict[str, Callable[[Userland, list[str]], None]] = {
    "install": install, "outputs": outputs, "tests": run_tests, "compile": compile_there,
}  # fmt: skip

if __name__ == "__main__":
    main()

"""Checks of driver, JetPack, CUDA, memory, power mode, packages and backends."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import system_memory
from edgellm.device_runtime import gpu, runners
from edgellm.tools.doctor import jetpack
from edgellm.tools.doctor.machine import Machine, ProgramError

OK, NOTE, FAULT = "ok", "note", "fault"
_QUERY = (
    "--query-gpu=name,driver_version,memory.total,memory.used,compute_cap",
    "--format=csv,noheader,nounits",
)
_OLDEST_DRIVER = 525  # of CUDA 12
_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13", "pycuda",
             "cuda-python", "tokenizers", "jinja2", "msgspec", "pillow")  # fmt: skip
_NEEDED = ("tokenizers", "jinja2", "msgspec")
_LITTLE_MEMORY_BYTES = 2 << 30
_OF_A_JETSON = "use TensorRT: pip's onnxruntime-gpu has no kernels for the GPUs of these boards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check; printed as one line."""

    what: str
    status: str
    found: str
    remedy: str = ""


def examine(machine: Machine) -> Iterator[Finding]:
    """Yield all findings; checks come after those that they depend on."""
    yield from _gpu(machine)
    yield from _driver(machine)
    yield from _gpu_kernels()
    yield from _jetpack(machine)
    yield from _cuda(machine)
    yield from _memory(machine)
    yield from _power(machine)
    yield from _packages()
    yield from _backends(machine)


def _gpu(machine: Machine) -> Iterator[Finding]:
    try:
        printed = machine.ask("nvidia-smi", *_QUERY)
    except ProgramError as error:
        yield Finding(
            what="driver",
            status=FAULT,
            found=str(error),
            remedy="restart the machine; if it stays, install the NVIDIA driver again",
        )
        return
    rows = [line.split(", ") for line in (printed or "").strip().splitlines()]
    if not rows:
        yield from _gpu_by_driver(machine)
        return
    for name, driver, total, used, capability in (row for row in rows if len(row) == 5):
        memory = f"{used} of {total} MB used" if total.isdigit() else "shares the system's memory"
        yield Finding(
            what="GPU", status=OK, found=f"{name}, compute capability {capability}, {memory}"
        )
        major = driver.split(".")[0]
        if major.isdigit() and int(major) < _OLDEST_DRIVER:
            older = f"{driver} is older than {_OLDEST_DRIVER}"
            yield Finding(
                what="driver", status=FAULT, found=older, remedy="install a newer NVIDIA driver"
            )
        else:
            yield Finding(what="driver", status=OK, found=driver)


def _gpu_by_driver(machine: Machine) -> Iterator[Finding]:
    """Report the GPU where nvidia-smi is missing, as on boards before JetPack 7."""
    try:
        capability, name = gpu.compute_capability(), gpu.name()
    except EdgeLLMError:  # see `_driver`
        return
    if capability is not None:
        found = f"{name}, compute capability {capability // 10}.{capability % 10}"
        yield Finding(what="GPU", status=OK, found=found)
    elif not _is_jetson(machine):
        yield Finding(what="GPU", status=NOTE, found="no NVIDIA GPU; engines run on the CPU")


def _is_jetson(machine: Machine) -> bool:
    return machine.read("etc/nv_tegra_release") is not None


def _driver(machine: Machine) -> Iterator[Finding]:
    """Report a driver that fails for this user; boards have no nvidia-smi."""
    try:
        gpu.compute_capability()
    except EdgeLLMError as error:
        found, remedy, closed = str(error), error.hint, machine.closed_devices()
        if closed:
            more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
            found += f"; this user may not open {min(closed)}{more}"
            groups = ",".join(sorted({*closed.values()}))
            remedy = f"sudo usermod -aG {groups} $USER, and log in again"
        yield Finding(what="driver", status=FAULT, found=found, remedy=remedy)


def _gpu_kernels() -> Iterator[Finding]:
    """Report whether the GPU can be opened and runs a kernel."""
    from edgellm.tools.doctor import gpu_kernel

    what, status = "GPU kernels", NOTE
    try:
        if gpu.compute_capability() is None:
            return
    except EdgeLLMError:  # see `_driver`
        return
    try:
        packages = _require_bindings()
        status = FAULT
        gpu_kernel.run()
    except EdgeLLMError as error:
        is_circular = "edgellm-doctor" in error.hint
        remedy = _remedy_of_the_driver() if is_circular else error.hint
        yield Finding(what=what, status=status, found=str(error), remedy=remedy)
    else:
        yield Finding(what=what, status=OK, found=f"a kernel runs; {packages}")


def _remedy_of_the_driver() -> str:
    cuda, bindings = gpu.driver_cuda(), _version("cuda-bindings")
    if cuda is not None and bindings is not None and int(bindings.split(".")[0]) > cuda[0]:
        return (
            f"pip install 'cuda-python<{cuda[0] + 1}', since the driver's CUDA is "
            f"{cuda[0]}.{cuda[1]}; or install a newer NVIDIA driver"
        )
    return "restart the machine; if it stays, install the NVIDIA driver again"


def _jetpack(machine: Machine) -> Iterator[Finding]:
    release = machine.read("etc/nv_tegra_release")
    if release is None:
        return
    model = (machine.read("proc/device-tree/model") or "Jetson").strip("\0\n ")
    version = jetpack.l4t_version(release)
    found = jetpack.find(version) if version is not None else None
    if version is None or found is None:
        yield Finding(
            what="JetPack",
            status=FAULT,
            found=f"{model}, of an unknown release: {release.strip()[:60]}",
            remedy="flash JetPack 7.2 or newer",
        )
        return
    yield Finding(
        what="JetPack",
        status=FAULT if found.remedy else OK,
        found=f"{model}, {found.name} (L4T {version[0]}.{version[1]}), TensorRT {found.tensorrt}, "
        f"CUDA {found.cuda}: {found.runs}",
        remedy=found.remedy,
    )


def _cuda(machine: Machine) -> Iterator[Finding]:
    text = machine.read("usr/local/cuda/version.json")
    if text is None:
        return
    try:
        version = json.loads(text)["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        yield Finding(
            what="CUDA",
            status=FAULT,
            found="usr/local/cuda/version.json cannot be read",
            remedy="install the CUDA toolkit again",
        )
        return
    yield Finding(what="CUDA", status=OK, found=f"toolkit {version}")


def _memory(machine: Machine) -> Iterator[Finding]:
    memory = system_memory(machine.root)
    if memory is None:
        return
    found = f"{memory.available_bytes / 1e9:.1f} of {memory.total_bytes / 1e9:.1f} GB are free"
    if memory.available_bytes < _LITTLE_MEMORY_BYTES:
        remedy = "close other programs; llm_build --dryRun estimates what an engine needs"
        yield Finding(what="memory", status=FAULT, found=found, remedy=remedy)
    else:
        yield Finding(what="memory", status=OK, found=found)


def _power(machine: Machine) -> Iterator[Finding]:
    try:
        printed = machine.ask("nvpmodel", "-q")
    except ProgramError as error:
        yield Finding(
            what="power mode",
            status=NOTE,
            found=str(error),
            remedy="run it as root: sudo nvpmodel -q",
        )
        return
    mode = re.search(r"NV Power Mode:\s*(\S+)", printed or "")
    if mode is not None and "MAXN" in mode[1].upper():
        yield Finding(what="power mode", status=OK, found=mode[1])
    elif mode is not None:
        yield Finding(
            what="power mode",
            status=NOTE,
            found=f"{mode[1]} limits the clocks",
            remedy=_fastest_mode(machine),
        )
    governor = machine.read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is not None and governor.strip() == "powersave":
        yield Finding(
            what="CPU clocks",
            status=NOTE,
            found="the governor is powersave",
            remedy="sudo cpupower frequency-set -g performance",
        )


def _fastest_mode(machine: Machine) -> str:
    """The command for the board's fastest power mode, whose number differs by board."""
    modes = re.findall(
        r"^<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>",
        machine.read("etc/nvpmodel.conf") or "",
        flags=re.MULTILINE,
    )
    if not modes:
        return "choose MAXN of the list in /etc/nvpmodel.conf: sudo nvpmodel -m NUMBER"
    number, _ = max(modes, key=lambda mode: _watts(mode[1]))
    return f"sudo nvpmodel -m {number} && sudo jetson_clocks"


def _watts(mode: str) -> float:
    """Power of a mode by its name, MODE_15W; MAXN has no limit."""
    if "MAXN" in mode.upper():
        return float("inf")
    found = re.search(r"(\d+)W", mode.upper())
    return float(found[1]) if found else 0.0


def _packages() -> Iterator[Finding]:
    versions = {name: found for name in _PACKAGES if (found := _version(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for name in _NEEDED if name not in versions]
    if missing:
        found = f"{' and '.join(missing)} missing; {listed or 'none'}"
        yield Finding(
            what="packages",
            status=FAULT,
            found=found,
            remedy=install("device"),
        )
    else:
        yield Finding(what="packages", status=OK, found=listed)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends(machine: Machine) -> Iterator[Finding]:
    for name in runners.libraries():
        finding = _backend(name)
        yield finding
        if (name, finding.status) == ("onnxruntime", OK):
            yield _own_kernels()
            yield _cuda_provider(machine)


def _own_kernels() -> Finding:
    from edgellm.device_runtime.kernels.library import instruction_sets

    what = "--kernels edgellm"
    try:
        return Finding(what=what, status=OK, found=f"edgellm's kernels, {instruction_sets()[0]}")
    except EdgeLLMError as error:
        return Finding(what=what, status=NOTE, found=str(error), remedy=error.hint)


def _cuda_provider(machine: Machine) -> Finding:
    from edgellm.device_runtime.runners.onnxruntime_cuda import FUSED_VERSION
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda

    what = "--backend onnxruntime --device cuda"
    try:
        cuda.require_cuda()
    except EdgeLLMError as error:
        remedy = _OF_A_JETSON if _is_jetson(machine) else error.hint
        return Finding(what=what, status=NOTE, found=str(error), remedy=remedy)
    found = "ONNX Runtime's CUDA provider runs a kernel"
    if cuda.is_older_than(FUSED_VERSION):
        older = f"{found}; it is older than {FUSED_VERSION}, whose attention is fused"
        return Finding(
            what=what,
            status=NOTE,
            found=older,
            remedy="update onnxruntime-gpu, or build with --attention plain",
        )
    return Finding(what=what, status=OK, found=f"{found}; attention is fused in float16")


def _backend(name: str) -> Finding:
    try:
        found = runners.find(name).available() + _rewritten(name)
        if name == "tensorrt" and gpu.compute_capability() is not None:
            found += f"; {_require_bindings()}"
        return Finding(what=f"--backend {name}", status=OK, found=found)
    except EdgeLLMError as error:
        return Finding(what=f"--backend {name}", status=NOTE, found=str(error), remedy=error.hint)


def _require_bindings() -> str:
    """Return the packages that run engines; raises `EdgeLLMError` if one does not load."""
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import import_bindings
    from edgellm.device_runtime.runners.tensorrt.cuda.python_bindings import PythonBindings

    try:
        driver, _ = import_bindings()
    except EdgeLLMError as error:
        raise EdgeLLMError(f"engines can be built, but not run: {error}", hint=error.hint) from None
    packages = "cuda-python" if isinstance(driver, PythonBindings) else "pycuda and cuda-python"
    return f"engines run through {packages}"


def _rewritten(name: str) -> str:
    """Return whose kernels compute attention, and which operators an older TensorRT lacks."""
    if name != "tensorrt":
        return ""
    from edgellm.build.tensorrt.lowering.cache_plan import machine_fault
    from edgellm.build.tensorrt.lowering.op_table import lacking
    from edgellm.device_runtime.runners.tensorrt.library import trt_import

    library = trt_import.find_library()
    fault, operators = machine_fault(library), lacking(library.version)
    if not fault:
        trt_import.require_attributes(library.trt)
    whose = f"TensorRT's operators, since {fault}" if fault else "edgellm's kernels"
    stand_in = f"; other operators stand for {', '.join(operators)}" if operators else ""
    return f"; attention by {whose}{stand_in}"

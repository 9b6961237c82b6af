"""`edgellm-doctor` on simulated machines."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
from pathlib import Path

import pytest
from fake_cuda import FakeDriver, fake_graphs
from plugin_stub import library

from edgellm.build import resource_estimate
from edgellm.build.tensorrt.lowering import cache_plan
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda
from edgellm.device_runtime.runners.tensorrt.cuda.driver import CudaDevice
from edgellm.device_runtime.runners.tensorrt.library import trt_import
from edgellm.tools.doctor import checks, gpu_kernel, jetpack
from edgellm.tools.doctor import machine as doctor_machine
from edgellm.tools.doctor.checks import FAULT, NOTE, OK, Finding, examine
from edgellm.tools.doctor.fit import examine_bundle
from edgellm.tools.doctor.machine import Machine

ORIN_6 = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n"
THOR_7_2 = "# R39 (release), REVISION: 2.0, GCID: 1, BOARD: generic, EABI: aarch64\n"
MEMORY = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\n"


@pytest.fixture
def machine(tmp_path):
    """Files below a root and programs that print."""
    (tmp_path / "root").mkdir()
    (tmp_path / "bin").mkdir()

    def make(files: dict[str, str], **programs: str) -> Machine:
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, script in programs.items():
            path = tmp_path / "bin" / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        return Machine(tmp_path / "root", f"{tmp_path / 'bin'}")

    return make


def _found(machine: Machine, what: str) -> list[Finding]:
    return [finding for finding in examine(machine) if finding.what == what]


def test_a_workstation_has_no_faults(machine):
    row = "NVIDIA RTX 4090, 570.86.10, 24564, 310, 8.9"
    here = machine(
        {"proc/meminfo": MEMORY, "usr/local/cuda/version.json": CUDA}, nvidia_smi=f"echo '{row}'"
    )
    (gpu,), (driver,) = _found(here, "GPU"), _found(here, "driver")
    assert (gpu.status, driver.status) == (OK, OK)
    assert gpu.found == "NVIDIA RTX 4090, compute capability 8.9, 310 of 24564 MB used"
    assert driver.found == "570.86.10"
    assert _found(here, "CUDA") == [Finding(what="CUDA", status=OK, found="toolkit 13.2.0")]
    assert _found(here, "memory") == [
        Finding(what="memory", status=OK, found="12.3 of 16.4 GB are free")
    ]
    assert not _found(here, "JetPack")


CUDA = '{"cuda": {"name": "CUDA SDK", "version": "13.2.0"}}'


def test_old_and_broken_drivers_are_faults(machine):
    old = machine({}, nvidia_smi="echo 'Tesla T4, 470.1, 15000, 0, 7.5'")
    (driver,) = _found(old, "driver")
    assert (driver.status, driver.found) == (FAULT, "470.1 is older than 525")
    broken = machine({}, nvidia_smi="echo 'NVIDIA-SMI has failed' >&2; exit 9")
    (driver,) = _found(broken, "driver")
    assert driver.status == FAULT
    assert driver.found == "nvidia-smi fails: NVIDIA-SMI has failed"
    assert driver.remedy


def test_a_machine_without_gpu_gets_a_note(machine):
    (gpu,) = _found(machine({}), "GPU")
    assert gpu.status == NOTE
    assert "run on the CPU" in gpu.found


def test_an_orin_with_jetpack_6_is_supported(machine):
    files = {"etc/nv_tegra_release": ORIN_6, "proc/device-tree/model": "NVIDIA Jetson Orin NX\0"}
    modes = ["0 NAME=MAXN", "1 NAME=10W", "2 NAME=15W", "3 NAME=25W"]
    files["etc/nvpmodel.conf"] = "".join(f"< POWER_MODEL ID={mode} >\n" for mode in modes)
    here = machine(files, nvpmodel="echo 'NV Power Mode: 15W\n2'")
    (pack,), (power,) = _found(here, "JetPack"), _found(here, "power mode")
    assert pack.status == OK
    assert (
        "Orin NX, JetPack 6.1 or 6.2 (L4T 36.4), TensorRT 10.3, CUDA 12.6: fp16, int8, int4"
        in pack.found
    )
    assert (power.status, power.remedy) == (NOTE, "sudo nvpmodel -m 0 && sudo jetson_clocks")
    assert not _found(here, "GPU")  # Jetson boards get no GPU finding


@pytest.mark.parametrize(
    ("modes", "number"),
    [
        (("15W", "25W", "MAXN_SUPER", "7W"), 2),  # an Orin Nano with JetPack 6.2
        (("15W", "7W"), 0),  # before
        (("7W", "15W"), 1),
    ],
)
def test_the_fastest_power_mode_depends_on_the_board(machine, modes, number):
    lines = [
        f"< POWER_MODEL ID={at} NAME={name} >\nCPU_ONLINE CORE_0 1" for at, name in enumerate(modes)
    ]
    files = {"etc/nvpmodel.conf": "\n".join(["# <POWER_MODEL ID=id_num NAME=mode_name>", *lines])}
    (power,) = _found(machine(files, nvpmodel="echo 'NV Power Mode: 7W'"), "power mode")
    assert power.remedy == f"sudo nvpmodel -m {number} && sudo jetson_clocks"
    (power,) = _found(machine({"etc/nvpmodel.conf": ""}), "power mode")
    assert "/etc/nvpmodel.conf" in power.remedy


def test_a_thor_with_little_memory_is_a_fault(machine):
    files = {"etc/nv_tegra_release": THOR_7_2, "proc/meminfo": MEMORY.replace("12000", "1200")}
    here = machine(files, nvpmodel="echo 'NV Power Mode: MAXN'")
    (pack,), (power,), (memory,) = (
        _found(here, what) for what in ("JetPack", "power mode", "memory")
    )
    assert (pack.status, power.status, memory.status) == (OK, OK, FAULT)
    assert "TensorRT 10.16, CUDA 13.2: all precisions" in pack.found
    assert not pack.remedy


def test_a_xavier_runs_cpu_engines_only(machine):
    release = ORIN_6.replace("R36", "R35").replace("4.3", "6.0")
    (pack,) = _found(machine({"etc/nv_tegra_release": release}), "JetPack")
    assert (pack.status, "JetPack 5 (L4T 35.6), TensorRT 8.4 to 8.5" in pack.found) == (FAULT, True)
    assert "a Xavier gets no newer one: build with --backend onnxruntime" in pack.remedy


def test_the_documentation_lists_the_same_releases():
    page = Path(__file__).parents[2] / "docs" / "tensorrt.md"
    lines = page.read_text("utf-8").split("| JetPack |")[1].splitlines()[2:]
    rows = [
        [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines)
    ]
    assert [[row[0].split(" (")[0], *row[1:]] for row in rows] == [
        [each.name.removeprefix("JetPack "), each.boards, each.tensorrt, each.cuda, each.python,
         each.runs, each.remedy]
        for each in jetpack.RELEASES
    ]  # fmt: skip


def test_unknown_file_contents_are_faults(machine):
    here = machine(
        {"etc/nv_tegra_release": "?", "usr/local/cuda/version.json": "{}", "proc/meminfo": "?"}
    )
    assert [_found(here, what)[0].status for what in ("JetPack", "CUDA")] == [FAULT, FAULT]
    assert not _found(here, "memory")
    assert jetpack.find((21, 1)) is None


def test_replaced_operators_of_an_older_tensorrt_are_listed(monkeypatch):
    trt = library()
    trt.__version__ = "10.13.3.9"
    monkeypatch.setattr(trt_import, "find_library", lambda: trt_import.Library(trt, False))
    found = checks._backend("tensorrt").found
    assert found.startswith("TensorRT 10.13.3.9; attention by edgellm's kernels; other operators ")
    assert found.endswith("Swish, TensorScatter")


@pytest.mark.parametrize(
    ("sm", "cuda_version", "reason"),
    [
        (75, (13, 0), "no kernels were compiled for compute capability 7.5"),
        (110, (12, 6), "the kernels for compute capability 11.0 are PTX 9.0"),
    ],
)
def test_a_gpu_without_edgellm_s_kernels_gives_the_reason(monkeypatch, sm, cuda_version, reason):
    trt = types.SimpleNamespace(__name__="tensorrt", __version__="11.4.1")
    monkeypatch.setattr(trt_import, "find_library", lambda: trt_import.Library(trt, False))
    monkeypatch.setattr(cache_plan, "compute_capability", lambda: sm)
    monkeypatch.setattr(cache_plan, "driver_cuda", lambda: cuda_version)
    found = checks._backend("tensorrt").found
    assert found.startswith(f"TensorRT 11.4.1; attention by TensorRT's operators, since {reason}")


def test_a_board_without_cuda_python_or_whole_attributes_gets_the_remedy(machine, monkeypatch):
    """TensorRT compiles there, and its engines would not run."""
    trt = library()
    trt.__version__ = "10.13.3.9"
    monkeypatch.setattr(trt_import, "find_library", lambda: trt_import.Library(trt, False))
    monkeypatch.setattr(checks.gpu, "compute_capability", lambda: 110)
    monkeypatch.setattr(gpu_kernel, "run", lambda: None)
    for name in ("pycuda", "pycuda.driver", "cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    (found,) = _found(machine({}), "--backend tensorrt")
    assert (found.status, "through pycuda and cuda-python" in found.found) == (OK, True)
    sys.modules["cuda.bindings.driver"].CUdevice_attribute = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    (found,) = _found(machine({}), "--backend tensorrt")
    assert (found.status, "run through cuda-python" in found.found) == (OK, True)
    with monkeypatch.context() as without:
        for module in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
            without.setitem(sys.modules, module, None)
        findings = [*_found(machine({}), "GPU kernels"), *_found(machine({}), "--backend tensorrt")]
    for found in findings:
        assert (found.status, found.remedy.startswith("pip install cuda-python")) == (NOTE, True)
        assert "can be built, but not run: cuda-python is not usable here" in found.found
    assert len(findings) == 2
    trt = library(repeats=True)
    trt.__version__ = "10.13.3.9"
    (found,) = _found(machine({}), "--backend tensorrt")
    assert (found.status, "numpy<2" in found.remedy) == (NOTE, True)


def test_a_driver_that_fails_is_a_fault(machine, monkeypatch):
    def fails() -> None:
        raise EdgeLLMError("the NVIDIA driver fails: cuInit gives 999", hint="groups")

    monkeypatch.setattr(checks.gpu, "compute_capability", fails)
    (driver,) = _found(machine({}), "driver")
    assert (driver.status, driver.remedy) == (FAULT, "groups")
    here = machine(dict.fromkeys(["dev/nvmap", "dev/nvgpu/igpu0/ctrl", "dev/nvidia0"], ""))
    (here.root / "dev/nvidia0").chmod(0o600)
    for name in ("dev/nvmap", "dev/nvgpu/igpu0/ctrl"):
        (here.root / name).chmod(0o660)
    (driver,) = _found(here, "driver")
    assert driver.remedy == "groups"
    monkeypatch.setattr(doctor_machine.os, "access", lambda *_: False)
    (driver,) = _found(here, "driver")
    assert driver.found.endswith("999; this user may not open /dev/nvgpu/igpu0/ctrl and 1 more")
    group = (here.root / "dev/nvmap").group()
    assert driver.remedy == f"sudo usermod -aG {group} $USER, and log in again"


def _device_of_a_fake() -> CudaDevice:
    """A GPU that computes nothing."""
    driver = FakeDriver()
    return CudaDevice(driver, fake_graphs(driver), driver.Device(0))


def _device_of_an_older_driver() -> CudaDevice:
    raise EdgeLLMError("the NVIDIA driver does not work", hint="edgellm-doctor says more")


@pytest.mark.parametrize(
    ("open_device", "cuda_version", "found", "remedy"),
    [
        (
            _device_of_a_fake,
            (13, 0),
            "a kernel that copies rows on the GPU gives wrong rows",
            "restart",
        ),
        (_device_of_an_older_driver, (13, 0), "the NVIDIA driver does not work", "restart"),
        (
            _device_of_an_older_driver,
            (12, 6),
            "the NVIDIA driver does not work",
            "pip install 'cuda-python<13', since the driver's CUDA is 12.6",
        ),
    ],
)
def test_a_gpu_that_runs_no_kernel_is_a_fault(
    monkeypatch, open_device, cuda_version, found, remedy
):
    monkeypatch.setattr(checks.gpu, "compute_capability", lambda: 110)
    monkeypatch.setattr(checks.gpu, "driver_cuda", lambda: cuda_version)
    monkeypatch.setattr(checks, "_require_bindings", lambda: "")
    monkeypatch.setattr(checks, "_version", lambda _: "13.5.0")
    monkeypatch.setattr(gpu_kernel, "open_device", open_device)
    (kernels,) = checks._gpu_kernels()
    assert (kernels.status, kernels.found) == (FAULT, found)
    assert kernels.remedy.startswith(remedy)


def test_packages_and_backends_are_checked(machine, monkeypatch):
    here = machine({})
    assert [each.status for each in _found(here, "--backend onnxruntime")] == [OK]
    (tensorrt,) = _found(here, "--backend tensorrt")
    assert tensorrt.status in (OK, NOTE)
    (provider,) = _found(here, "--backend onnxruntime --device cuda")
    assert (provider.status, bool(provider.remedy)) in ((OK, False), (NOTE, True))
    monkeypatch.setattr(cuda, "require_cuda", lambda: "cuda")
    monkeypatch.setattr(cuda.ort, "__version__", "1.31.1")
    (provider,) = _found(here, "--backend onnxruntime --device cuda")
    assert provider.status == OK
    assert provider.found.endswith("attention is fused in float16")
    monkeypatch.setattr(cuda.ort, "__version__", "1.30.2")
    (provider,) = _found(here, "--backend onnxruntime --device cuda")
    assert provider.status == NOTE
    assert "--attention plain" in provider.remedy
    monkeypatch.setattr(checks, "_NEEDED", ("no-such-package",))
    (packages,) = _found(here, "packages")
    assert (packages.status, packages.remedy[-9:]) == (FAULT, "[device]'")


def test_the_command_prints_one_line_per_finding():
    command = [sys.executable, "-m", "edgellm.tools.doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr
    lines = result.stdout.splitlines()
    assert any(line.startswith("ok     --backend onnxruntime: ") for line in lines)
    assert all(line.startswith(("ok ", "note ", "fault ", "       remedy: ")) for line in lines)
    assert Path("/proc/meminfo").exists() == any(": " in x and "GB are free" in x for x in lines)


def test_a_bundle_is_checked_for_memory_and_disk(tiny_bundle, tmp_path, monkeypatch):
    """The checks are those of llm_build."""
    found = list(examine_bundle(tiny_bundle, "onnxruntime", ""))
    whats = ["compiler", "build memory", "disk", "cache memory"]
    assert [(each.what, each.status) for each in found] == [(what, OK) for what in whats]
    monkeypatch.setattr(resource_estimate, "available_memory_bytes", lambda: 1000)
    faults = [each for each in examine_bundle(tiny_bundle, "auto", "") if each.status == FAULT]
    assert [each.what for each in faults] == ["build memory"]
    assert "quantize the model" in faults[0].remedy
    (nothing,) = examine_bundle(tmp_path, "auto", "")
    assert nothing.status == FAULT
    (foreign,) = examine_bundle(tiny_bundle, "onnxruntime", "8.9")
    assert (foreign.status, foreign.found) == (FAULT, "--gpu is not for ONNX Runtime")

"""What `docs/how-to/jetson.md` says that boards print, against what edgellm prints for them.

A board is NVIDIA's bindings of its TensorRT on empty libraries, a driver that names its GPU, and
its files. Numbers are those of another model, so they are not compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy_llama
import pytest
import real_bindings
from device_fakes import make_device, run_transfer
from installed import ROOT

from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

PAGE = ROOT / "docs" / "how-to" / "jetson.md"
_BLOCK = re.compile(r"<!-- printed: (.+?) -->\n```console\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d+)?")
TRANSFER = "transfer"
FLAGS = "--backend tensorrt --maxInputLen 16 --maxKVCacheCapacity 32"
ORIN_MODES = "15W", "25W", "MAXN_SUPER", "7W"


@dataclass(frozen=True, kw_only=True)
class Board:
    """What tells boards apart."""

    tensorrt: str
    numpy: str
    sm: int
    cuda: str  # of the driver
    model: str = ""
    release: str = ""
    modes: tuple[str, ...] = ("MAXN",)
    smi: str = ""  # what nvidia-smi prints
    gib: int = 64


BOARDS = {
    "Orin Nano, JetPack 6.2": Board(
        tensorrt="10.3",
        numpy="1",
        sm=87,
        cuda="12060",
        model="NVIDIA Jetson Orin Nano Developer Kit",
        release="# R36 (release), REVISION: 4.3",
        modes=ORIN_MODES,
        gib=8,
    ),
    "Orin Nano, JetPack 6.2, NumPy 2": Board(
        tensorrt="10.3",
        numpy="2",
        sm=87,
        cuda="12060",
        model="NVIDIA Jetson Orin Nano Developer Kit",
        release="# R36 (release), REVISION: 4.3",
        modes=ORIN_MODES,
        gib=8,
    ),
    "Thor, JetPack 7.0": Board(
        tensorrt="10.13",
        numpy="1",
        sm=110,
        cuda="13000",
        model="NVIDIA Jetson AGX Thor Developer Kit",
        release="# R38 (release), REVISION: 2.0",
        gib=128,
    ),
    "Thor, JetPack 7.2": Board(
        tensorrt="10.16",
        numpy="2",
        sm=110,
        cuda="13020",
        model="NVIDIA Jetson AGX Thor Developer Kit",
        release="# R39 (release), REVISION: 2.0",
        gib=128,
    ),
    "AGX Orin, JetPack 7.2": Board(
        tensorrt="10.16",
        numpy="2",
        sm=87,
        cuda="13020",
        model="NVIDIA Jetson AGX Orin Developer Kit",
        release="# R39 (release), REVISION: 2.0",
        gib=64,
    ),
    "RTX card": Board(
        tensorrt="11.4",
        numpy="2",
        sm=120,
        cuda="13000",
        smi="NVIDIA GeForce RTX 5090, 580.95.05, 32607, 15, 12.0",
        gib=32,
    ),
    "DGX Spark": Board(
        tensorrt="10.16",
        numpy="2",
        sm=121,
        cuda="13000",
        smi="NVIDIA GB10, 580.142, [N/A], [N/A], 12.1",
        gib=128,
    ),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoint = open_checkpoint(str(numpy_llama.write_llama(folder / "checkpoint")))
    export_llm(checkpoint, folder / "bundle", ExportOptions(dtype="fp16"))
    return folder / "bundle"


@pytest.fixture(scope="module")
def printed_by(tmp_path_factory) -> Callable[..., str]:
    libraries = real_bindings.make_libraries(tmp_path_factory.mktemp("libraries"))

    def ask(name: str, bundle: Path | None = None, *, init: int = 0, **packages: str) -> str:
        """What the doctor prints, and a dry run of a bundle; `init`: the driver's first status."""
        board, folder = BOARDS[name], tmp_path_factory.mktemp("board")
        write_board(board, folder)
        asked = {
            "root": str(folder),
            "programs": str(folder / "bin"),
            "bundle": bundle and str(bundle),
            "available_bytes": 200_000_000 if board.gib == 8 else board.gib << 30,
            "flags": [*FLAGS.split()],
        }
        return real_bindings.run(
            "board_child.py",
            libraries,
            asked,
            version=board.tensorrt,
            numpy=board.numpy,
            **{"cuda": board.cuda[:2], **packages},
            variables={
                "STUB_INIT": str(init),
                "STUB_SM": str(board.sm),
                "STUB_CUDA": board.cuda,
                "STUB_GIB": str(board.gib),
            },
        )

    return ask


def write_board(board: Board, folder: Path) -> None:
    """The files and programs that tell what a board is."""
    modes = "".join(f"< POWER_MODEL ID={at} NAME={each} >\n" for at, each in enumerate(board.modes))
    kilobytes = board.gib << 20
    files = {"proc/meminfo": f"MemTotal: {kilobytes} kB\nMemAvailable: {kilobytes * 9 // 10} kB\n"}
    programs = {}
    if board.release:
        files["etc/nv_tegra_release"] = board.release
        files["proc/device-tree/model"] = f"{board.model}\0"
        files["etc/nvpmodel.conf"] = modes
        programs["nvpmodel"] = f"NV Power Mode: {board.modes[0]}"
    if board.smi:
        programs["nvidia-smi"] = board.smi
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin").mkdir()
    for name, line in programs.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\necho '{line}'\n")
        program.chmod(0o755)


def _documented() -> dict[str, list[str]]:
    """Lines that the page shows, by board."""
    found: dict[str, list[str]] = {}
    for name, text in _BLOCK.findall(PAGE.read_text("utf-8")):
        lines = [line for line in text.splitlines() if not line.startswith("$ ")]
        found.setdefault(name, []).extend(lines)
    return found


def _without_numbers(text: str) -> str:
    return " ".join(_NUMBER.sub("N", text).split())


@pytest.mark.each_change("Orin Nano, JetPack 6.2", "DGX Spark")
@pytest.mark.parametrize("name", BOARDS)
def test_the_page_shows_what_is_printed(printed_by, bundle, name):
    printed = {_without_numbers(line) for line in printed_by(name, bundle).splitlines()}
    shown = _documented()[name]
    assert shown
    assert [line for line in shown if _without_numbers(line) not in printed] == []


def test_the_page_shows_what_a_transfer_prints(bundle, tmp_path):
    device, here = make_device(tmp_path)
    environment = {**os.environ, **device.environment(here)}
    words = bundle, "user@jetson:models/bundle"
    sent, checked = (
        run_transfer(*words, *more, env=environment).stdout for more in ([], ["--check"])
    )
    shown = [_without_numbers(line) for line in _documented()[TRANSFER]]
    assert shown == [_without_numbers(line) for line in (sent, checked)]


def test_every_block_is_of_a_board():
    assert {*_documented()} == {*BOARDS, TRANSFER}


@pytest.mark.parametrize(
    ("name", "packages", "expected"),
    [
        (
            "Thor, JetPack 7.2",
            {"pycuda": "2026.1"},
            (
                "ok     GPU kernels: a kernel runs; engines run through pycuda and cuda-python",
                "ok     --backend tensorrt: TensorRT 10.16.1.11; attention by edgellm's kernels",
            ),
        ),
        (
            "Thor, JetPack 7.2",
            {"cuda": ""},
            (
                "note   GPU kernels: engines can be built, but not run: cuda-python is not usable",
                "       remedy: pip install cuda-python",
            ),
        ),
        (
            "Thor, JetPack 7.2",
            {"init": 999},
            (
                "fault  driver: the NVIDIA driver fails: cuInit gives 999",
                "       remedy: add the user",
            ),
        ),
    ],
    ids=["pycuda", "no cuda-python", "a driver that fails"],
)
def test_the_doctor_runs_a_kernel(printed_by, name, packages, expected):
    """Or it names the package that is missing; the process ends without pycuda's warnings."""
    lines = printed_by(name, **packages).splitlines()
    for each in expected:
        assert any(line.startswith(each) for line in lines), lines
    assert not any("PyCUDA" in line for line in lines)

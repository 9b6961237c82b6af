"""The PTX that ships matches its sources, passes its gates, and is found or rejected."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.kernels.triton.catalog import (
    ADVANCE_STATE,
    KERNELS,
    LARGEST_SHARED_BYTES,
    TARGETS,
    attend,
    delta_rows,
    expert_downs,
    head_rows,
    keep_rows,
    variants,
)
from edgellm.scripts.ptx import Assembled, Ptx, faults

SMALLEST = keep_rows(64, "fp16")


def test_the_ptx_is_of_these_sources():
    archives = {path.name for path in prebuilt.FOLDER.iterdir()}
    assert archives == {prebuilt.archive_path(sm).name for sm in TARGETS}
    for sm in TARGETS:
        listed = prebuilt.read_manifest(sm)["kernels"]
        for variant in variants(sm):
            recipe = listed[variant.name]["recipe_sha256"]
            assert recipe == prebuilt.recipe_hash(variant, sm), "run python -m edgellm.scripts.ptx"
    assert len({prebuilt.read_manifest(sm)["triton"] for sm in TARGETS}) == 1


def test_an_archive_has_its_manifest_and_the_listed_kernels():
    for sm in TARGETS:
        listed = {f"{name}.ptx" for name in prebuilt.read_manifest(sm)["kernels"]}
        with zipfile.ZipFile(prebuilt.archive_path(sm)) as archive:
            assert set(archive.namelist()) == listed | {prebuilt.MANIFEST}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_signatures_are_those_of_the_functions(kernel):
    """The catalog reads the sources; Triton reads the same annotations."""
    language = pytest.importorskip("triton.language", reason="pip install '.[kernels]'")
    module = importlib.import_module(f"edgellm.device_runtime.kernels.triton.{kernel.module}")
    parameters = inspect.signature(getattr(module, kernel.name).fn).parameters
    annotations = {name: each.annotation for name, each in parameters.items()}
    assert kernel.signature == {
        name: "i32" if annotation is inspect.Parameter.empty else annotation
        for name, annotation in annotations.items()
        if annotation is not language.constexpr
    }


@pytest.mark.parametrize("sm", TARGETS)
def test_every_kernel_of_a_target_passes_its_gates(sm):
    listed = prebuilt.read_manifest(sm)["kernels"]
    assert set(listed) == {variant.name for variant in variants(sm)}
    for variant in variants(sm):
        found, entry = prebuilt.find(variant, sm, TARGETS[sm]), listed[variant.name]
        text, name = found.ptx, variant.name
        version = re.search(r"^\.version (\d)\.(\d)$", text, re.MULTILINE)
        assert version is not None
        assert int(version[1] + version[2]) == found.ptx_version == TARGETS[sm], name
        assert re.search(rf"^\.target sm_{sm}a?$", text, re.MULTILINE), name
        assert f".entry {found.entry}(" in text
        assert len(re.findall(rf"^\s*\.param .*{found.entry}_param_", text, re.MULTILINE)) == len(
            variant.kernel.signature
        )
        assert entry["signature"] == variant.kernel.signature
        assert found.threads == 32 * variant.warps
        assert f".reqntid {found.threads}" in text
        assert found.shared_bytes <= LARGEST_SHARED_BYTES
        ptx = Ptx(
            entry=found.entry,
            text=text,
            version=found.ptx_version,
            target=entry["target"],
            shared_bytes=found.shared_bytes,
        )
        assert faults(variant, ptx, Assembled(entry["registers"], 0)) == []
        assert entry["registers"] <= (variant.max_registers or 255), name


def test_gpus_without_their_own_ptx():
    assert prebuilt.find(SMALLEST, 121).sm == 89  # Triton's sm_120a runs on no other
    assert prebuilt.find(SMALLEST, 103).sm == 89
    said = r"no kernels were compiled for compute capability 8\.6"
    with pytest.raises(EdgeLLMError, match=said) as caught:
        prebuilt.find(SMALLEST, 86)
    assert caught.value.hint == "there are some for 8.7, 8.9, 9.0, 11.0, 12.0"


def test_a_driver_that_is_too_old():
    with pytest.raises(EdgeLLMError, match=r"11\.0 are PTX 9\.0, the NVIDIA driver takes 8\.8"):
        prebuilt.find(SMALLEST, 110, 88)


def test_a_kernel_that_was_not_compiled():
    of_fp8 = attend(64, "fp8")
    with pytest.raises(EdgeLLMError, match=r"no kernel attend-.*-codesfp8 .* 8\.7") as caught:
        prebuilt.find(of_fp8, 87)
    assert "edgellm.scripts.ptx" in caught.value.hint


@pytest.mark.parametrize("damage", ["folder", "manifest", "archive", "no kernel", "kernel"])
def test_files_that_are_damaged(tmp_path, monkeypatch, damage):
    text = json.dumps(prebuilt.read_manifest(110)) if damage != "manifest" else "{"
    prebuilt.read_manifest.cache_clear()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "ptx")
    if damage != "folder":
        (tmp_path / "ptx").mkdir()
        with zipfile.ZipFile(tmp_path / "ptx" / "sm_110.zip", "w") as archive:
            archive.writestr(prebuilt.MANIFEST, text)
            if damage == "kernel":
                archive.writestr(f"{SMALLEST.name}.ptx", ".version 9.0")
        if damage == "archive":
            (tmp_path / "ptx" / "sm_110.zip").write_bytes(b"PK")
    try:
        with pytest.raises(EdgeLLMError, match=r"cannot be read|is damaged") as caught:
            prebuilt.find(SMALLEST, 110)
    finally:
        prebuilt.read_manifest.cache_clear()
    assert "install edgellm again" in caught.value.hint


WIDE = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"


@pytest.mark.parametrize(
    ("said", "text", "shared", "spilled"),
    [
        ("8 bytes of registers are spilled", WIDE * 16, 0, 8),
        ("49153 bytes of shared memory", WIDE * 16, 49153, 0),
        ("a path is in the text", WIDE * 16 + '.file 1 "/home/a.py"\n', 0, 0),
        ("wgmma in the text", WIDE * 16 + "wgmma.mma_async;\n", 0, 0),
        ("a thread copies 240 bytes 16 at a time, not 256", WIDE * 15, 0, 0),
    ],
)
def test_the_gates_can_fail(said, text, shared, spilled):
    ptx = Ptx(entry="attend", text=text, version=85, target="sm_87", shared_bytes=shared)
    variant = attend(128, "fp16")
    assert faults(variant, ptx, Assembled(64, spilled)) == [said]
    assert (
        faults(
            variant,
            Ptx(entry="attend", text=WIDE * 16, version=85, target="sm_87", shared_bytes=0),
            Assembled(64, 0),
        )
        == []
    )


def test_states_are_read_16_bytes_at_a_time():
    load = "ld.global.v4.b32 {%r1}, [%rd1];\n"
    for variant, text, wanted in (
        (delta_rows(takes=True), WIDE, 8),
        (delta_rows(takes=False), WIDE, 6),
        (ADVANCE_STATE, load, 2),
    ):
        said = f"a thread reads {16 * wanted - 16} bytes 16 at a time, not {16 * wanted}"
        for times, expected in ((wanted - 1, [said]), (wanted, [])):
            ptx = Ptx(
                entry="delta_rows", text=text * times, version=85, target="sm_87", shared_bytes=0
            )
            assert faults(variant, ptx, Assembled(128, 0)) == expected


def test_experts_are_read_16_bytes_at_a_time():
    """Pairs of 4-bit codes 8 at a time, since widths are multiples of 16."""
    variant, pair = expert_downs("int4"), WIDE.replace("0x10", "0x8")
    for text, faulty in ((WIDE * 4 + pair * 4, False), (WIDE * 4, True), (pair * 8, True)):
        ptx = Ptx(entry="expert_downs", text=text, version=85, target="sm_87", shared_bytes=0)
        assert bool(faults(variant, ptx, Assembled(128, 0))) == faulty


def test_heads_are_read_16_bytes_at_a_time():
    """Weights of 4 bits, and the inputs of few tokens, 8 at a time; the code has a step thrice."""
    pair = WIDE.replace("0x10", "0x8")
    for codes, text in (("fp16", WIDE * 18 + pair * 3), ("int4", WIDE * 8 + pair * 12)):
        for added, faulty in ((text, False), (text + WIDE, True), (text[: -len(WIDE)], True)):
            ptx = Ptx(entry="head_rows", text=added, version=85, target="sm_87", shared_bytes=0)
            assert bool(faults(head_rows(codes), ptx, Assembled(128, 0))) == faulty


def test_a_kernel_compiles_to_the_ptx_that_ships(tmp_path):
    """In another process, since the kernels of this one are interpreted."""
    pytest.importorskip("triton", reason="kernels are compiled by triton: pip install '.[kernels]'")
    code = (
        "import hashlib\n"
        "from edgellm.device_runtime.kernels.triton.catalog import variants\n"
        "from edgellm.scripts.ptx import assemble, compile_variant\n"
        f"variant = next(v for v in variants(110) if v.name == {SMALLEST.name!r})\n"
        "ptx = compile_variant(variant, 110)\n"
        "print(hashlib.sha256(ptx.text.encode()).hexdigest(), assemble(ptx).spilled_bytes)\n"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    expected = prebuilt.read_manifest(110)["kernels"][SMALLEST.name]["sha256"]
    assert result.stdout.split() == [expected, "0"]

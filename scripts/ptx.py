"""Compile edgellm's Triton kernels to PTX, without a GPU.

python -m edgellm.scripts.ptx [--sm 110]... writes device_runtime/kernels/triton/ptx. It needs
Triton (pip install '.[kernels]'), whose wheels include the assembler that checks the PTX. Kernels
whose sources and options have not changed are taken from the archive that is there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.cli import App, run_command
from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.kernels.triton.catalog import (
    LARGEST_SHARED_BYTES,
    STEPS,
    TARGETS,
    Variant,
    variants,
)

_PACKAGE = "edgellm.device_runtime.kernels.triton"
_POINTER_BYTES = 16  # alignment
_WIDE_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10,")
_WIDE_LOAD = re.compile(r"ld\.global\.v4\.b32")
_PAIR_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x8,")
_CODE_BITS = {"fp16": 16, "int4": 4, "fp4": 4}  # of weights by address, else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ptx:
    """One kernel for one GPU."""

    entry: str
    text: str
    version: int  # 85 for 8.5
    target: str  # sm_110a
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Assembled:
    """The assembler's report on a kernel."""

    registers: int
    spilled_bytes: int


def compile_variant(variant: Variant, sm: int) -> Ptx:
    """Compile a kernel to PTX without debug lines (they contain paths) and Triton's own arguments.

    Raises:
        EdgeLLMError: Triton is missing, or set to interpret.
    """
    triton, compiler, backend = _load_triton()
    kernel = variant.kernel
    function = getattr(importlib.import_module(f"{_PACKAGE}.{kernel.module}"), kernel.name)
    names = list(function.arg_names)
    if names != [*kernel.signature, *variant.constants]:
        raise EdgeLLMError(f"the catalog lists other constants of {kernel.name} than {names}")
    kinds = {**kernel.signature, **dict.fromkeys(variant.constants, "constexpr")}
    steps = {name: _POINTER_BYTES for name, kind in kernel.signature.items() if kind[0] == "*"}
    steps |= {name: step for name, step in STEPS.items() if name in names}
    attributes = {(names.index(name),): [["tt.divisibility", step]] for name, step in steps.items()}
    constants = {(names.index(key),): value for key, value in variant.constants.items()}
    source = compiler.ASTSource(
        fn=function, signature=kinds, constexprs=constants, attrs=attributes
    )
    options = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "ptx_version": TARGETS[sm],
        "enable_fp_fusion": kernel.fuses,
        "maxnreg": variant.max_registers or None,
    }
    made = triton.compile(source, target=backend.GPUTarget("cuda", sm, 32), options=options)
    text = _strip_hidden(made.asm["ptx"], len(kernel.signature))
    text = re.sub(r"^\s*(//.*|\.(loc|file)\s.*)?\n", "", text, flags=re.MULTILINE)
    version, target = (re.search(rf"\.{name} (\S+)", text) for name in ("version", "target"))
    assert version is not None
    assert target is not None
    number = int(version[1].replace(".", ""))
    return Ptx(
        entry=made.metadata.name,
        text=text,
        version=number,
        target=target[1].rstrip(","),
        shared_bytes=made.metadata.shared,
    )


def _load_triton() -> tuple[Any, Any, Any]:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # read when a kernel is compiled
    # Tiles of 64 rows would take wgmma or tcgen05, see `faults`.
    os.environ["DISABLE_MMA_V3"] = os.environ["DISABLE_MMA_V5"] = "1"
    names = "triton", "triton.compiler", "triton.backends.compiler"
    try:
        found = tuple(importlib.import_module(name) for name in names)
    except ImportError as error:
        raise EdgeLLMError(
            f"Triton cannot be loaded: {error}",
            hint=install("kernels"),
        ) from None
    if found[0].knobs.runtime.interpret:
        raise EdgeLLMError("TRITON_INTERPRET is set", hint="unset it to compile")
    return found[0], found[1], found[2]


def _strip_hidden(ptx: str, declared: int) -> str:
    """Drop the trailing scratch pointers that only Triton's own launcher passes.

    Raises:
        EdgeLLMError: the kernel reads one of them.
    """
    head = re.search(r"(\.entry \w+\()(.*?)(\))", ptx, re.DOTALL)
    assert head is not None
    parameters = head[2].split(",\n")
    for parameter in parameters[declared:]:
        name = re.search(r"\w+_param_\d+", parameter)
        assert name is not None
        if len(re.findall(rf"{name[0]}\b", ptx)) != 1:
            raise EdgeLLMError(f"a kernel reads {name[0]}, which launchers do not pass")
    parts = ",\n".join(parameters[:declared])
    return f"{ptx[: head.start(2)]}{parts}\n{ptx[head.start(3) :]}"


def assemble(ptx: Ptx) -> Assembled:
    """Assemble PTX with the assembler of Triton's wheel; raise `EdgeLLMError` with its message."""
    triton, _, _ = _load_triton()
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "kernel.ptx")
        path.write_text(ptx.text, "ascii")
        command = [folder / "ptxas-blackwell", "-v", f"--gpu-name={ptx.target}", path]
        command += ["-o", path.with_suffix(".cubin")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise EdgeLLMError(f"the assembler rejects {ptx.entry}: {result.stderr[:300]}")
    registers = re.search(r"Used (\d+) registers", result.stderr)
    spilled = re.search(r"(\d+) bytes spill stores", result.stderr)
    assert registers is not None
    return Assembled(int(registers[1]), int(spilled[1]) if spilled else 0)


def faults(variant: Variant, ptx: Ptx, assembled: Assembled) -> list[str]:
    """Return the reasons why a kernel must not ship."""
    found = []
    if assembled.spilled_bytes:
        found.append(f"{assembled.spilled_bytes} bytes of registers are spilled")
    if ptx.shared_bytes > LARGEST_SHARED_BYTES:
        found.append(f"{ptx.shared_bytes} bytes of shared memory")
    if "/" in re.sub(r"//.*", "", ptx.text):
        found.append("a path is in the text")
    for unit in ("wgmma", "tcgen05"):  # these matrix units need other memory than mma.sync
        found += [f"{unit} in the text"] * (unit in ptx.text)
    if variant.kernel.name in ("delta_rows", "advance_state"):
        wide, wanted = 16 * len(_wide_reads(variant).findall(ptx.text)), _state_bytes(variant)
        if wide < wanted:
            found.append(f"a thread reads {wide} bytes 16 at a time, not {wanted}")
    if variant.kernel.name in ("expert_gates", "expert_downs", "head_rows"):
        counts = len(_WIDE_COPY.findall(ptx.text)), len(_PAIR_COPY.findall(ptx.text))
        if counts != (wanted := _weight_copies(variant)):
            found.append(f"a thread copies {counts} times 16 and 8 bytes, not {wanted} times")
    if variant.kernel.name in ("attend", "finish"):
        wide, wanted = 16 * len(_WIDE_COPY.findall(ptx.text)), _wide_bytes(variant)
        if wide < wanted:
            found.append(f"a thread copies {wide} bytes 16 at a time, not {wanted}")
    return found


def _wide_reads(variant: Variant) -> re.Pattern[str]:
    """Return what a step of a recurrent layer reads 16 bytes with; `delta_rows` copies ahead."""
    return _WIDE_COPY if variant.kernel.name == "delta_rows" else _WIDE_LOAD


def _state_bytes(variant: Variant) -> int:
    """Return the bytes of a recurrent state that a thread reads in a step.

    The code of `delta_rows` has a step twice, before the loop and in it, with queries, and with
    keys where products have them.
    """
    constants, threads = variant.constants, 32 * variant.warps
    keys, values, rows = (int(constants[name]) for name in ("KEYS", "VALUES", "ROWS"))
    if variant.kernel.name != "delta_rows":
        return 4 * keys * values // threads
    return 2 * 4 * keys * (values + rows * (1 + bool(constants["TAKES"]))) // threads


def _weight_copies(variant: Variant) -> tuple[int, int]:
    """Return how often a thread of a product copies 16 bytes, and 8: of pairs of codes.

    The code has a step for each stage, before the loop and in it; gates have two products, and
    heads one for few tokens, whose tokens a thread may copy 8 bytes of, and one for more.
    """
    constants = variant.constants
    bits = _CODE_BITS.get(str(constants["CODES"]), 8)
    threads, step = 32 * variant.warps, int(constants["STEP"])
    weights = int(constants["OUT"]) * step * bits // 8 // threads
    tiles = [int(constants[name]) for name in ("FEW", "ROWS") if name in constants]
    tiles *= 2 if variant.kernel.name == "expert_gates" else 1
    wide = pairs = 0
    for rows in tiles:
        given = 2 * rows * step // threads
        wide, pairs = wide + given // 16, pairs + given % 16 // 8
        wide, pairs = (wide, pairs + weights // 8) if bits == 4 else (wide + weights // 16, pairs)
    return variant.stages * wide, variant.stages * pairs


def _wide_bytes(variant: Variant) -> int:
    """Return the bytes of the KV cache that a thread of attention copies 16 at a time.

    The code has a block of slots twice, before the loop and in it. Triton 3.9 copies values of
    8-bit caches, which it converts, 8 bytes at a time.
    """
    constants = variant.constants
    slot_bytes = int(constants["D"])
    if constants["CODES"] == "fp16":
        slot_bytes = 2 * (slot_bytes + int(constants.get("OUT", slot_bytes)))
    return 2 * int(constants["BLOCK"]) * slot_bytes // (32 * variant.warps)


def write_target(sm: int, archive: Path) -> None:
    """Compile, check and pack all kernels for a GPU, and their manifest.

    Raises:
        EdgeLLMError: a kernel fails a check.
        OSError: the archive cannot be written.
    """
    triton, _, _ = _load_triton()
    entries, made = {}, _unchanged(sm, triton.__version__)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as pack:
        for variant in variants(sm):
            entry, data = made.get(variant.name) or _compiled(variant, sm)
            _pack(pack, f"{variant.name}.ptx", data)
            entries[variant.name] = entry
        manifest = {
            "triton": triton.__version__,
            "is_portable": {entry["target"] for entry in entries.values()} == {f"sm_{sm}"},
            "kernels": entries,
        }
        _pack(pack, prebuilt.MANIFEST, json.dumps(manifest, indent=1).encode("ascii"))


def _unchanged(sm: int, version: str) -> dict[str, tuple[Mapping[str, Any], bytes]]:
    """Kernels of the archive that is there that would be compiled to the same; by name."""
    path = prebuilt.archive_path(sm)
    if not path.exists():
        return {}
    manifest, found = prebuilt.read_manifest(sm), {}
    with zipfile.ZipFile(path) as archive:
        for variant in variants(sm):
            entry = manifest["kernels"].get(variant.name)
            recipe = prebuilt.recipe_hash(variant, sm)
            if entry and manifest["triton"] == version and entry["recipe_sha256"] == recipe:
                found[variant.name] = entry, archive.read(f"{variant.name}.ptx")
    return found


def _compiled(variant: Variant, sm: int) -> tuple[Mapping[str, Any], bytes]:
    """A kernel's entry and PTX; raises `EdgeLLMError` if it fails a check."""
    ptx = compile_variant(variant, sm)
    assembled = assemble(ptx)
    if found := faults(variant, ptx, assembled):
        raise EdgeLLMError(f"{variant.name} for sm_{sm}: {'; '.join(found)}")
    print(
        f"sm_{sm} {variant.name}: {assembled.registers} registers, {ptx.shared_bytes} bytes shared",
        flush=True,
    )
    data = ptx.text.encode("ascii")
    return _entry(variant, ptx, assembled, data, prebuilt.recipe_hash(variant, sm)), data


def _pack(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Add a file without a time, so equal kernels make equal archives."""
    archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)


def _entry(
    variant: Variant, ptx: Ptx, assembled: Assembled, data: bytes, recipe: str
) -> Mapping[str, Any]:
    return {
        "entry": ptx.entry,
        "signature": variant.kernel.signature,
        "grid": list(variant.kernel.grid),
        "constants": dict(variant.constants),
        "warps": variant.warps,
        "shared_bytes": ptx.shared_bytes,
        "registers": assembled.registers,
        "target": ptx.target,
        "ptx_version": ptx.version,
        "sha256": hashlib.sha256(data).hexdigest(),
        "recipe_sha256": recipe,
    }


app = App()


@app.command()
def ptx(
    sm: Annotated[
        list[int] | None, typer.Option(help="Compute capability, 110 for 11.0. Default: all.")
    ] = None,
) -> None:
    """Compile edgellm's Triton kernels to the PTX that ships with it."""
    if unknown := set(sm or ()) - set(TARGETS):
        raise EdgeLLMError(
            f"--sm {min(unknown)} is not a target", hint=f"targets: {', '.join(map(str, TARGETS))}"
        )
    prebuilt.FOLDER.mkdir(exist_ok=True)
    for each in sm or TARGETS:
        with tempfile.TemporaryDirectory(dir=prebuilt.FOLDER) as work:
            made = Path(work, prebuilt.archive_path(each).name)
            write_target(each, made)
            made.replace(prebuilt.archive_path(each))


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()

"""CUDA calls of ONNX Runtime's CUDA provider, counted without a GPU.

    pip download --no-deps onnxruntime-gpu nvidia-cuda-runtime nvidia-cuda-crt, and unpack them
    python benchmarks/gpu.py provider ENGINE --onnxruntime FOLDER --include FOLDER

The released provider runs on `cuda_stub.c`, compiled here, with host memory and kernels that
compute nothing. It shows whether every node has a kernel and whether forward passes can be
recorded. It counts launches, copies, waits and allocations of a forward pass. `--onnxruntime` is
the folder of the package `onnxruntime`, `--include` that of cuda_runtime_api.h. A C compiler and nm
are required. `--records_nothing` shows forward passes that cannot be recorded.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edgellm.core.model_spec import DecoderSpec
    from edgellm.device_runtime.networks.decoder import DecoderNetwork

COUNTS = ("launches", "products", "copies", "replays", "allocations", "waits", "refusals")
VERSIONS = {"cudart": 13, "cublas": 13, "cublasLt": 13, "curand": 10, "cuda": 1, "cudnn": 9}
_STUB = "CUDA_HOST_STUB"  # environment: where the libraries are, in the process that counts
TREE_ROWS, IMAGE_ROWS = 30, 16


def build_stub(folder: Path, provider: Path, include: Path) -> None:
    """Compile the libraries that a provider loads into a folder."""
    own = Path(__file__).with_name("cuda_stub.c")
    runtime = _compile(folder, "cudart", [own], include)
    defined = {
        line.split()[-1].partition("@")[0] for line in _run("nm", "-D", runtime).splitlines()
    }
    listed = _run("nm", "-D", "--undefined-only", provider).split()
    wanted = {name.partition("@")[0] for name in listed} - defined
    by_library: dict[str, list[str]] = {name: [] for name in VERSIONS}
    for name in sorted(name for name in wanted if name.startswith(("cu", "__cuda"))):
        by_library[_library(name)].append(name)
    by_library["cudnn"] = _looked_up(provider.read_bytes(), "cudnn")
    for library, names in by_library.items():
        source = folder / f"{library}.c"
        body = "\n".join(_definition(name) for name in names)
        source.write_text(f"#include <stddef.h>\nvoid stub_product(const char *);\n{body}\n")
        _compile(folder, library, [source, *([own] if library == "cudart" else [])], include)
    (folder / "libcudnn.so").symlink_to(_file(folder, "cudnn"))


def _library(name: str) -> str:
    prefixes = {"cublasLt": "cublasLt", "cublas": "cublas", "curand": "curand", "cuda": "cudart"}
    bare = name.lstrip("_")
    return next((to for prefix, to in prefixes.items() if bare.startswith(prefix)), "cuda")


def _looked_up(library: bytes, prefix: str) -> list[str]:
    """Return the names of functions that a library looks up at run time."""
    return sorted(
        part.decode()
        for part in {*library.split(b"\0")}
        if re.fullmatch(rf"{prefix}[A-Z]\w+".encode(), part) is not None
    )


def _file(folder: Path, library: str) -> Path:
    return folder / f"lib{library}.so.{VERSIONS[library]}"


def _compile(folder: Path, library: str, sources: Sequence[Path], include: Path) -> Path:
    made = _file(folder, library)
    versions = folder / f"{library}.map"
    versions.write_text(f"{made.name} {{ global: *; }};\n")
    runtime = [] if library == "cudart" else [_file(folder, "cudart")]
    linked = [f"-Wl,-soname,{made.name}", f"-Wl,--version-script={versions}"]
    flags = ["-w", "-shared", "-fPIC", "-I", include, "-o", made]
    _run("cc", *flags, *sources, *runtime, *linked)
    return made


def _run(*command: object) -> str:
    words = [str(each) for each in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def _definition(name: str) -> str:
    """Return a function that reports success, and counts matrix products."""
    if "GetVersion" in name:
        return f"size_t {name}(void) {{ return 91000; }}"
    if name.endswith(("String", "StatusName")):
        return f'const char *{name}(void) {{ return "a stub"; }}'
    if "Gemm" in name or "gemm" in name or name in ("cublasLtMatmul", "cudnnReduceTensor"):
        return f'int {name}(void) {{ stub_product("{name}"); return 0; }}'
    if name.startswith(("cudnnCreate", "cublasCreate")) or name.endswith("Create"):
        return f"int {name}(void **made) {{ *made = (void *)8; return 0; }}"
    if name.startswith("cudnnGetReduction"):
        return f"int {name}(void *a, void *b, void *c, void *d, size_t *s) {{ return *s = 64, 0; }}"
    if name == "cublasGetMathMode":
        return f"int {name}(void *handle, int *mode) {{ return *mode = 0; }}"
    if name.startswith("cudnnBackend"):
        return f"int {name}(void) {{ return 3000; }}"  # not supported
    return f"int {name}(void) {{ return 0; }}"


class Counter:
    """The stub's counts since the last query."""

    def __init__(self, folder: Path) -> None:
        self._stub = ctypes.CDLL(str(_file(folder, "cudart")))

    def show(self, what: str) -> None:
        counted = (ctypes.c_long * len(COUNTS))()
        self._stub.stub_counts(counted)
        self._stub.stub_reset()
        values = zip(COUNTS, counted, strict=True)
        print(f"{what:12}", ", ".join(f"{name} {value}" for name, value in values), flush=True)


def count(engine: Path, stub: Path) -> None:
    """Run forward passes of an engine in a process with the stub."""
    from edgellm.core.manifest import LLM_ENGINE, load_engine
    from edgellm.device_runtime.networks.decoder import open_decoder
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider

    provider.require_cuda = lambda: "cuda"
    counter = Counter(stub)
    manifest = load_engine(engine, LLM_ENGINE)
    session = open_decoder(engine, manifest)
    counter.show("load")
    prompt = min(session.capacity // 2, manifest.max_input_len)
    _ = session.run(np.arange(prompt) % 9, 0, np.zeros(1, np.int64)).token_ids
    counter.show("prompt")
    _ = session.run(np.array([5]), prompt, np.zeros(1, np.int64)).token_ids
    counter.show("token")
    rows = min(TREE_ROWS, manifest.max_verify_tree_size, session.capacity - prompt - 1)
    if rows > 1:
        mask, depths = np.tri(rows, dtype=np.bool_), np.arange(rows) // 5
        places = prompt + 1 + depths
        ids, outputs = np.arange(rows), np.arange(rows)
        tree = session.run(ids, prompt + 1, outputs, position_ids=places, tree_mask=mask)
        _ = tree.token_ids
        counter.show(f"tree of {rows}")
    if manifest.decoder.images is not None:
        _count_image(session, manifest.decoder, counter)
    _count_together(session, prompt, counter)


def _count_image(session: DecoderNetwork, spec: DecoderSpec, counter: Counter) -> None:
    """Run a prompt with image tokens, and one more token."""
    from edgellm.device_runtime.arrays import ImageRows

    assert spec.images is not None
    shape = IMAGE_ROWS, spec.hidden_size
    levels = np.zeros((spec.images.num_deepstack, *shape), np.float32)
    session.kv.images = ImageRows(embeds=np.zeros(shape, np.float32), deepstack=levels, keys={})
    ids = spec.vocab_size + np.arange(IMAGE_ROWS)
    _ = session.run(ids, 0, np.zeros(1, np.int64)).token_ids
    counter.show("image")
    _ = session.run(np.array([5]), IMAGE_ROWS, np.zeros(1, np.int64)).token_ids
    counter.show("token")


def _count_together(session: DecoderNetwork, prompt: int, counter: Counter) -> None:
    """Run tokens, then trees, of a full batch."""
    from edgellm.device_runtime.networks.decoder import SequencePart

    if session.max_batch_size == 1:
        return
    kvs = [session.new_kv() for _ in range(session.max_batch_size)]
    session.kv.free()
    wanted, tree = np.zeros(1, np.int64), np.arange(4)
    for kv in kvs:
        _ = session.run(np.arange(prompt) % 9, 0, wanted, kv=kv).token_ids
    tokens = [SequencePart(kv, wanted, prompt, wanted) for kv in kvs]
    trees = [
        SequencePart(kv, tree, prompt + 1, tree, prompt + 1 + tree, np.tri(4, dtype=np.bool_))
        for kv in kvs
    ]
    counter.show("prompts")
    for name, parts in (
        ("tokens", tokens),
        ("trees", trees),
        ("recording", trees),
        ("trees", trees),
    ):
        for found in session.run_batch(parts):
            _ = found.token_ids
        counter.show(f"{len(parts)} {name}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path)
    parser.add_argument("--onnxruntime", type=Path, required=True)
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--sm", type=int, default=89)
    parser.add_argument("--trace", action="store_true", help="print names of kernels to stderr")
    parser.add_argument("--records_nothing", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Run this command again with the stub's libraries, then count; return the exit status."""
    if _STUB in os.environ:
        count(arguments.engine, Path(os.environ[_STUB]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        capi = arguments.onnxruntime / "onnxruntime" / "capi"
        provider = capi / "libonnxruntime_providers_cuda.so"
        build_stub(Path(folder), provider, arguments.include)
        paths = [str(arguments.onnxruntime), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            _STUB: folder,
            "LD_LIBRARY_PATH": folder,
            "PYTHONPATH": os.pathsep.join(paths),
            "STUB_SM": str(arguments.sm),
            "STUB_TRACE": str(int(arguments.trace)),
            "STUB_RECORDS_NOTHING": str(int(arguments.records_nothing)),
        }
        command = [sys.executable, *sys.argv]
        return subprocess.run(command, env=environment, check=False).returncode

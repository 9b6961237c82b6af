"""What host and device agree on: manifests, graph names, artifact folders, errors.

Standard library only, so that every other module may import it. Symbols used in shapes:
S query rows of one pass, R rows that get logits, C KV capacity, V vocabulary, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

CONTRACT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class EdgeLLMError(Exception):
    """A failure that the user can mend: one line that says what, one that says how."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnsupportedModelError(EdgeLLMError):
    """The checkpoint is sound, but edgellm does not know how to compute it."""


class BrokenArtifactError(EdgeLLMError):
    """A checkpoint, bundle or engine on disk is damaged, incomplete or of another version."""


class LimitError(EdgeLLMError):
    """Something does not fit: memory, prompt length, KV capacity."""


class RequestError(EdgeLLMError):
    """One request is malformed; the others of the file still run."""


# ------------------------------------------------------------------ graph inputs and outputs
INPUT_IDS = "input_ids"  # int64 [1, S]
POSITION_IDS = "position_ids"  # int64 [1, S]; depth positions for tree nodes
WRITE_INDEX = "write_index"  # int64 [1]; rows already in the KV cache
TREE_MASK = "tree_mask"  # bool [S, S]; row i may see new row j
LOGITS_INDEX = "logits_index"  # int64 [R]; the rows that get logits
LOGITS = "logits"  # float32 [1, R, V]
TOKEN_IDS = "token_ids"  # int64 [1, R]; argmax of the logits


def past_name(layer: int, part: str) -> str:
    """Name of a KV-cache input, `part` is "key" or "value": [1, num_kv_heads, C, head_dim]."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Name of the KV-cache output that shares its buffer with `past_name(layer, part)`."""
    return f"present.{layer}.{part}"


# ------------------------------------------------------------------------------- manifests
@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Linear KV cache: per layer one key and one value tensor [1, num_kv_heads, C, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values of one token."""
        itemsize = {"float32": 4, "float16": 2}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The facts about a decoder that a builder or a runtime needs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_parameters: int
    kv: KVCacheSpec
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of one file of an artifact."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """What `edgellm-export` wrote: a portable ONNX graph, its weights and the tokenizer."""

    decoder: DecoderSpec
    dtype: str  # activations: "float16" or "float32"
    quantization: str  # "none" or the scheme of the linear layers
    opset: int
    eos_token_ids: tuple[int, ...]
    options: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "llm_bundle"
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True)
class PassGraph:
    """One compiled graph of an engine and the most query rows it is meant for."""

    path: str
    max_rows: int
    precision: str


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """What `llm_build` wrote: compiled graphs for one backend and one machine."""

    decoder: DecoderSpec  # `kv.dtype` is the engine's own
    backend: str
    backend_version: str
    machine: str  # what the compiled graphs depend on, e.g. the CPU's instruction sets
    max_input_len: int
    max_kv_cache_capacity: int
    graphs: tuple[PassGraph, ...]  # ascending `max_rows`
    pass_cost_ms: dict[str, float]  # query rows of one pass -> median milliseconds
    prefill_rows: int  # rows per pass at which a long prompt is fastest
    quantization: str
    eos_token_ids: tuple[int, ...]
    options: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "llm_engine"
    contract_version: int = CONTRACT_VERSION


Manifest = TypeVar("Manifest", BundleManifest, EngineManifest)


def load_manifest(folder: Path, kind: type[Manifest]) -> Manifest:
    """Read `folder/manifest.json` as a `kind`.

    Raises:
        BrokenArtifactError: no such folder or manifest, another kind of artifact, a newer
            contract, or fields that do not parse.
    """
    path = folder / MANIFEST_NAME
    maker = "edgellm-export llm" if kind is BundleManifest else "llm_build"
    if not folder.is_dir():
        raise BrokenArtifactError(f"no such folder: {folder}", hint=f"make it with {maker}")
    try:
        raw = json.loads(path.read_text("utf-8"))
        found = raw["kind"]
        version = raw["contract_version"]
    except FileNotFoundError:
        raise BrokenArtifactError(
            f"{folder} holds no {MANIFEST_NAME}", hint=f"make the folder with {maker}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error}", hint=f"make the folder again with {maker}"
        ) from None
    expected = kind.__dataclass_fields__["kind"].default
    if found != expected:
        raise BrokenArtifactError(f"{folder} is a {found}, not a {expected}")
    if version != CONTRACT_VERSION:
        raise BrokenArtifactError(
            f"{folder} has contract version {version}, this edgellm reads {CONTRACT_VERSION}",
            hint="update edgellm here" if version > CONTRACT_VERSION else f"run {maker} again",
        )
    try:
        return _parse(kind, raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error!r}", hint=f"make the folder again with {maker}"
        ) from None


def _parse(kind: Any, raw: Any) -> Any:
    """`raw` (from JSON) as the annotated type `kind`: dataclass, tuple, dict, union or scalar."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _parse(hints[name], value) for name, value in raw.items()})
    if origin is tuple:
        return tuple(_parse(args[0], item) for item in raw)
    if origin is dict:
        return {key: _parse(args[1], value) for key, value in raw.items()}
    if origin is types.UnionType:
        return None if raw is None else _parse(args[0], raw)
    if kind is float and isinstance(raw, int):
        return float(raw)
    if kind is not Any and not isinstance(raw, kind):
        raise TypeError(f"expected {kind.__name__}, found {raw!r}")
    return raw


def verify_sizes(folder: Path, files: dict[str, FileRecord]) -> None:
    """Check presence and size of every listed file; raises `BrokenArtifactError` at a fault."""
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise BrokenArtifactError(f"{path} is missing", hint="copy or make the folder again")
        size = path.stat().st_size
        if size != record.num_bytes:
            raise BrokenArtifactError(
                f"{path} has {size} bytes instead of {record.num_bytes}",
                hint="the copy was cut short or the file was changed; copy or make it again",
            )


def verify_files(folder: Path, files: dict[str, FileRecord]) -> None:
    """Check size and hash of every listed file; raises `BrokenArtifactError` at the first fault."""
    verify_sizes(folder, files)
    for name, record in files.items():
        if hash_file(folder / name).sha256 != record.sha256:
            raise BrokenArtifactError(
                f"{folder / name} was changed: its sha256 differs from {MANIFEST_NAME}",
                hint="copy or make the folder again",
            )


def hash_file(path: Path) -> FileRecord:
    """Size and sha256 of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())


# ------------------------------------------------------------------------- artifact folders
def publish(temporary: Path, output: Path, manifest: Manifest) -> Manifest:
    """Write the manifest and move a finished temporary folder to `output`.

    Files of an earlier artifact there are replaced, foreign files stay. Files that the
    manifest already lists (hashed while they were written) are not hashed again.

    Returns:
        The manifest with all files listed.

    Raises:
        EdgeLLMError: a foreign file has the name of one of ours.
    """
    names = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
    files = {name: manifest.files.get(name) or hash_file(temporary / name) for name in names}
    complete = dataclasses.replace(manifest, files=files)
    text = json.dumps(dataclasses.asdict(complete), indent=2)
    (temporary / MANIFEST_NAME).write_text(text + "\n", "utf-8")
    check_output(output, manifest.kind, names)
    old = _listed_files(output, manifest.kind)
    with _defer_interrupt():
        output.mkdir(parents=True, exist_ok=True)
        for name in [*names, MANIFEST_NAME]:
            target = output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).replace(target)
        for name in old - {*names, MANIFEST_NAME}:
            (output / name).unlink(missing_ok=True)
    return complete


@contextlib.contextmanager
def temporary_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` (same file system) that is gone when the block ends."""
    parent = output.absolute().parent
    path: Path | None = None
    try:
        with _defer_interrupt():
            path = _make_folder(parent, f".{output.name}.partial-")
        yield path
    finally:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)


def _make_folder(parent: Path, prefix: str) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise EdgeLLMError(f"cannot write into {parent}: {error.strerror}") from None
    path.chmod(0o755)
    return path


def check_output(output: Path, kind: str, names: list[str]) -> None:
    """Refuse an output folder where the files `names` would replace somebody else's.

    Raises:
        EdgeLLMError: `output` is a file, holds another kind of artifact, or has a file of one of
            these names that edgellm did not write.
    """
    if output.exists() and not output.is_dir():
        raise EdgeLLMError(f"{output} is a file", hint="give another output folder")
    ours = _listed_files(output, kind)
    for name in (MANIFEST_NAME, *names):
        if name not in ours and (output / name).exists():
            raise EdgeLLMError(
                f"{output / name} exists and is not of an earlier {kind}",
                hint="give another output folder, or move that file away",
            )


def _listed_files(folder: Path, kind: str) -> set[str]:
    """The files of an artifact of this kind that `folder` holds."""
    try:
        raw = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
        return {*raw["files"], MANIFEST_NAME} if raw["kind"] == kind else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


@contextlib.contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, so that renames are not cut in the middle."""
    pending: list[int] = []
    try:
        previous = signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    except ValueError:  # not the main thread: no handler to hold back
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt


# -------------------------------------------------------------------------------- commands
def run_command(command: Callable[[], object]) -> None:
    """Run a command line; a failure becomes one line and its remedy on stderr, exit code not 0.

    `--debug` anywhere on the command line shows the traceback instead.
    """
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        command()
    except SystemExit as stop:
        if stop.code == 130:  # how Typer reports Ctrl-C
            _fail("interrupted; nothing half-written was left", "", 130)
        raise
    except EdgeLLMError as error:
        if debug:
            raise
        _fail(str(error), error.hint, 2)
    except OSError as error:
        if debug or error.errno is None:
            raise
        hint = "free some space or give another folder" if error.errno == errno.ENOSPC else ""
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{os.strerror(error.errno)}{where}", hint, 2)
    except MemoryError:
        _fail("out of memory", "close other programs or use a smaller model", 2)
    except Exception as error:
        if debug:
            raise
        detail = str(error).splitlines()[0] if str(error) else ""
        _fail(
            f"unexpected {type(error).__name__}: {detail}", "run it with --debug and report it", 3
        )


def _fail(message: str, hint: str, code: int) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(code)

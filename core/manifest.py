"""Manifests of bundles and engines, with the facts of their networks.

An artifact is a language model (llm), a draft or a visual encoder. Its graphs have roles
(`edgellm.core.graph_roles`). Standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.graph_roles import ROLES
from edgellm.core.model_spec import (
    POOLINGS,
    AudioEncoderSpec,
    DecoderSpec,
    DraftSpec,
    KVCacheSpec,
    PageSpec,
    PoolerSpec,
    VisionSpec,
)
from edgellm.core.resources import require_regular_files
from edgellm.core.strict_json import parse

CONTRACT_VERSION = 2
ENGINE_VERSION = 3  # of engines, whose format changes more often than that of bundles
MANIFEST_NAME = "manifest.json"
_CHECKSUM = "manifest_sha256"  # key in the file: the hash of all other keys
LAYER_REPORT = ".layers.json"  # after the name of a compiled graph: what it was fused to
ENCODER_HASH = "bundle_encoder_sha256"  # in the provenance of engines; see `export.checkpoints`
THREADS = "threads"  # option of an engine: threads of a pass on the CPU
ESTIMATED = "estimated_cost"  # option of engines, see `Engine.estimated`
DRAFT_FOLDER = "draft"  # folder of a draft's engine in that of its base

DEVICES = ("cpu", "cuda")  # of libraries that have a backend for each, the default first

LLM_BUNDLE, LLM_ENGINE = "llm_bundle", "llm_engine"
DRAFT_BUNDLE, DRAFT_ENGINE = "draft_bundle", "draft_engine"
VISUAL_BUNDLE, VISUAL_ENGINE = "visual_bundle", "visual_engine"
AUDIO_BUNDLE, AUDIO_ENGINE = "audio_bundle", "audio_engine"
_ENGINES = (LLM_ENGINE, DRAFT_ENGINE, VISUAL_ENGINE, AUDIO_ENGINE)
# Flags of what an artifact was made from, with their keys in its provenance
_INPUTS = {
    LLM_BUNDLE: {"--model_dir": "checkpoint"},
    DRAFT_BUNDLE: {"--draft_model_dir": "checkpoint", "--base_model_dir": "base"},
    VISUAL_BUNDLE: {"--model_dir": "checkpoint"},
    AUDIO_BUNDLE: {"--model_dir": "checkpoint"},
    **{kind: {"--onnxDir": "bundle"} for kind in _ENGINES},
}
_MAKERS = {
    LLM_BUNDLE: "edgellm-export llm",
    DRAFT_BUNDLE: "edgellm-export draft",
    VISUAL_BUNDLE: "edgellm-export visual",
    AUDIO_BUNDLE: "edgellm-export audio",
    LLM_ENGINE: "llm_build",
    DRAFT_ENGINE: "llm_build --eagleDraft",
    VISUAL_ENGINE: "visual_build",
    AUDIO_ENGINE: "audio_build",
}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of one file of an artifact."""

    num_bytes: int
    sha256: str


EncoderSpec = VisionSpec | AudioEncoderSpec
Spec = DecoderSpec | DraftSpec | VisionSpec | AudioEncoderSpec
_SPECS: dict[str, type] = {
    LLM_BUNDLE: DecoderSpec, LLM_ENGINE: DecoderSpec, DRAFT_BUNDLE: DraftSpec,
    DRAFT_ENGINE: DraftSpec, VISUAL_BUNDLE: VisionSpec, VISUAL_ENGINE: VisionSpec,
    AUDIO_BUNDLE: AudioEncoderSpec, AUDIO_ENGINE: AudioEncoderSpec,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph."""

    path: str
    max_rows: int = 0  # maximum query tokens of a pass; 0: any
    precision: str = ""  # of an engine's linear layers


class _OfANetwork:
    """Facts of a network that bundles and engines share, by product."""

    __slots__ = ()
    kind: str
    spec: Spec
    graphs: dict[str, Any]  # by role

    @property
    def main_role(self) -> str:
        """The role of the main graph, which comes first."""
        return next(iter(self.graphs))

    @property
    def decoder(self) -> DecoderSpec:
        """The decoder of a language model or draft."""
        return self.draft.decoder if isinstance(self.spec, DraftSpec) else _as(DecoderSpec, self)

    @property
    def draft(self) -> DraftSpec:
        """Facts of a draft."""
        return _as(DraftSpec, self)

    @property
    def cache(self) -> KVCacheSpec | None:
        """KV cache of the network; None for encoders and heads."""
        if isinstance(self.spec, EncoderSpec) or not self.decoder.kv.num_layers:
            return None
        return self.decoder.kv

    def cache_of(self, role: str) -> KVCacheSpec | None:
        """KV cache of the graphs of a role; None if they have none."""
        return self.cache if ROLES[role].has_cache else None

    @property
    def vision(self) -> VisionSpec:
        """Facts of a visual encoder."""
        return _as(VisionSpec, self)

    @property
    def encoder(self) -> EncoderSpec:
        """Facts of an encoder of images or audio."""
        return self.vision if isinstance(self.spec, VisionSpec) else self.audio_encoder

    @property
    def audio_encoder(self) -> AudioEncoderSpec:
        """Facts of an audio encoder."""
        return _as(AudioEncoderSpec, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle(_OfANetwork):
    """Output of `edgellm-export`: portable ONNX graphs, weights, a model's other files."""

    kind: str
    spec: Spec
    graphs: dict[str, GraphSpec]  # by role
    dtype: str  # activations: "float16" or "float32"
    quantization: str  # "none" or the scheme of the linear layers
    opset: int
    options: dict[str, Any]
    provenance: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    hidden_taps: tuple[int, ...] = ()  # see DraftSpec; empty: no draft can be attached
    pooling: str = ""  # of `POOLINGS`: pooling of the tap to an embedding; "": none
    pooler: PoolerSpec | None = None  # what follows pooling; None: the vector gets length 1
    # Of options that a request does not give; from the model's generation_config.json
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(_OfANetwork):
    """Output of `llm_build` and `visual_build`, or `audio_build`: graphs for a machine.

    A limit is 0 where the product does not have it.
    """

    kind: str
    spec: Spec  # `kv.dtype` is the engine's own
    graphs: dict[str, tuple[GraphSpec, ...]]  # by role, each in ascending order of `max_rows`
    backend: str
    backend_version: str
    machine: str  # dependencies of the compiled graphs, e.g. the CPU's instruction sets
    quantization: str
    options: dict[str, Any]
    provenance: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    hidden_taps: tuple[int, ...] = ()
    pooling: str = ""  # see Bundle, as the next
    pooler: PoolerSpec | None = None
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # see Bundle
    max_input_len: int = 0  # tokens of a prompt
    max_kv_cache_capacity: int = 0
    max_batch_size: int = 1  # sequences of a pass; the cache holds all tokens of as many
    max_verify_tree_size: int = 0  # nodes of a token tree, root included; 0: plain decoding only
    max_draft_tree_size: int = 0  # maximum nodes drafted in one round
    min_image_tokens: int = 0  # of an image
    max_image_tokens: int = 0  # of all images of a request together
    max_image_tokens_per_image: int = 0
    max_audio_s: int = 0  # of an audio clip
    prefill_rows: int = 0  # chunk size at which a long prompt is fastest
    # By kind of pass: its rows -> milliseconds; {} if nothing was measured; see `estimated`
    cost_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    contract_version: int = ENGINE_VERSION

    @property
    def estimated(self) -> dict[str, list[int]]:
        """Rows by kind of pass whose milliseconds in `cost_ms` were extrapolated, not measured."""
        return self.options.get(ESTIMATED, {})

    @property
    def threads(self) -> int:
        """Threads of a pass on the CPU; 0: all cores.

        Raises:
            BrokenArtifactError: the manifest has another value.
        """
        found = self.options.get(THREADS, 0)
        if type(found) is not int or found < 0:
            raise BrokenArtifactError(
                f"{MANIFEST_NAME}: {THREADS} is {found!r}, not a number of threads",
                hint=f"run {self.builder} again",
            )
        return found

    @property
    def main_graphs(self) -> tuple[GraphSpec, ...]:
        """Graphs of its main role."""
        return self.graphs[self.main_role]

    @property
    def builder(self) -> str:
        """The command that made it."""
        return _MAKERS[self.kind].split()[0]

    @property
    def library(self) -> str:
        """The backend's library, as users name it."""
        return library_of(self.backend)


def is_kind(name: Any) -> bool:
    """Whether this is a kind of bundle or engine."""
    return isinstance(name, str) and name in _MAKERS


def library_of(backend: str) -> str:
    """The library of a backend, which may have one for each device, as users name it."""
    library, _, device = backend.rpartition("_")
    return library if device in DEVICES else backend


def with_kv_dtype(spec: Spec, dtype: str, pages: PageSpec | None = None) -> Spec:
    """The facts of a network with another type and pages of its cache; "" keeps them."""
    if not dtype or isinstance(spec, EncoderSpec):
        return spec
    if isinstance(spec, DraftSpec):
        return dataclasses.replace(spec, decoder=with_kv_dtype(spec.decoder, dtype, pages))
    return dataclasses.replace(spec, kv=dataclasses.replace(spec.kv, dtype=dtype, pages=pages))


_VALUES = {"dtype": ("float16", "float32"), "pooling": ("", *POOLINGS)}  # by key
_LIMIT_KEYS = ("max_", "min_", "prefill_")  # how keys of limits begin
_MAX_LIMIT = 1 << 24  # tokens or sequences
_Spec = TypeVar("_Spec", DecoderSpec, DraftSpec, VisionSpec, AudioEncoderSpec)
Manifest = TypeVar("Manifest", Bundle, Engine)


def _as(kind: type[_Spec], manifest: _OfANetwork) -> _Spec:
    if not isinstance(manifest.spec, kind):
        raise TypeError(f"a {manifest.kind} has no {kind.__name__}")
    return manifest.spec


def load_bundle(folder: Path, kind: str) -> Bundle:
    """Read the manifest of a bundle; raises as `load_manifest`."""
    return load_manifest(folder, kind, Bundle)


def load_engine(folder: Path, kind: str) -> Engine:
    """Read the manifest of an engine; raises as `load_manifest`."""
    return load_manifest(folder, kind, Engine)


def manifest_text(manifest: Bundle | Engine) -> str:
    """Content of `manifest.json`, with a checksum of itself."""
    raw = dataclasses.asdict(manifest)
    return json.dumps({**raw, _CHECKSUM: _checksum(raw)}, indent=2) + "\n"


def _checksum(raw: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def load_manifest(folder: Path, expected: str, form: type[Manifest]) -> Manifest:
    """Read `folder/manifest.json` of an artifact of the kind `expected`.

    Raises:
        BrokenArtifactError: no such folder or manifest, another kind of artifact, an older or
            newer contract, fields that do not parse, or a change after the manifest was written.
    """
    path = folder / MANIFEST_NAME
    maker = _MAKERS[expected]
    if not folder.is_dir():
        fault = f"{folder} is not a folder" if folder.exists() else f"no such folder: {folder}"
        raise BrokenArtifactError(fault, hint=f"make it with {maker}")
    require_regular_files(folder)
    try:
        raw = parse(path.read_text("utf-8"))
        found = raw["kind"]
        _ = raw["contract_version"]
    except FileNotFoundError:
        raise BrokenArtifactError(
            f"{folder} holds no {MANIFEST_NAME}", hint=f"make the folder with {maker}"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error}", hint=f"make the folder again with {maker}"
        ) from None
    if found != expected:
        raise BrokenArtifactError(
            f"{folder} is of kind {found}, not {expected}",
            hint=f"give the folder that {maker} made",
        )
    _require_version(folder, raw, ENGINE_VERSION if form is Engine else CONTRACT_VERSION)
    try:
        expected_checksum = raw.pop(_CHECKSUM, None)  # artifacts of earlier versions have none
        checksum = _checksum(raw)
        _require_known(raw)
        manifest = _parse(form, {**raw, "spec": _parse(_SPECS[expected], raw["spec"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error!r}", hint=f"make the folder again with {maker}"
        ) from None
    if expected_checksum not in (None, checksum):
        raise BrokenArtifactError(
            f"{path} was changed: its content differs from its checksum",
            hint=f"copy the folder again, or make it again with {maker}",
        )
    return manifest


def _require_version(folder: Path, raw: dict[str, Any], reads: int) -> None:
    """Raise `BrokenArtifactError` for another contract, with the version that wrote it."""
    found = raw["contract_version"]
    if found == reads:
        return
    from importlib.metadata import version  # takes a hundredth of a second

    provenance = raw.get("provenance")
    written = provenance.get("edgellm") if isinstance(provenance, dict) else None
    by = f" (edgellm {written} wrote it)" if isinstance(written, str) else ""
    own = version("edgellm")
    is_newer = isinstance(found, int) and found > reads
    newest = f" to {written} or newer" if by else ""
    raise BrokenArtifactError(
        f"{folder} has contract version {found}{by}; edgellm {own} here reads {reads}",
        hint=(f"update edgellm here{newest}, or " if is_newer else "")
        + f"make it anew, with its flags: {_remake(folder, raw)}",
    )


def _remake(folder: Path, raw: dict[str, Any]) -> str:
    """The command that makes a folder anew, from what any version's manifest says."""
    kind, provenance = raw["kind"], raw.get("provenance")
    known = provenance if isinstance(provenance, dict) else {}
    own = folder.parent if kind == DRAFT_ENGINE else folder
    output = "--engineDir" if kind in _ENGINES else "--output_dir"
    inputs = {flag: known.get(key) for flag, key in _INPUTS[kind].items()}
    words = _MAKERS[kind].split()
    for flag, path in inputs.items():
        words += [flag, path if isinstance(path, str) else flag.strip("-").upper()]
    return shlex.join([*words, output, str(own), "--overwrite"])


def _require_known(raw: dict[str, Any]) -> None:
    graphs = raw["graphs"]
    if not graphs or graphs.keys() - ROLES.keys():
        raise ValueError(f"graphs of the roles {[*graphs]}")
    for key, value in raw.items():
        if key.startswith(_LIMIT_KEYS) and not (type(value) is int and 0 <= value < _MAX_LIMIT):
            raise ValueError(f"{key} {value!r} is no limit of an engine")
    for key, known in _VALUES.items():
        if raw.get(key, known[0]) not in known:
            raise ValueError(f"{key} {raw[key]!r} is not one of {', '.join(map(repr, known))}")


def _parse(kind: Any, raw: Any) -> Any:
    """`raw` (from JSON) as the annotated type `kind`: dataclass, tuple, dict, union or scalar."""
    if dataclasses.is_dataclass(raw):
        return raw
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

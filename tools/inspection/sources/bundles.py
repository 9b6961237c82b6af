"""Reports of bundles, which edgellm-export writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgellm.core.graph_roles import COMMIT
from edgellm.core.manifest import (
    AUDIO_BUNDLE,
    DRAFT_BUNDLE,
    LLM_BUNDLE,
    VISUAL_BUNDLE,
    Bundle,
    FileRecord,
    load_bundle,
)
from edgellm.tools.inspection.report import Report
from edgellm.tools.inspection.sources.graphs import read_graph
from edgellm.tools.inspection.sources.provenance import of_bundle
from edgellm.tools.inspection.sources.specs import (
    audio_facts,
    decoder_facts,
    decoder_title,
    described,
    draft_facts,
    encoder_title,
    end_tokens,
    listed,
    request_defaults,
    vision_facts,
)

Check = Callable[[Path, dict[str, FileRecord]], None]  # raises for a damaged file
_FLOAT_BYTES = {"float16": 2, "float32": 4}


def inspect_bundle(folder: Path, check: Check) -> Report:
    """Return the report of a decoder's bundle."""
    manifest = load_bundle(folder, LLM_BUNDLE)
    check(folder, manifest.files)
    spec = manifest.decoder
    return Report(
        path=str(folder),
        kind=manifest.kind,
        title=f"ONNX bundle: {decoder_title(spec)}, {_stored(manifest)}",
        facts={
            **decoder_facts(spec),
            **_graph_facts(manifest),
            "end tokens": end_tokens(manifest.eos_token_ids),
            "defaults of requests": request_defaults(manifest.generation_defaults),
            "hidden taps": listed(manifest.hidden_taps),
            "embeds texts by": manifest.pooling,
        },
        description=described(manifest),
        graphs=tuple(
            read_graph(folder / graph.path, _FLOAT_BYTES[manifest.dtype])
            for role, graph in manifest.graphs.items()
            if role != COMMIT  # reads no weights
        ),
        origins=of_bundle(manifest.provenance),
        loads_as=_computed_in(manifest.dtype),
        files=manifest.files,
        kv=spec.kv,
        capacity=spec.max_positions,
        is_decoder=True,
    )


def inspect_draft_bundle(folder: Path, check: Check) -> Report:
    """Return the report of a draft's bundle."""
    manifest = load_bundle(folder, DRAFT_BUNDLE)
    check(folder, manifest.files)
    spec, size = manifest.draft, _FLOAT_BYTES[manifest.dtype]
    return Report(
        path=str(folder),
        kind=manifest.kind,
        title=f"ONNX bundle of a draft: {decoder_title(spec.decoder)}, {_stored(manifest)}",
        facts={**draft_facts(spec), **_graph_facts(manifest)},
        description=described(manifest),
        graphs=tuple(read_graph(folder / one.path, size) for one in manifest.graphs.values()),
        origins=of_bundle(manifest.provenance),
        loads_as=_computed_in(manifest.dtype),
        files=manifest.files,
        kv=spec.decoder.kv,
        capacity=spec.decoder.max_positions,
    )


def inspect_visual_bundle(folder: Path, check: Check) -> Report:
    """Return the report of a visual encoder's bundle."""
    manifest = load_bundle(folder, VISUAL_BUNDLE)
    return _encoder_report(folder, manifest, vision_facts(manifest.vision), check)


def inspect_audio_bundle(folder: Path, check: Check) -> Report:
    """Return the report of an audio encoder's bundle."""
    manifest = load_bundle(folder, AUDIO_BUNDLE)
    return _encoder_report(folder, manifest, audio_facts(manifest.audio_encoder), check)


def _encoder_report(folder: Path, manifest: Bundle, facts: dict[str, str], check: Check) -> Report:
    article = "a visual" if manifest.kind == VISUAL_BUNDLE else "an audio"
    check(folder, manifest.files)
    graph = read_graph(folder / _main(manifest), _FLOAT_BYTES[manifest.dtype], is_encoder=True)
    return Report(
        path=str(folder),
        kind=manifest.kind,
        title=f"ONNX bundle of {article} encoder: {encoder_title(manifest.encoder)}, "
        f"{_stored(manifest)}",
        facts={**facts, **_graph_facts(manifest)},
        description=described(manifest),
        graphs=(graph,),
        origins=of_bundle(manifest.provenance),
        loads_as=_computed_in(manifest.dtype),
        files=manifest.files,
    )


def _main(manifest: Bundle) -> str:
    return next(iter(manifest.graphs.values())).path


def _stored(manifest: Bundle) -> str:
    return f"{manifest.dtype}, quantization {manifest.quantization}"


def _graph_facts(manifest: Bundle) -> dict[str, str]:
    return {
        "activations": manifest.dtype,
        "quantization": manifest.quantization,
        "opset": str(manifest.opset),
    }


def _computed_in(dtype: str) -> str:
    return f"floats in {_FLOAT_BYTES[dtype]} bytes, as in the graph's compute; the rest as stored"

"""Reports of engines: files and measurements."""

from __future__ import annotations

from pathlib import Path

from edgellm.core.graph_roles import measured_name
from edgellm.core.manifest import (
    AUDIO_ENGINE,
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_ENGINE,
    MANIFEST_NAME,
    VISUAL_ENGINE,
    Engine,
    load_engine,
)
from edgellm.core.model_spec import KVCacheSpec
from edgellm.tools.inspection.report import Costs, Graph, Report
from edgellm.tools.inspection.sources.bundles import Check
from edgellm.tools.inspection.sources.graphs import read_graph
from edgellm.tools.inspection.sources.provenance import of_engine
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
from edgellm.tools.inspection.sources.trt_layers import fusions_of

NO_TREES = "none: not an EAGLE base"
_AS_STORED = "as stored, without ONNX Runtime's packed copies, which replace them"


def inspect_engine(folder: Path, check: Check) -> Report:
    """Return the report of a decoder's engine and of its draft."""
    manifest = load_engine(folder, LLM_ENGINE)
    check(folder, manifest.files)
    spec, draft = manifest.decoder, None
    if (folder / DRAFT_FOLDER / MANIFEST_NAME).exists():
        draft = inspect_draft_engine(folder / DRAFT_FOLDER, check)
    return Report(
        path=str(folder),
        kind=manifest.kind,
        title=f"engine: {decoder_title(spec)}, {_precisions(manifest)}"
        + (", with a draft" if draft is not None else ""),
        facts={
            **decoder_facts(spec),
            **_build_facts(manifest),
            "longest prompt": f"{manifest.max_input_len} tokens",
            "KV cache": _cache_fact(manifest, spec.kv),
            "kernels": str(manifest.options.get("kernels", "")),
            "prompts in passes of": f"{manifest.prefill_rows} tokens",
            "end tokens": end_tokens(manifest.eos_token_ids),
            "defaults of requests": request_defaults(manifest.generation_defaults),
            "hidden taps": listed(manifest.hidden_taps),
            "embeds texts by": manifest.pooling,
            "largest verified tree": _nodes(manifest.max_verify_tree_size),
        },
        description=described(manifest),
        graphs=_graphs(folder, manifest),
        origins=of_engine(manifest.provenance),
        loads_as=_AS_STORED,
        files=manifest.files,
        kv=spec.kv,
        capacity=manifest.max_kv_cache_capacity,
        num_sequences=manifest.max_batch_size,
        is_decoder=True,
        costs=_costs(manifest),
        fusions=fusions_of(folder, manifest),
        draft=draft,
    )


def inspect_draft_engine(folder: Path, check: Check) -> Report:
    """Return the report of a draft's engine."""
    manifest = load_engine(folder, DRAFT_ENGINE)
    check(folder, manifest.files)
    spec = manifest.draft
    return Report(
        path=str(folder),
        kind=manifest.kind,
        title=f"draft engine: {decoder_title(spec.decoder)}, {_precisions(manifest)}",
        facts={
            **draft_facts(spec),
            **_build_facts(manifest),
            **(_tree_facts(manifest) if manifest.cache is not None else {}),
        },
        description=described(manifest),
        graphs=_graphs(folder, manifest),
        origins=of_engine(manifest.provenance),
        loads_as=_AS_STORED,
        files=manifest.files,
        kv=spec.decoder.kv,
        capacity=manifest.max_kv_cache_capacity,
        num_sequences=manifest.max_batch_size,
        costs=_costs(manifest),
        fusions=fusions_of(folder, manifest),
    )


def _cache_fact(manifest: Engine, kv: KVCacheSpec) -> str:
    """Size and dtype of the KV cache of a base or a draft."""
    fact = f"{manifest.max_kv_cache_capacity} tokens, {kv.dtype}"
    if kv.pages is None or not kv.pages.pass_rows:
        return fact
    windows = ", ".join(str(window) for window in sorted({*kv.pages.windows} - {0}))
    return f"{fact}; sliding-window layers ({windows}) store little more than their window"


def _tree_facts(manifest: Engine) -> dict[str, str]:
    return {
        "KV cache": _cache_fact(manifest, manifest.draft.decoder.kv),
        "largest drafted tree": _nodes(manifest.max_draft_tree_size),
    }


def inspect_visual_engine(folder: Path, check: Check) -> Report:
    """Return the report of a visual encoder's engine."""
    manifest = load_engine(folder, VISUAL_ENGINE)
    check(folder, manifest.files)
    limits = {
        "tokens of an image": f"{manifest.min_image_tokens} to "
        f"{manifest.max_image_tokens_per_image}",
        "of a request's images": f"{manifest.max_image_tokens} at most",
    }
    return _encoder_report(folder, manifest, vision_facts(manifest.vision), limits)


def inspect_audio_engine(folder: Path, check: Check) -> Report:
    """Return the report of an audio encoder's engine."""
    manifest = load_engine(folder, AUDIO_ENGINE)
    check(folder, manifest.files)
    limits = {"longest clip": f"{manifest.max_audio_s} s"}
    return _encoder_report(folder, manifest, audio_facts(manifest.audio_encoder), limits)


def _encoder_report(
    folder: Path, manifest: Engine, facts: dict[str, str], limits: dict[str, str]
) -> Report:
    (graph,), kind = manifest.main_graphs, manifest.kind.partition("_")[0]
    return Report(
        path=str(folder),
        kind=manifest.kind,
        title=f"{kind} engine: {encoder_title(manifest.encoder)}, {graph.precision}",
        facts={**facts, **_build_facts(manifest), **limits},
        description=described(manifest),
        graphs=(read_graph(folder / graph.path, is_encoder=True),),
        origins=of_engine(manifest.provenance),
        loads_as=_AS_STORED,
        files=manifest.files,
        fusions=fusions_of(folder, manifest),
    )


def _graphs(folder: Path, manifest: Engine) -> tuple[Graph, ...]:
    """Read one graph per file; all kinds of passes of a compiled plan share a file."""
    paths = dict.fromkeys(one.path for graphs in manifest.graphs.values() for one in graphs)
    return tuple(read_graph(folder / path) for path in paths)


def _costs(manifest: Engine) -> tuple[Costs, ...]:
    """Return the measured costs; engines compiled ahead of time have none."""
    return tuple(
        Costs(
            measured_name(kind),
            {int(rows): ms for rows, ms in times.items()},
            tuple(manifest.estimated.get(kind, ())),
        )
        for kind, times in manifest.cost_ms.items()
    )


def _build_facts(manifest: Engine) -> dict[str, str]:
    return {
        "backend": f"{manifest.library} {manifest.backend_version}",
        "machine": manifest.machine,
        "quantization": manifest.quantization,
        "options": ", ".join(f"{key} {value}" for key, value in manifest.options.items()),
    }


def _precisions(manifest: Engine) -> str:
    parts = [f"{graph.precision} up to {graph.max_rows} tokens" for graph in manifest.main_graphs]
    return f"{manifest.library}, {', '.join(parts)}"


def _nodes(size: int) -> str:
    return f"{size} nodes" if size else NO_TREES

"""Makes the engine of a model for this machine: download, export, build, store."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from edgellm.core.artifact import temporary_folder
from edgellm.core.commands.extras import remedy
from edgellm.core.commands.progress import share_of, shown
from edgellm.core.errors import BrokenArtifactError, EdgeLLMError, LimitError
from edgellm.core.manifest import DRAFT_FOLDER, LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.tools.store import hub
from edgellm.tools.store.model_source import BUNDLE, ENGINE, Source, read_source
from edgellm.tools.store.store import Entry, Recipe, Record, Store, key_of, size_of

if TYPE_CHECKING:
    from edgellm.build.plan import Plan
    from edgellm.core.manifest import Bundle
    from edgellm.export.checkpoints.checkpoint import Checkpoint

_DEVICE_ONLY = "export it on a host, copy the bundle here, and give the bundle's folder"
# Drafts that their authors trained for a model of the hub.
_TRAINED = {
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
}
_STORE_ELSEWHERE = "name a folder on another disk in EDGELLM_HOME"
_REMEDIES = {  # by those of llm_build
    "give an --engineDir on another disk": _STORE_ELSEWHERE,
    "give a folder on another disk": _STORE_ELSEWHERE,
    "quantize the model": "give --fast",
    "--maxKVCacheCapacity or --maxBatchSize": "--context",
    "--maxKVCacheCapacity": "--context",
}
_AUDIO_S = 120  # the longest audio clip
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Engines that are ready to run."""

    name: str
    engine: Path
    visual: Path | None = None
    audio: Path | None = None
    entry: Entry | None = None  # None: the user gave an engine's folder


def use(
    model: str, recipe: Recipe, action: Callable[[Prepared], _Result], *, store: Store | None = None
) -> _Result:
    """Run an action on a model's engine, which is made if the store lacks it.

    An engine that this edgellm or this machine cannot run any more is made again.

    Raises:
        EdgeLLMError: of `prepare` or the action.
    """
    found = prepare(model, recipe, store=store)
    try:
        return action(found)
    except BrokenArtifactError as error:
        if found.entry is None or str(found.entry.folder) not in str(error):
            raise
        typer.echo(f"note: {error}", err=True)
        return action(prepare(model, recipe, store=store, again=True))


def prepare(
    model: str,
    recipe: Recipe,
    *,
    store: Store | None = None,
    again: bool = False,
    update: bool = False,
) -> Prepared:
    """The engine of a model, made if the store has none that fits.

    Args:
        model: a path, a hub id or a name of the store.
        recipe: how it must be made.
        store: by default the user's.
        again: make it even if the store has one.
        update: ask the hub for a newer version.

    Raises:
        EdgeLLMError: no such model, no access, an unsupported one, or it does not fit here.
    """
    store = store or Store()
    source = read_source(model)
    if source is not None and source.kind == ENGINE:
        assert source.path is not None
        load_engine(source.path, LLM_ENGINE)
        return Prepared(name=source.name, engine=source.path)
    if not (again or update) and (entry := _stored(store, model, source, recipe)):
        entry.touch()
        return _ready(entry)
    source = source or _source_of(store, model)
    name = source.name

    def wait() -> None:
        typer.echo(f"waiting for another edgellm, which prepares {name}", err=True)

    if store.read_only is not None:
        typer.echo(
            f"note: {store.read_only} cannot be written, so engines go to {store.models}; "
            "EDGELLM_HOME names another folder",
            err=True,
        )
    with store.preparing(source.reference, wait):
        if not (again or update) and (entry := _stored(store, model, source, recipe)):
            return _ready(entry)
        return _ready(_make(store, source, recipe, again=again))


def _ready(entry: Entry) -> Prepared:
    return Prepared(
        name=entry.record.name,
        engine=entry.engine,
        visual=entry.visual,
        audio=entry.audio,
        entry=entry,
    )


def _stored(store: Store, model: str, source: Source | None, recipe: Recipe) -> Entry | None:
    """The entry used last that fits."""
    if source is None or source.path is None:
        entries = store.named(model)
    else:
        fingerprint = source.fingerprint()
        entries = [each for each in store.entries() if each.record.fingerprint == fingerprint]
    return next((each for each in entries if recipe.fits(each.record.recipe)), None)


def _source_of(store: Store, model: str) -> Source:
    """The source of a stored name, to make it in another way."""
    if entries := store.named(model):
        record = entries[0].record
        found = read_source(record.reference)
        if found is not None:
            return dataclasses.replace(found, name=record.name)
    close = store.similar(model)
    raise EdgeLLMError(
        f"no such folder, file or stored model: {model}",
        hint=(f"did you mean {close}? " if close else "")
        + "Give a folder, a .gguf file, a hub id (owner/model), or a name of edgellm list",
    )


def _make(store: Store, source: Source, recipe: Recipe, *, again: bool) -> Entry:
    """Download, export and build; an engine of the same content and recipe is taken as it is."""
    if source.path is None:
        found = hub.download(source.reference)
        path, identity = found.path, found.identity
    else:
        typer.echo(f"reading {source.path}", err=True)
        path, identity = source.path, source.identity()
    known = [each for each in store.entries() if each.record.identity == identity]
    fitting = next((each for each in known if recipe.fits(each.record.recipe)), None)
    if fitting is not None and not again:
        fitting.touch()
        return fitting
    target = store.models / key_of(identity, recipe)
    try:
        with temporary_folder(target) as work:
            entry = store.add(work, _build(source, path, identity, recipe, work))
    except LimitError as error:
        raise LimitError(str(error), hint=_own_remedy(error.hint)) from None
    _remove_outdated(store, entry)
    record = entry.record
    typer.echo(
        f"{record.name}: {record.family}, {record.num_parameters / 1e6:.1f} M parameters, "
        f"{record.precision}, context of {record.recipe.context} tokens, drafts by {record.draft}, "
        f"{record.num_bytes / 1e6:.1f} MB in {entry.folder}",
        err=True,
    )
    return entry


def _own_remedy(hint: str) -> str:
    """A hint of llm_build with the flags and variables of `edgellm run`."""
    for theirs, own in _REMEDIES.items():
        hint = hint.replace(theirs, own)
    return hint


def _remove_outdated(store: Store, newest: Entry) -> None:
    """Delete engines of earlier contents of the same source."""
    for entry in store.entries():
        record = entry.record
        same = record.reference == newest.record.reference
        can_go = entry.folder.parent != store.read_only
        if same and can_go and record.identity != newest.record.identity:
            typer.echo(f"deleting the engine of an earlier {record.name}: {entry.folder}", err=True)
            store.remove(entry)


# ------------------------------------------------------------------------- export and build
def _build(source: Source, path: Path, identity: str, recipe: Recipe, work: Path) -> Record:
    """Make the engines in a folder; bundles are deleted once their engines are built."""
    from edgellm.build import backends
    from edgellm.tools.store.engine_plan import choose_plan, draft_plan, require_positions

    bundles = work / "bundles"
    bundle, draft = path, ""
    checkpoint = None
    if source.kind != BUNDLE:
        checkpoint = _open(path)
        text = checkpoint.config.get("text_config")  # of a model that sees
        config = text if isinstance(text, dict) else checkpoint.config
        if isinstance(longest := config.get("max_position_embeddings"), int):
            require_positions(recipe.context, longest)  # before the export, which takes minutes
        bundle, draft = _export(source, checkpoint, recipe, bundles)
    manifest = load_bundle(bundle, LLM_BUNDLE)
    backend, plan = choose_plan(bundle, manifest, recipe, work / "engine")
    _run_build("llm", bundle, work / "engine", plan, backend)
    if draft:
        _run_build("draft", bundles / "draft", work / "engine", draft_plan(plan), backend)
    if checkpoint is not None:
        _build_encoder(checkpoint, bundles, work, plan.threads, backend)
        _build_audio_encoder(checkpoint, bundles, work, plan.threads, backend)
    shutil.rmtree(bundles, ignore_errors=True)
    made = dataclasses.replace(
        recipe,
        quantize=plan.quantize,
        context=plan.kv_capacity,
        device=backends.find(backend).DEVICE,
        draft=recipe.draft if manifest.decoder.audio is None else "",
    )
    return Record(
        name=source.name,
        reference=source.reference,
        identity=identity,
        fingerprint=source.fingerprint(),
        recipe=made,
        family=manifest.decoder.model_type,
        num_parameters=manifest.decoder.num_parameters,
        precision=_precision(manifest, plan),
        draft=_drafter(work / "engine", draft, plan),
        num_bytes=size_of(work),
    )


def _open(path: Path) -> Checkpoint:
    try:
        from edgellm.export.pipeline.open_checkpoint import open_checkpoint
    except ModuleNotFoundError as error:
        raise EdgeLLMError(
            f"{error.name} is not installed, so checkpoints cannot be exported here",
            hint=f"{remedy(error.name or '')}; or {_DEVICE_ONLY}",
        ) from None
    return open_checkpoint(str(path))


def _export(
    source: Source, checkpoint: Checkpoint, recipe: Recipe, bundles: Path
) -> tuple[Path, str]:
    """Export the model, and its draft if one is found: the bundle, and the draft's title or ""."""
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.draft import DraftOptions, export_draft
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.open_checkpoint import open_draft

    bundle = bundles / "base"
    bundles.mkdir()
    draft = _find_draft(source, checkpoint, recipe.draft)
    options = ExportOptions(draft_model_dir=draft or None)
    with shown() as report:

        def progress(done: int, total: int) -> None:
            report(share_of("exporting", done, total))

        export_llm(checkpoint, bundle, options, progress)
        if draft:
            opened = open_draft(draft)
            export_draft(opened, checkpoint, bundles / "draft", DraftOptions(), progress)
    return bundle, draft


def _find_draft(source: Source, checkpoint: Checkpoint, wanted: str) -> str:
    """The path of a trained draft; "" for none."""
    from edgellm.export import speech
    from edgellm.export.draft_checkpoints.kinds import own_names

    if wanted == "none" or speech.find(str(checkpoint.config.get("model_type"))) is not None:
        return ""
    if wanted != "auto":
        path = Path(wanted).expanduser()
        return wanted if path.exists() or not hub.is_id(wanted) else str(hub.download(wanted).path)
    if own_names(checkpoint.tensors.infos()):
        return checkpoint.label  # its own layers for drafting, such as mtp.*
    trained = _TRAINED.get(source.reference)
    if trained is None:
        return ""
    try:
        return str(hub.download(trained).path)
    except EdgeLLMError as error:
        typer.echo(f"note: without the draft {trained}: {error}", err=True)
        return ""


def _run_build(product: str, bundle: Path, engine: Path, plan: Plan, backend: str) -> None:
    from edgellm.build.engine import build_engine

    with shown() as report:
        built = build_engine(product, bundle, engine, plan, backend, report)
    for note in built.options.get("notes", ()):
        typer.echo(f"note: {note}", err=True)


def _build_encoder(
    checkpoint: Checkpoint, bundles: Path, work: Path, threads: int, backend: str
) -> None:
    """Export and build the visual encoder of a model that sees; an unsupported one is noted."""
    from edgellm.build.backends import options_of
    from edgellm.build.plan import image_plan
    from edgellm.core.errors import UnsupportedModelError
    from edgellm.export.pipeline.visual import VisualOptions, export_visual

    if not checkpoint.config.get("vision_config"):
        return
    try:
        manifest = export_visual(checkpoint, bundles / "visual", VisualOptions())
    except UnsupportedModelError as error:
        typer.echo(f"note: the model reads text only here: {error}", err=True)
        return
    per_image = max(512, manifest.vision.tokens_per_tile)
    plan = image_plan(4, max(1024, per_image), per_image, threads, options=options_of(backend, {}))
    _run_build("visual", bundles / "visual", work / "visual", plan, backend)


def _build_audio_encoder(
    checkpoint: Checkpoint, bundles: Path, work: Path, threads: int, backend: str
) -> None:
    """Export and build the audio encoder of a chat model; an unsupported one is noted."""
    from edgellm.build.backends import options_of
    from edgellm.build.plan import audio_plan
    from edgellm.core.errors import UnsupportedModelError
    from edgellm.export.pipeline.audio import export_audio
    from edgellm.export.pipeline.encoder import EncoderOptions

    if not checkpoint.config.get("audio_config"):
        return
    try:
        export_audio(checkpoint, bundles / "audio", EncoderOptions())
    except UnsupportedModelError as error:
        typer.echo(f"note: the model takes no audio here: {error}", err=True)
        return
    plan = audio_plan(_AUDIO_S, threads, options=options_of(backend, {}))
    _run_build("audio", bundles / "audio", work / "audio", plan, backend)


def _precision(manifest: Bundle, plan: Plan) -> str:
    if plan.quantize not in ("none", "auto"):
        return plan.quantize
    return manifest.quantization if manifest.quantization != "none" else manifest.dtype


def _drafter(engine: Path, draft: str, plan: Plan) -> str:
    """How the engine drafts, for users."""
    if not plan.max_verify_tree_size:
        return "nothing"
    if draft:
        from edgellm.core.manifest import DRAFT_ENGINE

        return load_engine(engine / DRAFT_FOLDER, DRAFT_ENGINE).draft.method
    return "n-grams"

"""Tests of the command `llm_build` for EAGLE bases and drafts."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from conftest import assert_one_line_error
from eagle_engines import EAGLE1, draft_plan, export_pair
from manifests import read_manifest, write_manifest

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.graph_variants import resolve_auto
from edgellm.build.onnxruntime_cpu.options import CpuOptions, kernels_of
from edgellm.build.plan import Plan
from edgellm.core.artifact import verify_files
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import (
    DRAFT_BUNDLE,
    DRAFT_ENGINE,
    LLM_BUNDLE,
    LLM_ENGINE,
    load_bundle,
    load_engine,
)
from edgellm.device_runtime.runners.onnxruntime_cpu import EDGELLM
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8

SIZES = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64)
TREES = ("--maxVerifyTreeSize", 12, "--maxDraftTreeSize", 20)


def _build(command, bundle, engine, *more):
    return command("llm_build", "--onnxDir", bundle, "--engineDir", engine, *SIZES, *more)


def test_a_draft_needs_the_engine_of_its_base(command_here, eagle_pair, tmp_path):
    engine = tmp_path / "engine"
    result = _build(command_here, eagle_pair.draft_bundle, engine, "--eagleDraft")
    assert_one_line_error(result, "has no base engine for this draft", "build the base first")
    assert not engine.exists()
    assert _build(command_here, eagle_pair.bundle, engine).returncode == 0
    result = _build(command_here, eagle_pair.draft_bundle, engine, "--eagleDraft")
    assert_one_line_error(result, "was built without --eagleBase", "--eagleBase --overwrite")
    assert not (engine / "draft").exists()


@pytest.mark.each_change("spec")
@pytest.mark.parametrize("spelling", ["eagle", "spec"])
def test_base_and_draft_are_built_into_one_folder(command_here, eagle_pair, tmp_path, spelling):
    engine = tmp_path / "engine"
    for bundle, part in ((eagle_pair.bundle, "Base"), (eagle_pair.draft_bundle, "Draft")):
        result = _build(command_here, bundle, engine, f"--{spelling}{part}", *TREES)
        assert result.returncode == 0, result.stderr
    assert str(engine) in result.stdout
    base = load_engine(engine, LLM_ENGINE)
    draft = load_engine(engine / "draft", DRAFT_ENGINE)
    verify_files(engine, base.files)
    verify_files(engine / "draft", draft.files)
    assert (base.max_verify_tree_size, base.hidden_taps) == (12, (2, 4, 5))
    assert (draft.max_draft_tree_size, draft.max_kv_cache_capacity) == (20, 64)
    measured = (base.cost_ms["pass"], draft.cost_ms["step"], draft.cost_ms["extend"])
    assert len({*map(frozenset, measured)}) == 1
    assert base.cost_ms["host"]["1"] > 0
    assert draft.draft.decoder.kv.dtype == "float32"
    assert [graph.path for graph in draft.graphs["fuse"]] == ["fuse.onnx"]
    rebuild = (eagle_pair.bundle, engine, "--eagleBase", *TREES, "--overwrite")
    result = _build(command_here, *rebuild)
    assert result.returncode == 0, result.stderr
    verify_files(engine / "draft", load_engine(engine / "draft", DRAFT_ENGINE).files)
    manifest = engine / "draft" / "manifest.json"  # an older edgellm's is built again after this
    text = manifest.read_text().replace('"contract_version": 3', '"contract_version": 1')
    manifest.write_text(text)
    result = _build(command_here, *rebuild)
    assert (result.returncode, manifest.read_text()) == (0, text), result.stderr


@pytest.mark.parametrize(
    ("flags", "precision"),
    [(("--quantize", "none"), "fp32"), (("--quantize", "int8"), "int8")],
)
def test_quantize_sets_the_precision_of_base_and_draft(
    command_here, eagle_pair, tmp_path, flags, precision
):
    engine = tmp_path / "engine"
    result = _build(command_here, eagle_pair.bundle, engine, "--eagleBase", *TREES, *flags)
    assert result.returncode == 0, result.stderr
    assert load_engine(engine, LLM_ENGINE).main_graphs[0].precision == precision
    result = _build(command_here, eagle_pair.draft_bundle, engine, "--eagleDraft", *flags)
    assert result.returncode == 0, result.stderr
    draft = load_engine(engine / "draft", DRAFT_ENGINE)
    assert [graph.precision for graph in draft.main_graphs] == [precision]


def test_small_drafts_are_int4_on_one_thread(eagle_pair, tmp_path):
    """As "auto" resolves, with edgellm's kernels on a processor with int8 dot products."""
    plan = dataclasses.replace(draft_plan("auto"), threads=2)
    if kernels_of(plan) != EDGELLM:
        pytest.skip("no compiler for the kernels")
    engine = tmp_path / "engine"
    built = build_engine("draft", eagle_pair.draft_bundle, engine, plan, "onnxruntime", str)
    expected = "int4" if has_fast_int8() else "fp32"
    assert {graphs[0].precision for graphs in built.graphs.values()} == {expected}
    assert (built.options["threads"], built.options["quantize"]) == (1, "auto")
    foreign = CpuOptions(kernels="onnxruntime")
    source, bundle = eagle_pair.draft_bundle, load_bundle(eagle_pair.draft_bundle, DRAFT_BUNDLE)
    for other in (dataclasses.replace(plan, options=foreign), dataclasses.replace(plan, threads=1)):
        assert resolve_auto(source, bundle, other).threads == other.threads
    kept = dataclasses.replace(plan, quantize="int8")
    assert resolve_auto(source, bundle, kept).quantize == "int8"


@pytest.mark.parametrize(
    ("which", "flags", "messages"),
    [
        ("base", ("--eagleBase", "--eagleDraft"), ("are two builds", "once for each")),
        ("base", ("--eagleDraft",), ("is of kind llm_bundle, not draft_bundle",)),
        ("draft", ("--eagleBase",), ("is of kind draft_bundle, not llm_bundle",)),
        ("draft", (), ("is of kind draft_bundle, not llm_bundle",)),
        ("base", ("--eagleBase", "--quantize", "nonsense"), ("give auto, none, int8 or int4",)),
        ("base", ("--eagleBase", "--maxVerifyTreeSize", 64), ("--maxVerifyTreeSize 64 does not",)),
        ("draft", ("--eagleDraft", "--maxDraftTreeSize", 64), ("--maxDraftTreeSize 64 does not",)),
        ("base", ("--eagleDraft", "--dry-run"), ("is of kind llm_bundle, not draft_bundle",)),
    ],
    ids=str,
)
def test_invalid_combinations_of_flags_and_bundles_are_rejected(
    command_here, eagle_pair, tmp_path, which, flags, messages
):
    bundle = eagle_pair.bundle if which == "base" else eagle_pair.draft_bundle
    result = _build(command_here, bundle, tmp_path / "engine", *flags)
    assert_one_line_error(result, *messages)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("flag", ["--maxVerifyTreeSize", "--maxDraftTreeSize"])
def test_empty_trees_are_usage_errors(command_here, eagle_pair, tmp_path, flag):
    result = _build(command_here, eagle_pair.bundle, tmp_path / "engine", "--eagleBase", flag, 0)
    assert result.returncode == 2
    assert flag.removeprefix("--") in result.stderr


def test_a_bundle_without_taps_is_rejected_as_a_base(command_here, tiny_bundle, tmp_path):
    result = _build(command_here, tiny_bundle, tmp_path / "engine", "--eagleBase")
    assert_one_line_error(result, "has no hidden taps for a draft", "--is_eagle_base")


def test_a_dry_run_predicts_a_draft(command_here, eagle_pair, tmp_path):
    flags = ("--eagleDraft", "--quantize", "none")
    result = _build(command_here, eagle_pair.draft_bundle, tmp_path / "engine", *flags, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "engine").exists()
    megabytes = float(result.stdout.splitlines()[1].split()[1])
    _build(command_here, eagle_pair.bundle, tmp_path / "engine", "--eagleBase", *TREES)
    _build(command_here, eagle_pair.draft_bundle, tmp_path / "engine", *flags)
    files = load_engine(tmp_path / "engine" / "draft", DRAFT_ENGINE).files
    actual = sum(record.num_bytes for name, record in files.items() if name.endswith(".data")) / 1e6
    assert megabytes == pytest.approx(actual, rel=0.25, abs=0.2)


def test_damaged_draft_bundles_are_rejected(command_here, eagle_pair, tmp_path):
    bundle = Path(shutil.copytree(eagle_pair.draft_bundle, tmp_path / "bundle"))
    weights = next(bundle.glob("*.weights"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    result = _build(command_here, bundle, tmp_path / "engine", "--eagleDraft")
    assert_one_line_error(result, f"{weights.name} has")
    weights.unlink()
    result = _build(command_here, bundle, tmp_path / "engine", "--eagleDraft")
    assert_one_line_error(result, f"{weights.name} is missing")
    (bundle / "manifest.json").write_text("{")
    result = _build(command_here, bundle, tmp_path / "engine", "--eagleDraft")
    assert_one_line_error(result, "is damaged")
    assert not (tmp_path / "engine").exists()


@pytest.fixture(scope="module")
def other_pair(tmp_path_factory):
    """Its draft is EAGLE-1's, whose tap is another."""
    return export_pair(tmp_path_factory.mktemp("other"), EAGLE1)


def test_drafts_of_another_base_are_rejected_in_both_orders(
    command_here, eagle_pair, other_pair, tmp_path
):
    engine = Path(shutil.copytree(eagle_pair.engine, tmp_path / "engine"))
    result = _build(command_here, other_pair.draft_bundle, engine, "--eagleDraft")
    assert_one_line_error(result, "with hidden taps (8,), this one has (2, 4, 5)")
    result = _build(command_here, other_pair.bundle, engine, "--eagleBase")
    assert_one_line_error(result, "with hidden taps (2, 4, 5), this one has (8,)")
    for folder, kind in ((engine, LLM_ENGINE), (engine / "draft", DRAFT_ENGINE)):
        verify_files(folder, load_engine(folder, kind).files)


def _changed(bundle: Path, folder: Path, section: str, change: dict[str, object]) -> Path:
    """The bundle with other facts in its manifest."""
    shutil.copytree(bundle, folder)
    manifest = read_manifest(folder)
    place = manifest
    for name in section.split(".") if section else ():
        place = place[name]
    place.update(change)
    write_manifest(folder, manifest)
    return folder


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("spec", {"base_hidden_size": 64}, "hidden size 64, this one has 96"),
        ("spec", {"base_num_layers": 9}, "number of layers 9, this one has 8"),
        ("spec.decoder", {"vocab_size": 99}, "vocabulary size 99, this one has 96"),
        ("spec", {"hidden_taps": [1, 4, 5]}, r"hidden taps \(1, 4, 5\), this one has \(2, 4, 5\)"),
    ],
)
def test_bases_and_drafts_must_match(eagle_pair, tmp_path, section, change, message):
    draft = _changed(eagle_pair.draft_bundle, tmp_path / "draft", section, change)
    with pytest.raises(BrokenArtifactError, match=message):
        build_engine("draft", draft, eagle_pair.engine, draft_plan(), "onnxruntime", lambda _: None)


def test_a_base_for_another_draft_is_rejected(eagle_pair, tmp_path):
    engine = Path(shutil.copytree(eagle_pair.engine, tmp_path / "engine"))
    facts = load_bundle(eagle_pair.bundle, LLM_BUNDLE).decoder
    assert dataclasses.replace(facts, vocab_size=99).vocab_size == 99
    base = _changed(eagle_pair.bundle, tmp_path / "base", "spec", {"vocab_size": 99})
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto", max_verify_tree_size=8)
    with pytest.raises(BrokenArtifactError, match="vocabulary size 96, this one has 99"):
        build_engine("llm", base, engine, plan, "onnxruntime", lambda _: None)

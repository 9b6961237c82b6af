"""The command `llm_inference --spec`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from conftest import assert_one_line_error, write_tokenizer
from manifests import read_manifest, write_manifest

from edgellm.core.artifact import hash_file
from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.request_files.spec_flags import SpecFlags
from edgellm.device_runtime.speculate.open_drafter import resolve_auto
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

REQUESTS = {
    "max_generate_length": 40,
    "requests": [
        {"messages": [{"role": "user", "content": "w20 w21"}], "temperature": 0},
        {"messages": [{"role": "user", "content": "w20 w21"}], "temperature": 0},
        {"messages": [{"role": "user", "content": "w23"}], "temperature": 0.3, "seed": 5},
        {"messages": [{"role": "user", "content": "w23"}], "disable_spec_decode": True, "seed": 42},
    ],
}


@pytest.fixture
def infer(infer_requests, tree_engine):
    """Run `llm_inference` with flags; return the outputs."""

    def run(*flags, engine=tree_engine, content=REQUESTS):
        return infer_requests(engine, content, *flags)

    return run


@pytest.fixture
def ask(infer_here, tree_engine):
    """The same in this process."""
    return lambda *flags, engine=tree_engine: infer_here(engine, REQUESTS, *flags)


def flags(**given) -> SpecFlags:
    """The flags of a command line, with defaults for all others."""
    nothing = {
        field.name: False if field.type == "bool" else None
        for field in dataclasses.fields(SpecFlags)
    }
    return SpecFlags(**{**nothing, "max_non_leaves": 10, **given})


def test_lookups_draft_for_an_engine_without_hidden_states(infer, tmp_path):
    _, plain = infer("--spec", "none")
    trees = tmp_path / "trees.json"
    result, answers = infer("--spec", "suffix", "--eagleTree", "fixed", "--treeOutputFile", trees)
    assert result.returncode == 0, result.stderr
    assert "acceptance length" in result.stdout
    for one, other in zip(plain, answers, strict=True):
        assert one["output_text"] == other["output_text"]
        assert "spec_verify_count" not in one["timings"]
        assert ("spec_verify_count" in other["timings"]) == (other["request_idx"] != 3)
    assert answers[1]["timings"]["spec_acceptance_length"] > 5  # repeated text
    assert [request["request_idx"] for request in json.loads(trees.read_text())["requests"]] == [
        0,
        1,
        2,
    ]


def test_engines_without_tree_support_are_rejected(ask, tiny_engine):
    result, _ = ask("--ngram", engine=tiny_engine)
    assert_one_line_error(result, "was built for plain decoding", "--maxVerifyTreeSize")
    assert_one_line_error(ask("--eagle")[0], "is not an EAGLE base", "--is_eagle_base")
    result, _ = ask("--spec", "ngram", "--eagleVerifyTreeSize", 13)
    assert_one_line_error(result, "trees of 13 nodes", "exceed the engine's 12")


@pytest.mark.parametrize("tree", ["cost", "fixed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_equal_plain_ones(tree_engine, tree, temperature):
    llm = LLM(tree_engine, spec=SpecOptions(network=None, lookups=("ngram", "suffix"), tree=tree))
    for prompt in ("w20 w21", "w9 w10 w9 w10 w9", "w23"):
        ids = []
        for speculative in (False, True):
            answer = llm.generate(
                prompt,
                sampling=SamplingParams(temperature=temperature, seed=42),
                speculative=speculative,
            )
            list(answer)
            ids.append(answer.token_ids)
        assert ids[0] == ids[1]
        assert answer.profile.rounds or len(ids[0]) == 1
        assert all(counts.tree_size <= 12 for counts in answer.profile.rounds)


def _ids(llm, temperature, *, speculative):
    answer = llm.generate(
        "w20 w21 w22",
        sampling=SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=42),
        speculative=speculative,
        max_generate_length=60,
    )
    list(answer)
    return answer.token_ids, answer.profile.rounds


@pytest.mark.parametrize("shape", [{"tree": "cost"}, {"tree": "fixed"}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("draft", ["tiny_engine", "tiny_int4_engine"])
def test_a_draft_model_is_lossless(tree_engine, draft, shape, request):
    """The base's own model as the draft, and that model rounded to INT4."""
    folder = request.getfixturevalue(draft)
    llm = LLM(
        tree_engine,
        spec=SpecOptions(network="draft", draft_engine_dir=folder, **shape),
        verify=True,
    )
    for temperature in (0.0, 1.0):
        (plain, _), (found, rounds) = (
            _ids(llm, temperature, speculative=speculative) for speculative in (False, True)
        )
        assert found == plain
        if "top_k" in shape and draft == "tiny_engine" and temperature == 0:
            assert all(one.accepted == one.tree_depth for one in rounds)  # a chain, always right


def test_a_draft_model_with_another_vocabulary_is_rejected(ask, tiny_engine, tmp_path):
    draft = shutil.copytree(tiny_engine, tmp_path / "draft")
    write_tokenizer(draft, 95)
    manifest = read_manifest(draft)
    record = hash_file(draft / "tokenizer.json")
    manifest["files"]["tokenizer.json"] = dataclasses.asdict(record)
    write_manifest(draft, manifest)
    result, answers = ask("--draftEngineDir", draft)
    assert_one_line_error(result, "has other tokens than", "95 is none there, 'w95' here")
    assert answers is None
    assert_one_line_error(ask("--draftEngineDir", tmp_path / "no")[0], "no such folder")


@pytest.mark.parametrize(
    ("given", "network", "lookups"),
    [
        ({"eagle": True}, "own", ()),
        ({"spec": "eagle"}, "eagle", ()),
        ({"spec": "medusa", "eagle": True}, "medusa", ()),
        ({"spec": "eagle", "eagle": True, "ngram": True}, "eagle", ("ngram",)),
        ({"spec": "ngram"}, None, ("ngram",)),
        ({"ngram": True}, None, ("ngram",)),
        ({"draft_engine_dir": Path("d"), "ngram": True}, "draft", ("ngram",)),
        ({"spec": "suffix"}, None, ("suffix",)),
        ({"spec": "suffix", "ngram": True}, None, ("ngram", "suffix")),
        ({"spec": "auto"}, "auto", ()),
        ({"spec": "auto", "draft_engine_dir": Path("d"), "suffix": True}, "auto", ("suffix",)),
    ],
    ids=str,
)
def test_flags_give_options(given, network, lookups):
    options = flags(**given).read()
    assert options is not None
    assert (options.network, options.lookups) == (network, lookups)


def test_flags_that_decode_plainly():
    assert flags().read() is None
    assert flags(spec="none", steps=3).read() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec": "hydra"}, "--spec hydra: give block, draft, eagle, gemma4_assistant, "),
        ({"spec": "none", "eagle": True}, "--spec none decodes plainly"),
        ({"tree": "fixed"}, "--eagleTree needs speculation"),
        ({"steps": 3, "posterior_alpha": 0.1}, "--eagleDraftStep needs speculation"),
        ({"eagle": True, "tree": "tall"}, "--eagleTree tall: give cost or fixed"),
        (
            {"eagle": True, "tree": "cost", "use_dynamic_tree": True},
            "--eagleTree and --eagleUseDynamicTree exclude each other",
        ),
        (
            {"eagle": True, "use_dynamic_tree": True, "choices": "mc_sim_7b_63"},
            "--eagleUseDynamicTree and --eagleChoices exclude each other",
        ),
        ({"eagle": True, "dynamic_top_k": 3}, "is the --eagleDraftTopK of --eagleUseDynamicTree"),
        (
            {"eagle": True, "use_dynamic_tree": True, "dynamic_top_k": 3, "draft_top_k": 4},
            "is the --eagleDraftTopK of --eagleUseDynamicTree",
        ),
        ({"eagle": True, "choices": "[[0], [0, 1]"}, r"is not JSON: \[\[0\], \[0, 1\]"),
        ({"eagle": True, "choices": "[[0], [true]]"}, "not a list of lists of ranks"),
        ({"eagle": True, "choices": "[]"}, "has none"),
        ({"eagle": True, "choices": "[[0], []]"}, r"\[\] is not a choice"),
        ({"eagle": True, "choices": "[[0], [-1]]"}, r"\[-1\] is not a choice"),
        ({"eagle": True, "choices": "[[0], [1, 0]]"}, r"\[1, 0\] has no parent"),
        ({"eagle": True, "choices": "[[0], [1], [0]]"}, r"\[0\] is given twice"),
        (
            {"eagle": True, "choices": "mc_sim_7b_63", "max_non_leaves": 9},
            "level 1 of the choices has 10 nodes with children, --maxNonLeavesPerLayer allows 9",
        ),
        ({"spec": "auto", "eagle": True}, "--eagle and auto exclude each other"),
        ({"spec": "draft"}, "a draft model and the folder of its engine go together"),
        ({"eagle": True, "draft_engine_dir": Path("d")}, "eagle and draft exclude each other"),
        ({"spec": "none", "draft_engine_dir": Path("d")}, "--spec none decodes plainly"),
        ({"spec": "ngram", "choices": "[[0]]"}, "a static tree is a network's alone"),
        ({"eagle": True, "ngram": True, "choices": "[[0]]"}, "a static tree is a network's alone"),
    ],
    ids=str,
)
def test_flags_without_effect_are_rejected(given, message):
    with pytest.raises(EdgeLLMError, match=message):
        flags(**given).read()


def test_tree_flags_set_kind_size_and_static_paths():
    def options(**given):
        return flags(eagle=True, **given).read()

    assert options().tree == "cost"
    dynamic = options(use_dynamic_tree=True, dynamic_top_k=4)
    assert (dynamic.tree, dynamic.top_k) == ("fixed", 4)
    assert options(choices="[[0], [1], [0, 2]]").choices == ((0,), (1,), (0, 2))
    named = options(choices="mc_sim_7b_63")
    assert len(set(named.choices)) == 63
    assert named.limits(60) == TreeLimits(top_k=10, steps=4, verify_size=64, static_rows=21)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"top_k": 2}, "take --eagleDraftTopK 3, 2 is the bound"),
        ({"steps": 1}, "take --eagleDraftStep 2, 1 is the bound"),
        ({"verify_size": 3}, "take --eagleVerifyTreeSize 4, 3 is the bound"),
    ],
    ids=str,
)
def test_choices_beyond_the_bounds_are_rejected(bounds, message):
    options = SpecOptions(choices=((0,), (1,), (0, 2)), **bounds)
    with pytest.raises(LimitError, match=message):
        options.limits(60)


def test_bounds_default_to_those_of_the_method():
    eagle, text = SpecOptions(), SpecOptions(network=None, lookups=("ngram",), top_k=3)
    assert (eagle.limits(60).steps, eagle.limits(60).verify_size) == (6, 60)
    assert (text.limits(12).top_k, text.limits(12).steps, text.limits(12).verify_size) == (
        3,
        16,
        12,
    )
    assert SpecOptions(verify_size=61).limits(60).verify_size == 61  # rejected later, by name


@pytest.mark.parametrize(
    "wrong", [{"network": "x"}, {"lookups": ("x",)}, {"tree": "x"}, {"network": None}], ids=str
)
def test_invalid_options_are_rejected(wrong):
    with pytest.raises(EdgeLLMError):
        SpecOptions(**wrong)


def test_auto_uses_the_available_drafters(tiny_engine, tree_engine, eagle_pair):
    """Plain decoding, lookups, the draft in the folder, or a given draft model."""
    auto, both = SpecOptions(network="auto"), ("ngram", "suffix")
    found = {}
    for engine in (tiny_engine, tree_engine, eagle_pair.engine):
        manifest = load_engine(engine, LLM_ENGINE)
        found[engine] = resolve_auto(auto, engine, manifest)
    assert found[tiny_engine] is None
    assert found[tree_engine] == SpecOptions(network=None, lookups=both)
    assert found[eagle_pair.engine] == SpecOptions(network="own", lookups=both, adapts=True)
    given = SpecOptions(network="auto", draft_engine_dir=tree_engine, lookups=("suffix",))
    assert resolve_auto(given, eagle_pair.engine, manifest) == SpecOptions(
        network="draft", draft_engine_dir=tree_engine, lookups=("suffix",), adapts=True
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("engine", ["tiny_engine", "tree_engine", "eagle_pair"])
def test_auto_is_lossless(engine, temperature, request):
    found = request.getfixturevalue(engine)
    llm = LLM(getattr(found, "engine", found), spec=SpecOptions(network="auto"))
    for prompt in ("w20 w21", "w9 w10 w9 w10 w9") * 3:
        ids = []
        for speculative in (False, True):
            answer = llm.generate(
                prompt,
                sampling=SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=42),
                speculative=speculative,
                max_generate_length=40,
            )
            list(answer)
            ids.append(answer.token_ids)
        assert ids[0] == ids[1]

"""`llm_inference --spec` as a user meets it."""

from __future__ import annotations

import json

import pytest
from conftest import assert_one_line_error

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.spec_flags import SpecFlags

REQUESTS = {
    "max_generate_length": 40,
    "requests": [
        {"messages": [{"role": "user", "content": "w20 w21"}], "temperature": 0},
        {"messages": [{"role": "user", "content": "w20 w21"}], "temperature": 0},
        {"messages": [{"role": "user", "content": "w23"}], "temperature": 0.3, "seed": 5},
        {"messages": [{"role": "user", "content": "w23"}], "disable_spec_decode": True},
    ],
}


@pytest.fixture
def infer(command, tree_engine, tmp_path):
    """Write a request file, run the command, read the answers."""

    def run(*flags, engine=tree_engine, content=REQUESTS):
        source, output = tmp_path / "in.json", tmp_path / "out.json"
        source.write_text(json.dumps(content))
        output.unlink(missing_ok=True)
        result = command(
            "llm_inference", "--engineDir", engine, "--inputFile", source,
            "--outputFile", output, *flags,
        )  # fmt: skip
        answers = json.loads(output.read_text())["responses"] if output.exists() else None
        return result, answers

    return run


def flags(**given) -> SpecFlags:
    named = dict.fromkeys(("spec", "top_k", "steps", "verify_size", "typical_acceptance"))
    switches = dict.fromkeys(("eagle", "ngram", "suffix"), False)
    return SpecFlags(**{**named, **switches, "tree": "cost", **given})


def test_text_alone_drafts_for_an_engine_without_features(infer, tmp_path):
    _, plain = infer("--spec", "none")
    trees = tmp_path / "trees.json"
    result, answers = infer("--spec", "suffix", "--eagleTree", "fixed", "--treeOutputFile", trees)
    assert result.returncode == 0, result.stderr
    assert "acceptance length" in result.stdout
    for one, other in zip(plain, answers, strict=True):
        assert one["output_text"] == other["output_text"]
        assert "spec_verify_count" not in one["timings"]
        assert ("spec_verify_count" in other["timings"]) == (other["request_idx"] != 3)
    assert answers[1]["timings"]["spec_acceptance_length"] > 5  # it was said before
    assert [request["request_idx"] for request in json.loads(trees.read_text())["requests"]] == [
        0, 1, 2,
    ]  # fmt: skip


def test_engines_that_were_not_built_for_it(infer, tiny_engine):
    result, _ = infer("--ngram", engine=tiny_engine)
    assert_one_line_error(result, "was built for plain decoding", "--maxVerifyTreeSize")
    assert_one_line_error(infer("--eagle")[0], "is no EAGLE base", "--is_eagle_base")
    result, _ = infer("--spec", "ngram", "--eagleVerifyTreeSize", 13)
    assert_one_line_error(result, "--eagleVerifyTreeSize 13 exceeds the engine's 12")


@pytest.mark.parametrize("tree", ["cost", "fixed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_plain_ones(tree_engine, tree, temperature):
    llm = LLM(tree_engine, spec=SpecOptions(None, ("ngram", "suffix"), tree=tree))
    for prompt in ("w20 w21", "w9 w10 w9 w10 w9", "w23"):
        ids = []
        for speculative in (False, True):
            answer = llm.generate(
                prompt, sampling=SamplingParams(temperature), speculative=speculative
            )
            list(answer)
            ids.append(answer.token_ids)
        assert ids[0] == ids[1]
        assert answer.profile.rounds or len(ids[0]) == 1
        assert all(counts.tree_size <= 12 for counts in answer.profile.rounds)


@pytest.mark.parametrize(
    ("given", "network", "lookups"),
    [
        ({"eagle": True}, "eagle", ()),
        ({"spec": "eagle"}, "eagle", ()),
        ({"spec": "eagle", "eagle": True, "ngram": True}, "eagle", ("ngram",)),
        ({"spec": "ngram"}, None, ("ngram",)),
        ({"ngram": True}, None, ("ngram",)),
        ({"spec": "suffix"}, None, ("suffix",)),
        ({"spec": "suffix", "ngram": True}, None, ("ngram", "suffix")),
    ],
    ids=str,
)
def test_what_flags_mean(given, network, lookups):
    options = flags(**given).read()
    assert options is not None
    assert (options.network, options.lookups) == (network, lookups)


def test_flags_that_decode_plainly():
    assert flags().read() is None
    assert flags(spec="none", steps=3).read() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec": "medusa"}, "--spec medusa: give eagle, ngram, suffix or none"),
        ({"spec": "none", "eagle": True}, "--spec none decodes plainly"),
        ({"eagle": True, "tree": "tall"}, "--eagleTree tall: give cost or fixed"),
    ],
    ids=str,
)
def test_flags_that_mean_nothing(given, message):
    with pytest.raises(EdgeLLMError, match=message):
        flags(**given).read()


def test_bounds_are_the_methods_own_where_none_are_given():
    eagle, text = SpecOptions(), SpecOptions(None, ("ngram",), top_k=3)
    assert (eagle.limits(60).steps, eagle.limits(60).verify_size) == (6, 60)
    assert (text.limits(12).top_k, text.limits(12).steps, text.limits(12).verify_size) == (
        3,
        16,
        12,
    )
    assert SpecOptions(verify_size=61).limits(60).verify_size == 61  # refused later, by name


@pytest.mark.parametrize(
    "wrong", [{"network": "x"}, {"lookups": ("x",)}, {"tree": "x"}, {"network": None}], ids=str
)
def test_options_that_mean_nothing(wrong):
    with pytest.raises(EdgeLLMError):
        SpecOptions(**wrong)

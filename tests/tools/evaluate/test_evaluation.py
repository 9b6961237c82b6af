"""Whole evaluations on tiny engines: scores, captions of images, margins of divergences."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from image_checkpoints import picture
from vlm_engines import build_vlm

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.tools.evaluate.answers import read_records
from edgellm.tools.evaluate.datasets.questions import load
from edgellm.tools.evaluate.evaluation import Job, evaluate
from edgellm.tools.evaluate.scoring import divergence
from edgellm.tools.evaluate.scoring.scores import read_scores
from edgellm.tools.evaluate.settings import read_settings


def job(engine: Path, output: Path, dataset: str, file: Path | None = None, **changes) -> Job:
    options = {
        "multimodal_engine_dir": None, "limit": None, "spec": None, "max_generate_length": 8,
        "temperature": 0.0, "seed": 0, "repeats": 1, "run_code": False,
    }  # fmt: skip
    return Job(
        engine_dir=engine,
        dataset=dataset,
        data_file=file,
        output_dir=output,
        **{**options, **changes},
    )


def answers(folder: Path, mode: str):
    path = folder / f"{mode}.jsonl"
    return read_records(path, path.read_bytes())


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_captions_are_scored_without_whitespace(tmp_path, capsys):
    engines = build_vlm(tmp_path / "vlm", "qwen2_5_vl")
    for seed in (1, 2):
        picture(33, 21, seed=seed).save(tmp_path / f"{seed}.png")
    rows = [{"image": f"{seed}.png", "caption": "w1", "prompt": "w3 w4"} for seed in (1, 2)]
    file = write(tmp_path / "captions.jsonl", *rows)
    visual = {"multimodal_engine_dir": engines.visual_engine}
    evaluate(job(engines.engine, tmp_path / "first", "captions", file, **visual))
    texts = [record.choices[0].turns[0] for record in answers(tmp_path / "first", "plain").values()]
    rows[0]["caption"] = texts[0].replace(" ", "\n")
    write(file, *rows)
    evaluate(job(engines.engine, tmp_path / "second", "captions", file, **visual))
    found = read_scores(tmp_path / "second").questions
    assert [one.modes["plain"].scores for one in found] == [{"text exact": 1}, {"text exact": 0}]
    assert "text exact" in capsys.readouterr().out


def test_code_runs_with_run_code_only(tiny_engine, tmp_path):
    """The tiny model writes no valid program; one test accepts any, the other fails."""
    file = write(
        tmp_path / "code.jsonl",
        {"turns": ["def f(): pass\n#"], "scoring": "code", "entry_point": "f",
         "test": "def check(f): pass"},
        {"turns": ["def f(): pass\n"], "scoring": "code", "entry_point": "f",
         "test": "def check(f): assert f() == 1"},
    )  # fmt: skip
    evaluate(job(tiny_engine, tmp_path / "run", str(file)))
    assert read_scores(tmp_path / "run").questions[0].modes["plain"].scores == {}
    assert "not run (--runCode)" in (tmp_path / "run" / "report.md").read_text()
    evaluate(job(tiny_engine, tmp_path / "run", str(file), run_code=True))
    scores = read_scores(tmp_path / "run")
    assert scores.programs
    assert scores.questions[1].modes["plain"].scores == {"pass@1": 0.0}
    assert scores.questions[1].modes["plain"].failures


@pytest.fixture(scope="module")
def speculated(eagle_pair, tmp_path_factory):
    """A finished run with EAGLE."""
    folder = tmp_path_factory.mktemp("evaluations")
    file = write(folder / "q.jsonl", {"turns": ["w20 w21", "w22"]}, {"turns": ["w30 w31"]})
    task = job(eagle_pair.engine, folder / "run", str(file), spec=SpecOptions())
    evaluate(task)
    return task


def test_greedy_speculation_is_lossless(speculated):
    scores = read_scores(speculated.output_dir)
    assert scores.divergences == []
    measure = scores.questions[0].modes["spec"]
    assert measure.rounds > 0
    assert measure.turns == 2
    assert measure.emitted_tokens == measure.decoded_tokens
    assert measure.emitted_tokens == measure.accepted_draft_tokens + measure.rounds


def test_a_divergence_has_its_margin(speculated):
    """A token changed by hand has a lower logit than the model's own token."""
    folder = speculated.output_dir
    questions, settings = load(speculated.dataset, None), read_settings(folder)
    records = {mode: answers(folder, mode) for mode in settings.modes}
    changed = copy.deepcopy(records)
    ids = changed["spec"][1].choices[0].token_ids[1]
    ids[3] = (ids[3] + 1) % 50
    llm = LLM(speculated.engine_dir)
    assert divergence.compare(llm, questions, settings, records) == []
    (found,) = divergence.compare(llm, questions, settings, changed)
    assert (found.question_id, found.turn, found.token) == (1, 1, 3)
    assert found.plain_token == records["plain"][1].choices[0].token_ids[1][3]
    assert found.margin is not None
    assert found.margin > 0
    del ids[3:]
    (found,) = divergence.compare(llm, questions, settings, changed)
    assert (found.token, found.margin) == (3, None)


def test_sampled_repeats_differ_and_are_reproducible(speculated, tmp_path):
    texts = []
    for name in ("a", "b"):
        task = job(
            speculated.engine_dir, tmp_path / name, speculated.dataset, temperature=2.0, repeats=2
        )
        evaluate(task)
        found = answers(tmp_path / name, "plain")[2].choices
        texts.append([choice.token_ids for choice in found])
        assert read_scores(tmp_path / name).divergences is None
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]

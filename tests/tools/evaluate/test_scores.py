"""Scores of cases computed by hand, intervals, reports and comparisons."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from conftest import assert_one_line_error
from html_pages import Page

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.answers import Choice, Record
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.evaluation import _write
from edgellm.tools.evaluate.reporting.comparison import compare_runs
from edgellm.tools.evaluate.reporting.report import report_markdown, report_page, tables
from edgellm.tools.evaluate.scoring import rouge as rouge_module
from edgellm.tools.evaluate.scoring.bootstrap import mean_of, rate_ratio, ratio_of, share_of
from edgellm.tools.evaluate.scoring.divergence import Divergence
from edgellm.tools.evaluate.scoring.exact_match import last_number, number_matches, text_matches
from edgellm.tools.evaluate.scoring.rouge import rouge
from edgellm.tools.evaluate.scoring.scores import read_scores, score
from edgellm.tools.evaluate.settings import Settings


@pytest.mark.parametrize(
    ("summary", "reference", "expected"),
    [  # by rouge-score 0.1.2, without stemming
        ("The cat sat on the mat.", "The cat lay on the mat.", (0.833333, 0.6, 0.833333)),
        ("police killed the gunman", "police kill the gunman", (0.75, 0.333333, 0.75)),
        ("the gunman kill police", "police kill the gunman", (1.0, 0.333333, 0.5)),
        (
            "A quick brown fox jumps over the lazy dog near the river bank",
            "The quick brown dog jumps over a lazy fox, and runs to the river",
            (0.814815, 0.24, 0.518519),
        ),
        ("2,000 men walked 3.5 miles", "3.5 miles: 2,000 men", (0.923077, 0.727273, 0.461538)),
        ("", "something", (0, 0, 0)),
    ],
)
def test_rouge_equals_rouge_score(summary, reference, expected):
    found = rouge(summary, reference)
    assert tuple(round(found[name], 6) for name in ("rouge1", "rouge2", "rougeL")) == expected


def test_a_missing_rouge_score_is_one_line(monkeypatch):
    monkeypatch.setattr(rouge_module, "find_spec", lambda _: None)
    with pytest.raises(EdgeLLMError, match="ROUGE needs rouge-score") as found:
        rouge_module.require_rouge()
    assert "pip install 'edgellm[eval]'" in found.value.hint


def test_rouge_ignores_case_of_non_ascii_letters():
    assert rouge("Größe über alles", "größe ÜBER alles")["rouge2"] == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.", "7"),
        ("It costs $1,430.50.", "1430.50"),
        ("#### -5", "-5"),
        ("10-5", "5"),
        ("The answer is -12 degrees", "-12"),
        ("18.", "18"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_found(text, number):
    found = last_number(text)
    assert (None if found is None else str(found)) == number


def test_exact_matches_of_numbers_and_texts():
    assert number_matches("so 18.00 dollars", "18")
    assert number_matches("1,000", "1000")
    assert not number_matches("18 apples and 2 pears", "18")
    assert not number_matches("no idea", "18")
    assert text_matches("Row 1 : red , blue .\n", "Row 1: red, blue.")
    assert not text_matches("Row 1: red", "Row 1: blue")


def test_intervals_have_the_nominal_coverage():
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(50):
        found = mean_of(list(random.normal(3.0, 1.0, 60)))
        assert found is not None
        hits += found.low <= 3.0 <= found.high
    assert 0.84 <= hits / 50 < 1


def test_intervals_of_ratios_are_paired():
    tokens = [100.0, 200.0, 50.0, 80.0]
    found = rate_ratio((tokens, [10.0, 20.0, 5.0, 8.0]), (tokens, [5.0, 10.0, 2.5, 4.0]))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    # Paired: a slower machine for some questions does not change the ratio.
    found = rate_ratio((tokens, [10.0, 90.0, 5.0, 40.0]), (tokens, [5.0, 45.0, 2.5, 20.0]))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))
    assert ratio_of([3.0], [2.0]).low is None
    assert ratio_of([], []) is None
    assert ratio_of([0.0, 0.0], [0.0, 0.0]) is None


def test_intervals_of_shares_are_wilsons():
    """For 0 and 5 out of 10."""
    none, half = share_of([0.0] * 10), share_of([0.0, 1.0] * 5)
    assert none is not None
    assert half is not None
    assert (none.low, none.high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert (half.low, half.high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert share_of([]) is None
    assert share_of([0.5, 0.5, 1.0]) == mean_of([0.5, 0.5, 1.0])


QUESTIONS = [
    Question(turns=["1 + 1?"], question_id=1, category="maths", scoring="number", reference="2"),
    Question(turns=["2 + 2?"], question_id=2, category="maths", scoring="number", reference="4"),
    Question(turns=["a", "b"], question_id="<talk>", category="<b>talk</b>"),
]
SETTINGS = Settings(
    dataset="questions.jsonl", num_questions=3, data_sha256="aa", model="tiny", engines={},
    spec={"network": "eagle"}, max_generate_length=8, temperature=0.0, seed=0, repeats=1,
)  # fmt: skip


def choice(*turns, speed=1.0, drafted=0, accepted=0, rounds=0):
    count = len(turns)
    return Choice(
        index=0, turns=list(turns), idxs=[9] * count, new_tokens=[11] * count,
        wall_time=[2 / speed] * count, token_ids=[[1]] * count, prompt_tokens=[3] * count,
        decode_ms=[1000 / speed] * count, emitted_tokens=[10] * count, rounds=[rounds] * count,
        draft_tokens=[drafted] * count, accepted_draft_tokens=[accepted] * count,
        finish_reasons=["stop"] * count,
    )  # fmt: skip


def records(answers, **figures):
    return {
        question.question_id: Record(
            question_id=question.question_id,
            answer_id="x",
            model_id="m",
            tstamp=0.0,
            choices=[choice(*turns, **figures)],
        )
        for question, turns in zip(QUESTIONS, answers, strict=True)
    }


def scored(speed=2.0, right="4"):
    return score(
        QUESTIONS,
        {
            "plain": records([["2"], ["4"], ["x", "y"]]),
            "spec": records([["2"], [right], ["x", "y"]], speed=speed, drafted=20, accepted=5,
                            rounds=4),
        },
        [Divergence(question_id=2, turn=0, token=3, plain_token=7, speculated_token=8, margin=1e-4,
                    spread=2.0)],
        None,
    )  # fmt: skip


def cells(found, title, name):
    table = next(table for table in found if table.title == title)
    return next(row for row in table.rows if row[0] == name)


def test_the_tables_show_ratios_scores_and_divergences():
    found = tables(SETTINGS, scored(right="5"))
    assert cells(found, "Speed", "all") == (
        "all", "3", "10.0", "20.0", "2.00 (2.00 to 2.00)", "2.00 (2.00 to 2.00)",
    )  # fmt: skip
    assert cells(found, "Acceptance", "maths")[1:] == ("2.50 (2.50 to 2.50)", "0.250", "10", "40")
    _, count, plain, spec, difference = cells(found, "Scores", "number exact")
    assert (count, plain) == ("2", "1.000 (0.342 to 1.000)")
    assert spec.startswith("0.500 (")
    assert difference.startswith("-0.500 (")
    same = next(table for table in found if table.title.startswith("Greedy answers"))
    assert same.note == "2 of 3 answers have the plain answer's token ids"
    assert same.rows == (("2", "1", "3", "7", "8", "0.0001", "2"),)


def test_a_failed_turn_scores_zero():
    found = records([[], ["4"], ["x"]])
    found[1].choices[0].error = "too long"
    plain = SETTINGS.__class__(**{**msgspec.structs.asdict(SETTINGS), "spec": None})
    made = score(QUESTIONS, {"plain": found}, None, None)
    assert [one.modes["plain"].scores for one in made.questions] == [
        {"number exact": 0.0},
        {"number exact": 1.0},
        {},
    ]
    facts = dict(tables(plain, made)[-1].rows)
    assert facts["failed turns"] == "1: too long"


def test_reports_escape_names():
    text = report_markdown(SETTINGS, scored())
    assert "| maths | 2 | 10.0 | 20.0 | 2.00 (2.00 to 2.00) |" in text
    source = report_page(SETTINGS, scored())
    page = Page(source)
    assert "<b>talk" not in source
    assert "&lt;b&gt;talk" in source
    names = [name for name, _ in page.elements]
    assert names.count("svg") == 2
    assert "script" not in names
    assert all(
        "http" not in (value or "") for _, found in page.elements for value in found.values()
    )


def write(folder, scores, **changes):
    folder.mkdir()
    run = msgspec.structs.replace(SETTINGS, **changes)
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    if scores is not None:
        _write(folder, run, scores)


def test_comparisons_show_differences_and_settings(tmp_path):
    write(tmp_path / "a", scored())
    write(tmp_path / "b", scored(speed=3.0, right="5"), max_generate_length=9)
    assert read_scores(tmp_path / "a") == scored()
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert cells(found, "Speed, plain", "tokens/s")[1:] == ("10.0", "10.0", "1.00 (1.00 to 1.00)")
    assert cells(found, "Speed, speculative", "tokens/s")[3] == "1.50 (1.50 to 1.50)"
    values = "Acceptance and scores, speculative"
    assert cells(found, values, "acceptance length")[3] == "+0.00 (+0.00 to +0.00)"
    assert cells(found, values, "number exact")[3].startswith("-0.500 (-1.000 to ")
    assert cells(found, "Different settings", "max generate length")[1:] == ("8", "9")


def test_runs_with_other_questions_or_without_scores_are_rejected(tmp_path):
    write(tmp_path / "a", scored())
    write(tmp_path / "b", scored(), data_sha256="bb", dataset="other")
    write(tmp_path / "c", None)
    for other, message in (
        ("b", "the runs have different questions"),
        ("c", "is not finished"),
        ("d", "holds no evaluation"),
    ):
        with pytest.raises(EdgeLLMError, match=message) as caught:
            compare_runs(tmp_path / "a", tmp_path / other)
        assert caught.value.hint
    (tmp_path / "a" / "scores.json").write_text("{")
    command = [sys.executable, "-m", "edgellm.tools.evaluate", "--compare", tmp_path / "a"]
    result = subprocess.run([*command, tmp_path / "a"], capture_output=True, text=True, check=False)
    assert_one_line_error(result, "scores.json is damaged")

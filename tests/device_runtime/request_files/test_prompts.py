"""`llm_inference --prompt`: no files, the text on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from conftest import assert_one_line_error

from edgellm.device_runtime import LLM, SamplingParams


@pytest.fixture(scope="module")
def expected(tiny_engine):
    """The greedy output for a message."""
    llm = LLM(tiny_engine)

    def text(content: str, length: int = 6) -> str:
        output = llm.generate(
            [{"role": "user", "content": content}],
            sampling=SamplingParams(temperature=0),
            max_generate_length=length,
        )
        return "".join(step.text for step in output)

    return text


def _run(engine: Path, *flags: object, stdin: str | bytes | None = None):
    given = ("--engineDir", engine, "--temperature", 0, "--maxTokens", 6, *flags)
    if stdin is None:
        return forks.shared().run("llm_inference", *given)
    words = [Path(sys.executable).parent / "llm_inference", *map(str, given)]
    text = stdin.encode() if isinstance(stdin, str) else stdin
    result = subprocess.run(words, input=text, capture_output=True, check=False)
    return subprocess.CompletedProcess(
        [], result.returncode, result.stdout.decode(), result.stderr.decode()
    )


def test_prompts_are_answered_on_standard_output(tiny_engine, expected, tmp_path):
    output = tmp_path / "out.json"
    result = _run(tiny_engine, "--prompt", "w20", "--prompt", "w21 w22", "--outputFile", output)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{expected('w20')}\n{expected('w21 w22')}\n"
    assert "2 responses" in result.stderr
    content = json.loads(output.read_text())
    assert content["input_file"] is None
    assert [one["output_text"] for one in content["responses"]] == result.stdout.splitlines()


@pytest.mark.parametrize(
    ("prompt", "stdin", "message"),
    [("w20", "w21\n", "w20\n\nw21"), ("-", "w21 w22\n", "w21 w22"), ("w20", "", "w20")],
)
def test_piped_text_follows_the_prompt(tiny_engine, expected, prompt, stdin, message):
    result = _run(tiny_engine, "--prompt", prompt, stdin=stdin)
    assert (result.returncode, result.stdout) == (0, expected(message) + "\n")


def test_a_sampled_output_has_its_seed(tiny_engine):
    flags = ("--prompt", "w20", "--temperature", 3, "--topP", 1, "--topK", 0)
    first = _run(tiny_engine, *flags)
    seed = first.stderr.rstrip().rpartition("; seed ")[2]
    assert _run(tiny_engine, *flags, "--seed", seed).stdout == first.stdout


def test_wrong_combinations_are_rejected(tiny_engine, tmp_path):
    requests = tmp_path / "in.json"
    requests.write_text("{}")
    for flags, fragments in (
        ((), ("there are no requests", "--prompt TEXT")),
        (("--prompt", "w20", "--inputFile", requests), ("exclude each other",)),
        (("--inputFile", requests), ("need --outputFile",)),
        (("--prompt", "w20", "--resume"), ("--resume needs --outputFile",)),
        (("--prompt", ""), ("the prompt is empty",)),
    ):
        assert_one_line_error(_run(tiny_engine, *flags), *fragments)
    result = _run(tiny_engine, "--prompt", "-", stdin=b"\xff")
    assert_one_line_error(result, "standard input is not UTF-8: byte 0")

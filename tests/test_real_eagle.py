"""SmolLM2-135M-Instruct with its EAGLE-3 draft: speculation says what plain decoding says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.requests.prove import prove
from edgellm.device_runtime.requests.request_file import Options
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.draft import DraftOptions, export_draft
from edgellm.export.source import open_checkpoint

pytestmark = pytest.mark.real
DRAFT = Path(__file__).parent.parent / "examples" / "smollm2-135m-instruct-eagle3"
PROMPTS = [
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a short poem about the sea.",
    "List five fruits and their colours.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish, French and German.",
    "Write a Python function that reverses a string.",
    "What is 17 times 23? Think step by step.",
    "Summarize the story of Romeo and Juliet.",
    "Name three planets that are larger than Earth.",
    "Write a polite email that declines an invitation.",
    "Why is the sky blue?",
    "Count from 1 to 30.",
    "Repeat the sentence 'the cat sat on the mat' ten times.",
    "Give me a recipe for pancakes.",
    "What are the advantages of solar power?",
    "Write a SQL query that counts the users of each country.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Describe the water cycle.",
    "What should I pack for a week in the mountains?",
    "Tell me a joke about computers.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Write a haiku about autumn.",
    "Explain the difference between a list and a tuple in Python.",
    "What happened in 1969?",
    "Write a dialogue between a teacher and a student.",
    "How does a bicycle stay upright?",
    "List the months of the year and how many days they have.",
    "What is a prime number? Give ten of them.",
    "Write the alphabet, one letter per line.",
    "Give three tips for better sleep.",
    "Write HTML for a page with a heading and a list.",
    "What is the difference between weather and climate?",
    "Describe your favourite animal.",
    "How do vaccines work?",
    "Write a limerick about a frog.",
    "What does the heart do?",
    "Explain recursion with an example.",
    "Write a letter to a friend who moved away.",
    "What is the boiling point of water at high altitude?",
    "Give a short history of the bicycle.",
    "Write a JSON object that describes a book.",
    "Why do leaves change their colour?",
    "What are the primary colours?",
    "Tell a bedtime story about a dragon.",
    "How many legs do eight spiders have?",
    "Write a to-do list for a Monday.",
    "Explain what an operating system does.",
    "Give me synonyms for 'happy'.",
    "Plan a day in Rome.",
]


@pytest.fixture(scope="module")
def bundles(smollm2_gguf, tmp_path_factory) -> Path:
    return make_bundles(smollm2_gguf, tmp_path_factory.mktemp("eagle"))


def make_bundles(smollm2_gguf: Path, folder: Path) -> Path:
    """Those of base and draft, and the draft's engine."""
    assert (DRAFT / "model.safetensors").exists(), f"the draft is missing: {DRAFT}"
    options = ExportOptions("fp32", draft_model_dir=str(DRAFT))
    export_llm(open_checkpoint(str(smollm2_gguf)), folder / "base", options)
    draft, base = (open_checkpoint(str(path), tokenizer=False) for path in (DRAFT, smollm2_gguf))
    export_draft(draft, base, folder / "draft", DraftOptions("fp32"))
    plan = Plan(256, 512, 0, max_draft_tree_size=60)
    build_engine("draft", folder / "draft", folder / "built", plan, "onnxruntime", lambda _: None)
    return folder


def build(bundles: Path, engine: Path, quantize: str, kernels: str) -> Path:
    """The engine, with its draft."""
    shutil.copytree(bundles / "built", engine)
    options = CpuOptions(kernels)
    plan = Plan(256, 512, 0, "auto", quantize, max_verify_tree_size=60, options=options)
    build_engine("llm", bundles / "base", engine, plan, "onnxruntime", lambda _: None)
    return engine


def _opened(bundles: Path, engine: Path, quantize: str, kernels: str, tree: str = "cost") -> LLM:
    return LLM(build(bundles, engine, quantize, kernels), spec=SpecOptions(tree=tree))


def _requests(count: int) -> list[dict]:
    return [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS[:count]]


def test_answers_of_own_kernels_are_identical_to_the_bit(bundles, tmp_path):
    llm = _opened(bundles, tmp_path / "engine", "int4", "edgellm")
    assert len(set(PROMPTS)) == 50
    for comparison in prove(llm, Options(max_generate_length=64), _requests(50)):
        assert comparison.line().endswith("tokens, identical, equal bits")


def test_fp32_answers_are_identical(bundles, tmp_path):
    """By ONNX Runtime's products, whose last bits depend on the number of rows."""
    llm = _opened(bundles, tmp_path / "engine", "none", "onnxruntime")
    accepted = verified = 0
    for request in _requests(10):
        ids = []
        for speculative in (False, True):
            answer = llm.generate(
                request["messages"],
                sampling=SamplingParams(temperature=0),
                max_generate_length=64,
                speculative=speculative,
            )
            list(answer)
            ids.append(answer.token_ids)
        assert ids[0] == ids[1], request
        accepted += sum(counts.accepted for counts in answer.profile.rounds)
        verified += len(answer.profile.rounds)
    assert accepted > 0.5 * verified  # the draft has learned something


def test_int4_divergences_are_close_calls(bundles, tmp_path):
    """ONNX Runtime verifies trees in int8, single rows in INT4: what parts them is rounding."""
    llm = _opened(bundles, tmp_path / "engine", "int4", "onnxruntime", tree="fixed")
    for comparison in prove(llm, Options(max_generate_length=64), _requests(6)):
        if comparison.divergence is not None:
            assert comparison.margin is not None
            assert comparison.spread is not None
            assert abs(comparison.margin) < 0.25 * comparison.spread, comparison.line()

"""SmolLM2-135M-Instruct with its EAGLE-3 draft: bundles, engines and prompts of tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

DRAFT = Path(__file__).parents[2] / "examples" / "smollm2-135m-instruct-eagle3"
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


def make_bundles(smollm2_gguf: Path, folder: Path) -> Path:
    """Bundles of base and draft, and the draft's engine."""
    assert (DRAFT / "model.safetensors").exists(), f"the draft is missing: {DRAFT}"
    options = ExportOptions(dtype="fp32", draft_model_dir=str(DRAFT))
    export_llm(open_checkpoint(str(smollm2_gguf)), folder / "base", options)
    draft, base = (open_checkpoint(str(path), tokenizer=False) for path in (DRAFT, smollm2_gguf))
    export_draft(draft, base, folder / "draft", DraftOptions("fp32"))
    plan = Plan(max_input_len=256, kv_capacity=512, threads=0, max_draft_tree_size=60)
    build_engine("draft", folder / "draft", folder / "built", plan, "onnxruntime", lambda _: None)
    return folder


def build(bundles: Path, engine: Path, quantize: str, kernels: str) -> Path:
    """The engine, with its draft."""
    shutil.copytree(bundles / "built", engine)
    options = CpuOptions(kernels)
    plan = Plan(
        max_input_len=256,
        kv_capacity=512,
        threads=0,
        prefill="auto",
        quantize=quantize,
        max_verify_tree_size=60,
        options=options,
    )
    build_engine("llm", bundles / "base", engine, plan, "onnxruntime", lambda _: None)
    return engine

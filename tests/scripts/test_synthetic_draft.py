"""Training conversations of drafts of the synthetic model, and the shipped draft."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error
from PIL import Image

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.scripts.demo_images import DRAFT, MODEL
from edgellm.scripts.synthetic_vlm.conversations import converse
from edgellm.scripts.synthetic_vlm.evaluate import fresh
from edgellm.scripts.synthetic_vlm.prompts import PROMPTS
from edgellm.scripts.synthetic_vlm.scenes import score

pytestmark = pytest.mark.usefixtures("one_thread")


def _write(folder: Path, *flags: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "edgellm.scripts.synthetic_vlm.prompts"]
    command += ["--output_dir", str(folder), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_conversations_for_a_draft(tmp_path):
    result = _write(tmp_path / "a", "--count", 8)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "a" / PROMPTS).read_text().splitlines()
    kinds = ["one", "later", "one", "two", "one", "turns", "one", "later"]
    assert len(lines) == len(kinds)
    shown = set()
    for number, (line, kind) in enumerate(zip(lines, kinds, strict=True)):
        meant = converse(kind, 2, 0, number)
        messages = json.loads(line)["messages"]
        assert messages[-1]["role"] == "user"
        assert [m["role"] for m in messages] == [m["role"] for m in meant.messages[:-1]]
        items = [item for m in messages if isinstance(m["content"], list) for item in m["content"]]
        names = [item["image"] for item in items if item["type"] == "image"]
        shown |= set(names)
        for name, scene in zip(names, meant.scenes, strict=True):
            picture = Image.open(tmp_path / "a" / name)
            np.testing.assert_array_equal(np.asarray(picture), np.asarray(scene.image))
    assert {path.name for path in (tmp_path / "a").iterdir()} == {PROMPTS, *shown}
    again = _write(tmp_path / "a")
    assert_one_line_error(again, "exists", "another --output_dir")
    assert _write(tmp_path / "b", "--count", 8, "--seed", 1).returncode == 0
    assert (tmp_path / "b/00000-0.png").read_bytes() != (tmp_path / "a/00000-0.png").read_bytes()


@pytest.mark.nightly
def test_the_shipped_draft_is_lossless_with_high_acceptance(tmp_path):
    """Captions of fresh scenes are right, as without it, with more than 3 tokens a round."""
    source, network = open_checkpoint(str(MODEL)), open_checkpoint(str(DRAFT), tokenizer=False)
    options = ExportOptions(dtype="fp32", draft_model_dir=str(DRAFT))
    export_llm(source, tmp_path / "bundle", options)
    export_draft(network, source, tmp_path / "drafted", DraftOptions("fp32"))
    export_visual(source, tmp_path / "seeing", VisualOptions("fp32"))
    plan = Plan(
        max_input_len=256,
        kv_capacity=512,
        threads=1,
        prefill="auto",
        max_verify_tree_size=60,
        max_draft_tree_size=60,
    )
    engine = tmp_path / "engine"
    build_engine("llm", tmp_path / "bundle", engine, plan, "onnxruntime", lambda _: None)
    build_engine("draft", tmp_path / "drafted", engine, plan, "onnxruntime", lambda _: None)
    limits = image_plan(4, 256, 64, threads=1)
    build_engine(
        "visual", tmp_path / "seeing", tmp_path / "encoder", limits, "onnxruntime", lambda _: None
    )
    llm = LLM(engine, spec=SpecOptions(tree="fixed"), multimodal_engine_dir=tmp_path / "encoder")
    exact, rounds = 0, []
    for number in range(4):
        scene = fresh("one", number).asked
        scene.image.save(tmp_path / "scene.png")
        image = {"type": "image", "image": str(tmp_path / "scene.png")}
        content = [image, {"type": "text", "text": "Describe the image."}]
        found = [
            llm.generate(
                [{"role": "user", "content": content}],
                sampling=SamplingParams(temperature=0),
                max_generate_length=64,
                speculative=speculative,
            )
            for speculative in (False, True)
        ]
        plain, speculated = ([list(answer), answer.token_ids][1] for answer in found)
        assert speculated == plain
        exact += score(found[1].text, scene).exact
        rounds += found[1].profile.rounds
    assert exact >= 3
    assert sum(counts.emitted for counts in rounds) / len(rounds) > 3


def test_the_examples_of_images_are_small():
    files = [path for folder in (MODEL, DRAFT) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 25e6
    facts = json.loads((DRAFT / "training.json").read_text())
    card = (DRAFT / "README.md").read_text()
    recipe = facts["recipe"]
    for name in ("epochs", "learning_rate", "batch_tokens"):
        assert f"--{name} {recipe[name]:g}" in card or recipe[name] == 4096
    assert f"--draft_vocab_size {facts['draft_vocab_size']}" in card

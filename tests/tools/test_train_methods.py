"""EAGLE-1, Medusa, DFlash and DSpark: training on a toy language, acceptance by the base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_reference import MASK, WINDOWED, BlockReference
from conftest import make_checkpoint
from eagle_reference import EPSILON, INNER
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.artifact import MADE_BY_NAME, move_files
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import Bundle
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.tools.train_draft.checkpoint_writers import draft_shape
from edgellm.tools.train_draft.cli import train_draft
from edgellm.tools.train_draft.data.corpus import Generation
from edgellm.tools.train_draft.methods.dflash_network import BlockDraft
from edgellm.tools.train_draft.methods.losses import PIECE, token_loss
from edgellm.tools.train_draft.train import Recipe, Trainer
from edgellm.tools.train_draft.training_run import Job, run

VOCAB = 96
BASE = {**models.find("llama").TINY, "num_hidden_layers": 2, "tie_word_embeddings": False}
WINDOWS = {"dflash": 8}  # by method
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base that counts: the head's row of w(i+1) is w(i)'s embedding; layers change little."""
    folder = make_checkpoint(tmp_path_factory.mktemp("counting") / "base", **BASE)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0.05
        if name == "model.norm.weight":
            tensors[name].fill_(1)
    embedding = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=-1) * 4
    following = torch.arange(VOCAB) + 1
    following[-1] = 10
    head = torch.zeros_like(embedding)
    head[following[10:]] = embedding[10:]
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def job(base, tmp_path) -> Job:
    lines = []
    for begin in range(10, 58):
        user = {"role": "user", "content": f"w{begin}"}
        answer = " ".join(f"w{number}" for number in range(begin + 1, begin + 31))
        lines.append({"messages": [user, {"role": "assistant", "content": answer}]})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe(
        epochs=16, unrolls=3, unroll_weight=0.8, learning_rate=2e-2, warmup_steps=4,
        batch_tokens=512, max_tokens=64, max_gradient_norm=1.0, seed=0, feature_noise=0.2,
    )  # fmt: skip
    return Job(
        base_model_dir=str(base),
        output_dir=tmp_path / "draft",
        data=(data,),
        self_prompts=0,
        work_dir=tmp_path / "work",
        init_from=None,
        draft_vocab_size=0,
        hidden_taps=(),
        held_out=6,
        cache_features=True,
        save_every=100,
        device="cpu",
        recipe=recipe,
        generation=Generation(
            max_new_tokens=12, sampled_share=0.0, temperature=1.0, batch=4, seed=0
        ),
    )


def _of(job: Job, method: str) -> Job:
    if method in ("dflash", "dspark"):
        vocab = {"dflash": VOCAB, "dspark": 90}[method]
        sizes = {"draft_vocab_size": vocab, "block_size": 4, "num_layers": 2}
        sizes["sliding_window"] = WINDOWS.get(method, 0)
        return replace(job, method=method, hidden_taps=(0, 1), **sizes)
    return replace(job, method=method, num_heads=3 if method == "medusa" else 0)


def _engine(job: Job, base: Path, folder: Path) -> tuple[Path, Bundle]:
    options = ExportOptions(dtype="fp32", draft_model_dir=str(job.output_dir))
    export_llm(open_checkpoint(str(base)), folder / "bundle", options)
    draft = open_draft(str(job.output_dir))
    whole = open_checkpoint(str(base), tokenizer=False)
    manifest = export_draft(draft, whole, folder / "draft_bundle", DraftOptions("fp32"))
    plan = Plan(
        max_input_len=64,
        kv_capacity=128,
        threads=1,
        prefill="same",
        quantize="none",
        max_verify_tree_size=8,
    )
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)
    plan = Plan(
        max_input_len=64,
        kv_capacity=128,
        threads=1,
        prefill="auto",
        quantize="none",
        max_draft_tree_size=32,
    )
    build_engine(
        "draft", folder / "draft_bundle", folder / "engine", plan, "onnxruntime", lambda _: None
    )
    return folder / "engine", manifest


@pytest.mark.each_change("dflash", "medusa")
@pytest.mark.parametrize("method", ["eagle", "medusa", "dflash", "dspark"])
def test_a_trained_draft_is_accepted(job, base, tmp_path, monkeypatch, method):
    losses = []
    train = Trainer._train

    def note(trainer, *arguments):
        losses.append(train(trainer, *arguments))
        return losses[-1]

    monkeypatch.setattr(Trainer, "_train", note)
    run(_of(job, method))
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
    training = json.loads((job.output_dir / "training.json").read_text())
    assert training["method"] == method
    assert training["acceptance_length_estimate"] > 2.5
    engine, manifest = _engine(job, base, tmp_path)
    assert manifest.draft.method == method  # with a window, blocks stay bidirectional
    assert manifest.draft.decoder.sliding_window == WINDOWS.get(method)
    exporters = {"eagle": "SafeAILab", "medusa": "FasterDecoding", "dflash": "z-lab"}
    assert manifest.provenance["exporter"] == exporters.get(method, "SpecForge")
    llm = LLM(engine, spec=SpecOptions(top_k=2, steps=3, tree="fixed"))
    texts, lengths = set(), []
    for speculative in (True, False):
        output = llm.generate(
            "w20 w21 w22",
            sampling=SamplingParams(temperature=0),
            max_generate_length=40,
            speculative=speculative,
        )
        list(output)
        texts.add(output.text)
        lengths += [counts.emitted for counts in output.profile.rounds]
    assert len(texts) == 1
    assert "w23 w24 w25" in texts.pop()
    assert np.mean(lengths) > 2.5


@pytest.mark.parametrize("method", ["eagle", "medusa", "dspark"])
def test_an_interrupted_run_gives_the_same_draft(job, tmp_path, monkeypatch, method):
    job = _of(replace(job, recipe=replace(job.recipe, epochs=2), save_every=2), method)
    whole = replace(job, output_dir=tmp_path / "whole", work_dir=tmp_path / "whole_work")
    run(whole)
    train, calls = Trainer._train, []

    def cut(trainer, *arguments):
        loss = train(trainer, *arguments)
        calls.append(trainer.step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(Trainer, "_train", cut)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    run(job)
    assert calls[3:5] == [3, 2]
    for path in whole.output_dir.glob("[!.]*"):  # the record has times
        assert (job.output_dir / path.name).read_bytes() == path.read_bytes()


def test_heads_start_as_the_bases_or_from_another_draft(job, base, tmp_path):
    """The learning rate is 0. Files of another method's draft in the folder are removed."""
    idle = replace(job.recipe, epochs=1, learning_rate=0.0)
    job = _of(replace(job, recipe=idle), "medusa")
    former = tmp_path / "former"
    former.mkdir()
    (former / "model.safetensors").write_bytes(b"of eagle")
    facts = {"command": "edgellm-train-draft", "settings": {}, "inputs": {}}
    move_files(former, job.output_dir, ["model.safetensors"], set(), facts)
    run(job)
    names = {"config.json", "training.json", "medusa_lm_head.safetensors", MADE_BY_NAME}
    assert {path.name for path in job.output_dir.iterdir()} == names
    tensors = load_file(job.output_dir / "medusa_lm_head.safetensors")
    head = load_file(base / "model.safetensors")["lm_head.weight"].bfloat16()
    for index in range(3):
        assert not tensors[f"{index}.0.linear.weight"].any()
        assert not tensors[f"{index}.0.linear.bias"].any()
        assert torch.equal(tensors[f"{index}.1.weight"], head)
    assert len(tensors) == 9
    tensors["1.0.linear.bias"] += 1
    given = shutil.copytree(job.output_dir, tmp_path / "given")
    save_file(tensors, given / "medusa_lm_head.safetensors")
    later = replace(
        job, init_from=given, output_dir=tmp_path / "later", work_dir=tmp_path / "later_work"
    )
    run(later)
    found = load_file(later.output_dir / "medusa_lm_head.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for wrong in (replace(later, num_heads=2), replace(later, init_from=base)):
        with pytest.raises(EdgeLLMError, match="holds no draft of these sizes"):
            run(replace(wrong, work_dir=tmp_path / "x"))
    with pytest.raises(EdgeLLMError, match="holds a run with other settings"):
        run(replace(job, num_heads=2))


@pytest.mark.parametrize("rows", [0, 3, PIECE + 5])
def test_the_loss_of_tokens_has_the_gradients_of_autograd(rows):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, requires_grad=True)
    weight = torch.randn(20, 16, requires_grad=True)
    tokens = torch.randint(20, (rows,))
    found = token_loss(hidden, weight, tokens)
    if not rows:
        assert found.item() == 0
        return
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, tokens)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(loss, [hidden, weight]) for loss in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"method": "hydra"}, "--method hydra: give eagle3, eagle, medusa, dflash or dspark"),
        ({"method": "medusa", "draft_vocab_size": 9}, "is for --method eagle3, dflash and dspark"),
        ({"method": "eagle3", "block_size": 4}, "--block_size is for --method dflash and dspark"),
        ({"method": "eagle", "hidden_taps": "1,2"}, "--hidden_taps is for --method eagle3, dflash"),
        ({"method": "eagle", "num_heads": 3}, "--num_heads is for --method medusa, not eagle"),
        ({"feature_noise": 0.1}, "--feature_noise is for --method eagle, not eagle3"),
        ({"method": "medusa", "unrolls": 3}, "--unrolls is for --method eagle3 and eagle, not"),
        ({"method": "eagle", "unroll_weight": 0.0}, "--unroll_weight is for --method eagle3, med"),
        ({"method": "medusa", "sliding_window": 8}, "eagle3, eagle, dflash and dspark, not medusa"),
    ],
)
def test_flags_of_another_method_are_rejected(flags, message, tmp_path):
    with pytest.raises(EdgeLLMError, match=message):
        train_draft(
            base_model_dir=str(tmp_path),
            output_dir=tmp_path / "out",
            data=[tmp_path / "data"],
            **flags,
        )


def test_a_block_drafter_starts_from_another(job, base, tmp_path):
    """The learning rate is 0. The mask token is one that no conversation contains."""
    idle = replace(job.recipe, epochs=1, learning_rate=0.0)
    job = _of(replace(job, recipe=idle), "dspark")
    run(job)
    config = json.loads((job.output_dir / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 95, "target_layer_ids": [-1, 0]}
    tensors = load_file(job.output_dir / "model.safetensors")
    tensors["fc.weight"] += 1
    given = shutil.copytree(job.output_dir, tmp_path / "given")
    save_file(tensors, given / "model.safetensors")
    later = replace(
        job, init_from=given, output_dir=tmp_path / "later", work_dir=tmp_path / "later_work"
    )
    run(later)
    found = load_file(later.output_dir / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for wrong, message in (
        ({"draft_vocab_size": 80}, "holds no draft of these sizes"),
        ({"init_from": base}, "holds no draft of these sizes"),
        ({"block_size": 5}, "predicts blocks of 4"),
        ({"num_layers": 3}, "--num_layers 3 exceeds the base's 2 layers"),
        ({"sliding_window": 3}, "--sliding_window 3 is shorter than a block of 4"),
    ):
        with pytest.raises(EdgeLLMError, match=message):
            run(replace(later, work_dir=tmp_path / "x", **wrong))


@pytest.mark.parametrize("window", [0, 7])
def test_training_of_blocks_equals_the_reference(base, window):
    """Of blocks after a text of nine tokens and of two."""
    layout = replace(WINDOWED["one_window"], qk_norm=False, window=window, sliding=(0, 1))
    layout = layout if window else replace(layout, sliding=())
    reference = BlockReference(base, layout)
    sizes = draft_shape(AutoConfig.from_pretrained(base), VOCAB, 3, window)
    shape = replace(sizes, rope_theta=1e4, rms_norm_eps=EPSILON, intermediate_size=INNER)
    draft = BlockDraft(shape=shape, num_layers=2, has_norms=False, has_head=False)
    draft.load_state_dict(reference.tensors)
    taps = torch.randn(1, 12, 3 * 96, generator=torch.Generator().manual_seed(1))
    ids, anchors = torch.tensor([[[20] + 5 * [MASK], [30] + 5 * [MASK]]]), torch.tensor([[9, 2]])
    with torch.no_grad():
        (found,) = draft(taps, reference.embedding[ids], anchors)
    for rows, anchor, newest in zip(found, (9, 2), (20, 30), strict=True):
        expected = reference.predicted(taps[0, :anchor], newest, 6)
        torch.testing.assert_close(rows, expected, atol=2e-5, rtol=2e-5)

"""`edgellm-train-draft`: training, resuming, export of the draft, invalid input."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_one_line_error, make_checkpoint
from draft_runs import DraftRun, K
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgellm.core.artifact import MADE_BY_NAME
from edgellm.core.errors import EdgeLLMError
from edgellm.core.file_lock import hold
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools.train_draft import train as train_module
from edgellm.tools.train_draft import training_run as run_module
from edgellm.tools.train_draft.base import Prompt
from edgellm.tools.train_draft.checkpoint_writers import read_draft
from edgellm.tools.train_draft.cli import app
from edgellm.tools.train_draft.data.corpus import Generation
from edgellm.tools.train_draft.data.hidden_states import FeatureCache
from edgellm.tools.train_draft.methods.eagle3 import Eagle3
from edgellm.tools.train_draft.methods.eagle_network import Draft, DraftShape
from edgellm.tools.train_draft.methods.low_rank_head import LowRankDraft
from edgellm.tools.train_draft.train import Recipe, Trainer
from edgellm.tools.train_draft.training_run import Job, run

VOCAB, LAYERS, HEAD = 96, 8, 40
BASE = {**models.find("llama").TINY, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "base"
    return make_checkpoint(folder, **BASE)


@pytest.fixture
def data(tmp_path) -> Path:
    """Conversations whose answers count up, and prompts without answers."""
    lines = []
    for begin in range(10, 34):
        user = {"role": "user", "content": f"w{begin} w{begin + 1}"}
        answer = " ".join(f"w{number}" for number in range(begin + 2, begin + 18))
        lines.append({"messages": [user, {"role": "assistant", "content": answer}]})
    lines += [{"messages": [{"role": "user", "content": f"w{begin}"}]} for begin in range(50, 56)]
    return _write_lines(tmp_path / "data.jsonl", lines)


@pytest.fixture
def job(base, data, tmp_path) -> Job:
    recipe = Recipe(
        epochs=2, unrolls=3, unroll_weight=0.9, learning_rate=3e-3, warmup_steps=2,
        batch_tokens=128, max_tokens=48, max_gradient_norm=1.0, seed=0,
    )  # fmt: skip
    return Job(
        base_model_dir=str(base),
        output_dir=tmp_path / "draft",
        data=(data,),
        self_prompts=0,
        work_dir=tmp_path / "work",
        init_from=None,
        draft_vocab_size=HEAD,
        hidden_taps=(),
        held_out=4,
        cache_features=True,
        save_every=3,
        device="cpu",
        recipe=recipe,
        generation=Generation(
            max_new_tokens=12, sampled_share=0.5, temperature=0.8, batch=4, seed=0
        ),
    )


def _write_lines(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def _arguments(job: Job, **changes: object) -> list[str]:
    flags = {
        "base_model_dir": job.base_model_dir, "output_dir": job.output_dir, "data": job.data[0],
        "work_dir": job.work_dir, "draft_vocab_size": HEAD, "epochs": 2, "unrolls": 3,
        "warmup_steps": 2, "batch_tokens": 128, "max_tokens": 48, "max_new_tokens": 12,
        "held_out": 4, "save_every": 3, "generation_batch": 4, "device": "cpu", **changes,
    }  # fmt: skip
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)]


def _command(job: Job) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "edgellm.tools.train_draft", *_arguments(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _run_here(job: Job, *more: str) -> None:
    """Run the same command line in this process; errors are raised."""
    app([*_arguments(job), *more], standalone_mode=False)


def _network(folder: Path, vocabulary: int = HEAD) -> tuple[Draft, np.ndarray]:
    """Load the network of a written folder, in float32."""
    config = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "draft_vocab_size", "rms_norm_eps", "rope_theta")  # fmt: skip
    taps = [tap + 1 for tap in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    window = config.get("sliding_window", 0)
    sizes = {name: config[name] for name in names}
    shape = DraftShape(num_taps=len(taps), sliding_window=window, **sizes)
    draft = Draft(shape)
    assert shape.draft_vocab_size == vocabulary
    return draft, read_draft(draft, folder, taps, VOCAB)


def test_the_command_trains_a_draft_that_loads(job, command_here):
    result = _command(job)
    assert result.returncode == 0, result.stderr
    assert "the base has answered 6 of 6 prompts" in result.stderr
    assert "30 conversations" in result.stderr
    assert "acceptance length" in result.stderr.splitlines()[-1]
    assert {path.name for path in job.output_dir.iterdir()} == {
        "model.safetensors",
        "config.json",
        "training.json",
        MADE_BY_NAME,
    }
    _network(job.output_dir)
    written = _files(job.output_dir)
    again = command_here("edgellm-train-draft", *_arguments(job))
    assert (again.returncode, again.stderr) == (0, "")
    assert "finished already" in again.stdout
    _run_here(job, "--overwrite")  # nothing is trained, the same draft is written
    assert _files(job.output_dir) == written
    another = f"another edgellm-train-draft uses {job.work_dir}"
    with hold(job.work_dir / "lock", "", ""), pytest.raises(EdgeLLMError, match=another):
        _run_here(job, "--overwrite")
    other = command_here("edgellm-train-draft", *_arguments(job, epochs=3))
    assert_one_line_error(other, "it has --epochs 2, not 3", "--overwrite to replace it")
    assert other.returncode == 2
    with pytest.raises(EdgeLLMError, match="holds a run with other settings"):
        run(replace(job, output_dir=job.output_dir.with_name("b"), held_out=5))
    job.data[0].write_text(job.data[0].read_text().replace("w20", "w21"))
    with pytest.raises(EdgeLLMError, match="it is from other files of --data 1"):
        _run_here(job)
    with pytest.raises(EdgeLLMError, match="the conversations have changed"):
        _run_here(job, "--overwrite")
    assert _files(job.output_dir) == written


def _files(folder: Path) -> dict[str, bytes]:
    """All files but the record, which has their times."""
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def test_the_loss_decreases(job, monkeypatch):
    losses = []
    train = Trainer._train

    def note(trainer, *arguments):
        losses.append(train(trainer, *arguments))
        return losses[-1]

    monkeypatch.setattr(Trainer, "_train", note)
    run(replace(job, recipe=replace(job.recipe, epochs=12)))
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    assert losses[-1] == losses[-1]


@pytest.mark.parametrize("cache_features", [True, False])
def test_an_interrupted_run_gives_the_same_draft(job, tmp_path, monkeypatch, cache_features):
    """Interrupts while prompts are completed, in a training step, and after the last save."""
    job = replace(job, cache_features=cache_features)
    generation = replace(job.generation, max_new_tokens=6)
    job = replace(job, generation=generation, recipe=replace(job.recipe, epochs=3))
    whole = replace(job, output_dir=tmp_path / "whole", work_dir=tmp_path / "whole_work")
    run(whole)

    train, calls = Trainer._train, []

    def cut(trainer, *arguments):
        loss = train(trainer, *arguments)
        calls.append(trainer.step)
        if len(calls) in (2, 7, 8, 20):
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(Trainer, "_train", cut)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            run(job)
        assert not job.output_dir.exists()
    answers = job.work_dir / "answers.jsonl"
    answers.write_bytes(answers.read_bytes()[:-9])  # the last line was cut
    assert calls[19] > 12
    stored = []
    monkeypatch.setattr(FeatureCache, "store", lambda *arguments: stored.append(arguments))
    run(job)
    assert not stored  # all hidden states are cached: the last save was after the first epoch
    assert calls[:9] == [0, 1, 0, 1, 2, 3, 4, 3, 3]  # saved at step 3 only
    assert answers.read_text() == (whole.work_dir / "answers.jsonl").read_text()
    assert (job.output_dir / "model.safetensors").read_bytes() == (
        whole.output_dir / "model.safetensors"
    ).read_bytes()
    estimates = [
        json.loads((folder / "training.json").read_text())["acceptance_length_estimate"]
        for folder in (job.output_dir, whole.output_dir)
    ]
    assert estimates[0] == estimates[1]


def test_a_limit_in_minutes_ends_with_a_small_learning_rate(job, monkeypatch):
    """On a clock that passes one second at each look: two looks a step."""
    seconds, rates, answered = itertools.count(), [], []
    monkeypatch.setattr(train_module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    train, answer = Trainer._train, run_module.answer_prompts

    def note(trainer, *arguments):
        loss = train(trainer, *arguments)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"] / job.recipe.learning_rate)
        return loss

    def count(*arguments):
        for number in answer(*arguments):
            answered.append(number)
            yield number

    monkeypatch.setattr(Trainer, "_train", note)
    monkeypatch.setattr(run_module, "answer_prompts", count)
    limited = replace(
        job,
        recipe=replace(job.recipe, epochs=500, minutes=0.5),
        generation=replace(job.generation, generation_minutes=10.0),
    )
    run(limited)
    assert len(rates) == 16
    assert rates[0] == 0.5  # of a warm-up of two steps
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.08
    assert json.loads((job.output_dir / "training.json").read_text())["recipe"]["minutes"] == 0.5
    written, steps = _files(job.output_dir), len(rates)
    assert answered == [0, 6]
    run(replace(limited, overwrite=True))  # nothing is answered or trained, the same is written
    assert (len(rates), answered, _files(job.output_dir)) == (steps, [0, 6], written)


def test_ctrl_c_prints_one_line_and_keeps_the_state(job):
    arguments = _arguments(job, epochs=400, save_every=1)
    command = [sys.executable, "-m", "edgellm.tools.train_draft", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 90
    while not (job.work_dir / "training.pt").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = f"error: interrupted; prompts and the last saved step are kept in {job.work_dir}"
    again = shlex.join(["python", "-m", "edgellm.tools.train_draft", *arguments])
    assert printed.splitlines()[-2:] == [kept, f"hint: the same command goes on: {again}"]
    assert "Traceback" not in printed
    assert not job.output_dir.exists()
    base = run_module.load_base(job.base_model_dir, torch.device("cpu"))
    learner = Eagle3(base=base, taps=(2, 4, 5), draft_vocab_size=HEAD, unrolls=3, decay=0.9)
    trainer = Trainer(
        learner=learner, recipe=job.recipe, folder=job.work_dir, device=torch.device("cpu")
    )
    assert trainer.resume()
    assert trainer.step > 0


def test_the_draft_vocabulary_has_the_most_frequent_answer_tokens(job):
    run(job)
    tensors = load_file(job.output_dir / "model.safetensors")
    targets = tensors["d2t"] + torch.arange(HEAD)
    assert targets.tolist() == sorted(set(targets.tolist()))
    assert tensors["t2d"].nonzero()[:, 0].tolist() == targets.tolist()
    assert tensors["t2d"].shape == (VOCAB,)
    counting = set(range(18, 44))  # in ever more answers than any token of the base's own
    assert counting <= set(targets.tolist())
    config = json.loads((job.output_dir / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (HEAD, VOCAB)
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [tap + 1 for tap in ids] == [2, LAYERS // 2, LAYERS - 3]
    # vLLM reads both keys as inputs of layers and prefers the top-level one.
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, LAYERS // 2, LAYERS - 3]


def test_training_starts_from_another_draft(job, tmp_path):
    run(job)
    later = replace(
        job,
        init_from=job.output_dir,
        output_dir=tmp_path / "later",
        work_dir=tmp_path / "later_w",
        recipe=replace(job.recipe, epochs=1, learning_rate=0.0),
    )
    run(later)
    first, second = (load_file(j.output_dir / "model.safetensors") for j in (job, later))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = replace(later, hidden_taps=(1, 4, 5), work_dir=tmp_path / "x")
    with pytest.raises(EdgeLLMError, match=r"uses the hidden taps \[2, 4, 5\]") as found:
        run(other)
    assert found.value.hint == "give --hidden_taps 2,4,5"
    for wrong in (replace(later, draft_vocab_size=41), replace(later, init_from=tmp_path)):
        with pytest.raises(EdgeLLMError, match="holds no draft of these sizes"):
            run(replace(wrong, work_dir=tmp_path / "x"))
    (tmp_path / "broken").mkdir()
    shutil.copy(job.output_dir / "config.json", tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"no")
    with pytest.raises(EdgeLLMError, match="holds no draft of these sizes"):
        run(replace(later, init_from=tmp_path / "broken", work_dir=tmp_path / "x"))
    assert not (tmp_path / "x").exists()  # invalid settings create no folder


@pytest.mark.parametrize("vocabulary", [pytest.param(HEAD, marks=pytest.mark.nightly), VOCAB])
def test_a_low_rank_head_learns_the_head(job, base, tmp_path, vocabulary):
    """From the truncated SVD, by KL divergence; the draft itself does not change."""
    window = {"draft_vocab_size": vocabulary, "sliding_window": 6}
    drafted = replace(job, output_dir=tmp_path / "first", work_dir=tmp_path / "w", **window)
    run(drafted)
    recipe = replace(job.recipe, epochs=8, learning_rate=2e-2)
    trained = replace(
        job, **window, init_from=drafted.output_dir, draft_head_rank=24, recipe=recipe
    )
    run(trained)
    first, last = (load_file(each.output_dir / "model.safetensors") for each in (drafted, trained))
    factors = ["efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"]
    tables = {"embed_tokens.weight"} if vocabulary == VOCAB else {"d2t", "t2d"}
    own = {name.replace("midlayer", "layers.0") for name in first} - {"d2t", "t2d"}
    assert {*last} == {*factors, *own, *tables}
    for name in first.keys() - {"d2t", "t2d"}:
        assert torch.equal(first[name], last[name.replace("midlayer", "layers.0")])
    head = first["lm_head.weight"].float()
    learned = last[factors[0]].float() @ last[factors[1]].float()
    states = _states(drafted, base)
    wanted = (states @ head.T).log_softmax(-1)
    svd, kl = (
        functional.kl_div((states @ weight.T).log_softmax(-1), wanted, log_target=True)
        for weight in (_truncated(head, 24), learned)
    )
    assert kl < 0.8 * svd
    config = json.loads((trained.output_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle4"]
    assert (config["num_candidates"], config["sliding_window"]) == (vocabulary, 6)
    checkpoints = (open_checkpoint(str(f), tokenizer=False) for f in (trained.output_dir, base))
    manifest = export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    assert manifest.provenance["exporter"] == "Automodel"
    assert manifest.draft.num_candidates == vocabulary


def _truncated(head: torch.Tensor, rank: int) -> torch.Tensor:
    left, singular, right = torch.linalg.svd(head, full_matrices=False)
    return left[:, :rank] * singular[:rank] @ right[:rank]


def _states(job: Job, base: Path) -> torch.Tensor:
    """Normed hidden states of a draft's first step in the answers of its training."""
    draft, _ = _network(job.output_dir, job.draft_vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [json.loads(line)["messages"] for line in job.data[0].read_text().splitlines()[:24]]
    ids = torch.tensor([tokenizer.apply_chat_template(each)["input_ids"] for each in texts])
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        taps = torch.cat([states[tap] for tap in (2, 4, 5)], -1)[:, :-1]
        embeddings = model.get_input_embeddings()(ids[:, 1:])
        positions = torch.arange(ids.shape[1] - 1).expand(1, *ids[:, 1:].shape)
        (hidden,) = draft.unroll(taps, embeddings, positions, 1)
        return draft.norm(hidden)[:, -14:].flatten(0, 1)


def test_a_low_rank_head_starts_as_the_svd():
    shape = DraftShape(
        hidden_size=32,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        draft_vocab_size=HEAD,
        num_taps=3,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    module = LowRankDraft(Draft(shape), 6)
    module.factorize()
    up, down = module.efficient_lm_head.weight, module.efficient_lm_head_down_proj.weight
    expected = _truncated(module.draft.lm_head.weight, 6)
    torch.testing.assert_close(up @ down, expected, atol=1e-5, rtol=1e-4)


def test_a_low_rank_head_needs_its_draft(job, tmp_path):
    with pytest.raises(EdgeLLMError, match="there is none") as found:
        run(replace(job, draft_head_rank=8))
    assert "--init_from" in found.value.hint
    run(job)
    later = replace(job, init_from=job.output_dir, work_dir=tmp_path / "x", draft_head_rank=8)
    for changes, message in (
        ({"draft_head_rank": HEAD + 1}, "--draft_head_rank 41 exceeds the head's rank 40"),
        ({"sliding_window": 6}, "was trained with a window of all tokens"),
        ({"init_from": tmp_path}, "holds no draft"),
    ):
        with pytest.raises(EdgeLLMError, match=message):
            run(replace(later, **changes))
        assert not (tmp_path / "x").exists()


def test_self_prompts_are_completed_and_trained_on(job, monkeypatch):
    prompts = [Prompt((7, 3, number, 4, 7, 3)) for number in range(10, 20)]
    monkeypatch.setattr(run_module, "write_prompts", lambda *_: iter([0, len(prompts)]))
    monkeypatch.setattr(
        run_module, "read_conversations", lambda paths, _: ([], prompts * bool(paths))
    )
    run(replace(job, data=(), self_prompts=len(prompts)))
    answered = (job.work_dir / "answers.jsonl").read_text().splitlines()
    found = sorted(tuple(json.loads(line)["prompt"]) for line in answered)
    assert found == [prompt.ids for prompt in prompts]
    assert json.loads((job.output_dir / "training.json").read_text())["self_prompts"] == 10


def test_conversations_or_self_prompts_are_required(job, command_here):
    flags = _arguments(job)
    at = flags.index("--data")
    result = command_here("edgellm-train-draft", *flags[:at], *flags[at + 2 :])
    assert_one_line_error(result, "no conversations to train on", "--self_prompts N")
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("{", "line 2 is not a conversation"),
        ('{"messages": []}', "IndexError"),
        ('{"messages": "hello"}', "TypeError"),
        ('{"message": []}', "KeyError('messages')"),
        ('{"messages": [{"role": "user"}]}', "KeyError('content')"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "no tools here"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "UnicodeDecodeError"),
    ],
)
def test_an_invalid_line_is_rejected_with_its_number(job, line, fragment):
    text = line if isinstance(line, bytes) else line.encode()
    job.data[0].write_bytes(b'{"messages": [{"role": "user", "content": "w1"}]}\n' + text + b"\n")
    with pytest.raises(EdgeLLMError, match="line 2 is not a conversation") as found:
        run(job)
    assert fragment in str(found.value)
    assert not job.work_dir.exists()


def test_unicode_line_ends_in_texts_and_empty_lines_are_accepted(job, base):
    from edgellm.tools.train_draft.base import load_base
    from edgellm.tools.train_draft.data.corpus import read_conversations

    job.data[0].write_bytes(
        '\n{"messages": [{"role": "user", "content": "w10\u2028w11\x85"}]}\r\n \n'.encode()
    )
    loaded = load_base(str(base), torch.device("cpu"))
    samples, prompts = read_conversations([job.data[0]], loaded)
    assert (len(samples), len(prompts), loaded.stop_ids) == (0, 1, {2})
    assert {10, 11} <= set(prompts[0].ids)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"hidden_taps": (2, 2, 5)}, "hidden taps"),
        ({"hidden_taps": (2, 4, LAYERS)}, "hidden taps"),
        ({"hidden_taps": (5, 4, 2)}, "do not ascend"),
        ({"hidden_taps": (-1, 4, 5)}, "outside of 0 to 8"),
        ({"draft_vocab_size": VOCAB + 1}, "--draft_vocab_size 97 exceeds"),
        ({"held_out": 30}, "leave none to train"),
        ({"device": "nonsense"}, "--device nonsense"),
        ({"data": (Path("absent.jsonl"),)}, "no such data file: absent.jsonl"),
        ({"base_model_dir": "/absent"}, "no such folder"),
    ],
)
def test_invalid_settings_are_rejected_and_create_no_folder(job, changes, fragment):
    with pytest.raises(EdgeLLMError, match=fragment):
        run(replace(job, **changes))
    assert not job.work_dir.exists()
    assert not job.output_dir.exists()


def test_foreign_files_are_not_overwritten(job):
    job.output_dir.mkdir()
    foreign = job.output_dir / "config.json"
    for others in ({}, {"training.json": "{}"}, {"training.json": "[1]"}):
        foreign.write_text("mine")
        for name, text in others.items():
            (job.output_dir / name).write_text(text)
        with pytest.raises(EdgeLLMError, match="was not made by edgellm: it has config"):
            run(job)
        assert foreign.read_text() == "mine"
    with pytest.raises(EdgeLLMError, match="is a file"):
        run(replace(job, output_dir=job.data[0]))


def test_hidden_taps_must_be_numbers(job, command_here):
    result = command_here("edgellm-train-draft", *_arguments(job, hidden_taps="a,b"))
    assert_one_line_error(result, "--hidden_taps a,b: give whole numbers")
    assert result.returncode == 2


@pytest.mark.parametrize("window", [0, 5])
def test_the_export_agrees_with_the_network(job, base, tmp_path, window):
    """Runs the exported fuse and model graphs on ONNX Runtime, for step 0 and recycled steps."""
    _run_here(job, "--hidden_taps", "0,3,6", *["--sliding_window", str(window)] * bool(window))
    checkpoints = (open_checkpoint(str(f), tokenizer=False) for f in (job.output_dir, base))
    manifest = export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    assert manifest.draft.hidden_taps == (0, 3, 6)
    assert manifest.draft.decoder.sliding_window == (window or None)
    draft, vocabulary = _network(job.output_dir)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    random = torch.Generator().manual_seed(1)
    rows, steps, hidden_size = 9, 4, BASE["hidden_size"]
    taps = torch.randn(1, rows, 3 * hidden_size, generator=random)
    ids = torch.randint(VOCAB, (1, rows + steps), generator=random)
    with torch.no_grad():
        positions = torch.arange(rows + steps - 1)[None, None]
        unrolled = list(draft.unroll(taps, embedding[ids[:, 1:]], positions, steps))
        log_probs = [draft.lm_head(draft.norm(x[0])).log_softmax(-1) for x in unrolled]

    graphs = DraftRun(tmp_path / "bundle", manifest)
    hidden = graphs.fuse(taps[0])
    last = rows - 1  # the chain that starts at the newest token
    found = graphs.forward(
        ids[0, 1 : rows + 1], hidden, torch.arange(rows), np.tri(rows, dtype=bool), 0, [last]
    )
    for step in range(steps):
        best = log_probs[step][last].topk(K)
        np.testing.assert_allclose(found[1][0], best.values, atol=2e-4)
        np.testing.assert_array_equal(found[0][0], vocabulary[best.indices])
        np.testing.assert_allclose(found[2][0], unrolled[step][0, last], atol=2e-4, rtol=2e-4)
        if step + 1 < steps:
            position = rows + step
            token, recycled = ids[0, position + 1 : position + 2], torch.from_numpy(found[2])
            mask = np.ones((1, 1), bool)
            found = graphs.forward(token, recycled, torch.tensor([position]), mask, position, [0])

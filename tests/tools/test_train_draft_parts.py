"""Parts of draft training against naive implementations: generation, attention, loss, batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from edgellm.core.errors import UnsupportedModelError
from edgellm.export import models
from edgellm.tools.train_draft import base as base_module
from edgellm.tools.train_draft.base import Base, Prompt
from edgellm.tools.train_draft.data import corpus, grouped_attention
from edgellm.tools.train_draft.data import generate as generate_module
from edgellm.tools.train_draft.data import hidden_states as features_module
from edgellm.tools.train_draft.data.corpus import (
    Generation,
    Sample,
    answer_prompts,
    stored_answers,
)
from edgellm.tools.train_draft.data.generate import generate
from edgellm.tools.train_draft.data.hidden_states import (
    FeatureCache,
    TappedBase,
    make_batch,
    plan,
    row_lengths,
)
from edgellm.tools.train_draft.methods import eagle_network
from edgellm.tools.train_draft.methods.eagle_network import Draft, DraftShape
from edgellm.tools.train_draft.methods.losses import PIECE, head_loss
from edgellm.tools.train_draft.train import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
STOPS = frozenset([2, 17, 33, 50, 71])
GREEDY = Generation(max_new_tokens=10, sampled_share=0.0, temperature=1.0, batch=4, seed=0)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def base(request, tmp_path_factory) -> Path:
    config = {**models.find(request.param).TINY, "num_hidden_layers": 6}
    return make_checkpoint(tmp_path_factory.mktemp("parts") / "base", **config)


@pytest.fixture(scope="module")
def model(base):
    """In float32, so that near ties do not depend on the batch."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded(model) -> Base:
    """A base without a usable tokenizer."""
    return Base(model=model, tokenizer=PreTrainedTokenizerBase(), stop_ids=frozenset([2]))


@pytest.fixture
def prompts() -> list[Prompt]:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 14, 23)
    return [Prompt(tuple(random.integers(3, 96, size).tolist())) for size in sizes]


def _expected(model, prompt: tuple[int, ...], stop_ids: frozenset[int], limit: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=limit,
        pad_token_id=0,
        eos_token_id=sorted(stop_ids),
        attention_mask=torch.ones(1, len(prompt)),
    )
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(params=["as_on_cpus", "as_on_gpus"])
def device_class(request, monkeypatch) -> list[int]:
    """Generation as on a class of devices; filled with the query lengths of grouped attention."""
    lengths: list[int] = []
    if request.param == "as_on_gpus":
        monkeypatch.setattr(generate_module, "_STEPS_PER_READ", {"cpu": 8})
        monkeypatch.setattr(grouped_attention, "_DEVICES", ("cpu",))
        attend = grouped_attention.attend

        def note(module, query, *others, **options):
            lengths.append(query.shape[2])
            return attend(module, query, *others, **options)

        monkeypatch.setattr(grouped_attention, "attend", note)
    return lengths


@pytest.mark.each_change("llama-as_on_gpus-7", "llama-as_on_cpus-7")
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_greedy_outputs_equal_those_of_transformers(model, loaded, prompts, batch, device_class):
    rows = dict(
        generate(
            loaded, prompts, stop_ids=STOPS, max_new_tokens=40, temperature=0.0, batch=batch, seed=0
        )
    )
    assert sorted(rows) == list(range(len(prompts)))
    for index, answer in rows.items():
        assert answer == _expected(model, prompts[index].ids, STOPS, 40)
    assert len({len(answer) for answer in rows.values()}) > 5  # they finish at different steps
    assert any(answer[-1] in STOPS for answer in rows.values())
    assert not device_class or min(device_class) == 1
    assert loaded.config._attn_implementation == "sdpa"


def test_a_batch_that_exceeds_the_memory_is_halved(model, loaded, prompts, monkeypatch, capsys):
    complete, sizes = generate_module._complete, []

    def limited(base, chosen, *others):
        sizes.append(len(chosen))
        if len(chosen) > 8:
            raise torch.OutOfMemoryError
        return complete(base, chosen, *others)

    monkeypatch.setattr(generate_module, "_complete", limited)
    options = {"stop_ids": STOPS, "max_new_tokens": 5, "temperature": 0.0, "batch": 64, "seed": 0}
    rows = dict(generate(loaded, prompts, **options))
    assert sizes == [23, 11, 5, 6, 12, 6, 6]
    assert "23 prompts exceed the GPU's memory; trying 11 in a batch" in capsys.readouterr().err
    for index, answer in rows.items():
        assert answer == _expected(model, prompts[index].ids, STOPS, 5)
    monkeypatch.setattr(generate_module, "_complete", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        list(generate(loaded, prompts, **options))


def test_no_batch_begins_after_the_deadline(loaded, prompts, tmp_path, monkeypatch):
    """Answers of finished batches are stored; a later call without a deadline adds the others."""
    seconds = iter(range(100))
    monkeypatch.setattr(generate_module.time, "monotonic", lambda: next(seconds))
    store = tmp_path / "answers.jsonl"
    assert list(answer_prompts(loaded, prompts, store, GREEDY, deadline=3)) == [0, 12]
    assert len(stored_answers(store)) == 12
    assert _answer(loaded, prompts, store) == [12, 23]
    assert len(stored_answers(store)) == 23


def test_the_kv_cache_is_enlarged_beyond_its_first_allocation(model, loaded):
    """One output is longer than an allocation, the other finishes earlier."""
    prompts = [Prompt((5,)), Prompt((6, 7, 8))]
    found = generate(loaded, prompts, stop_ids=frozenset([2]), max_new_tokens=150,
                     temperature=0.0, batch=2, seed=0)  # fmt: skip
    for index, answer in found:
        assert answer == _expected(model, prompts[index].ids, frozenset([2]), 150)


def test_sampled_outputs_follow_the_distribution(model, loaded):
    def first_tokens(seed):
        rows = generate(loaded, [Prompt((5, 9))] * 4000, stop_ids=STOPS, max_new_tokens=1,
                        temperature=2.0, batch=1000, seed=seed)  # fmt: skip
        return [answer[0] for _, answer in rows]

    drawn = first_tokens(1)
    with torch.no_grad():
        expected = (model(torch.tensor([[5, 9]])).logits[0, -1] / 2.0).softmax(-1).numpy()
    counts = np.bincount(drawn, minlength=96) / len(drawn)
    assert np.abs(counts - expected).sum() / 2 < 0.08
    assert drawn == first_tokens(1) != first_tokens(2)


def _answer(loaded, prompts, store, how=GREEDY) -> list[int]:
    return list(answer_prompts(loaded, prompts, store, how))


def test_answers_do_not_depend_on_interrupts(loaded, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK", 8)
    monkeypatch.setattr(corpus, "_CHUNK_BATCHES", 1)
    how = replace(GREEDY, sampled_share=0.5)
    whole = tmp_path / "whole.jsonl"
    assert _answer(loaded, prompts, whole, how) == [0, 8, 16, 23]
    assert _answer(loaded, prompts, whole, how) == [23]
    content = whole.read_bytes()
    for size in (1, 40, 200, len(content) // 2, len(content) - 1):
        cut = tmp_path / f"{size}.jsonl"
        cut.write_bytes(content[:size])
        _answer(loaded, prompts, cut, how)
        assert cut.read_bytes() == content
    assert len(stored_answers(whole)) == len(prompts)


def test_incomplete_and_damaged_lines_are_generated_again(loaded, tmp_path):
    store, prompts = tmp_path / "answers.jsonl", [Prompt((5, 6)), Prompt((7, 8)), Prompt((9,))]
    _answer(loaded, prompts[:1], store)
    store.write_bytes(store.read_bytes() + b'{"prompt": [7, 8], "answ')
    _answer(loaded, prompts, store)
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [[5, 6], [9], [7, 8]]
    store.write_text(store.read_text().replace('{"prompt": [9]', '{"prompt": [9{"prompt": [9]'))
    _answer(loaded, prompts, store)
    assert [sample.prompt for sample in stored_answers(store)] == prompts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_base_equals_that_of_transformers(base, monkeypatch, dtype):
    monkeypatch.setattr(base_module, "compute_dtype", lambda _: dtype)
    loaded = base_module.load_base(str(base), CPU)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found = loaded.model(ids).logits
        assert found.dtype == dtype
        assert torch.equal(found, theirs(ids).logits)
    assert loaded.stop_ids == {2}


def test_a_base_without_end_token_or_head_is_rejected(base, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(base, tmp_path / "base")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert base_module.load_base(str(folder), CPU).stop_ids == {2, 3}
    path.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert base_module.load_base(str(folder), CPU).stop_ids == {2}  # from the tokenizer
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="has no eos_token_id"):
        base_module.load_base(str(folder), CPU)
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight"):
        base_module.load_base(str(folder), CPU)


def _sample(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Sample:
    return Sample(Prompt(prompt), answer)


def test_taps_are_the_inputs_of_layers(model, loaded):
    samples = [_sample((5, 6, 7), (8, 9)), _sample((10,), (11,))]
    batch = make_batch(samples, [1, 0], 16)
    found = TappedBase(loaded, (0, 3, 5))(batch.rows)
    assert found.dtype == torch.bfloat16
    for row, number in enumerate(batch.samples):
        ids = torch.tensor([samples[number].ids])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        for place, expected in enumerate((states[0], states[3], states[5], states[-1])):
            torch.testing.assert_close(
                found[row, : ids.shape[1], place].float(), expected[0], atol=1e-3, rtol=2**-8
            )


AXES = (0,) * 2 + (1,) * 3 + (2,)  # position axis of each RoPE pair
SHAPE = DraftShape(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    head_dim=12, draft_vocab_size=20, num_taps=2, rms_norm_eps=1e-5, rope_theta=1e4,
    mrope_section=(2, 3, 1),
)  # fmt: skip


def _naive_rope(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to [heads, D], with pairs (i, i + D/2) as complex numbers."""
    half = x.shape[-1] // 2
    angles = position[list(AXES)] * SHAPE.rope_theta ** (-torch.arange(half) / half)
    rotated = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


def _naive_unroll(draft: Draft, taps, embeddings, positions, steps: int) -> torch.Tensor:
    """Run each chain separately: token i attends to the base's tokens 0..i and its own steps.

    In a window, it attends to the newest of them.
    """
    newest = -draft.shape.sliding_window
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    repeat = SHAPE.num_attention_heads // SHAPE.num_key_value_heads
    found = torch.zeros(steps, len(taps), SHAPE.hidden_size)

    def project(embedding, hidden, place):
        wide = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)])
        q, k, v = (
            p(wide).view(-1, SHAPE.head_dim)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return _naive_rope(q, positions[:, place]), _naive_rope(k, positions[:, place]), v

    fused = [draft.fc(row) for row in taps]
    true = [project(embeddings[i], fused[i], i) for i in range(len(taps))]
    for i in range(len(taps)):
        hidden, past = fused[i], [(k, v) for _, k, v in true[:i]]
        for step in range(steps):
            q, k, v = project(embeddings[i + step], hidden, i + step)
            past.append((k, v))
            keys, values = (
                torch.stack(part[newest:]).repeat_interleave(repeat, 1)
                for part in zip(*past, strict=True)
            )
            scores = torch.einsum("hd,thd->ht", q, keys) * SHAPE.head_dim**-0.5
            mixed = torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten()
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found[step, i] = hidden
    return found


@pytest.mark.parametrize(("first", "window"), [(0, 0), (4, 0), (0, 3), (4, 5)])
def test_the_training_time_test_equals_chains_with_explicit_keys(first, window, monkeypatch):
    """A window of 3 ends inside the steps; two queries attend together."""
    monkeypatch.setattr(eagle_network, "_CHUNK", 2)
    torch.manual_seed(0)
    draft, steps, rows = Draft(replace(SHAPE, sliding_window=window)), 4, 7
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    taps, embeddings = torch.randn(2, rows, 64) * 3, torch.randn(2, rows + steps - 1, 32)
    positions = torch.randint(9, (3, 2, rows + steps - 1))
    with torch.no_grad():
        found = torch.stack(list(draft.unroll(taps, embeddings, positions, steps, first)))
        for row in range(2):
            expected = _naive_unroll(draft, taps[row], embeddings[row], positions[:, row], steps)
            torch.testing.assert_close(found[:, row], expected[:, first:], atol=1e-5, rtol=1e-5)


def test_right_padding_does_not_change_hidden_states():
    torch.manual_seed(0)
    draft, steps = Draft(SHAPE), 3
    taps, embeddings = torch.randn(1, 9, 64), torch.randn(1, 9 + steps - 1, 32)
    positions, few = torch.arange(9 + steps - 1).expand(3, 1, -1), slice(6 + steps - 1)
    with torch.no_grad():
        long = list(draft.unroll(taps, embeddings, positions, steps))
        short = list(draft.unroll(taps[:, :6], embeddings[:, few], positions[..., few], steps))
    for one, other in zip(long, short, strict=True):
        torch.testing.assert_close(one[:, :6], other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 2 * PIECE + 3])
def test_the_loss_has_the_gradients_of_autograd(rows):
    torch.manual_seed(0)
    hidden = torch.randn(3, rows, 16, requires_grad=True)
    weight = torch.randn(20, 16, requires_grad=True)
    targets = torch.randn(rows, 20).softmax(-1)
    importance = torch.tensor([0.5, 0.3, 0.2])
    found = head_loss(hidden, weight, targets, importance)
    grads = torch.autograd.grad(found * 2.5, [hidden, weight])
    log_q = (hidden @ weight.T).log_softmax(-1)
    expected = -((targets * log_q).sum(-1).mean(-1) * importance).sum()
    wanted = torch.autograd.grad(expected * 2.5, [hidden, weight])
    torch.testing.assert_close(found, expected)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_the_loss_of_no_tokens_is_zero():
    hidden = torch.zeros(2, 0, 16, requires_grad=True)
    loss = head_loss(hidden, torch.randn(20, 16), torch.zeros(0, 20), torch.tensor([0.5, 0.5]))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None


def test_batches_contain_every_conversation_once():
    random = np.random.default_rng(1)
    lengths = random.integers(2, 60, 200).tolist()
    for order in (None, np.random.default_rng([0, 1])):
        groups = plan(lengths, 256, order)
        assert sorted(index for group in groups for index in group) == list(range(200))
        for group in groups:
            assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 256
    one, other = (plan(lengths, 256, np.random.default_rng([0, epoch])) for epoch in (1, 2))
    assert one == plan(lengths, 256, np.random.default_rng([0, 1]))
    assert one != other
    assert plan([500], 256, None) == [[0]]  # a conversation that is too long has its own batch


def test_long_conversations_are_truncated():
    samples = [_sample((5, 6, 7), (8, 9, 10))]
    batch = make_batch(samples, [0], 5)
    assert row_lengths(samples, 5) == [batch.num_tokens] == [5]
    assert batch.rows.ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.learned.tolist() == [[False, False, False, True, True]]


def test_a_full_disk_while_saving_the_state_is_reported(tmp_path):
    """Torch hides the disk's error in its own."""
    (tmp_path / "training.pt.partial").symlink_to("/dev/full")
    trainer = Trainer.__new__(Trainer)
    trainer.folder, trainer.optimizers, trainer.step, trainer.seconds = tmp_path, [], 1, 0.0
    trainer._module = torch.nn.Linear(300, 300)
    with pytest.raises(OSError, match="No space left on device"):
        trainer.save()


def test_a_full_disk_is_found_when_the_cache_is_created(tmp_path, monkeypatch):
    """Writing to an unallocated page would end the process by SIGBUS."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_module.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FeatureCache(tmp_path / "features.bin", [3], (2, 4))
    with pytest.raises(OSError, match="No space left"):
        FeatureCache(tmp_path / "features.bin", [10**12], (2, 10**4))
    assert not list(tmp_path.iterdir())


def test_saved_hidden_states_survive_an_interrupt(tmp_path):
    samples = [_sample((1,), (2, 3)), _sample((4,), (5,)), _sample((6,), (7,))]
    path, lengths = tmp_path / "features.bin", row_lengths(samples, 9)
    batches = [make_batch(samples, [number], 9) for number in range(3)]
    values = [torch.randn(1, length, 2, 4).bfloat16() for length in lengths]
    cache = FeatureCache(path, lengths, (2, 4))
    cache.store(batches[0], values[0])
    cache.save()
    cache.store(batches[1], values[1])
    again = FeatureCache(path, lengths, (2, 4))
    assert [again.has(batch) for batch in batches] == [True, False, False]
    assert torch.equal(again.load(batches[0]), values[0])
    both = make_batch(samples, [0, 1], 9)
    again.store(batches[1], values[1])
    loaded = again.load(both)
    assert torch.equal(loaded[1, :2], values[1][0])
    assert not loaded[1, 2:].any()
    other = FeatureCache(path, lengths, (3, 4))  # another width: created anew
    assert not any(other.has(batch) for batch in batches)


def test_child_processes_import_this_checkout():
    """The commands of test_train_draft.py must test this checkout."""
    code = "import edgellm.tools.train_draft as m; print(m.__file__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert os.path.samefile(out.stdout.strip(), Path(base_module.__file__).with_name("__init__.py"))

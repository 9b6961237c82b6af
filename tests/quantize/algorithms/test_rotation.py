"""`--rotate residual`: a rotated residual stream, the same model, and its drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from draft_runs import DraftRun, drive
from eagle_engines import EAGLE1, EAGLE3, PEAGLE
from eagle_reference import VOCAB, Layout, Reference, make_draft
from quantize_cases import SIZES, make_job, make_model, write_text
from transformers import AutoConfig, AutoModelForCausalLM

from edgellm.core.artifact import require_pair
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.export import models
from edgellm.export.checkpoints.checkpoint import TensorInfo, write_safetensors
from edgellm.export.checkpoints.residual_rotation import KEY, Computed, Recipe, Rotation, mixed
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.algorithms.residual_rotation import rotated
from edgellm.quantize.algorithms.value_rotation import check_values, rotate_values
from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.models.language_model import LanguageModel, untied
from edgellm.quantize.pipeline.run import run_job
from edgellm.quantize.pipeline.summary import print_summary
from edgellm.tools.train_draft.checkpoint_writers import draft_config, draft_shape

pytestmark = pytest.mark.usefixtures("one_thread")

# Biases, fused and unfused experts, latent attention, fused projections, scaled residuals
TAKEN = ("seed_oss", "qwen2_moe", "mixtral", "granitemoe", "minicpm3", "phi3")
HYBRIDS = (
    "lfm2_moe",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "qwen3_next",
    "kimi_linear",
)
NO_VALUES = {
    "kimi_linear": "a convolution follows the model's v_proj",
    "minicpm3": "no separate v_proj",
    "phi3": "no separate v_proj",
    "qwen3_next": "gates the output of attention",
}
REJECTED = {
    "olmo2": "lacks input_layernorm",
    "gemma3_text": "has post_feedforward_layernorm|has pre_feedforward",
    "glm4": "has post_mlp_layernorm",
    "cohere2": "lacks post_attention_layernorm",
    "starcoder2": "unknown tensor model.norm.bias",
}


@pytest.mark.parametrize("width", [1, 6, 7, 64, 96, 576])
def test_the_rotation_is_orthogonal_and_its_own_inverse(width):
    matrix = mixed(np.eye(width, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-5)
    rotation = Rotation(width, 3)
    x = np.random.default_rng(0).standard_normal((2, 3, width)).astype(np.float32)
    np.testing.assert_allclose(rotation.back(rotation.turn(x)), x, atol=1e-5)
    if width > 7:
        spike = rotation.turn(np.eye(width, dtype=np.float32)[5])
        assert np.abs(spike).max() < 3 / np.sqrt(width)
        assert not np.array_equal(rotation.turn(x), Rotation(width, 4).turn(x))


@pytest.mark.each_change("qwen2_moe", "minicpm3", "granitemoehybrid", "kimi_linear", "falcon_h1")
@pytest.mark.parametrize("kind", TAKEN + HYBRIDS)
def test_a_rotated_model_computes_the_same(tmp_path, kind):
    """The residual stream is rotated, and values if no gate follows them."""
    tiny = models.find(kind).TINY
    tiny = {**tiny, "moe_latent_size": 48} if kind == "nemotron_h" else tiny
    sizes = {key: size for key, size in SIZES.items() if key in tiny}
    folder = make_checkpoint(tmp_path / "model", **{**tiny, **sizes})
    before = LanguageModel.open(str(folder), ())
    after = rotated(before, 0, ())
    table = before.embedding_name
    tables = [read_tensor(model.tensors, table).floats() for model in (before, after)]
    if kind in NO_VALUES:
        with pytest.raises(UnsupportedModelError, match=NO_VALUES[kind]):
            check_values(after.tensors.infos(), after.layers, after.family)
    else:
        check_values(after.tensors.infos(), after.layers, after.family)
        after = _with_values_turned(after)
    assert np.abs(tables[0] - tables[1]).max() > 0.1
    if before.head_name == table:
        assert after.head_name == "lm_head.weight"
        assert after.whole.config[KEY]["untied"]
    ids = torch.arange(40).reshape(2, 20) % 90 + 3
    logits = [_logits(folder, ids), _logits(_write(after, folder, tmp_path / "turned"), ids)]
    # Delta nets always compute in float32; their two forms differ as much.
    is_delta = kind in ("qwen3_next", "kimi_linear")
    allowed = 1e-4 * np.abs(logits[0]).max() if is_delta else 1e-4
    np.testing.assert_allclose(logits[1], logits[0], atol=allowed, rtol=1e-4)


def test_all_config_keys_untie_the_head():
    text, tied = {"tie_word_embeddings": True}, {"tie_embedding": True, "vocab_size": 9}
    assert untied({**tied, "text_config": text}) == {
        "tie_embedding": False,
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": False},
        "vocab_size": 9,
    }


@pytest.mark.parametrize("kind", REJECTED)
def test_structures_that_do_not_commute_are_rejected(tmp_path, kind):
    model = LanguageModel.open(str(make_model(tmp_path / "model", kind)), ())
    with pytest.raises(UnsupportedModelError, match=REJECTED[kind]):
        rotated(model, 0, ())


@dataclass
class TurnedRun(DraftRun):
    """A draft of a base with rotated hidden states."""

    rotation: Rotation | None = None

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        assert self.rotation is not None
        streams = taps.numpy().reshape(len(taps), -1, self.rotation.size)
        return super().fuse(torch.from_numpy(self.rotation.turn(streams)).flatten(1))


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> tuple[Path, Path]:
    """Return a base and its rotated copy."""
    folder = tmp_path_factory.mktemp("bases")
    sizes = {"num_hidden_layers": 8, "intermediate_size": 96, "tie_word_embeddings": True}
    base = make_checkpoint(folder / "base", **{**models.find("llama").TINY, **sizes})
    return base, _write(rotated(LanguageModel.open(str(base), ()), 0, ()), base, folder / "turned")


HEADLESS = Layout({"architectures": ["LlamaForCausalLMEagle3"]}, draft_vocab=VOCAB)
HEADLESS = replace(HEADLESS, own_head=False, d2t=False, t2d=False)
NORMED = Layout({"draft_vocab_size": 40, "fc_norm": True}, fc_norm=True)


@pytest.mark.parametrize("layout", [EAGLE3, NORMED, PEAGLE], ids=["plain", "normed", "peagle"])
def test_a_draft_follows_its_rotated_base(tmp_path, bases, layout):
    draft = make_draft(tmp_path / "draft", layout)
    opened = [open_checkpoint(str(folder), tokenizer=False) for folder in (draft, *bases)]
    manifest = export_draft(opened[0], opened[2], tmp_path / "bundle", DraftOptions("fp32"))
    rotation = Rotation.of(opened[2].config)
    run = TurnedRun(tmp_path / "bundle", manifest, rotation=rotation)
    reference = Reference(draft, bases[0], layout)
    drive(run, reference)
    zeros = torch.zeros(2, manifest.draft.taps_width)  # the learned hidden state of mask tokens
    np.testing.assert_allclose(run.fuse(zeros), reference.fuse(zeros), atol=2e-4, rtol=2e-4)
    options = ExportOptions(dtype="fp32", hidden_taps=manifest.draft.hidden_taps)
    plain, turned = (
        export_llm(open_checkpoint(str(folder)), tmp_path / folder.name, options)
        for folder in bases
    )
    require_pair(manifest.draft, turned, "here")
    with pytest.raises(BrokenArtifactError, match="rotation hadamard 0, this one has none"):
        require_pair(manifest.draft, plain, "here")


def test_a_draft_trained_with_the_rotated_base_needs_that_base(tmp_path, bases):
    """It reads the rotated hidden states unchanged."""
    folder = make_draft(tmp_path / "draft", EAGLE3)
    config = AutoConfig.from_pretrained(bases[1])
    trained = draft_config(draft_shape(config, 40, 3), config, "LlamaForCausalLMEagle3")
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, KEY: trained[KEY]}))
    plain, turned, draft = (
        open_checkpoint(str(each), tokenizer=False) for each in (*bases, folder)
    )
    manifest = export_draft(draft, turned, tmp_path / "bundle", DraftOptions("fp32"))
    drive(DraftRun(tmp_path / "bundle", manifest), Reference(folder, bases[1], EAGLE3))
    with pytest.raises(UnsupportedModelError, match="rotated otherwise"):
        export_draft(draft, plain, tmp_path / "other", DraftOptions())


def test_unsupported_drafts_are_rejected(tmp_path, bases):
    base = open_checkpoint(str(bases[1]), tokenizer=False)
    for layout, reason in (
        (EAGLE1, "final norm"),
        (
            Layout(
                {"architectures": ["LlamaForCausalLMEagle3"]},
                own_head=False,
                draft_vocab=VOCAB,
                d2t=False,
                t2d=False,
            ),
            "base's head",
        ),
    ):
        folder = make_draft(tmp_path / reason, layout)
        draft = open_checkpoint(str(folder), tokenizer=False)
        with pytest.raises(UnsupportedModelError, match=reason):
            export_draft(draft, base, tmp_path / "bundle", DraftOptions())
    with pytest.raises(UnsupportedModelError, match="--pooling: the residual stream"):
        export_llm(base, tmp_path / "bundle", ExportOptions(pooling="mean"))
    assert not (tmp_path / "bundle").exists()


def test_a_run_reports_the_bytes_of_an_untied_head(tmp_path, capsys):
    """A rotation unties the head, which int8_tied rejects."""
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1, tie_word_embeddings=True)
    text = write_text(tmp_path / "text.jsonl", 40)
    job = make_job(model, text, tmp_path / "out", "fp8", num_samples=2, rotate="all")
    report = run_job(job, lambda *_: None)
    print_summary(report, job.output_dir)
    assert "the head is no longer the embedding" in capsys.readouterr().out
    tensors = open_checkpoint(str(job.output_dir)).tensors.infos()
    assert report.untied_bytes == tensors["lm_head.weight"].num_bytes
    stored = sum(info.num_bytes for info in tensors.values())
    assert (report.bytes_after, report.quality.kl_divergence < 0.05) == (stored, True)
    bundle = export_llm(open_checkpoint(str(job.output_dir)), tmp_path / "b", ExportOptions())
    assert bundle.decoder.rotation == "hadamard 0"
    for change, message in (
        ({"rotate": "resid"}, "--rotate resid: no such choice"),
        ({"lm_head_quantization": "int8_tied"}, "two matrices"),
    ):
        with pytest.raises(EdgeLLMError, match=message):
            run_job(replace(job, output_dir=tmp_path / "other", **change), lambda *_: None)
    assert not (tmp_path / "other").exists()


def _with_values_turned(model: LanguageModel) -> LanguageModel:
    recipes = {}
    for index, layer in enumerate(model.layers):
        source = {name: each.floats() for name, each in model.layer_source(index).items()}
        for name, turned in rotate_values(source, model.config.head_dim, model.family).items():
            if turned is not source[name]:
                info = TensorInfo("F32", turned.shape)
                place = model.stored_name(layer + name)
                recipes[place] = Recipe(info, lambda turned=turned: [turned])
    assert recipes
    whole = replace(model.whole, tensors=Computed(model.whole.tensors, recipes))
    return replace(model, whole=whole)


def _write(model: LanguageModel, like: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in like.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = model.whole.tensors
    write_safetensors(folder / "model.safetensors", tensors, sorted(tensors.infos()))
    (folder / "config.json").write_text(json.dumps(model.whole.config))
    return folder


def _logits(folder: Path, ids: torch.Tensor) -> np.ndarray:
    """In float64: a layer of delta nets multiplies float32's rounding error by 1000."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        return model(ids).logits.numpy()

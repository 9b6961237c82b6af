"""GGUF files of encoders: hidden states of transformers, token ids of its tokenizers."""

from __future__ import annotations

import dataclasses
import io
import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from encoder_checkpoints import make_encoder
from gguf_files import piece_vocabulary
from gguf_text_encoders import (
    CLS,
    LAST,
    MEAN,
    RANK,
    write_byte_level,
    write_text_encoder,
    write_unigram,
    write_wordpiece,
)
from portable import open_portable
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.core.model_spec import POOLER_FILE
from edgellm.device_runtime import LLM
from edgellm.export import encoders, models
from edgellm.export.checkpoints.checkpoint import read_whole
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

IDS = np.random.default_rng(3).integers(9, 96, 40)
FLOATS = ExportOptions(dtype="fp32")
_S, _F = "sliding_attention", "full_attention"
_GEMMA = {
    **models.find("gemma3_text").TINY,
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "query_pre_attn_scalar": 32,
    "rope_parameters": {
        _F: {"rope_type": "default", "rope_theta": 1e6},
        _S: {"rope_type": "default", "rope_theta": 1e4},
    },
}
CASES = {
    "bert": ("bert", encoders.find("bert").TINY),
    "xlm_roberta": ("bert", encoders.find("xlm_roberta").TINY),
    "modernbert": ("modern-bert", encoders.find("modernbert").TINY),
    "embeddinggemma": ("gemma-embedding", _GEMMA),
}


def hidden_states(source, output, *, keeps_blocks=False):
    checkpoint = open_checkpoint(str(source))
    if keeps_blocks:
        checkpoint = dataclasses.replace(checkpoint, tensors=checkpoint.blocks)
    manifest = export_llm(checkpoint, output, FLOATS)
    network = open_portable(output, 64)
    return network.run(IDS, 0, np.arange(1)).taps.copy(), manifest


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_transformers(tmp_path, name):
    arch, config = CASES[name]
    folder = make_encoder(tmp_path / "hf", **config)
    file = write_text_encoder(tmp_path / "model.gguf", arch, folder, pooling_type=MEAN)
    found, manifest = hidden_states(file, tmp_path / "bundle")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor(IDS)[None]).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    assert manifest.pooling == "mean"


def test_rerankers_equal_their_checkpoint(tmp_path):
    config = encoders.find("xlm_roberta").TINY
    folder = make_encoder(
        tmp_path / "hf", "AutoModelForSequenceClassification", **config, num_labels=1
    )
    file = write_text_encoder(tmp_path / "model.gguf", "bert", folder, pooling_type=RANK)
    found, manifest = hidden_states(file, tmp_path / "found")
    expected, other = hidden_states(folder, tmp_path / "expected")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (manifest.pooler, manifest.pooling) == (other.pooler, other.pooling)
    assert manifest.pooler.rerank is not None
    own, stated = (tmp_path / each / POOLER_FILE for each in ("found", "expected"))
    assert own.read_bytes() == stated.read_bytes()


def test_dense_layers_follow_the_pooling_of_embeddinggemma(tmp_path):
    arch, config = CASES["embeddinggemma"]
    folder = make_encoder(tmp_path / "hf", **config)
    random = np.random.default_rng(1)
    layers = [random.normal(size=size).astype(np.float32) for size in ((128, 96), (48, 128))]
    np.savez(folder / "dense.npz", dense_2=layers[0], dense_3=layers[1])
    sizes = {"dense_2_feat_in": 96, "dense_2_feat_out": 128}
    file = write_text_encoder(tmp_path / "m.gguf", arch, folder, pooling_type=MEAN, **sizes)
    opened = open_checkpoint(str(file))
    assert [(each.in_features, each.out_features) for each in opened.pooler.dense] == [
        (96, 128),
        (128, 48),
    ]
    assert opened.pooler.normalize
    for index, layer in enumerate(layers):
        np.testing.assert_array_equal(opened.pooler_tensors[f"{index}.weight"], layer)
    assert not any("dense_" in name for name in opened.tensors.infos())
    np.savez(folder / "dense.npz", dense_2=layers[0], dense_3=layers[0])
    write_text_encoder(file, arch, folder, pooling_type=MEAN, **sizes)
    assert "dense layer for 96 numbers after one that gives 128" in failure(file)


def failure(file):
    """The message of the error that opening a model gives, with its hint."""
    with pytest.raises(EdgeLLMError) as caught:
        export_llm(open_checkpoint(str(file)), file.with_suffix(""), FLOATS)
    assert not file.with_suffix("").exists()
    return f"{caught.value}; {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("bert", {"pooling_type": RANK}, "texts are embedded by a classifier"),
        ("bert", {"attention__causal": True}, "bert.attention.causal = True"),
        ("bert", {"moe_every_n_layers": 2}, "bert.moe_every_n_layers"),
        ("bert", {}, "give --pooling cls or --pooling mean"),
        ("modernbert", {"attention__layer_norm_epsilon": None}, "layer_norm_epsilon"),
        ("modernbert", {"pooling_type": CLS, "hidden_activation": "swoosh"}, "swoosh"),
    ],
)
def test_unsupported_metadata_is_rejected(tmp_path, name, extra, message):
    arch, config = CASES[name]
    folder = make_encoder(tmp_path / "hf", **config)
    assert message in failure(write_text_encoder(tmp_path / "model.gguf", arch, folder, **extra))


def test_heads_without_all_their_facts_are_rejected(tmp_path):
    kind = "AutoModelForSequenceClassification"
    for name, message in (
        ("bert", "without BERT's pooler"),
        ("modernbert", "head of ModernBERT, whose pooling"),
    ):
        arch, config = CASES[name]
        folder = make_encoder(tmp_path / "hf" / name, kind, **config, num_labels=1)
        file = tmp_path / f"{name}.gguf"
        rename_head(folder / "model.safetensors")
        write_text_encoder(file, arch, folder, pooling_type=CLS)
        assert message in failure(file)


def rename_head(path):
    """As the converter does for a head of one layer."""
    from safetensors.numpy import load_file, save_file

    found = load_file(path)
    save_file(
        {name.replace("classifier.", "classifier.out_proj."): each for name, each in found.items()},
        path,
        {"format": "pt"},
    )


TEXTS = (
    "Hello, World! It's 1234.5 apples-and-oranges",
    "  leading   spaces\tand\nlines  ",
    "na\u00efve CAF\u00c9 \u00c5ngstr\u00f6m \u0130stanbul stra\u00dfe",
    "\u65e5\u672c\u8a9e\u3068\u4e2d\u6587 mixed with latin",
    "e\u0301 combining, zero\u200bwidth, nbsp\u00a0here, soft\u00adhyphen",
    "\ufb01ligature \uff26\uff55\uff4c\uff4c \u2460 \u00bd",
    "emoji \U0001f600\U0001f468\u200d\U0001f469 and \u2028 separators\x07",
    "unknownword zzzzqqqq [MASK] [CLS] <s> </s>",
    "العربية हिन्दी 한국어 Русский",
    "",
    "a" * 120,
)


def tokenizer_of(words, folder, arch="bert", **extra):
    """The tokenizer made from a file with this vocabulary, and a model of no matter."""
    kind = "modernbert" if arch == "modern-bert" else "bert"
    size = extra.pop("vocab_size")
    config = {**CASES[kind][1], "vocab_size": size, "num_hidden_layers": 1}
    source = make_encoder(folder / "made", **config)
    file = write_text_encoder(folder / "m.gguf", arch, source, words, pooling_type=CLS)
    opened = open_checkpoint(str(file))
    return Tokenizer.from_str(opened.tokenizer_files["tokenizer.json"].decode()), opened


def require_equal(found, expected, texts=TEXTS):
    for text in texts:
        assert found.encode(text).ids == expected(text)["input_ids"], text
    for first, second in zip(texts, [each for each in texts[1:] if each], strict=False):
        pair, other = found.encode(first, second), expected(first, second)
        assert pair.ids == other["input_ids"], (first, second)
        assert pair.type_ids == other.get("token_type_ids", [0] * len(pair.ids))


def wordpiece_vocabulary(is_cased):
    """Special tokens, characters of the texts, their halves of words, and words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    found = dict.fromkeys(special)
    for text in TEXTS:
        split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(text))
        for word, _ in split:
            found |= dict.fromkeys((word[:3], f"##{word[3:5]}", f"##{word[-1]}", word[0]))
    if is_cased:
        found |= dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return {token: index for index, token in enumerate(found)}


@pytest.mark.parametrize("is_cased", [False, True])
def test_wordpiece_equals_transformers(tmp_path, is_cased):
    vocabulary = wordpiece_vocabulary(is_cased)
    expected = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=not is_cased)
    expected.save_pretrained(tmp_path / "hf")
    found, opened = tokenizer_of(
        lambda writer: write_wordpiece(writer, tmp_path / "hf"),
        tmp_path,
        vocab_size=len(vocabulary),
    )
    require_equal(found, expected)
    ids = found.encode("Hello, World! It's naive").ids
    assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert opened.pooling == "cls"


def test_files_say_what_wordpiece_normalizes(tmp_path):
    vocabulary = wordpiece_vocabulary(False)
    expected = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False, strip_accents=True)
    expected.save_pretrained(tmp_path / "hf")

    def write(writer):
        write_wordpiece(writer, tmp_path / "hf")
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", False)
        writer.add_bool("tokenizer.ggml.normalizer.strip_accents", True)

    found, _ = tokenizer_of(write, tmp_path, vocab_size=len(vocabulary))
    require_equal(found, expected)


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """A SentencePiece model with SentencePiece's own normalization, as XLM-RoBERTa's."""
    import sentencepiece

    folder, model = tmp_path_factory.mktemp("unigram"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[:7], *TEXTS[8:10]] * 4),
        model_writer=model,
        vocab_size=120,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    return folder


def test_unigrams_equal_transformers_and_sentencepiece(unigram, tmp_path):
    import sentencepiece

    expected = transformers.XLMRobertaTokenizer.from_pretrained(unigram)
    found, _ = tokenizer_of(
        lambda writer: write_unigram(writer, unigram, 200), tmp_path, vocab_size=200
    )
    require_equal(found, expected)
    pieces = sentencepiece.SentencePieceProcessor(str(unigram / "sentencepiece.bpe.model"))
    for text in TEXTS[:7]:
        own = [3 if index == 0 else index + 1 for index in pieces.encode(text)]
        assert found.encode(text).ids == [0, *own, 2], text


def test_tokens_that_fill_a_vocabulary_change_no_others(tmp_path):
    """An unknown character costs 10 more than the rarest token: here it beats two rare ones."""
    pieces = [("\u2581", -2.0), ("ca", -12.0), ("b", -12.0), ("ab", -1.0)]
    own = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")] + pieces
    expected = transformers.XLMRobertaTokenizer(vocab=own)

    def write(writer):
        filled = [*own, *((f"[PAD{at}]", -10000.0) for at in range(8, 20))]
        writer.add_tokenizer_model("t5")
        writer.add_token_list([token for token, _ in filled])
        writer.add_token_scores([score for _, score in filled])
        writer.add_token_types([3, 3, 3, 2, 1, 1, 1, 1, *[5] * 12])
        for role, index in (("bos", 0), ("pad", 1), ("eos", 2), ("unk", 3)):
            getattr(writer, f"add_{role}_token_id")(index)

    found, _ = tokenizer_of(write, tmp_path, vocab_size=20)
    require_equal(found, expected, ("cab", "ca b ab", "[PAD8] x"))
    assert found.encode("cab").ids == [0, 4, 3, 7, 2]


def test_modernbert_tokenizers_equal_tokenizers(tmp_path):
    tokens, merges = piece_vocabulary()
    tokens = ["[PAD]", "[CLS]", "[SEP]", *tokens[3:]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    expected = Tokenizer(BPE(vocabulary, [tuple(each.split()) for each in merges]))
    expected.normalizer = normalizers.NFC()
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.add_special_tokens(tokens[:3])
    expected.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    folder = tmp_path / "hf"
    folder.mkdir()
    expected.save(str(folder / "tokenizer.json"))
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found, _ = tokenizer_of(
        lambda writer: write_byte_level(writer, folder, "modern-bert"),
        tmp_path,
        "modern-bert",
        vocab_size=len(tokens),
    )
    for text in TEXTS:
        assert found.encode(text).ids == expected.encode(text).ids, text


def test_older_files_of_bert_have_the_ids_of_llama_cpp(tmp_path):
    """Converters before it had keys for them wrote neither ids nor which tokens are added."""
    tokens = [f"[unused{index}]" for index in range(104)]
    named = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    vocabulary = {named.get(index, token): index for index, token in enumerate([*tokens, "the"])}

    def write(writer):
        writer.add_tokenizer_model("bert")
        writer.add_token_list(
            [token if index in named else f"\u2581{token}" for token, index in vocabulary.items()]
        )
        writer.add_token_types([3 if index in named else 1 for index in range(105)])

    found, _ = tokenizer_of(write, tmp_path, vocab_size=105)
    assert found.encode("The zzz").ids == [101, 104, 100, 102]


def test_an_engine_of_a_file_embeds_as_transformers(tmp_path):
    vocabulary = wordpiece_vocabulary(False)
    tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    config = {**CASES["bert"][1], "vocab_size": len(vocabulary), "max_position_embeddings": 128}
    source = make_encoder(tmp_path / "hf", **config)
    tokenizer.save_pretrained(source)
    file = write_text_encoder(
        tmp_path / "m.gguf",
        "bert",
        source,
        lambda writer: write_wordpiece(writer, source),
        pooling_type=CLS,
    )
    export_llm(open_checkpoint(str(file)), tmp_path / "bundle", FLOATS)
    assert load_bundle(tmp_path / "bundle", LLM_BUNDLE).pooling == "cls"
    plan = Plan(max_input_len=64, kv_capacity=64, threads=1)
    build_engine(
        "llm", tmp_path / "bundle", tmp_path / "engine", plan, "onnxruntime", lambda _: None
    )
    llm = LLM(tmp_path / "engine")
    model = transformers.AutoModel.from_pretrained(source, attn_implementation="eager")
    for text in TEXTS[:4]:
        with torch.no_grad():
            first = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0].numpy()
        np.testing.assert_allclose(llm.embed(text), first / np.linalg.norm(first), atol=2e-5)


def test_blocks_of_encoders_are_kept(tmp_path):
    config = {**CASES["bert"][1], "hidden_size": 96, "intermediate_size": 128}
    folder = make_encoder(tmp_path / "hf", **config)
    file = write_text_encoder(tmp_path / "m.gguf", "bert", folder, pooling_type=LAST)
    quantized = tmp_path / "q.gguf"
    requantize(file, quantized)
    opened = open_checkpoint(str(quantized))
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    assert opened.blocks.infos()[name].dtype == "Q8_0"
    plain = np.frombuffer(read_whole(open_checkpoint(str(file)).tensors, name), np.float32)
    floats = np.frombuffer(read_whole(opened.tensors, name), np.float32)
    np.testing.assert_allclose(floats, plain, atol=1e-2)
    expected, _ = hidden_states(quantized, tmp_path / "expected")
    found, manifest = hidden_states(quantized, tmp_path / "found", keeps_blocks=True)
    assert manifest.pooling == "last"
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def requantize(source, target):
    """Copy a file with its matrices as Q8_0."""
    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(target, "bert")
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.")):
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        if tensor.name.startswith(("blk.", "token_embd.")) and len(tensor.shape) == 2:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
